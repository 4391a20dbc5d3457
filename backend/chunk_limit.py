"""How many tokens of prompts a step may have while other requests decode, from measured times."""

from __future__ import annotations

from collections import defaultdict, deque

from backend.budget.times import bucket_of


class ChunkLimit:
    """So many tokens as keep a step within a given time.

    A step takes a fixed time and so much more for each token of a prompt (least squares over the last steps). What a step takes whatever it
    holds, smaller ones do not save: they are cut no further than to where it is two thirds of all.
    """

    LEAST = 32
    """A prompt goes on, whatever it takes."""
    WINDOW, FADING = 32, 0.7
    """Steps that are remembered, and the weight of each against the next: one that was slow for a reason of its own is soon forgotten."""
    STUCK = 8
    """Steps of the fewest tokens after which more are tried."""
    ALIKE = 0.05
    """Counts that differ by less say nothing of what a token takes."""
    GROWTH = 2
    """Times as many tokens are tried where the last step took less than its share of the time, whatever older ones say."""

    def __init__(self, max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._steps: deque[tuple[int, float]] = deque(maxlen=self.WINDOW)

    def choose(self, num_decoding: int) -> int | None:
        """None: as many as the budget allows."""
        if not num_decoding or not self._steps:
            return None
        fixed, per_token = self._fit()
        room = max(self._max_seconds - fixed, fixed / 2)
        count = room / per_token if per_token > 0 else self.GROWTH * max(count for count, _ in self._steps)
        last, seconds = self._steps[-1]
        if self.GROWTH * seconds <= self._max_seconds:
            count = max(count, self.GROWTH * last)
        if len(self._steps) >= self.STUCK and all(count <= self.LEAST for count, _ in list(self._steps)[-self.STUCK :]):
            count = max(count, self.GROWTH * self.LEAST)  # of steps all of one size nobody knows what they take whatever they hold
        return max(self.LEAST, int(count)) if count < 2**16 else None

    def observe(self, num_prompt_tokens: int, seconds: float) -> None:
        """Of a step with so many tokens of prompts."""
        if num_prompt_tokens:
            self._steps.append((num_prompt_tokens, seconds))

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
