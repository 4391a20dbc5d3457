"""Which requests run in the next step, on which pages. Integers only.

Under one budget of known tokens, running requests go first (one token each), then unfinished prompts, then waiting ones. Drafts
come on top: how many is not the budget's to say. When pages run out, the youngest request of the lowest priority gives its
pages back and starts again later.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

from backend.core import Batch, Request, Scheduled
from backend.errors import RequestError
from backend.fetches import Fetches
from backend.limits import Limits
from backend.pages import PagePool
from backend.prefix_cache import Match, PrefixCache, RequestPages
from backend.waiting import WaitingQueue


class Scheduler:
    """Owns the pages and the order of requests. `schedule` and `commit` alternate."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_batch_size: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_waiting: int,
        enable_prefix_caching: bool = True,
        count_tokens_after_step: Callable[[Request], int] = lambda request: 0,
        whole_rows: Callable[[int], int] | None = None,
    ) -> None:
        """count_tokens_after_step: pages of a request are held for that many tokens past those of a step, for a drafter that runs at its end.

        whole_rows: the most rows of a step with prompts, its requests that decode among them, that are worth having, of no more than so many; None:
        any number is.
        """
        self.limits = Limits(
            max_batch_size=max_batch_size, max_waiting=max_waiting, max_model_len=max_model_len, page_size=page_size, num_pages=num_pages
        )
        self.pool = PagePool(num_pages, page_size)
        self.prefix_cache = PrefixCache(self.pool) if enable_prefix_caching else None
        self._pages = RequestPages(self.pool, self.prefix_cache)
        self.max_batch_size = max_batch_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self._count_tokens_after_step = count_tokens_after_step
        self._whole_rows = whole_rows
        self.running: list[Request] = []  # by (priority, arrival)
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue(self._requests, self.pool, self.prefix_cache)
        self._arrivals = 0
        self.fetches = Fetches(self.pool, self.prefix_cache, self._num_fetched_pages)
        self._ready: list[Request] = []
        """Whose prompts another node has computed: with pages, and waiting for a place among the running."""
        self.on_run: Callable[[Request], None] = lambda request: None
        """Told of each request that comes among the running, for the first time or again."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self.running)

    @property
    def num_decoding(self) -> int:
        """Running requests whose prompts are computed, or on their way, and whose next token somebody waits for here."""
        return sum(r.is_decoding and not r.is_prefill_only for r in self.running)

    @property
    def has_prompts(self) -> bool:
        """Some prompt is to be computed, should there be room."""
        return bool(self._waiting) or not all(r.is_decoding for r in self.running)

    @property
    def num_open(self) -> int:
        return len(self._requests)

    def open_requests(self) -> list[Request]:
        return list(self._requests.values())

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError for an id in use, CapacityError when too many wait."""
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r:.100} is in use")
        self.limits.check_room(1, self.num_open)
        request.arrival, request.num_tokens_after_step = self._arrivals, self._count_tokens_after_step(request)
        self._arrivals += 1
        self._requests[request.request_id] = request
        self._waiting.push([request])

    def finish(self, request: Request) -> None:
        """Takes a request out, whatever it was doing. Its computed pages stay findable while nobody needs the room."""
        del self._requests[request.request_id]
        if request in self.running:
            self._pages.release(request)
            self.running.remove(request)
        elif request.page_ids:
            self._pages.release(request)
            self._waiting.push(self.fetches.end(request))
            if request in self._ready:
                self._ready.remove(request)
        else:  # it waits, and holds nothing
            self._waiting.note_ended()

    # -- one step ---------------------------------------------------------------------------------------------------

    def schedule(
        self,
        draft_limit: Callable[[Request], int] | None = None,
        *,
        may_preempt: bool = True,
        is_held: Callable[[Request], bool] | None = None,
        max_prompt_tokens: int | None = None,
    ) -> Batch:
        """The next step's batch; empty when there is nothing to do. Pages for everything in it are held.

        draft_limit: most drafts of a request, where that is fewer than the request wants. may_preempt: False while steps are
        under way whose tokens are not known yet: requests that lack pages are left out then, and the batch says so.
        is_held: running requests that sit this step out. max_prompt_tokens: of prompts in this step, where that is less than
        the budget leaves.
        """
        batch = Batch()
        scheduled: set[str] = set()
        if self._waiting:
            self._pages.catch_up()
        while self._ready and len(self.running) < self.max_batch_size:
            self._run(self._ready.pop(0))
        decoding = []
        for request in self.running:
            # This runs for each request in each step: properties and small methods would cost more than what they do.
            num_known = len(request.token_ids)
            if num_known - request.num_computed_tokens <= 1:
                room = self._end(request) - num_known - request.num_steps_ahead
                if room > 0 and (is_held is None or not is_held(request)):
                    decoding.append((request, room))
        budget = self.max_num_batched_tokens - len(decoding)
        if max_prompt_tokens is not None:
            budget = min(budget, max_prompt_tokens)
        size = self.pool.page_size
        for request, room in decoding:
            if batch.preempted and request in batch.preempted:
                continue
            after = request.num_tokens_after_step
            # The step's own token comes on top of the drafts. A prompt's step verifies none.
            is_first = not request.num_steps_ahead and request.num_output_tokens == 0
            drafts = 0 if is_first else min(request.speculation.max_drafts, room - 1)
            if draft_limit is not None and drafts:
                drafts = min(drafts, draft_limit(request))
            is_held_by_pages = request.num_computed_tokens + request.num_tokens_ahead + 1 + drafts + after <= len(request.page_ids) * size
            is_short = not is_held_by_pages and not self._reserve(request, 1 + drafts + after, scheduled, batch, may_preempt=False)
            if is_short:
                drafts = 0
                # A drafter at the step's end keeps what it makes of the newest token, once and for all.
                if not self._reserve(request, 1 + min(1, after, room - 1), scheduled, batch, may_preempt=may_preempt):
                    batch.is_short = True
                    continue
            scheduled.add(request.request_id)
            batch.entries.append(Scheduled(request, 1, drafts, len(request.token_ids) - 1, is_decoding=not is_first, is_short=is_short))
        budget = self._round_off(budget, batch)
        for request in list(self.running):
            if budget <= 0:
                break
            if request.request_id in scheduled or request not in self.running or request.is_decoding:
                continue
            if is_held is not None and is_held(request):
                continue
            chunk = min(budget, len(request.token_ids) - request.num_computed_tokens)
            if self._reserve(request, chunk, scheduled, batch, may_preempt=may_preempt):
                scheduled.add(request.request_id)
                budget -= chunk
                batch.entries.append(self._chunk(request, chunk))
            else:
                batch.is_short = True
        if not batch.preempted:
            self._admit(batch, budget)
        return batch

    def _round_off(self, budget: int, batch: Batch) -> int:
        """Tokens of prompts beside the batch's requests that decode, each of which has as many rows as the widest."""
        if self._whole_rows is None or (len(batch.entries) == len(self.running) and not self._waiting):
            return budget
        prompts = itertools.chain((r for r in self.running if not r.is_decoding), self._waiting)
        left = itertools.accumulate(len(r.token_ids) - r.num_computed_tokens for r in prompts)
        if all(count <= budget for count in left):  # what is cut off would be a step of its own
            return budget
        rows = len(batch.entries) * (1 + max((entry.max_drafts for entry in batch.entries), default=0))
        whole = self._whole_rows(budget + rows) - rows
        return whole if whole > 0 else budget

    @staticmethod
    def _chunk(request: Request, num_tokens: int) -> Scheduled:
        begin = request.num_computed_tokens
        return Scheduled(request, num_tokens, begin=begin, emits=begin + num_tokens == len(request.token_ids))

    def _end(self, request: Request) -> int:
        """Tokens that a request may have. The prompt's end is a step even where nothing follows it."""
        most = 1 if request.is_prefill_only else request.params.max_tokens or 1
        return min(most + len(request.prompt_token_ids), self.max_model_len)

    def _reserve(self, request: Request, num_tokens: int, scheduled: set[str], batch: Batch, *, may_preempt: bool) -> bool:
        """Holds pages for `num_tokens` more than steps under way may compute; may take them from younger requests not in this step yet."""
        known = min(request.num_computed_tokens + request.num_tokens_ahead + num_tokens, self.max_model_len)
        needed = self.pool.pages_for(known) - len(request.page_ids)
        if needed <= 0:
            return True
        while (pages := self.pool.allocate(needed)) is None:
            victim = next((r for r in reversed(self.running) if r.request_id not in scheduled), None)
            if not may_preempt or victim is None:
                return False
            self._preempt(victim, batch)
            if victim is request:
                return False
        request.page_ids += pages
        batch.fresh_pages += pages
        return True

    def _preempt(self, request: Request, batch: Batch) -> None:
        self._pages.release(request)
        self.running.remove(request)
        request.num_computed_tokens = 0
        request.hand_off = None
        request.num_preemptions += 1
        self._waiting.push([request])
        batch.preempted.append(request)

    def _admit(self, batch: Batch, budget: int) -> None:
        waiting = self._waiting
        while (request := waiting.first()) is not None:
            if request.is_remote and self.fetches.park(request):
                waiting.pop()
                continue
            if waiting.lacks_pages(request):
                break
            if request.is_remote:
                if len(self.fetches) >= self.max_batch_size:
                    break
                if not self.fetches.start(request, [source for source, _, _ in batch.page_copies]):
                    if not batch.page_copies:  # the next batch may have those
                        waiting.note_lack(request)
                    break
                waiting.note_given()
                if request.is_remote:
                    batch.fetches.append(waiting.pop())
                    continue
            if budget <= 0 or len(self.running) >= self.max_batch_size:
                break
            if not self._start(request, batch):
                waiting.note_lack(request)
                break
            waiting.note_given()
            waiting.pop()
            self._run(request)
            chunk = min(budget, len(request.token_ids) - request.num_computed_tokens)
            assert len(request.page_ids) * self.pool.page_size >= request.num_computed_tokens + chunk
            budget -= chunk
            batch.entries.append(self._chunk(request, chunk))

    def _run(self, request: Request) -> None:
        bisect.insort(self.running, request, key=lambda r: (r.priority, r.arrival))
        self.on_run(request)

    def _num_fetched_pages(self, request: Request) -> int:
        """Of the prompt, and of its first token for a drafter that has seen it at the step's end."""
        known = len(request.prompt_token_ids) + min(1, request.num_tokens_after_step)
        return self.pool.pages_for(min(known, self.max_model_len))

    def take_first(self, request: Request) -> Scheduled:
        """What another node computed of a request, as a step that was launched here and is to be committed: that does not wait for the pages."""
        self._count_prompt(request)
        begin = request.num_computed_tokens
        self._note_launched(entry := Scheduled(request, len(request.prompt_token_ids) - begin, begin=begin))
        return entry

    def end_fetch(self, request: Request) -> None:
        """Its pages are filled: it runs when there is a place. Should it lose them, they are computed here.

        They are registered when they are looked for, or once the next step was read: neither the first token waits for that, nor the thread that
        sends it.
        """
        self._waiting.push(self.fetches.end(request))
        request.is_remote = False
        self._pages.postpone(request)
        bisect.insort(self._ready, request, key=lambda r: (r.priority, r.arrival))
        request.num_computed_tokens = len(request.prompt_token_ids)
        if request.num_output_tokens:  # it was committed before
            self._give_back(request)

    def give_up_fetch(self, request: Request) -> None:
        """Its prompt is to be computed here."""
        self._waiting.push(self.fetches.end(request))
        self._pages.release(request)
        request.is_remote, request.num_computed_tokens = False, 0
        self._waiting.push([request])

    def _start(self, request: Request, batch: Batch) -> bool:
        """Gives a waiting request its cached beginning and pages for all its known tokens, or nothing."""
        match = Match()
        if self.prefix_cache is not None and not request.scores_prompt:
            match = self.prefix_cache.match(request.token_ids, len(request.token_ids) - 1, request.prompt_hashes)
        wanted = min(len(request.token_ids) + request.num_tokens_after_step, self.max_model_len, self.pool.num_pages * self.pool.page_size)
        count = self.pool.pages_for(wanted) - len(match.page_ids)
        if not self.pool.can_take(match.page_ids, count):
            return False
        for page in match.page_ids:
            self.pool.share(page)
        # The page to copy may be given out by this very call: the worker reads all sources before it writes anything.
        pages = self.pool.allocate(count)
        assert pages is not None
        request.page_ids, request.page_hashes = match.page_ids + pages, match.page_hashes
        batch.fresh_pages += pages
        request.num_computed_tokens = len(match.page_ids) * self.pool.page_size + match.num_copied
        if match.copy_from >= 0:
            batch.page_copies.append((match.copy_from, pages[0], match.num_copied))
        if request.num_preemptions == 0 and request.num_output_tokens == 0:
            self._count_prompt(request)
        return True

    def _count_prompt(self, request: Request) -> None:
        request.num_cached_tokens = request.num_computed_tokens
        self.num_prompt_tokens += len(request.prompt_token_ids)
        self.num_cached_tokens += request.num_cached_tokens

    def launch(self, entries: Sequence[Scheduled]) -> None:
        """A step of these entries is under way: the next one may be scheduled before its tokens are known."""
        for entry in entries:
            request = entry.request
            if not entry.is_decoding:
                request.num_computed_tokens = entry.begin + entry.num_tokens
                # Whoever shares these pages computes after the step that fills them.
                self._pages.register_full(request)
            self._note_launched(entry)

    @staticmethod
    def _note_launched(entry: Scheduled) -> None:
        if entry.emits:
            entry.request.num_steps_ahead += 1
            entry.request.num_tokens_ahead += 1 + entry.max_drafts

    def commit(self, entry: Scheduled, emitted: Sequence[int]) -> None:
        """Books the result of a launched entry that emits: `emitted` (cut to what counts) is appended.

        Pages past the accepted prefix, and past what steps under way may write, go back; pages that are full now can be found by
        other requests.
        """
        request = entry.request
        assert entry.emits, f"{request.request_id} emitted {len(emitted)} tokens before the end of its prompt"
        request.num_steps_ahead -= 1
        request.num_tokens_ahead -= 1 + entry.max_drafts
        if not emitted:
            return
        num_before = len(request.token_ids)
        was_prompt = num_before == len(request.prompt_token_ids)
        if not was_prompt:  # a step was read since what is postponed came
            self._pages.catch_up()
        request.token_ids.extend(emitted)
        if request.is_remote:  # its pages are on their way: the rest is `end_fetch`'s
            return
        request.num_computed_tokens = num_before + len(emitted) - 1
        self._give_back(request)
        if self.prefix_cache is not None:
            self._pages.register_full(request)
            if was_prompt:
                self._pages.register_tail(request)

    def _give_back(self, request: Request) -> None:
        """Pages past what is computed, and past what steps under way may write."""
        # The newest token is not computed, but a drafter at the step's end has seen it: what it keeps of it is in its page.
        after = request.num_tokens_after_step
        ahead = request.num_tokens_ahead + after if request.num_steps_ahead else min(after, 1)
        if request.num_computed_tokens + ahead <= (len(request.page_ids) - 1) * self.pool.page_size:
            keep = self.pool.pages_for(request.num_computed_tokens + ahead)
            for page in reversed(request.page_ids[keep:]):
                self.pool.release(page)
            del request.page_ids[keep:]

    def check(self) -> None:
        """Asserts that every page is accounted for. For tests and for idle moments."""
        holders: dict[int, int] = {}
        for request in self._requests.values():
            for page in request.page_ids:
                holders[page] = holders.get(page, 0) + 1
        self.pool.check(holders)
        if self.prefix_cache is not None:
            self.prefix_cache.check()
