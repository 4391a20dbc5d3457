"""What limits on the number of drafts would bring, from what steps had and accepted at each place: where the drafts themselves are not known yet."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

MEMORY = 0.998
"""What is left of old counts after one more step of a request."""
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 4.0
"""Before anything is measured: of each further draft, and how many measurements that is worth. Hopeful, so that drafts are tried."""


class Kind(NamedTuple):
    """Requests that draft alike."""

    method: str
    strategy: str
    has_model: bool
    """A model drafter was asked."""
    has_host: bool = False
    """Lookups of the host were asked too, for which no step is under way."""


@functools.cache
def asking(kind: Kind, has_model: bool, has_host: bool = False) -> Kind:
    """The same requests where these are asked."""
    return kind._replace(has_model=has_model, has_host=has_host)


class _Counts:
    """By place in the draft: how often there might have been a draft, how often there was one, and how often it was accepted."""

    def __init__(self) -> None:
        self.tries: list[float] = []
        self.drafted: list[float] = []
        self.accepted: list[float] = []

    def _extend(self, count: int) -> None:
        while len(self.tries) < count:
            self.tries.append(PRIOR_WEIGHT)
            self.drafted.append(PRIOR_WEIGHT)
            self.accepted.append(PRIOR_WEIGHT * PRIOR_ACCEPTANCE ** len(self.tries))

    def add(self, limits: Sequence[int], num_drafts: Sequence[int], num_accepted: Sequence[int]) -> None:
        most = max(limits)
        self._extend(most)
        if len(limits) == 1:
            self._add_one(most, num_drafts[0], num_accepted[0])
            return
        beyond = [_count_beyond(values, most) for values in (limits, num_drafts, num_accepted)]
        for place, (tries, drafted, accepted) in enumerate(zip(*beyond)):
            kept = MEMORY**tries
            self.tries[place] = self.tries[place] * kept + tries
            self.drafted[place] = self.drafted[place] * kept + drafted
            self.accepted[place] = self.accepted[place] * kept + accepted

    def _add_one(self, limit: int, num_drafts: int, num_accepted: int) -> None:
        for values, count in ((self.tries, limit), (self.drafted, min(num_drafts, limit)), (self.accepted, min(num_accepted, limit))):
            values[:limit] = [MEMORY * value + 1.0 for value in values[:count]] + [MEMORY * value for value in values[count:limit]]

    def add_expected(self, count: int, chances: Sequence[float], weight: float) -> None:
        self._extend(count)
        kept, has_drafts = MEMORY**weight, weight if chances else 0.0
        others = [0.0] * (count - len(chances))
        self.tries[:count] = [kept * value + weight for value in self.tries[:count]]
        self.drafted[:count] = [kept * value + has_drafts for value in self.drafted[:count]]
        self.accepted[:count] = [kept * value + weight * chance for value, chance in zip(self.accepted, (*chances, *others))]

    def expect(self, top: int) -> list[tuple[float, float]]:
        drafted, accepted, last, ratio = 0.0, 0.0, 1.0, PRIOR_ACCEPTANCE
        found = [(drafted, accepted)]
        for place in range(top):
            if place < len(self.tries):
                tries = self.tries[place]
                drafted, last = drafted + self.drafted[place] / tries, self.accepted[place] / tries
                ratio = last ** (1 / (place + 1))
            else:
                drafted, last = drafted + 1, last * ratio
            accepted += last
            found.append((drafted, accepted))
        return found


def _count_beyond(values: Sequence[int], most: int) -> list[int]:
    """How many of them are above 0, 1, ... most - 1."""
    counts = [0] * (most + 1)
    for value in values:
        counts[value if value < most else most] += 1
    return list(itertools.accumulate(reversed(counts[1:])))[::-1]


class Forecast:
    """Called by the engine thread only."""

    def __init__(self) -> None:
        self._counts: dict[Kind, _Counts] = defaultdict(_Counts)

    def add(self, kind: Kind, limits: Sequence[int], num_drafts: Sequence[int], num_accepted: Sequence[int]) -> None:
        """One step's requests of a kind [N]: the limit of each, its drafts, and those accepted."""
        if limits and max(limits):
            self._counts[kind].add(limits, num_drafts, num_accepted)

    def add_expected(self, kind: Kind, count: int, chances: Sequence[float], weight: float = 1.0) -> None:
        """Of a step with a limit of `count`, had its drafts been others: how likely each of those would have been accepted, none: there would have
        been no draft. weight: steps like it."""
        self._counts[kind].add_expected(count, chances, weight)

    def expect(self, kind: Kind, top: int) -> list[tuple[float, float]]:
        """Drafts and accepted drafts of one request's step with a limit of 0 to `top`."""
        return self._counts[kind].expect(top)
