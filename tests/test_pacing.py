"""Adaptive drafting on simulated machines: as fast as the best fixed number of drafts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from backend.core import Draft, Request, SamplingParams, Scheduled, Speculation, Verdict
from backend.pacing import Pacer

Cost = Callable[[int], float]


def memory_bound(tokens: int) -> float:
    """A GPU: reading the weights costs 4 ms, whatever the batch."""
    return 4e-3 + 1e-6 * tokens


def compute_bound(tokens: int) -> float:
    """A CPU: every token is paid for, past the first few."""
    return 4e-3 + 0.4e-3 * max(0, tokens - 4)


def make_requests(count: int, method: str = "mtp", drafts: int = 5) -> list[Request]:
    return [
        Request(str(i), [1, 2], SamplingParams(max_tokens=10**6), speculation=Speculation(method, drafts), token_ids=[1, 2, 3], num_computed_tokens=2)
        for i in range(count)
    ]


class Machine:
    """Runs steps of requests whose drafts are right with a probability each, and keeps the time."""

    def __init__(self, cost: Cost, draft_cost: float, acceptance: float, pacer: Pacer | None, seed: int = 0) -> None:
        self.cost, self.draft_cost, self.acceptance, self.pacer = cost, draft_cost, acceptance, pacer
        self.numbers = random.Random(seed)
        self.seconds = 0.0
        self.emitted = 0
        self.limits: list[int] = []

    def step(self, requests: list[Request], fixed: int = 0) -> None:
        if self.pacer is not None:
            self.pacer.choose(requests)
        entries, rows, accepted = [], [], []
        for request in requests:
            limit = fixed if self.pacer is None else min(self.pacer.limit(request), request.speculation.num_speculative_tokens)
            entries.append(Scheduled(request, 1, limit))
            rows.append([7] * limit)
            right = 0
            while right < limit and self.numbers.random() < self.acceptance:
                right += 1
            accepted.append(right)
        draft = Draft(rows, [["mtp"] * len(r) for r in rows])
        verdict = Verdict([[7] * (a + 1) for a in accepted], accepted, [None] * len(rows), [False] * len(rows))
        most = max(map(len, rows))
        noise = 1 + (self.numbers.random() < 0.05) * 2 * self.numbers.random()  # now and then, something else runs
        propose, rest = noise * most * self.draft_cost, noise * self.cost(sum(map(len, rows)) + len(rows))
        if self.pacer is not None:
            self.pacer.observe(entries, draft, verdict, propose, rest)
        self.seconds += propose + rest
        self.emitted += sum(accepted) + len(rows)
        self.limits.append(most)

    def speed(self, requests: list[Request], steps: int, fixed: int = 0) -> float:
        self.seconds, self.emitted, self.limits = 0.0, 0, []
        for _ in range(steps):
            self.step(requests, fixed)
        return self.emitted / self.seconds


CASES = [
    (cost, batch, acceptance, draft_cost)
    for cost in (memory_bound, compute_bound)
    for batch in (1, 8, 32, 200)
    for acceptance in (0.05, 0.5, 0.9)
    for draft_cost in (0.0, 0.4e-3)
]


@pytest.mark.parametrize(("cost", "batch", "acceptance", "draft_cost"), CASES)
def test_as_fast_as_the_best_fixed_number(cost, batch, acceptance, draft_cost):
    requests = make_requests(batch)
    fixed = [Machine(cost, draft_cost, acceptance, None).speed(requests, 400, k) for k in range(6)]
    machine = Machine(cost, draft_cost, acceptance, Pacer())
    machine.speed(requests, 100)  # a server's first hundred steps
    speed = machine.speed(requests, 400)
    assert speed > 0.9 * max(fixed)


def test_it_notices_when_the_batch_grows_and_shrinks():
    machine = Machine(compute_bound, 0.0, 0.7, Pacer())
    medians = []
    for batch in (1, 64, 1):
        machine.speed(make_requests(batch), 150)
        machine.speed(make_requests(batch), 150)
        medians.append(sorted(machine.limits)[75])
    assert medians[1] <= 1 < 3 <= min(medians[0], medians[2])


def test_it_notices_when_the_text_becomes_predictable():
    """What was given up is tried again."""
    machine = Machine(compute_bound, 0.3e-3, 0.02, Pacer())
    requests = make_requests(8)
    machine.speed(requests, 1500)
    assert sorted(machine.limits)[750] == 0
    machine.acceptance = 0.95
    machine.speed(requests, 3000)
    assert sorted(machine.limits[-300:])[150] >= 1


def test_trials_from_nothing_take_few_requests():
    machine = Machine(compute_bound, 0.3e-3, 0.02, Pacer())
    requests = make_requests(64)
    machine.speed(requests, 200)
    assert sorted(machine.limits)[100] == 0
    counts = []
    for _ in range(200):
        machine.step(requests)
        counts.append(sum(machine.pacer.limit(r) > 0 for r in requests))
    assert max(counts) == 2
    assert len({r.request_id for r in requests}) == 64


def test_methods_are_told_apart():
    """A method without acceptance does not take the drafts from one that has it, when each runs alone."""
    pacer = Pacer()
    bad = Machine(compute_bound, 0.0, 0.0, pacer)
    good = Machine(compute_bound, 0.0, 0.95, pacer)
    for _ in range(20):
        bad.speed(make_requests(2, "ngram"), 20)
        good.speed(make_requests(2, "mtp"), 20)
    assert sorted(bad.limits)[10] <= 1 and sorted(good.limits)[10] >= 4


def test_plain_requests_are_left_alone():
    pacer = Pacer()
    pacer.choose(make_requests(4, "none", 0))
    assert pacer.limit(make_requests(1)[0]) == 5
    pacer.choose([])
