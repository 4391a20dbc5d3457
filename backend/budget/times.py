"""Seconds by number of tokens or requests, as they were measured."""

from __future__ import annotations

import bisect
import itertools

SMOOTHING_DOWN, SMOOTHING_UP = 0.5, 0.1
"""Share of the newest measurement in an average. Noise only ever makes a step slower, so a faster one says more."""
TRIES = 3
"""Measurements of a count before any of them counts."""
MAX_RATIO = 4.0
"""A measurement counts as so many times the average at most: a step that something else held up says nothing of its size."""


def bucket_of(count: int) -> int:
    """Counts above 8 to three bits."""
    shift = max(0, count.bit_length() - 3)
    return count >> shift << shift


class Times:
    """Averages at the counts that were seen, straight lines between them. A count takes no longer than a greater one: what says so is noise.

    Hopeful where nothing was seen: past the largest count the last line goes on, before the smallest time falls with the count. What looks
    good and was never tried is so tried.
    """

    def __init__(self) -> None:
        self.counts: list[int] = []
        """Those that are known, in order."""
        self._seconds: dict[int, float] = {}
        self._first: dict[int, list[float]] = {}
        """Of counts that are not known yet: the least of TRIES measurements is the first that counts."""
        self._least: list[float] | None = []
        """Of each count, the least average of those that are no smaller; None: not since the last measurement, for more are made than asked for."""

    def __bool__(self) -> bool:
        return bool(self.counts)

    def add(self, count: int, seconds: float) -> None:
        count = bucket_of(count)
        known = self._seconds.get(count)
        if known is None:
            first = self._first.setdefault(count, [])
            first.append(seconds)
            if len(first) < TRIES and self.counts:
                return
            bisect.insort(self.counts, count)
            self._seconds[count] = min(first)
        else:
            change = min(seconds, MAX_RATIO * known) - known
            self._seconds[count] = known + change * (SMOOTHING_UP if change > 0 else SMOOTHING_DOWN)
        self._least = None

    def at(self, count: float) -> float:
        """0 before anything was measured."""
        counts = self.counts
        if not counts:
            return 0.0
        if self._least is None:
            self._least = list(itertools.accumulate((self._seconds[own] for own in reversed(counts)), min))[::-1]
        least = self._least
        place = bisect.bisect_left(counts, count)
        if place == 0:
            return least[0] * count / counts[0]
        if len(counts) == 1:
            return least[0]
        high = min(place, len(counts) - 1)
        return least[high - 1] + (least[high] - least[high - 1]) * (count - counts[high - 1]) / (counts[high] - counts[high - 1])
