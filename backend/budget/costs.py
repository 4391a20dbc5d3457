"""What a step takes, by phase: measured by the device's clock at the ends of phases, not by the host's around them."""

from __future__ import annotations

import enum
from collections import defaultdict

from backend.budget.times import Times


class CostClass(enum.Enum):
    """How a drafter's time grows with the number of drafts, where that was not measured yet."""

    FREE = enum.auto()
    """Text is searched: next to nothing."""
    PER_DRAFT = enum.auto()
    """A forward, or a head, for each."""
    BLOCK = enum.auto()
    """One forward for all."""


class StepCosts:
    """Seconds of the target's forward and verdict by rows, and of the model drafter by drafts and requests."""

    def __init__(self, drafter: CostClass = CostClass.PER_DRAFT) -> None:
        self._class = drafter
        self._verify = Times()
        self._draft: dict[int, Times] = defaultdict(Times)  # by drafts, over requests

    @property
    def is_known(self) -> bool:
        """Some step was measured."""
        return bool(self._verify)

    def add_verify(self, rows: int, seconds: float) -> None:
        self._verify.add(rows, seconds)

    def add_draft(self, num_drafts: int, num_requests: int, seconds: float) -> None:
        """num_drafts: the most that the model made for a request."""
        self._draft[num_drafts].add(num_requests, seconds)

    def verify(self, rows: float) -> float:
        return self._verify.at(rows)

    def draft(self, num_drafts: int, num_requests: float) -> float:
        """Of numbers of drafts that were not measured, on the line through those beside them, or from the nearest one by the class. A number
        takes no longer than a greater one: what says so is noise."""
        if num_drafts <= 0 or not num_requests or not self._draft or self._class is CostClass.FREE:
            return 0.0
        measured = {number: times.at(num_requests) for number, times in self._draft.items()}
        above = [number for number in measured if number >= num_drafts]
        below = [number for number in measured if number < num_drafts]
        most = min((measured[number] for number in above), default=0.0)
        if num_drafts in measured or self._class is CostClass.BLOCK:
            return most if above else measured[max(below)]
        if not below:
            return most * num_drafts / min(above)
        low = max(below)
        least = min(measured[low], most) if above else measured[low]
        if not above:
            return least * num_drafts / low
        return least + (most - least) * (num_drafts - low) / (min(above) - low)
