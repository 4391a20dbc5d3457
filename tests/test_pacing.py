"""Adaptive drafting on simulated machines: as fast as the best fixed number of drafts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from backend.core import Outcome, Request, SamplingParams, Scheduled, Speculation
from backend.pacing import ChunkLimit, Pacer

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


MEAN_NOISE = 1.05
"""One step in twenty takes up to three times as long."""


class Machine:
    """Runs steps of requests whose drafts are right with a probability each, and keeps the time."""

    def __init__(self, cost: Cost, draft_cost: float, acceptance: float, pacer: Pacer, seed: int = 0) -> None:
        self.cost, self.draft_cost, self.acceptance, self.pacer = cost, draft_cost, acceptance, pacer
        self.numbers = random.Random(seed)
        self.seconds = 0.0
        self.emitted = 0
        self.limits: list[int] = []

    def step(self, requests: list[Request], num_prompt_tokens: int = 0) -> None:
        self.pacer.choose(requests)
        entries, outcomes = [], []
        for request in requests:
            limit = min(self.pacer.limit(request), request.speculation.num_speculative_tokens)
            entries.append(Scheduled(request, 1, limit, is_decoding=True))
            right = 0
            while right < limit and self.numbers.random() < self.acceptance:
                right += 1
            outcomes.append(Outcome([7] * (right + 1), limit, right))
        most, num_drafts = max(o.num_drafts for o in outcomes), sum(o.num_drafts for o in outcomes)
        if num_prompt_tokens:
            entries.append(Scheduled(make_requests(1)[0], num_prompt_tokens, emits=False))
            outcomes.append(Outcome([], 0, 0))
        noise = 1 + (self.numbers.random() < 0.05) * 2 * self.numbers.random()  # now and then, something else runs
        propose, rest = noise * most * self.draft_cost, noise * self.cost(num_drafts + len(requests) + num_prompt_tokens)
        self.pacer.observe(entries, outcomes, propose, rest)
        self.seconds += propose + rest
        self.emitted += sum(len(o.token_ids) for o in outcomes)
        self.limits.append(most)

    def speed(self, requests: list[Request], steps: int) -> float:
        self.seconds, self.emitted, self.limits = 0.0, 0, []
        for _ in range(steps):
            self.step(requests)
        return self.emitted / self.seconds


def expected_speed(cost: Cost, draft_cost: float, acceptance: float, batch: int, limit: int) -> float:
    """Tokens a second with a fixed number of drafts, as `Machine` counts them."""
    emitted = batch * sum(acceptance**position for position in range(limit + 1))
    return emitted / (MEAN_NOISE * (limit * draft_cost + cost(batch * (1 + limit))))


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
    fixed = [expected_speed(cost, draft_cost, acceptance, batch, limit) for limit in range(6)]
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


def test_drafts_go_on_while_prompts_come():
    """Of a new server all of them, and of one that knows the times as many as without prompts; also where the batch is one never seen."""
    machine = Machine(memory_bound, 0.1e-3, 0.9, Pacer())
    for batch in range(1, 60):
        machine.step(make_requests(batch), num_prompt_tokens=500)
    assert machine.limits[1:] == [5] * 58, "the first step is not known to have a prompt"
    machine.speed(make_requests(4), 200)
    assert sorted(machine.limits)[100] == 5 and min(machine.limits[:8]) == 0, "what each number takes is tried where it can be measured"
    machine.limits = []
    for batch in range(60, 100):
        machine.step(make_requests(batch), num_prompt_tokens=500)
    assert machine.limits[1:] == [5] * 39


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


def test_what_accepts_any_likely_draft_is_not_paced():
    """Its answers would follow the load. The others in its batch are paced all the same, and know what it costs."""
    pacer = Pacer()
    machine = Machine(compute_bound, 0.0, 0.0, pacer)
    taken = make_requests(8)
    for request in taken[:4]:
        request.speculation = Speculation("mtp", 5, "topp")
    machine.speed(taken, 300)
    assert [pacer.limit(r) for r in taken] == [5] * 4 + [0] * 4
    pacer = Pacer()
    pacer.choose(taken[:4])
    assert pacer.limit(taken[0]) == 5


# -- how much of a prompt a step takes ---------------------------------------------------------------------------------


def per_token(tokens: int) -> float:
    return 2e-3 + 0.1e-3 * tokens


@pytest.mark.parametrize("seen", [(100, 400), (64, 128, 256, 512), (1000, 2000), (4096,)], ids=str)
def test_prompts_are_cut_to_what_a_step_has_time_for(seen):
    """Whatever sizes come first, a few steps later they are right: 400 tokens take as long as a step may."""
    limit = ChunkLimit(max_seconds=per_token(400))
    for count in seen:
        limit.observe(count, per_token(count))
    for _ in range(12):
        chosen = limit.choose(num_decoding=8)
        assert chosen is not None
        limit.observe(chosen, per_token(chosen))
    assert 300 <= chosen <= 440


@pytest.mark.parametrize("seen", [[(512, 1.5)], [(32, 0.9), (4096, 1.5)], [(8000, 0.5)] * 3], ids=str)
def test_slow_first_steps_are_forgotten(seen):
    """They load what later ones use: what they took says nothing of these."""
    limit = ChunkLimit(max_seconds=per_token(400))
    for count, seconds in seen:
        limit.observe(count, seconds)
    chosen = []
    for _ in range(24):
        chosen.append(limit.choose(num_decoding=8))
        limit.observe(chosen[-1], per_token(chosen[-1]))
    assert all(300 <= count <= 440 for count in chosen[18:]) and sum(chosen) >= 24 * 200


@pytest.mark.parametrize("first", [40e-3, 2.0])
def test_steps_are_not_cut_where_that_saves_nothing(first):
    """Kernels that the host launches one by one take as long for 32 tokens as for 2,048, and the first time longer."""
    limit = ChunkLimit(max_seconds=20e-3)
    limit.observe(512, first)
    for _ in range(60):
        chosen = limit.choose(num_decoding=8)
        chosen = min(chosen or 8192, 8192)
        limit.observe(chosen, 40e-3 + max(0, chosen - 2048) * 20e-6)
    assert 700 <= chosen <= 6000


def test_a_prompt_goes_on_however_slow_steps_are():
    limit = ChunkLimit(max_seconds=1e-3)
    for count in (64, 128, 256):
        limit.observe(count, per_token(count))
    assert limit.choose(num_decoding=1) == ChunkLimit.LEAST


def test_chunks_are_not_cut_where_nobody_waits_or_nothing_is_known():
    limit = ChunkLimit(max_seconds=1e-3)
    assert limit.choose(num_decoding=5) is None
    limit.observe(0, 5.0)  # a step without prompts says nothing
    assert limit.choose(num_decoding=5) is None
    limit.observe(512, per_token(512))
    assert limit.choose(num_decoding=0) is None
    roomy = ChunkLimit(max_seconds=1e3)
    roomy.observe(128, per_token(128))
    roomy.observe(256, per_token(256))
    assert roomy.choose(num_decoding=5) is None
