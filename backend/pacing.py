"""How many drafts are worth it now: chosen from measured step times and acceptance, so that speculation does not slow large batches.

A step of few tokens costs what reading the weights costs, so drafts are almost free; once arithmetic bounds it, every draft is paid
for, and most are rejected. Where the one turns into the other depends on machine, model and batch: it is measured, not configured.
"""

from __future__ import annotations

import bisect
from collections import defaultdict, deque
from collections.abc import Sequence

from backend.core import Outcome, Request, Scheduled

SMOOTHING_DOWN, SMOOTHING_UP = 0.5, 0.1
"""Share of the newest measurement in an average of times. Noise only ever makes a step slower, so a faster one says more."""
MEMORY = 0.998
"""What is left of old acceptance counts after one more step of a request."""
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 4.0
"""Before anything is measured: of each further draft, and how many measurements that is worth. Hopeful, so that drafts are tried."""
EXPLORE_EVERY, FAR_EVERY = 32, 8
"""Steps between trials of one draft more, and trials between those of any other number: what is never tried cannot be known to have
become better."""
TRIAL_STEPS = 2
"""A model drafter that was not asked for long catches up in the first; the second is what can be measured."""
MAX_EXPLORERS = 2
"""Requests that a trial from no drafts at all takes: a model drafter has to catch up for each."""
MIN_GAIN = 1.03
"""Another number of drafts has to promise this much more speed, or noise would drive the choice."""
UNPACED = ("topp",)
"""Strategies that accept whatever is likely: how many drafts they have decides how often the drafter's taste wins over the target's, so
that it must not follow the load."""
NEAR = 1.3
"""Token counts that differ by no more than this factor say something about one another's time."""


class _Times:
    """Seconds by number of tokens: averages at the counts that were seen, straight lines between them."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._seconds: dict[int, float] = {}

    @staticmethod
    def bucket(count: int) -> int:
        """Counts above 8 to three bits."""
        shift = max(0, count.bit_length() - 3)
        return count >> shift << shift

    def add(self, count: int, seconds: float) -> None:
        count = self.bucket(count)
        if count not in self._seconds:
            bisect.insort(self._counts, count)
            self._seconds[count] = seconds
        else:
            change = seconds - self._seconds[count]
            self._seconds[count] += change * (SMOOTHING_UP if change > 0 else SMOOTHING_DOWN)

    def knows(self, count: int) -> bool:
        """Whether a count near enough was seen."""
        place = bisect.bisect_left(self._counts, count)
        return any(count <= NEAR * other and other <= NEAR * count for other in self._counts[max(0, place - 1) : place + 1])

    def at(self, count: int) -> float:
        """Past the largest count seen, the last line goes on; before the smallest, all take as long."""
        if not self._counts:
            return 0.0
        place = bisect.bisect_left(self._counts, count)
        if place < len(self._counts) and self._counts[place] == count:
            return self._seconds[count]
        if place == 0 or len(self._counts) == 1:
            return self._seconds[self._counts[0]]
        low, high = self._counts[max(0, min(place, len(self._counts) - 1) - 1)], self._counts[min(place, len(self._counts) - 1)]
        slope = max(0.0, (self._seconds[high] - self._seconds[low]) / (high - low))
        return self._seconds[low] + slope * (count - low)


class _Acceptance:
    """Of one method, by position in the draft: how often there was a draft, and how often it was accepted."""

    def __init__(self) -> None:
        self.tries: list[float] = []
        self.drafted: list[float] = []
        self.accepted: list[float] = []

    def add(self, limits: list[int], num_drafts: list[int], num_accepted: list[int]) -> None:
        """One step's requests: the limit of each, its drafts, and those accepted."""
        while len(self.tries) < max(limits):
            hopeful = PRIOR_WEIGHT * PRIOR_ACCEPTANCE ** (len(self.tries) + 1)
            self.tries.append(PRIOR_WEIGHT)
            self.drafted.append(PRIOR_WEIGHT)
            self.accepted.append(hopeful)
        for position in range(max(limits)):
            tries, drafted, accepted = (sum(value > position for value in values) for values in (limits, num_drafts, num_accepted))
            kept = MEMORY**tries
            self.tries[position] = self.tries[position] * kept + tries
            self.drafted[position] = self.drafted[position] * kept + drafted
            self.accepted[position] = self.accepted[position] * kept + accepted

    def expect(self, top: int) -> list[tuple[float, float]]:
        """Drafts and accepted drafts of one request's step with a limit of 0 to `top`."""
        drafted, accepted, last, ratio = 0.0, 0.0, 1.0, PRIOR_ACCEPTANCE
        outcomes = [(drafted, accepted)]
        for position in range(top):
            if position < len(self.tries):
                tries = self.tries[position]
                drafted, last = drafted + self.drafted[position] / tries, self.accepted[position] / tries
                ratio = last ** (1 / (position + 1))
            else:
                drafted, last = drafted + 1, last * ratio
            accepted += last
            outcomes.append((drafted, accepted))
        return outcomes


class Pacer:
    """Chooses one limit for all drafts of a step. Called by the engine thread only."""

    def __init__(self) -> None:
        self._step_times = _Times()
        self._draft_times: dict[str, dict[int, _Times]] = defaultdict(lambda: defaultdict(_Times))  # by method and limit, over requests
        self._acceptance: dict[str, _Acceptance] = defaultdict(_Acceptance)
        self._steps = 0
        self._limit: int | None = None  # what is best as far as known
        self._applied: int | None = None  # that, or a trial
        self._explorers: frozenset[str] | None = None
        self._has_prompts = False  # in the last step that was read; the next one is likely to as well

    def choose(self, requests: Sequence[Request]) -> None:
        """Sets the limit for the next step of these requests, all of them decoding.

        Nothing is tried beside prompts, where no time could be measured: what was never seen would be tried again at each step for as long
        as prompts wait.
        """
        self._explorers = None
        wanted: dict[tuple[str, int, bool], int] = defaultdict(int)
        for request in requests:
            if request.speculation.num_speculative_tokens:
                wanted[request.speculation.method, request.speculation.num_speculative_tokens, is_paced(request)] += 1
        if not any(paced for _, _, paced in wanted):
            return
        self._steps += 1
        top = max(count for _, count, paced in wanted if paced)
        outcomes = self._expect(top, len(requests), wanted)
        current = min(self._limit if self._limit is not None else top, top)
        unknown = next((limit for limit in range(top + 1) if not self._step_times.knows(round(outcomes[limit][0]))), None)
        if unknown is not None:
            self._limit, self._applied = current, current if self._has_prompts else unknown
            return
        speeds = [emitted / max(seconds, 1e-9) for _, emitted, seconds in outcomes]
        best = max(range(top + 1), key=lambda limit: speeds[limit])
        if speeds[best] > MIN_GAIN * speeds[current]:
            current = best
        self._limit = self._applied = current
        if not self._has_prompts and self._steps >= EXPLORE_EVERY and self._steps % EXPLORE_EVERY < TRIAL_STEPS:
            self._explore(requests, top)

    def _explore(self, requests: Sequence[Request], top: int) -> None:
        """Another limit for this step."""
        trial = self._steps // EXPLORE_EVERY
        assert self._limit is not None
        self._applied = trial // FAR_EVERY % (top + 1) if trial % FAR_EVERY == 0 else min(self._limit + 1, top)
        if self._limit == 0:
            drafting = [r.request_id for r in requests if r.speculation.num_speculative_tokens and is_paced(r)]
            start = trial * MAX_EXPLORERS % len(drafting)
            self._explorers = frozenset((drafting + drafting)[start : start + MAX_EXPLORERS])

    def limit(self, request: Request) -> int:
        """Most drafts of a request in the next step."""
        if self._applied is None or not is_paced(request):
            return request.speculation.num_speculative_tokens
        if self._explorers is not None and request.request_id not in self._explorers:
            return 0
        return self._applied

    def _expect(self, top: int, num_requests: int, wanted: dict[tuple[str, int, bool], int]) -> list[tuple[float, float, float]]:
        """For limits of 0 to `top`: tokens that a step computes, tokens that it emits, and its seconds. wanted: requests by method, drafts
        that they want, and whether the limit holds for them."""
        most = max(count for _, count, _ in wanted)
        expected = {method: self._acceptance[method].expect(most) for method, _, _ in wanted}
        outcomes = []
        for limit in range(top + 1):
            tokens = emitted = float(num_requests)
            drafting: dict[str, int] = defaultdict(int)
            for (method, count, paced), number in wanted.items():
                drafted, accepted = expected[method][min(limit, count) if paced else count]
                tokens += number * drafted
                emitted += number * accepted
                drafting[method] += number
            seconds = self._step_times.at(round(tokens))
            if limit:
                seconds += sum(self._draft_seconds(method, limit, number) for method, number in drafting.items())
            outcomes.append((tokens, emitted, seconds))
        return outcomes

    def _draft_seconds(self, method: str, limit: int, num_requests: int) -> float:
        """From the nearest limit that was measured, in proportion."""
        known = self._draft_times[method]
        if not known:
            return 0.0
        nearest = min(known, key=lambda other: (abs(other - limit), other))
        return known[nearest].at(num_requests) * limit / nearest

    def observe(self, entries: Sequence[Scheduled], outcomes: Sequence[Outcome], draft_seconds: float, rest_seconds: float) -> None:
        """What a step brought. Steps with prompts in them say nothing about the time of drafts."""
        drafting: dict[str, tuple[list[int], list[int], list[int]]] = {}
        for entry, outcome in zip(entries, outcomes):
            if entry.max_drafts:
                limits, drafts, accepted = drafting.setdefault(entry.request.speculation.method, ([], [], []))
                limits.append(entry.max_drafts)
                drafts.append(outcome.num_drafts)
                accepted.append(outcome.num_accepted)
        for method, (limits, drafts, accepted) in drafting.items():
            self._acceptance[method].add(limits, drafts, accepted)
        self._has_prompts = not all(entry.is_decoding for entry in entries)
        if not self._has_prompts:
            self._step_times.add(len(entries) + sum(outcome.num_drafts for outcome in outcomes), rest_seconds)
            if len(drafting) == 1:
                ((method, (limits, _, _)),) = drafting.items()
                self._draft_times[method][max(limits)].add(len(limits), draft_seconds)


def is_paced(request: Request) -> bool:
    return request.speculation.verify_strategy not in UNPACED


class ChunkLimit:
    """How many tokens of prompts a step may have while other requests decode: so many as keep it within a given time.

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
            bucket = _Times.bucket(count)
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
