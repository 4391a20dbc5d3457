"""Multi-token prediction: which tokens the drafter has to be shown, and what it is asked for.

Follows vLLM's and FastDeploy's MTP in what it computes, but not in how it keeps up. The target's last hidden state of every token
is kept in the pages, beside its keys and values; the drafter keeps count of what it has seen of each page. So it catches up when
drafts are wanted, from wherever it stands: after chunked prefill, a prefix that other requests computed with or without it,
preemption, or its own restart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from backend.config import MAX_SPECULATIVE_TOKENS
from backend.core import Batch, Draft, DraftFaults, Request, Scheduled, slots_of
from backend.drafters.calls import LIKELIEST, OWN_NOISE, SHARED_NOISE, DraftCall, DraftError, DraftService

logger = logging.getLogger(__name__)

MAX_STEP_TOKENS = MAX_SPECULATIVE_TOKENS + 1
"""A request that took part in the last step has no more than these to be shown."""
RETRY_SECONDS, RETRY_SHARE = 0.5, 10
"""A drafter that failed is asked again after this long, or this many times what the failed call took: one that hangs must not take most
of the time. Plain decoding goes on meanwhile."""


class MtpDrafter:
    """A Drafter over a DraftService."""

    name = "mtp"
    taps: tuple[str, ...] = ("hidden",)

    def __init__(self, service: DraftService, draft_sampling: str, max_tokens: int) -> None:
        """max_tokens: tokens that one call catches up on at most; longer backlogs take several steps."""
        self._service = service
        self._shares_noise = draft_sampling == "shared_noise"
        self._max_tokens = max_tokens
        self.page_entries = service.page_entries
        self._num_seen: dict[str, int] = {}
        self._retry_at = 0.0
        self._is_open = False
        self._fresh: set[int] = set()
        self._page_size = 0
        self._hidden = torch.empty(0)
        self._seen_in_page: list[int] = []
        """By page: leading slots that the drafter's memory is right for."""

    def attach(self, num_pages: int, page_size: int, taps: dict[str, torch.Tensor]) -> None:
        self._page_size = page_size
        self._hidden = taps["hidden"].flatten(0, 1)
        self._seen_in_page = [0] * num_pages

    def start(self, request: Request) -> None:
        pass  # its tokens are read off it when it wants drafts

    def stop(self, request: Request) -> None:
        self._num_seen.pop(request.request_id, None)

    def close(self) -> None:
        pass

    def begin_step(self, batch: Batch) -> None:
        """Takes note of pages that changed hands, and of requests that lost theirs."""
        for page in batch.fresh_pages:
            self._seen_in_page[page] = 0
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
        started = time.monotonic()
        try:
            if not self._is_open:
                self._service.open(len(self._seen_in_page), self._page_size)
                self._is_open = True
            reply = self._service.draft(call)
        except Exception as error:  # whatever it is: drafts are optional
            self._fail(error, time.monotonic() - started)
            faults.failures[self.name] += 1
            faults.undrafted[self.name] += len(asked)
            return draft
        if self._retry_at:
            logger.info("drafter %s is back", self.name)
            self._retry_at = 0.0
        self._fresh.clear()
        draft.is_behind = any(count > MAX_STEP_TOKENS for count in call.query_lens)
        for i, b in enumerate(asked):
            self._note(entries[b].request, call.seq_lens[i] - call.query_lens[i], call.seq_lens[i])
            draft.token_ids[b] = reply.token_ids[i]
            draft.sources[b] = [self.name] * len(reply.token_ids[i])
            if i in reply.probs:
                draft.probs[b] = reply.probs[i]
        return draft

    def is_behind(self, request: Request) -> bool:
        """Whether the drafter has still to be shown tokens of a request."""
        return self._num_seen.get(request.request_id, 0) < len(request.token_ids)

    def hand_over(self, request: Request) -> None:
        """A step on the device is about to draft for a request: what it writes to the request's pages is not to be cleared later."""
        self._fresh.difference_update(request.page_ids)

    def follow(self, request: Request) -> None:
        """The drafter was shown all tokens of a request by a step on the device."""
        known = min(len(request.token_ids), len(request.page_ids) * self._page_size)
        self._note(request, self._num_seen.get(request.request_id, 0), known)

    def _fail(self, error: Exception, seconds: float) -> None:
        """The drafter's memory can no longer be relied on: it is shown everything again when it is back."""
        if not self._retry_at:
            details = None if isinstance(error, DraftError) else error
            logger.warning("drafter %s failed, decoding goes on without drafts: %s", self.name, error, exc_info=details)
        self._retry_at = time.monotonic() + max(RETRY_SECONDS, RETRY_SHARE * seconds)
        self._is_open = False
        self._seen_in_page = [0] * len(self._seen_in_page)
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
            before += [-1] * (seen == 0) + slots_of(pages, max(seen - 1, 0), end - 1, size)
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
        seen = self._num_seen.get(request.request_id)
        if seen is None:
            seen = 0
            for page in request.page_ids:
                seen += self._seen_in_page[page]
                if self._seen_in_page[page] < self._page_size:
                    break
        return min(seen, len(request.token_ids) - 1)

    def _note(self, request: Request, begin: int, end: int) -> None:
        self._num_seen[request.request_id] = end
        size = self._page_size
        for number in range(begin // size, -(-end // size)):
            page = request.page_ids[number]
            self._seen_in_page[page] = max(self._seen_in_page[page], min(size, end - number * size))
