"""Prompts that another node computes for this engine, and prompts that this engine computes for others: the engine's side of both.

How requests and pages come from node to node is `backend.disaggregation`'s business. All calls are on the engine's thread.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from backend.core import Batch, Delta, HandOff, Outcome, Request, Scheduled
from backend.errors import InternalError
from backend.limits import cut_at_end
from backend.open_requests import OpenRequest, OpenRequests
from backend.planned import PlannedStep
from backend.planner import Planner
from backend.scheduler import Scheduler
from backend.step.worker import Worker

logger = logging.getLogger(__name__)


Book = Callable[[OpenRequest, Scheduled, Outcome, list[str]], None]
"""Of a request, its share of the step, the outcome, and who made each draft that was verified."""


class Fetcher(Protocol):
    """Has prompts computed by other nodes. Its calls do not wait."""

    min_tokens: int
    """Prompts that lack fewer are computed here."""

    def wants(self, request: Request) -> bool:
        """Whether another node could compute this prompt now."""
        ...

    def begin(self, request: Request, num_cached_pages: int) -> None:
        """The request has pages for its whole prompt; those after the first num_cached_pages are to be filled. `HandOffs.take` or `give_up`
        are called in the end, unless `stop` comes first."""
        ...

    def stop(self, request: Request) -> None:
        """The request ended. Pages that are being written have to be leased by then."""
        ...


class PrefillSink(Protocol):
    """Passes on what comes of prompts that are computed for others."""

    def progress(self, request: Request, num_tokens: int) -> None:
        """The pages of so many leading tokens are final, and more are to come."""
        ...

    def done(self, request: Request, hand_off: HandOff) -> None:
        """All pages are final; the request gives its own hold of them up after this call."""
        ...


class HandOffs:
    """Both directions."""

    def __init__(self, scheduler: Scheduler, planner: Planner, worker: Worker, open_requests: OpenRequests, book: Book) -> None:
        """book: what a step emitted for a request."""
        self._book = book
        self._scheduler, self._planner, self._worker, self._open = scheduler, planner, worker, open_requests
        self._fetcher: Fetcher | None = None
        self.sink: PrefillSink | None = None
        self.fallbacks: Counter[str] = Counter()
        """Prompts that were computed here although another node was to, by reason."""
        self.num_fetched = 0
        scheduler.fetches.count_usable = planner.count_usable

    # -- prompts that another node computes --------------------------------------------------------------------------

    def use(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._scheduler.fetches.min_tokens = fetcher.min_tokens

    def admit(self, request: Request) -> None:
        """Before the scheduler has it. Prompts whose log-probabilities are wanted are computed where their scores are read."""
        is_own = request.is_prefill_only or request.scores_prompt
        request.is_remote = self._fetcher is not None and not is_own and self._fetcher.wants(request)

    def begin(self, batch: Batch) -> None:
        """Asks for what a batch has given pages for."""
        for request in batch.fetches:
            assert self._fetcher is not None
            try:
                self._fetcher.begin(request, request.num_computed_tokens // self._scheduler.pool.page_size)
            except Exception:
                logger.exception("request %r: no other node could be asked", request.group_id)
                self.give_up(request, "internal")

    def stop(self, request: Request) -> None:
        """A request ended."""
        if self._fetcher is not None and request.is_remote:
            self._fetcher.stop(request)

    def take_first(self, request: Request, hand_off: HandOff) -> None:
        """Another node has computed a prompt: the first token goes out while the pages are on their way. Should they not come, the request goes on
        as one that was set back. A token that ends it waits: the pages are kept for others, the other completions among them."""
        own = self._open.get(request)
        if own is None or request not in self._scheduler.fetches or request.num_output_tokens or self._may_end(request, hand_off):
            return
        if not self._fits(request, hand_off):
            return
        try:
            self._book_first(own, self._scheduler.take_first(request), hand_off)
        except Exception as error:  # it belongs to this request only
            self._open.fail_internally(own, error)

    def _may_end(self, request: Request, hand_off: HandOff) -> bool:
        """With its first token."""
        if request.params.n > 1 and (request.params.stop or request.grammar is not None):
            return True
        return cut_at_end(request, hand_off.outcome.token_ids, self._scheduler.max_model_len)[1] is not None

    def take(self, request: Request, hand_off: HandOff) -> None:
        """Its pages are here: the request goes on as if the step had been this node's."""
        own = self._open.get(request)
        if own is None or request not in self._scheduler.fetches or not self._fits(request, hand_off):
            return
        try:
            self._planner.take(request, request.num_computed_tokens // self._scheduler.pool.page_size, hand_off)
            entry = None if request.num_output_tokens else self._scheduler.take_first(request)
            self._scheduler.end_fetch(request)
            self.num_fetched += 1
            if entry is not None:
                self._book_first(own, entry, hand_off)
        except Exception as error:
            self._open.fail_internally(own, error)

    def _book_first(self, own: OpenRequest, entry: Scheduled, hand_off: HandOff) -> None:
        self._open.note_run(own.request)
        self._book(own, entry, hand_off.outcome, [])
        own.last_tokens = time.monotonic()

    def _fits(self, request: Request, hand_off: HandOff) -> bool:
        """Whether the first token is what this node can go on from. Otherwise the prompt is computed here."""
        (first,) = hand_off.outcome.token_ids
        if request.num_output_tokens:
            if request.token_ids[-1] == first:
                return True
            logger.warning(
                "request %r: one node's first token was %d, and another's, which took over, %d", request.group_id, request.token_ids[-1], first
            )
        elif request.grammar is None or request.grammar.allows(first):
            return True
        else:  # the other node's tokenizer or library differs
            logger.error("request %r: the first token, %d, came from another node, and the grammar does not allow it", request.group_id, first)
        self.stop(request)  # its pages may still be on their way
        self.give_up(request, "internal")
        return False

    def give_up(self, request: Request, reason: str) -> None:
        """The prompt is computed here after all."""
        if not self._open.is_open(request) or request not in self._scheduler.fetches:
            return
        self.fallbacks[reason] += 1
        self._scheduler.give_up_fetch(request)

    def fail(self, request: Request, error: Exception) -> None:
        """Nobody is to compute the prompt, for its other completions neither."""
        if self._open.is_open(request) and request in self._scheduler.fetches:
            for own in self._open:
                if own.request.group_id == request.group_id:
                    self._open.fail(own, error)

    # -- prompts that are computed for others ------------------------------------------------------------------------

    def report(self, own: OpenRequest, step: PlannedStep, number: int, outcome: Outcome) -> None:
        """A step with a part of such a prompt was read; with its last part the request ends."""
        request, sink = own.request, self.sink
        if sink is None:
            raise InternalError("this node computes no prompts for others")
        if not step.entries[number].emits:
            sink.progress(request, self._planner.count_covered(step, number))
            return
        if request.grammar is not None:
            request.grammar.advance(outcome.token_ids)  # raises where no token was possible: nothing of it is handed on
        sources, index = self._planner.hand_off(step, number, outcome)
        probs = self._worker.read_draft_probs(index) if index >= 0 else None
        # A step has scores of all its requests where one of them wants some.
        scores = None if outcome.scores is None or request.params.logprobs is None else outcome.scores[:1].copy()
        sink.done(request, HandOff(dataclasses.replace(outcome, scores=scores), sources, probs))
        self._open.send(own, Delta(request.group_id, request.index, finish_reason="length"))
