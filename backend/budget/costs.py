"""What a step takes, by phase: measured by the device's clock at the ends of phases, not by the host's around them."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Sequence

from backend.budget.line import Curve, Line
from backend.budget.times import MAX_RATIO, Times, bucket_of

MAX_AGE, MIN_AGE = 64, 8
"""Steps with prompts, one after the other, after which they say what steps take: before that, those without them say it better; and where there was
none without."""
REST_SMOOTHING = 0.05
"""Share of the newest step in the mean of what steps take outside their phases."""


class CostClass(enum.Enum):
    """How a drafter's time grows with the number of drafts, where that was not measured yet."""

    FREE = enum.auto()
    """Text is searched: next to nothing."""
    PER_DRAFT = enum.auto()
    """A forward, or a head, for each."""
    BLOCK = enum.auto()
    """One forward for all."""


class StepCosts:
    """Seconds of a step by rows without the model drafter, and of that by drafts and requests."""

    def __init__(self, drafter: CostClass = CostClass.PER_DRAFT, *, is_exact: bool = False) -> None:
        """is_exact: steps compute as many rows as they have tokens; else few numbers of rows come, and each has its own time."""
        self._class, self._is_exact = drafter, is_exact
        self._line, self._keys = Line(), 0
        self._beside, self._age = Line(), 0  # of steps with prompts, by rows and rows of prompts; how many since there was another
        self._verify = Times()
        self._verify_by: dict[int, Times] = defaultdict(Times)  # by requests: rows of more requests read more keys
        self._own: Times | None = None
        self._draft: dict[int, Times] = defaultdict(Times)  # by drafts, over requests
        self._drafts_of: dict[float, dict[int, float]] = {}  # by requests: of each number that was measured, the least time of those no smaller
        self._rest: float | None = None

    @property
    def is_known(self) -> bool:
        """Some step was measured."""
        return self.is_beside_prompts or bool(self._line) if self._is_exact else bool(self._verify)

    @property
    def is_beside_prompts(self) -> bool:
        """Steps with prompts say what steps take, since lately there were no others."""
        return self._age >= (MAX_AGE if self._line else MIN_AGE)

    def begin(self, num_requests: int, num_keys: int) -> None:
        """The steps that are asked about from now on have so many requests, with so many tokens."""
        self._own, self._keys = self._verify_by.get(bucket_of(num_requests)), num_keys

    def add_verify(self, rows: int, seconds: float, num_requests: int, num_keys: int) -> None:
        if self._is_exact:
            self._line.add(rows, num_keys, seconds)
            self._age = 0
            return
        self._verify.add(rows, seconds)
        self._verify_by[bucket_of(num_requests)].add(rows, seconds)

    def add_beside(self, rows: int, num_prompt_rows: int, seconds: float) -> None:
        """Of a step with prompts, whose rows are not counted in `rows`, where steps compute as many rows as they have tokens."""
        self._beside.add(rows, num_prompt_rows, seconds)
        self._age += 1

    def add_draft(self, num_drafts: int, num_requests: int, seconds: float, ends: Sequence[float] = ()) -> None:
        """num_drafts: the most that the model made for a request; ends: when each of them was made, of which fewer drafts' times are known too,
        and what one more takes from one and the same step."""
        self._drafts_of.clear()
        for number, end in enumerate(ends[: num_drafts - 1], 1):
            self._draft[number].add(num_requests, end + seconds - ends[-1])
        self._draft[num_drafts].add(num_requests, seconds)

    def add_rest(self, seconds: float) -> None:
        """Of a step outside its phases, where nothing else is under way meanwhile: fewer steps take less of it."""
        if self._rest is None:
            self._rest = seconds
        self._rest += REST_SMOOTHING * (min(seconds, MAX_RATIO * self._rest) - self._rest)

    @property
    def rest(self) -> float:
        """What a step takes outside its phases."""
        return self._rest or 0.0

    def verify(self, rows: float) -> float:
        """With what a step takes besides; 0 before anything was measured. Where rows are padded, beyond those that were measured with so many
        requests, times of any number of them say how it goes on."""
        if self._is_exact:
            return self.curve().at(rows) + self.rest if self.is_known else 0.0
        if not self._verify:
            return 0.0
        rest, own = self.rest, self._own
        if own is None or not own.counts:
            return self._verify.at(rows) + rest
        nearest = min(max(rows, own.counts[0]), own.counts[-1])
        if nearest == rows:
            return own.at(rows) + rest
        return own.at(nearest) * self._verify.at(rows) / max(self._verify.at(nearest), 1e-9) + rest

    def curve(self) -> Curve:
        """Of that beside `rest`, where steps compute as many rows as they have tokens."""
        return self._beside.curve_alone() if self.is_beside_prompts else self._line.curve(self._keys)

    def draft(self, num_drafts: int, num_requests: float) -> float:
        """Of numbers of drafts that were not measured, on the line through those beside them, or from the nearest one by the class. A number
        takes no longer than a greater one: what says so is noise."""
        if num_drafts <= 0 or not num_requests or not self._draft or self._class is CostClass.FREE:
            return 0.0
        measured = self._drafts_of.get(num_requests)
        if measured is None:
            measured, least = {}, float("inf")
            for number in sorted(self._draft, reverse=True):
                measured[number] = least = min(least, self._draft[number].at(num_requests))
            self._drafts_of[num_requests] = measured
        if (known := measured.get(num_drafts)) is not None:
            return known
        above = min((number for number in measured if number > num_drafts), default=0)
        below = max((number for number in measured if number < num_drafts), default=0)
        if self._class is CostClass.BLOCK:
            return measured[above or below]
        if not below or not above:
            return measured[above or below] * num_drafts / (above or below)
        return measured[below] + (measured[above] - measured[below]) * (num_drafts - below) / (above - below)
