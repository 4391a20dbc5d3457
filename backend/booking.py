"""What a step brought each request: cut at what ends it, booked, and sent. On the engine's thread."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

import torch

from backend.core import Delta, Outcome, Scheduled
from backend.errors import EngineError
from backend.limits import cut_at_end
from backend.metrics import Metrics
from backend.open_requests import OpenRequest, OpenRequests
from backend.planned import PlannedStep
from backend.planner import Planner
from backend.scheduler import Scheduler
from backend.step.scores import read_scores

logger = logging.getLogger(__name__)

Report = Callable[[OpenRequest, PlannedStep, int, Outcome], None]
"""Of a request whose prompt is computed for another node: the step, its number there, and the outcome."""


class Booking:
    """Of one engine's steps."""

    report: Report
    """Called with what came of prompts that are computed for other nodes."""

    def __init__(self, scheduler: Scheduler, planner: Planner, open_requests: OpenRequests, metrics: Metrics, dtype: torch.dtype) -> None:
        """dtype: of the model."""
        self._scheduler, self._planner, self._open, self._metrics, self._dtype = scheduler, planner, open_requests, metrics, dtype
        self._now = 0.0
        self._last: Counter[float] = Counter()
        """When the step before was read that brought a request tokens, and how many requests that was for."""

    def begin(self) -> None:
        """A step was read, and is booked now."""
        self._now = time.monotonic()

    def end(self) -> None:
        """It was."""
        for last, times in self._last.items():
            self._metrics.inter_token.observe(self._now - last, times)
        self._last.clear()

    def book(self, own: OpenRequest, step: PlannedStep, number: int, entry: Scheduled, outcome: Outcome) -> None:
        """Cuts an emitted span at what ends the request, books it, and sends the delta."""
        request = entry.request
        drafters = self._planner.read(step, number, outcome)
        if outcome.prompt_scores is not None:
            begin = entry.begin + 1
            following = request.prompt_token_ids[begin : begin + len(outcome.prompt_scores)]
            own.score_prompt(entry.begin, read_scores(outcome.prompt_scores, following, request.params.logprobs or 0))
        if outcome.is_broken:
            self._break(own)
            return
        if request.is_prefill_only:
            self.report(own, step, number, outcome)
        elif entry.emits:
            self.book_tokens(own, entry, outcome, drafters)

    def book_tokens(self, own: OpenRequest, entry: Scheduled, outcome: Outcome, drafters: list[str]) -> None:
        """drafters: who made each draft that was verified."""
        request = entry.request
        token_ids, reason = cut_at_end(request, outcome.token_ids, self._scheduler.max_model_len)
        if request.grammar is not None:
            token_ids = token_ids[: request.grammar.advance(token_ids)]
            reason = "stop" if request.grammar.is_complete else reason
        token_ids, text, is_stopped = own.read(token_ids)
        num_accepted = min(outcome.num_accepted, len(token_ids))
        logprobs = None
        if outcome.scores is not None and request.params.logprobs is not None:
            logprobs = read_scores(outcome.scores, token_ids, request.params.logprobs)
        self._scheduler.commit(entry, token_ids)
        if own.last_tokens:
            self._last[own.last_tokens] += 1
        own.last_tokens = self._now
        # The first drafts may be those of another node, whose trees are others.
        depth = max(num_accepted, request.speculation.depth_of(outcome.num_drafts)) if outcome.num_drafts else 0
        request.stats.add(outcome.num_drafts, num_accepted, len(token_ids), depth, drafters[num_accepted : outcome.num_drafts])
        self._metrics.add_verdict(request.speculation.method, outcome.num_drafts, num_accepted, len(token_ids), depth)
        sources = drafters[:num_accepted] + ["target"] * (len(token_ids) - num_accepted)
        self._open.send(own, Delta(request.group_id, request.index, token_ids, text, sources, logprobs, "stop" if is_stopped else reason))

    def _break(self, own: OpenRequest) -> None:
        """Ends a request whose scores are not finite; the others of the batch go on."""
        place, dtype = len(own.request.token_ids), self._dtype
        error = EngineError(f"the model's scores after token {place} are not finite: the weights may be damaged, or too large for {dtype}")
        logger.error("request %r: %s", own.request.group_id, error)
        self._open.fail(own, error)
