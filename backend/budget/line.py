"""Seconds of steps by rows and keys, as a line through those that were measured."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from backend.budget.times import MAX_RATIO

SMOOTHING = 0.02
"""Share of the newest step: so small that requests come and go within what is remembered, and keys with them."""
MIN_OWN, MAX_SHARE = 0.05, 0.1
"""Steps say what keys take where rows do not tell keys (1 - the square of their correlation), and where the newest one is no more of them."""
MAX_KNOWN_RATIO = 1.25
"""As `MAX_RATIO`, once the line is known: steps differ by a twentieth from it, those that something else held up by more."""
KEPT_SPREAD = 0.02
"""Standard deviation of rows, over their mean, below which what a row took before says more than what it takes now."""


class Curve(NamedTuple):
    """Seconds of steps by rows."""

    mean: float
    """Rows that are taken as many on average."""
    seconds: float
    """Of these."""
    more: float
    """Of a row above the mean."""
    fewer: float
    """Of one below it."""
    least: float
    """Whatever the rows are."""
    least_of_row: float

    def at(self, rows: float) -> float:
        return max(self.least + self.least_of_row * rows, self.seconds + (self.more if rows > self.mean else self.fewer) * (rows - self.mean))


class Line:
    """Of steps that compute as many rows as they have tokens. Without the keys, which are read whatever the rows are, a step of long answers would
    say that its rows are slow. A table by rows has the noise of each number, of which the choice of drafts picks what looks best.
    """

    def __init__(self) -> None:
        self._mean = np.zeros(3)  # of rows, keys and seconds
        self._products = np.zeros((3, 3))  # of their deviations, on average
        self._share = 0.0  # of the newest step in these
        self._more = self._fewer = 0.0  # seconds of a row above the mean, and of one below it: apart for as long as too little is known
        self._key = 0.0

    def __bool__(self) -> bool:
        return self._share > 0

    def add(self, rows: int, keys: int, seconds: float) -> None:
        """rows, keys: of a step, both at least 1."""
        if self:
            self._share = max(SMOOTHING, self._share / (1 + self._share))
            seconds = min(seconds, (MAX_RATIO if self._share > MAX_SHARE else MAX_KNOWN_RATIO) * self.curve(keys).at(rows))
        else:
            self._share, self._fewer = 1.0, seconds / rows  # hopeful: what looks good and was never tried is so tried
        apart = np.array((rows, keys, seconds)) - self._mean
        self._mean += self._share * apart
        self._products = (1 - self._share) * (self._products + self._share * np.outer(apart, apart))
        (rows_2, both, by_rows), (_, keys_2, by_keys), _ = self._products.tolist()
        own = rows_2 * keys_2 - both * both
        if self._share < MAX_SHARE and own > MIN_OWN * rows_2 * keys_2:
            self._key = max(0.0, (by_keys * rows_2 - by_rows * both) / own)
        kept, by_rows = (KEPT_SPREAD * float(self._mean[0])) ** 2, by_rows - self._key * both
        self._more = max(0.0, (by_rows + kept * self._more) / (rows_2 + kept))
        self._fewer = max(0.0, (by_rows + kept * self._fewer) / (rows_2 + kept))

    def curve(self, keys: float) -> Curve:
        """By rows, of steps with so many keys: 0 before anything was measured."""
        mean_rows, mean_keys, seconds = self._mean.tolist()
        return Curve(mean_rows, seconds + self._key * (keys - mean_keys), self._more, self._fewer, seconds / MAX_RATIO, 0.0)

    def curve_alone(self) -> Curve:
        """Of a line whose keys are rows as well, of another kind: of steps that have none of them, their share by rows at least."""
        mean_rows, mean_others, seconds = self._mean.tolist()
        least = seconds / max(1.0, mean_rows + mean_others)
        return Curve(mean_rows, seconds - self._key * mean_others, self._more, self._fewer, 0.0, least)
