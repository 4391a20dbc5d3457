"""The choice that the next step is planned by, and what it means for each of its requests."""

from __future__ import annotations

from backend.budget.known import Cohort, Group, Own
from backend.budget.limits import Choice, Limits
from backend.budget.trials import Trials
from backend.core import Request


class Applied:
    """Called by the engine thread only. What one choice means for requests that are alike is found once in a step: each of them is asked for it
    several times, which the host may have no time for while a device waits."""

    def __init__(self, limits: Limits, trials: Trials) -> None:
        self._limits, self._trials = limits, trials
        self.limit: int | None = None
        """Most drafts; None: nothing is limited."""
        self.is_asked, self.waits = True, False
        """As `Choice` has them."""
        self._number = 0  # of choices
        self._explorers: frozenset[str] = frozenset()  # requests that do not what all like them do: a trial may be for few

    def put(self, choice: Choice | None) -> None:
        """None: nothing is limited."""
        self._number += 1
        self._explorers = self._trials.explorers
        if choice is None:
            self.limit, self.waits = None, False
        else:
            self.limit, self.is_asked, self.waits = choice

    def limit_for(self, request: Request, own: Own) -> int:
        """Most drafts, of a request that the choice holds for, where steps have as many rows for each."""
        cohort = own.cohort
        if cohort.settled != self._number:
            self._settle(cohort)
        return cohort.limit if request.request_id not in self._explorers else self._limit_of(cohort.group)

    def num_model_for(self, request: Request, own: Own) -> int:
        """The same of drafts that the model drafter makes."""
        cohort = own.cohort
        if cohort.settled != self._number:
            self._settle(cohort)
        if request.request_id not in self._explorers:
            return cohort.num_model
        return min(cohort.group.num_model, self._limit_of(cohort.group)) if self.is_asked else 0

    def _settle(self, cohort: Cohort) -> None:
        is_trial, chosen = self._trials.is_on, self._limits.chosen
        cohort.limit = 0 if is_trial and not chosen.limit else self._limit_of(cohort.group)
        is_asked = self.is_asked and (chosen.is_asked or not is_trial)  # else they would have to catch up
        cohort.num_model = min(cohort.group.num_model, cohort.limit) if is_asked else 0
        cohort.settled = self._number

    def _limit_of(self, group: Group) -> int:
        assert self.limit is not None
        if group.num_nodes:
            return group.num_nodes if self.limit and self.is_asked else 0
        return min(group.num_wanted, self.limit)
