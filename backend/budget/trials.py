"""Trials: what is done otherwise in a step or two now and then. What is never tried cannot be known to have become better."""

from __future__ import annotations

from collections.abc import Sequence

from backend.budget.limits import Choice, Limits
from backend.core import Request

EXPLORE_EVERY = 48
"""Steps between trials."""
PLAIN_EVERY = 4
"""Trials of which one begins with a step that verifies nothing: what that takes is what all else is held against."""
TRIAL_STEPS = 2
"""A model drafter that was not asked for long catches up in the first; the second is what can be measured."""
MAX_SHARE, SMOOTHING = 0.03, 0.05
"""Of a device's time that trials of a model drafter may take, and of the newest step in that of a usual one."""
MAX_EXPLORERS = 2
"""Requests that a trial takes where others do without: a model drafter has to catch up for each."""


class Trials:
    """Of one engine's steps. `end` comes before each of them, then `choose` where there is a choice."""

    def __init__(self, limits: Limits, *, is_exact: bool) -> None:
        """is_exact: a step computes as many rows as it has tokens."""
        self._limits, self._is_exact = limits, is_exact
        self._is_time = False
        self._number = 0  # of the trial
        self.num_steps = 0
        """With a choice."""
        self.is_on = self.is_plain = False
        """Whether the step is a trial; whether it verifies nothing."""
        self.keeps_up = False
        """The model drafter follows the text in it though it is not asked for drafts: it is a trial without them."""
        self.explorers: frozenset[str] = frozenset()
        """Ids of requests that a trial is for, where it is not for all."""
        self._usual = self._owed = 0.0  # seconds of a step, and those that steps of trials took beyond it and others have not made up for

    def end(self) -> None:
        self.is_on = self.is_plain = self.keeps_up = False
        self.explorers = frozenset()

    def note(self, seconds: float, *, is_extra: bool) -> None:
        """What a step took the device. is_extra: the model drafter was asked in it for a trial, or caught up, which may be launched kernel by kernel
        and take as long as a hundred steps: the next trial is to wait until it is hardly felt."""
        if is_extra:
            self._owed += max(0.0, seconds - self._usual)
            return
        self._usual += SMOOTHING * (seconds - self._usual) if self._usual else seconds
        self._owed = max(0.0, self._owed - MAX_SHARE * seconds)

    def choose(self, paced: Sequence[Request], top: int, may_try: bool) -> Choice:
        """What the step's choice is: the best one known, or what is tried. paced: requests that follow it, which have `top` drafts at most; may_try:
        what a trial takes can be told."""
        self.num_steps += 1
        number = self.num_steps % EXPLORE_EVERY
        if self.num_steps < EXPLORE_EVERY or number >= TRIAL_STEPS or not may_try:
            return self._limits.chosen
        if number == 0:
            self._is_time = self._owed <= 0 and self._limits.is_time_to_try()
            self._number += self._is_time  # those that are left out are nobody's turn
        return self._explore(paced, top, is_first=number == 0) if self._is_time else self._limits.chosen

    def _explore(self, paced: Sequence[Request], top: int, *, is_first: bool) -> Choice:
        trial, chosen = self._number, self._limits.chosen
        start = trial * MAX_EXPLORERS % len(paced)
        self.is_on = True
        explorers = frozenset(r.request_id for r in (*paced, *paced)[start : start + MAX_EXPLORERS])
        if self._is_exact and not any(request.num_steps_ahead for request in paced):
            self.explorers = explorers
            self.is_plain = trial % PLAIN_EVERY == 0 and is_first
            return chosen
        other = self._limits.another(trial, top)
        if not chosen.limit or not chosen.is_asked:
            self.explorers = explorers
        else:  # to catch up afterwards would take more than the trial
            self.keeps_up = not self._is_exact and not (other.limit and other.is_asked)
        return other
