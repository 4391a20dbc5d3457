"""The host's side of a model drafter in another process: which tokens it has to be shown, and what it is asked for.

The target's last hidden state of every token is kept in the pages, beside its keys and values; the count of what the drafter has
seen of each page is kept here. So it catches up when drafts are wanted, from wherever it stands: after prompts, a prefix that other
requests computed with or without it, preemption, or its own restart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from backend.core import Batch, Draft, DraftFaults, Request, Scheduled, kv_slots
from backend.drafters.calls import LIKELIEST, OWN_NOISE, SHARED_NOISE, DraftCall, DraftError, DraftService
from backend.drafters.protocol import HIDDEN
from backend.kv_store import KvStore
from backend.pages import SeenPages

logger = logging.getLogger(__name__)

MAX_TOKENS = 2048
"""That one call catches up on; longer backlogs take several steps. Its own: the step's budget is for prompts."""
SLOW_SECONDS, MIN_TOKENS, REGAIN_CALLS = 1.0, 32, 1000
"""A call that fails after so long may have had too many tokens for its time: calls have a quarter of them from then on, MIN_TOKENS at least, and
twice as many again after so many that were answered (what fails costs all that the drafter had seen)."""
RETRY_SECONDS, RETRY_SHARE = 0.5, 10
"""A drafter that failed is asked again after this long, or this many times what the failed call took: one that hangs must not take most
of the time. Plain decoding goes on meanwhile."""


class RemoteDrafter:
    """A HostDrafter over a DraftService."""

    name = "mtp"

    def __init__(self, service: DraftService, draft_sampling: str) -> None:
        self._service = service
        self._shares_noise = draft_sampling == "shared_noise"
        self._num_seen: dict[str, int] = {}
        self._retry_at = 0.0
        self._max_tokens, self._num_calls = MAX_TOKENS, 0
        self._is_open = False
        self._fresh: set[int] = set()
        self._page_size = self._num_pages = self._stride = 0
        self._hidden = torch.empty(0)
        self._seen = SeenPages(0, 1)

    def attach(self, store: KvStore) -> None:
        self._page_size, self._num_pages, self._stride = store.page_size, store.num_pages, store.stride(HIDDEN)
        self._hidden = store.rows(HIDDEN)
        self._seen = SeenPages(store.num_pages, store.page_size)

    def start(self, request: Request) -> None:
        pass  # its tokens are read off it when it wants drafts

    def stop(self, request: Request) -> None:
        self._num_seen.pop(request.request_id, None)

    def close(self) -> None:
        pass

    def begin_step(self, batch: Batch) -> None:
        """Takes note of pages that changed hands, and of requests that lost theirs."""
        self._seen.reset(batch.fresh_pages)
        if self._is_open:
            self._fresh.update(batch.fresh_pages)
        for request in batch.preempted:
            self._num_seen.pop(request.request_id, None)

    def propose(self, entries: Sequence[Scheduled], faults: DraftFaults) -> Draft:
        draft = Draft([[] for _ in entries], [[] for _ in entries])
        if time.monotonic() < self._retry_at:
            faults.undrafted[self.name] += sum(1 for e in entries if e.max_drafts)
            return draft
        asked, call = self._make_call(entries)
        if not asked:
            return draft
        started = asked_at = time.monotonic()
        try:
            if not self._is_open:
                self._service.open(self._num_pages, self._page_size)
                self._is_open = True
            asked_at = time.monotonic()
            reply = self._service.draft(call)
        except Exception as error:  # whatever it is: drafts are optional
            now, num_tokens = time.monotonic(), len(call.token_ids)
            if now - asked_at >= SLOW_SECONDS and num_tokens > MIN_TOKENS:
                self._max_tokens, self._num_calls = max(MIN_TOKENS, num_tokens // 4), 0
            self._fail(error, now - started)
            faults.failures[self.name] += 1
            faults.undrafted[self.name] += len(asked)
            return draft
        if self._retry_at:
            logger.info("drafter %s is back", self.name)
            self._retry_at = 0.0
        self._num_calls += 1
        if self._num_calls % REGAIN_CALLS == 0:
            self._max_tokens = min(MAX_TOKENS, 2 * self._max_tokens)
        self._fresh.clear()
        for i, b in enumerate(asked):
            self._note(entries[b].request, call.seq_lens[i] - call.query_lens[i], call.seq_lens[i])
            draft.token_ids[b] = reply.token_ids[i]
            draft.sources[b] = [self.name] * len(reply.token_ids[i])
            if i in reply.probs:
                draft.probs[b] = reply.probs[i]
        return draft

    def _fail(self, error: Exception, seconds: float) -> None:
        """The drafter's memory can no longer be relied on: it is shown everything again when it is back."""
        if not self._retry_at:
            details = None if isinstance(error, DraftError) else error
            logger.warning("drafter %s failed, decoding goes on without drafts: %s", self.name, error, exc_info=details)
        self._retry_at = time.monotonic() + max(RETRY_SECONDS, RETRY_SHARE * seconds)
        self._is_open = False
        self._seen.forget_all()
        self._num_seen.clear()
        self._fresh.clear()

    def _make_call(self, entries: Sequence[Scheduled]) -> tuple[list[int], DraftCall]:
        """The call, and which entries it is about."""
        call, asked, before = DraftCall(fresh_pages=sorted(self._fresh)), [], []
        size, budget = self._page_size, self._max_tokens
        for b, entry in enumerate(entries):
            if not entry.max_drafts or budget <= 0:
                continue
            request = entry.request
            seen, known = self._count_seen(request), len(request.token_ids)
            end = min(known, seen + budget)
            steps = min(entry.max_drafts, request.speculation.num_model_steps) if end == known else 0
            budget -= end - seen
            pages = request.page_ids
            asked.append(b)
            call.token_ids += request.token_ids[seen:end]
            before += [-1] * (seen == 0) + kv_slots(pages, max(seen - 1, 0), end - 1, size, self._stride)
            call.query_lens.append(end - seen)
            call.seq_lens.append(end)
            call.page_ids.append(pages[: -(-max(end, end + steps - 1) // size)])
            call.num_drafts.append(steps)
            params = request.params
            call.choices.append((self._mode(request), min(max(params.top_k, 0), 2**31 - 1), request.signed_seed))
            call.filters.append((min(params.temperature, 1e30), params.top_p, params.min_p))
        slots = torch.tensor(before, dtype=torch.long, device=self._hidden.device)
        call.hidden = self._hidden[slots.clamp(min=0)].masked_fill_((slots < 0)[:, None], 0)
        return asked, call

    def _mode(self, request: Request) -> int:
        strategy = request.speculation.verify_strategy
        if request.params.is_greedy or strategy in ("greedy", "topp"):
            return LIKELIEST
        if strategy == "rejection":
            return OWN_NOISE
        return SHARED_NOISE if self._shares_noise else LIKELIEST

    def _count_seen(self, request: Request) -> int:
        """Leading tokens of a request that the drafter's memory is right for. The last known token is always new to it."""
        limit = len(request.token_ids) - 1
        seen = self._num_seen.get(request.request_id)
        return self._seen.count(request.page_ids, limit) if seen is None else min(seen, limit)

    def _note(self, request: Request, begin: int, end: int) -> None:
        self._num_seen[request.request_id] = end
        self._seen.note(request.page_ids, begin, end)
