"""What the engine counts. Plain numbers; an adapter publishes them."""

from __future__ import annotations

import bisect
from collections import Counter
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

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class Metrics:
    """Counts since the start; the speculation counters are by method."""

    steps: int = 0
    preemptions: int = 0
    drafts: Counter[str] = field(default_factory=Counter)
    draft_tokens: Counter[str] = field(default_factory=Counter)
    accepted_tokens: Counter[str] = field(default_factory=Counter)
    drafted_per_position: Counter[tuple[str, int]] = field(default_factory=Counter)
    accepted_per_position: Counter[tuple[str, int]] = field(default_factory=Counter)
    emitted_tokens: Counter[str] = field(default_factory=Counter)
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
    accepted_length: Histogram = field(default_factory=lambda: Histogram(LENGTHS))

    def add_verdict(self, method: str, num_drafted: int, num_accepted: int, num_emitted: int, depth: int) -> None:
        """Of one request's step; depth: drafts on the longest path, of which a chain has all."""
        self.emitted_tokens[method] += num_emitted
        if num_drafted:
            self.drafts[method] += 1
            self.draft_tokens[method] += num_drafted
            self.accepted_tokens[method] += num_accepted
            for position in range(depth):
                self.drafted_per_position[method, position] += 1
            for position in range(num_accepted):
                self.accepted_per_position[method, position] += 1
            self.accepted_length.observe(1 + num_accepted)

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
