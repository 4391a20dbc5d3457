"""How many tokens of prompts a step may have, from measured times: fewer while other requests decode."""

from __future__ import annotations

import math
from collections import defaultdict, deque

from backend.budget.times import bucket_of

DEFAULT_STEP_MS = 50.0
"""On GPU, while others decode. One H200, an 8B model, 128 requests: 50 ms halve the 99th percentile of the time per token for a few percent of the
tokens."""
LONGEST_SECONDS = 2.0
"""On CPU, of a step with prompts, whoever decodes or not: who cancels, comes new or asks whether the server lives waits for its end. Of a model of
1B weights 512 tokens take ten seconds and more on two busy cores, for which the supervisor took it for dead."""
FIRST_WORK = 2e10
"""Floating-point operations of the first step with a prompt, before any time is known: no CPU takes long for so many."""


def limit_chunks(max_step_ms: float | None, device_type: str, num_layers: int, hidden_size: int) -> ChunkLimit | None:
    """What an engine's steps are held to. max_step_ms: while others decode; None: the default, 0: they may take what they take."""
    if max_step_ms == 0:
        return None
    if device_type != "cpu":
        return ChunkLimit((DEFAULT_STEP_MS if max_step_ms is None else max_step_ms) / 1000)
    first = max(ChunkLimit.LEAST, int(FIRST_WORK / (24 * num_layers * hidden_size**2)))  # a layer has some 12 hidden_size^2 weights
    seconds = LONGEST_SECONDS if max_step_ms is None else max_step_ms / 1000
    return ChunkLimit(seconds, max(seconds, LONGEST_SECONDS), first)


class ChunkLimit:
    """So many tokens as keep a step within a given time.

    A step takes a fixed time and so much more for each token of a prompt (least squares over the last steps). What a step takes whatever it
    holds, smaller ones do not save: they are cut no further than to where it is two thirds of all, or half where nobody decodes.
    """

    LEAST = 32
    """A prompt goes on, whatever it takes."""
    WINDOW, FADING = 32, 0.7
    """Steps that are remembered, and the weight of each against the next: one that was slow for a reason of its own is soon forgotten."""
    EARLY, STUCK = 2, 8
    """Steps after which more tokens are tried: the first ones, if they were alike, and any of the fewest tokens."""
    ALIKE = 0.05
    """Counts that differ by less say nothing of what a token takes."""
    GROWTH = 2
    """Times as many tokens are tried where the last step took less than its share of the time, whatever older ones say."""

    def __init__(self, max_seconds: float, longest_seconds: float = math.inf, first: int | None = None) -> None:
        """max_seconds: of a step while others decode; longest_seconds: of any; first: tokens of the first one, None: as many as the budget allows."""
        self._max_seconds, self._longest_seconds = max_seconds, longest_seconds
        self._first = first
        self._steps: deque[tuple[int, float]] = deque(maxlen=self.WINDOW)
        self._line: tuple[float, float] | None = None  # through these, once somebody asked

    def choose(self, num_decoding: int) -> int | None:
        """None: as many as the budget allows."""
        limit = self._max_seconds if num_decoding else self._longest_seconds
        if not self._steps:
            return self._first
        if math.isinf(limit):
            return None
        if self._line is None:
            self._line = self._fit()
        fixed, per_token = self._line
        room = max(limit - fixed, fixed / 2 if num_decoding else fixed)
        count = room / per_token if per_token > 0 else self.GROWTH * max(count for count, _ in self._steps)
        last, seconds = self._steps[-1]
        if self.GROWTH * seconds <= limit:
            count = max(count, self.GROWTH * last)
        # Of steps all of one size nobody knows what they take whatever they hold.
        if len(self._steps) >= self.STUCK and all(count <= self.LEAST for count, _ in list(self._steps)[-self.STUCK :]):
            count = max(count, self.GROWTH * self.LEAST)
        if len(self._steps) == self.EARLY and len({bucket_of(count) for count, _ in self._steps}) == 1:
            count = max(count, self.GROWTH * last)
        return max(self.LEAST, int(count)) if count < 2**16 else None

    def observe(self, num_prompt_tokens: int, seconds: float) -> None:
        """Of a step with so many tokens of prompts."""
        if num_prompt_tokens:
            self._steps.append((num_prompt_tokens, seconds))
            self._line = None

    def _fit(self) -> tuple[float, float]:
        """Seconds of a step whatever it holds, and of each token."""
        seen: dict[int, list[tuple[float, int]]] = defaultdict(list)
        weights: dict[int, float] = defaultdict(float)
        weight = 1.0
        for count, seconds in reversed(self._steps):
            bucket = bucket_of(count)
            seen[bucket].append((seconds, count))
            weights[bucket] += weight
            weight *= self.FADING
        # Noise only ever makes a step slower: of two as large, the faster one.
        points = [(*sorted(own)[(len(own) - 1) // 2], weights[bucket]) for bucket, own in seen.items()]
        total = sum(weight for _, _, weight in points)
        mean_seconds, mean_count = (sum(point[i] * point[2] for point in points) / total for i in (0, 1))
        spread = sum(weight * (count - mean_count) ** 2 for _, count, weight in points)
        if spread <= total * (self.ALIKE * mean_count) ** 2:
            return 0.0, mean_seconds / mean_count
        slope = sum(weight * (count - mean_count) * (seconds - mean_seconds) for seconds, count, weight in points) / spread
        fixed = mean_seconds - slope * mean_count
        return (fixed, max(0.0, slope)) if fixed > 0 else (0.0, mean_seconds / mean_count)
