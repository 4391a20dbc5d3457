"""What steps took, told to those who price drafts by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backend.budget.costs import StepCosts
from backend.budget.limits import Limits
from backend.budget.padded import PaddedStep, PaddedTimes
from backend.budget.prices import Prices


@dataclass(frozen=True, slots=True)
class StepSeen:
    """A step that was read."""

    num_requests: int
    """Those of prompts among them."""
    num_rows: int
    """That were computed: of those that decode, and one for each prompt; where rows are padded, all."""
    num_keys: int
    """Tokens of its requests."""
    verify_seconds: float
    draft_seconds: float
    num_model: int
    """Most drafts that the model made for one of num_asked requests."""
    num_asked: int
    num_prompts: int = 0
    num_prompt_rows: int = 0
    draft_ends: Sequence[float] = ()
    """Where it is known, when the model had made each of its drafts: see `StepTimes.drafts`."""
    is_catching_up: bool = False
    """The model computed more than the step's own tokens."""
    is_first: bool = False
    """It took longer than its like will, and says nothing of what they take."""
    padded: PaddedStep | None = None
    """More of a step whose rows are as many for each request."""


class Observing:
    """Of one engine's steps. Called by the engine thread only."""

    def __init__(self, costs: StepCosts, padded: PaddedTimes | None, prices: Prices, limits: Limits) -> None:
        self._costs, self._padded, self._prices, self._limits = costs, padded, prices, limits

    def observe(self, step: StepSeen, outcomes: Sequence[tuple[int, int]], *, is_limited: bool, has_explorers: bool) -> None:
        """outcomes: of each request that may have drafts, those verified and accepted; is_limited: there was a choice; has_explorers: some of the
        requests were a trial."""
        if step.is_first:
            return
        num_emitted = step.num_requests + sum(accepted for _, accepted in outcomes)
        if step.padded is not None and self._padded is not None:
            self._observe_padded(self._padded, step, step.padded, num_emitted, is_limited)
            return
        if not has_explorers:
            is_longer = step.num_prompts > 0 or step.is_catching_up
            more = step.draft_seconds - self._costs.draft(step.num_model, step.num_asked) if is_longer else 0.0
            self._prices.observe_following(step.num_requests, len(outcomes), step.num_asked, more)
        if step.num_prompts:
            self._observe_beside(step, outcomes)
        else:
            self._observe_alone(step, outcomes, num_emitted)

    def _observe_padded(self, times: PaddedTimes, step: StepSeen, padded: PaddedStep, num_emitted: int, is_limited: bool) -> None:
        number, num_model, num_asked = step.num_requests, step.num_model, step.num_asked
        if step.is_catching_up or padded.is_behind:
            times.add_tokens(num_emitted)
        else:
            seconds = step.verify_seconds, step.draft_seconds
            times.add_device(number, step.num_rows, step.num_prompt_rows, step.num_keys, num_emitted, *seconds, num_model, num_asked)
        if number and is_limited and not step.num_prompts and self._limits.is_fresh:
            whole = times.step(number, padded.most_drafts, num_model, num_asked, padded.is_waited_for, num_emitted)
            self._limits.note_actual(num_emitted, whole)

    def _observe_beside(self, step: StepSeen, outcomes: Sequence[tuple[int, int]]) -> None:
        """With prompts."""
        num_decoding = step.num_requests - step.num_prompts
        if not num_decoding:
            return
        self._costs.add_beside(step.num_rows - step.num_prompts, step.num_prompt_rows, step.verify_seconds)
        if self._costs.is_beside_prompts:
            self._prices.observe_beside(num_decoding, outcomes, step.num_model, step.num_asked, step.draft_ends)

    def _observe_alone(self, step: StepSeen, outcomes: Sequence[tuple[int, int]], num_emitted: int) -> None:
        """Without."""
        seconds, num_model, num_asked = step.draft_seconds, step.num_model, step.num_asked
        self._costs.add_verify(step.num_rows, step.verify_seconds, step.num_requests, step.num_keys)
        if num_model and num_asked and not step.is_catching_up:
            self._prices.observe_draft(num_model, num_asked, seconds, step.draft_ends)
        if not step.num_requests:
            return
        self._prices.observe(step.num_requests, outcomes, None if step.is_catching_up else seconds)
        if outcomes and not num_asked:
            self._prices.observe_lookups(len(outcomes), seconds)
        self._limits.note_actual(num_emitted, self._costs.verify(step.num_rows) + self._costs.draft(num_model, num_asked))
