"""What the engine counts. Plain numbers; an adapter publishes them."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

LENGTHS = tuple(float(n) for n in range(1, 18))
TOKENS = tuple(float(2**n) for n in range(18))
"""Bounds of prompts' and answers' lengths."""


class Histogram:
    """Cumulative-bucket histogram, as Prometheus counts."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class Verdicts:
    """What came of the drafts of one method's requests, a request's step being one verdict. What is told of positions is counted when it is asked
    for: every step of every request comes by here."""

    num_emitted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    depths: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Steps with drafts, by drafts on the longest path, of which a chain has all."""
    accepted: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """The same steps, by accepted drafts."""

    @property
    def num_steps(self) -> int:
        """With drafts."""
        return sum(list(self.depths.values()))


def _by_position(counts: Mapping[int, int]) -> list[int]:
    """Of steps by their number of drafts: how many of them had a draft at each position."""
    known = list(counts.items())  # the engine's thread may add to them meanwhile
    return [sum(steps for count, steps in known if count > position) for position in range(max((count for count, _ in known), default=0))]


@dataclass(slots=True)
class Metrics:
    """Counts since the start; the speculation counters are by method."""

    steps: int = 0
    preemptions: int = 0
    verdicts: dict[str, Verdicts] = field(default_factory=dict)
    finished_requests: Counter[str] = field(default_factory=Counter)
    """By finish reason; those that ended with an error are not among them."""
    step_seconds: float = 0.0
    propose_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    time_to_first_token: Histogram = field(default_factory=Histogram)
    time_per_output_token: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)
    """From one step that emitted for a completion to the next, whatever they emitted; time_per_output_token is a completion's mean."""
    request_time: Histogram = field(default_factory=Histogram)
    queue_time: Histogram = field(default_factory=Histogram)
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    output_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    """Of completions that came to an end; queue_time of all that were begun."""
    step_time: Histogram = field(default_factory=Histogram)

    def add_verdict(self, method: str, num_drafted: int, num_accepted: int, num_emitted: int, depth: int) -> None:
        """Of one request's step; depth: drafts on the longest path, of which a chain has all."""
        own = self.verdicts.get(method)
        if own is None:
            own = self.verdicts[method] = Verdicts()
        own.num_emitted += num_emitted
        if num_drafted:
            own.num_drafted += num_drafted
            own.num_accepted += num_accepted
            own.depths[depth] += 1
            own.accepted[num_accepted] += 1

    def add_step(self, seconds: float) -> None:
        """From one plan to the next."""
        self.steps += 1
        self.step_seconds += seconds
        self.step_time.observe(seconds)

    def add_times(self, draft: float, forward: float, decide: float) -> None:
        """Seconds of a step's phases, as the device measured them; draft: and of drafters on the host."""
        self.propose_seconds += draft
        self.forward_seconds += forward
        self.verify_seconds += decide

    def _count(self, of: Callable[[Verdicts], int]) -> Counter[str]:
        """By method, those that have some."""
        return Counter({method: count for method, own in list(self.verdicts.items()) if (count := of(own))})

    @property
    def drafts(self) -> Counter[str]:
        """Steps of a request that verified some."""
        return self._count(lambda own: own.num_steps)

    @property
    def draft_tokens(self) -> Counter[str]:
        return self._count(lambda own: own.num_drafted)

    @property
    def accepted_tokens(self) -> Counter[str]:
        return self._count(lambda own: own.num_accepted)

    @property
    def emitted_tokens(self) -> Counter[str]:
        return self._count(lambda own: own.num_emitted)

    @property
    def drafted_per_position(self) -> Counter[tuple[str, int]]:
        return self._count_positions(lambda own: own.depths)

    @property
    def accepted_per_position(self) -> Counter[tuple[str, int]]:
        return self._count_positions(lambda own: own.accepted)

    def _count_positions(self, of: Callable[[Verdicts], Mapping[int, int]]) -> Counter[tuple[str, int]]:
        known = list(self.verdicts.items())
        return Counter({(method, place): count for method, own in known for place, count in enumerate(_by_position(of(own)))})

    @property
    def accepted_length(self) -> Histogram:
        """Of steps with drafts: the accepted ones, and the target's own token."""
        found = Histogram(LENGTHS)
        for own in list(self.verdicts.values()):
            for num_accepted, steps in list(own.accepted.items()):
                found.observe(1 + num_accepted, steps)
        return found
