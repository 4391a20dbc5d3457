"""Pages, prefix cache and scheduler under any history: no page leaks, no request is lost, no token is computed from another's KV.

The engine is replaced by as little as possible: the next token is a function of the tokens before it, and a KV slot holds the
name of the token prefix that was computed into it. Whatever the scheduler shares, copies or gives away wrongly then shows as a
slot that holds another prefix.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from backend.core import Batch, Request, Scheduled, Speculation
from backend.errors import CapacityError, RequestError
from backend.limits import cut_at_end
from backend.pages import PagePool
from backend.prefix_cache import MAX_SIBLINGS_SEARCHED, ROOT, PrefixCache, chain_hash, chain_hashes
from backend.sampling_params import SamplingParams
from backend.scheduler import Scheduler

VOCABULARY = 6
STOP_ID = 0
BASES = tuple(tuple((seed * 7 + i * i) % (VOCABULARY - 1) + 1 for i in range(64)) for seed in range(2))
"""Prompts begin with a piece of one of these, so that they share full pages and parts of pages."""


def next_token(token_ids: Sequence[int]) -> int:
    """The fake model: a function of the whole history."""
    return zlib.crc32(bytes(token_ids)) % VOCABULARY


def plain_output(request: Request, max_model_len: int) -> list[int]:
    """What the fake model says with no scheduler at all: one token at a time until the request ends."""
    params = request.params
    token_ids = list(request.prompt_token_ids)
    output: list[int] = []
    while len(output) < params.max_tokens and len(token_ids) < max_model_len:
        output.append(next_token(token_ids))
        token_ids.append(output[-1])
        if output[-1] in request.stop_ids and len(output) > params.min_tokens:
            break
    return output


@dataclass(slots=True)
class Launched:
    """A step under way: what the device makes of it is settled, and the host has not read it yet."""

    entries: list[Scheduled]
    emitted: list[list[int]]
    num_drafts: list[int]


@dataclass
class World:
    """A scheduler with a fake model and a simulated KV memory, stepped the way `Engine.step` and a worker do."""

    num_pages: int
    page_size: int
    max_batch_size: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 48
    max_waiting: int = 1000
    caching: bool = True
    num_ahead: int = 0
    """Steps under way while the next one is scheduled."""
    num_after: int = 0
    """Tokens past a step's own that pages are held for."""
    max_prompt_tokens: int | None = None
    scheduler: Scheduler = field(init=False)
    names: dict[tuple[int, int], int] = field(default_factory=dict)
    """(name of the prefix before, token) -> name of the prefix: exact, no hash may collide."""
    row_unit: int = 1
    """Steps with prompts are to have a multiple of so many rows."""
    kv: list[list[int]] = field(init=False)
    """[page][slot] the prefix that was computed there; -1: nothing yet."""
    device: dict[str, list[int]] = field(default_factory=dict)
    """What the worker knows of the tokens of running requests: as much as the host, or some steps more."""
    in_flight: list[Launched] = field(default_factory=list)
    is_short: bool = False
    waits_for_host: set[str] = field(default_factory=set)
    """Requests that sit out while a step of theirs is under way."""
    ended: dict[str, str] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    """What the history came by, so that a test can say that it tested something."""

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            num_pages=self.num_pages,
            page_size=self.page_size,
            max_batch_size=self.max_batch_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_waiting=self.max_waiting,
            enable_prefix_caching=self.caching,
            count_tokens_after_step=lambda request: self.num_after,
            whole_rows=lambda count: count - count % self.row_unit,
        )
        self.kv = [[-1] * self.page_size for _ in range(self.num_pages)]

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        min_tokens: int = 0,
        drafts: int = 0,
        priority: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> Request:
        """Queues a request as `Engine.submit` does: only when it fits. Raises RequestError."""
        self.scheduler.limits.check_fits(len(prompt), max_tokens)
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))
        speculation = Speculation("ngram", drafts)
        number = len(self.requests)
        request = Request(f"r{number}", list(prompt), params, speculation, priority=priority, stop_ids=frozenset(stop_ids))
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def cancel(self, request: Request) -> None:
        self.seen["cancelled while it ran" if request in self.scheduler.running else "cancelled while it waited"] += 1
        self._end(request, "cancelled")

    def prefixes(self, token_ids: Sequence[int]) -> list[int]:
        """The name of every prefix of `token_ids`, from one token on."""
        names, parent = [], -1
        for token_id in token_ids:
            parent = self.names.setdefault((parent, token_id), len(self.names))
            names.append(parent)
        return names

    def _end(self, request: Request, reason: str) -> None:
        self.ended[request.request_id] = reason
        self.scheduler.finish(request)
        self.device.pop(request.request_id, None)

    def end_of(self, request: Request) -> int:
        """Tokens at which the worker stops; stop ids are the host's business."""
        return min(len(request.prompt_token_ids) + max(1, request.params.max_tokens), self.max_model_len)

    @staticmethod
    def draft(token_ids: list[int], most: int, numbers: random.Random) -> list[int]:
        """Some drafts: the first of them right, the rest wrong."""
        count = numbers.randint(0, max(most, 0))
        right = numbers.randint(0, count)
        drafts: list[int] = []
        for place in range(count):
            good = next_token(token_ids + drafts)
            drafts.append(good if place < right else (good + 1) % VOCABULARY)
        return drafts

    def step(self, numbers: random.Random) -> Batch:
        scheduler = self.scheduler
        if self.is_short:
            self._finish_all()
        running = {r.request_id for r in scheduler.running}
        batch = scheduler.schedule(
            may_preempt=not self.in_flight,
            is_held=lambda r: r.request_id in self.waits_for_host and r.num_steps_ahead > 0,
            max_prompt_tokens=self.max_prompt_tokens,
        )
        self.is_short = batch.is_short
        self.seen["short of pages"] += batch.is_short
        self._check_batch(batch, running)
        for request in batch.preempted:
            self.device.pop(request.request_id, None)
        if not batch:
            self._finish_all()
        else:
            self._prepare_pages(batch)
            self.in_flight.append(self._compute(batch, numbers))
            scheduler.launch(batch.entries)
            while len(self.in_flight) > self.num_ahead:
                self._finish()
        self.check()
        return batch

    def _prepare_pages(self, batch: Batch) -> None:
        """As `KvStore.copy`: all sources are read, fresh pages are cleared, targets are written."""
        scheduler, size = self.scheduler, self.page_size
        sources = [list(self.kv[source]) for source, _, _ in batch.page_copies]
        targets = [target for _, target, _ in batch.page_copies]
        assert set(targets) <= set(batch.fresh_pages) and len(set(batch.fresh_pages)) == len(batch.fresh_pages)
        for page in batch.fresh_pages:
            self.kv[page] = [-1] * size
        assert len(set(targets)) == len(targets), f"two pages are copied to one: {batch.page_copies}"
        for (source, target, count), content in zip(batch.page_copies, sources, strict=True):
            self.seen["copies"] += 1
            self.seen["copied onto itself"] += source == target
            held = {page for r in scheduler.running for page in r.page_ids}
            self.seen["source given out in the same step"] += source in held and source != target
            self.kv[target] = content[:count] + [-1] * (size - count)

    def _compute(self, batch: Batch, numbers: random.Random) -> Launched:
        """What the worker does, in the order of launches, with the tokens that it knows."""
        launched, size = Launched(batch.entries, [], []), self.page_size
        spans = []
        for entry in batch.entries:
            request = entry.request
            known = self.device.setdefault(request.request_id, list(request.token_ids))
            end = self.end_of(request)
            if not entry.is_decoding:
                begin, sequence, drafts = entry.begin, known[: entry.begin + entry.num_tokens], []
            elif len(known) >= end:  # it ended in a step under way
                self.seen["nothing left to compute"] += 1
                begin, sequence, drafts = 0, [], []
            else:
                assert len(known) == len(request.token_ids) or request.num_steps_ahead, "the worker knows what nobody emitted"
                self.seen["computed ahead of the host"] += len(known) > len(request.token_ids)
                begin = len(known) - 1
                drafts = self.draft(known, min(entry.max_drafts, end - len(known) - 1), numbers)
                sequence = known + drafts
            names = self.prefixes(sequence)
            spans.append(names)
            assert len(sequence) <= len(request.page_ids) * size, f"{request.request_id} holds no page for what the step writes"
            for i in range(begin):
                found = self.kv[request.page_ids[i // size]][i % size]
                assert found == names[i], f"{request.request_id}: slot {i} of {begin} computed ones holds another prefix before the step"
            for i in range(begin, len(sequence)):
                self.kv[request.page_ids[i // size]][i % size] = names[i]
            emitted: list[int] = []
            while entry.emits and sequence and len(emitted) <= len(drafts) and len(known) + len(emitted) < end:
                emitted.append(next_token(known + emitted))
                if len(emitted) > len(drafts) or emitted[-1] != drafts[len(emitted) - 1]:
                    break
            known += emitted
            is_kept = not emitted or len(known) >= end or len(known) <= len(request.page_ids) * size
            assert is_kept or not self.num_after, f"{request.request_id}: no page for what a drafter at the step's end keeps of the newest token"
            launched.emitted.append(emitted)
            launched.num_drafts.append(len(drafts))
        # Attention reads after all entries have written, so nobody may have written into what another one reads.
        for entry, names in zip(batch.entries, spans, strict=True):
            held = [self.kv[page][slot] for page in entry.request.page_ids for slot in range(size)]
            assert held[: len(names)] == names, f"{entry.request.request_id}: another request wrote into its slots"
        return launched

    def _finish_all(self) -> None:
        while self.in_flight:
            self._finish()

    def _finish(self) -> None:
        launched = self.in_flight.pop(0)
        for entry, emitted, num_drafts in zip(launched.entries, launched.emitted, launched.num_drafts, strict=True):
            if entry.request.request_id in self.ended:
                self.seen["ended while a step was under way"] += 1
            elif not entry.emits:
                self.seen["chunks"] += 1
            else:
                self._commit(entry, emitted, num_drafts)

    def _commit(self, entry: Scheduled, emitted: list[int], num_drafts: int) -> None:
        request = entry.request
        self.seen["drafts rejected"] += num_drafts - max(len(emitted) - 1, 0)
        self.seen["drafts accepted"] += max(len(emitted) - 1, 0)
        counted, reason = cut_at_end(request, emitted, self.max_model_len)
        self.seen["spans cut"] += len(counted) < len(emitted)
        self.scheduler.commit(entry, counted)
        assert request.num_computed_tokens == len(request.token_ids) - 1
        least = self.scheduler.pool.pages_for(request.num_computed_tokens)
        ahead = request.num_tokens_ahead + self.num_after if request.num_steps_ahead else min(self.num_after, 1)
        most = self.scheduler.pool.pages_for(request.num_computed_tokens + ahead)
        assert least <= len(request.page_ids) <= most, "pages past the accepted prefix and the steps under way are kept"
        if reason is not None:
            self._end(request, reason)

    def _check_batch(self, batch: Batch, running: set[str]) -> None:
        scheduler = self.scheduler
        ids = [e.request.request_id for e in batch.entries]
        assert len(set(ids)) == len(ids), f"a request is in the batch twice: {ids}"
        assert not {r.request_id for r in batch.preempted} & set(ids), "a preempted request is in the batch"
        assert not (batch.preempted and self.in_flight), "pages are taken whose tokens are not known yet"
        assert sum(e.num_tokens for e in batch.entries) <= self.max_num_batched_tokens
        prompts = sum(e.num_tokens for e in batch.entries if not e.is_decoding and e.num_tokens > 1)
        assert self.max_prompt_tokens is None or prompts <= self.max_prompt_tokens
        assert len(scheduler.running) <= self.max_batch_size
        order = [(r.priority, r.arrival) for r in scheduler.running]
        assert order == sorted(order), f"running requests are out of order: {order}"
        if scheduler.num_open and not self.in_flight:
            assert batch.entries, "requests are open and nothing runs: the engine would sleep for ever"
        for entry in batch.entries:
            request = entry.request
            assert request in scheduler.running
            assert not (request.request_id in self.waits_for_host and request.num_steps_ahead), "the host has not seen what it waits for"
            assert entry.num_tokens >= 1
            assert 0 <= entry.max_drafts <= request.speculation.num_speculative_tokens
            assert entry.max_drafts == 0 or entry.is_decoding, "drafts are given to a request that does not decode"
            # A step may emit max_drafts + 1 tokens; more drafts than could be emitted are work for nothing.
            ahead = request.num_steps_ahead
            if entry.max_drafts:
                assert request.num_output_tokens + ahead + entry.max_drafts + 1 <= request.params.max_tokens
                assert len(request.token_ids) + ahead + entry.max_drafts + 1 <= self.max_model_len
            self.seen["full pages from the cache"] += request.request_id not in running and bool(request.page_hashes)
        self.seen["preemptions"] += len(batch.preempted)

    def check(self) -> None:
        """What holds between two steps."""
        scheduler = self.scheduler
        scheduler.check()
        held = {page for r in scheduler.running for page in r.page_ids}
        assert scheduler.pool.num_held == len(held)
        waiting = [r for r in scheduler.open_requests() if r not in scheduler.running]
        assert scheduler.num_waiting == len(waiting)
        for request in waiting:
            assert not request.page_ids, f"{request.request_id} waits and holds pages"
            assert request.num_computed_tokens == 0
        is_open = {r.request_id for r in scheduler.open_requests()}
        for request in self.requests:
            assert (request.request_id in is_open) != (request.request_id in self.ended), f"{request.request_id} is lost"

    def drain(self, numbers: random.Random) -> None:
        """Runs until nothing is open. Every step computes something, so a bound on the steps is a bound on the work."""
        steps = 0
        while self.scheduler.num_open:
            self.step(numbers)
            steps += 1
            assert steps < 1000, f"{self.scheduler.num_open} requests never end"
        self._finish_all()
        assert not self.scheduler.schedule(), "nothing is open and something runs"
        assert self.scheduler.pool.num_held == 0, "all requests ended and pages are held"

    def check_answers(self) -> None:
        """Every request that was not cancelled has the tokens that it would have had alone."""
        for request in self.requests:
            output = request.token_ids[len(request.prompt_token_ids) :]
            expected = plain_output(request, self.max_model_len)
            if self.ended[request.request_id] == "cancelled":
                assert output == expected[: len(output)]
            else:
                assert output == expected, f"{request.request_id} ({self.ended[request.request_id]})"
                is_stop = output[-1] in request.stop_ids and len(output) > request.params.min_tokens
                assert self.ended[request.request_id] == ("stop" if is_stop else "length")


class SchedulerHistory(RuleBasedStateMachine):
    """Any order of arrivals, steps and cancellations, on few pages."""

    @initialize(
        num_slots=st.integers(16, 72),
        page_size=st.sampled_from([1, 2, 4, 8]),
        max_batch_size=st.integers(1, 5),
        spare=st.integers(0, 20),
        caching=st.booleans(),
        num_ahead=st.integers(0, 1),
        num_after=st.sampled_from([0, 0, 1, 3]),
        max_prompt_tokens=st.sampled_from([None, None, 3]),
        seed=st.integers(0, 2**16),
    )
    def start(
        self,
        num_slots: int,
        page_size: int,
        max_batch_size: int,
        spare: int,
        caching: bool,
        num_ahead: int,
        num_after: int,
        max_prompt_tokens: int | None,
        seed: int,
    ) -> None:
        # EngineConfig holds max_num_batched_tokens >= max_batch_size.
        more: dict[str, Any] = {"caching": caching, "num_ahead": num_ahead, "num_after": num_after, "max_prompt_tokens": max_prompt_tokens}
        self.world = World(num_slots // page_size, page_size, max_batch_size, max_batch_size + spare, max_model_len=48, **more)
        self.numbers = random.Random(seed)

    @rule(
        base=st.integers(0, len(BASES) - 1),
        shared=st.sampled_from([0, 1, 3, 4, 7, 10, 12, 15, 16, 17, 22, 24, 30]),
        suffix=st.lists(st.integers(0, VOCABULARY - 1), max_size=5),
        max_tokens=st.sampled_from([1, 2, 5, 9, 14, 20]),
        min_tokens=st.integers(0, 6),
        drafts=st.integers(0, 6),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        stops=st.booleans(),
        waits=st.booleans(),
    )
    def arrive(
        self, base: int, shared: int, suffix: list[int], max_tokens: int, min_tokens: int, drafts: int, priority: int, stops: bool, waits: bool
    ) -> None:
        if waits:
            self.world.waits_for_host.add(f"r{len(self.world.requests)}")
        self._add([*BASES[base][:shared], *suffix] or [1], max_tokens, min_tokens, drafts, priority, stops)

    @precondition(lambda self: self.world.requests)
    @rule(which=st.integers(0, 1000), cut=st.integers(0, 6), suffix=st.lists(st.integers(0, VOCABULARY - 1), max_size=3), drafts=st.integers(0, 6))
    def go_on(self, which: int, cut: int, suffix: list[int], drafts: int) -> None:
        """A prompt that goes on from an earlier request's tokens, as a conversation's next turn does."""
        token_ids = self.world.requests[which % len(self.world.requests)].token_ids
        self._add([*token_ids[: max(1, len(token_ids) - cut)], *suffix], 6, 0, drafts, 0, True)

    def _add(self, prompt: list[int], max_tokens: int, min_tokens: int, drafts: int, priority: int, stops: bool) -> None:
        with contextlib.suppress(RequestError):  # it could never finish on so few pages
            self.world.add(prompt, max_tokens, min_tokens=min_tokens, drafts=drafts, priority=priority, stop_ids=[STOP_ID] if stops else [])

    @rule(count=st.integers(1, 6))
    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step(self.numbers)

    @precondition(lambda self: self.world.scheduler.num_open)
    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        requests = self.world.scheduler.open_requests()
        self.world.cancel(requests[which % len(requests)])

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain(self.numbers)
            self.world.check_answers()


def test_any_history() -> None:
    run_state_machine_as_test(
        SchedulerHistory, settings=settings(max_examples=400, stateful_step_count=40, deadline=None, report_multiple_bugs=False)
    )


def random_history(seed: int, *, caching: bool, page_size: int, num_ahead: int) -> World:
    """A long crowded history; unlike the property above it is the same one each time."""
    numbers = random.Random(seed)
    world = World(
        num_pages=40 // page_size + 3,
        page_size=page_size,
        max_batch_size=4,
        max_num_batched_tokens=14,
        caching=caching,
        num_ahead=num_ahead,
        row_unit=1 + seed % 3,
    )
    for _ in range(60):
        choice = numbers.random()
        if choice < 0.4:
            if world.requests and numbers.random() < 0.4:
                token_ids = numbers.choice(world.requests).token_ids
                prompt = token_ids[: numbers.randint(1, len(token_ids))]
            else:
                prompt = list(numbers.choice(BASES)[: numbers.randint(1, 24)])
            prompt += [numbers.randrange(VOCABULARY) for _ in range(numbers.randint(0, 4))]
            with contextlib.suppress(RequestError):
                world.add(
                    prompt,
                    numbers.randint(1, 18),
                    drafts=numbers.randint(0, 5),
                    priority=numbers.choice([0, 0, 1]),
                    stop_ids=numbers.choice([(), (STOP_ID,)]),
                )
        elif choice < 0.45 and world.scheduler.num_open:
            world.cancel(numbers.choice(world.scheduler.open_requests()))
        else:
            world.step(numbers)
    world.drain(numbers)
    world.check_answers()
    return world


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
def test_histories_meet_what_they_should(caching: bool, num_ahead: int) -> None:
    """The same checks over fixed histories, and proof that these come by sharing, copying, preempting and rejecting."""
    seen: Counter[str] = Counter()
    for seed in range(24):
        seen += random_history(seed, caching=caching, page_size=(2, 4, 8)[seed % 3], num_ahead=num_ahead).seen
    expected = {"preemptions", "chunks", "drafts accepted", "drafts rejected", "spans cut", "cancelled while it ran", "cancelled while it waited"}
    if num_ahead:
        expected |= {"computed ahead of the host", "nothing left to compute", "ended while a step was under way", "short of pages"}
    from_cache = {"copies", "full pages from the cache", "copied onto itself", "source given out in the same step"}
    assert expected <= set(seen), f"never met: {expected - set(seen)}"
    assert (from_cache & set(seen)) == (from_cache if caching else set()), f"met: {seen}"


# -- directed: one thing at a time ----------------------------------------------------------------------------------------------


def run(world: World, count: int = 1) -> list[Batch]:
    numbers = random.Random(0)
    return [world.step(numbers) for _ in range(count)]


def decode_only(world: World, drafts: Sequence[int], *, max_tokens: int = 20) -> list[Request]:
    """Requests whose prompts, of one token, are done in one step: they all decode at the next one."""
    requests = [world.add([1 + i % 5], max_tokens, drafts=d) for i, d in enumerate(drafts)]
    run(world)
    assert [r.num_output_tokens for r in requests] == [1] * len(requests)
    return requests


def test_budget_bounds_a_prompt_to_chunks() -> None:
    world = World(num_pages=16, page_size=4, max_num_batched_tokens=10)
    request = world.add(BASES[0][:25], 4)
    sizes = [run(world)[0].entries[0].num_tokens for _ in range(3)]
    assert sizes == [10, 10, 5]
    assert request.num_output_tokens == 1


def test_budget_is_shared_between_decoding_and_prompts_and_drafts_come_on_top() -> None:
    world = World(num_pages=32, page_size=4, max_batch_size=4, max_num_batched_tokens=12)
    decoding = decode_only(world, [5, 2])
    late = world.add(BASES[0][:20], 4)
    batch = run(world)[0]
    assert [(e.request, e.num_tokens, e.max_drafts) for e in batch.entries] == [(decoding[0], 1, 5), (decoding[1], 1, 2), (late, 10, 0)]


def test_decoding_needs_no_more_than_the_batch_size() -> None:
    """max_num_batched_tokens may equal max_batch_size: every decoding request still gets its token, and all of its drafts."""
    world = World(num_pages=32, page_size=4, max_batch_size=4, max_num_batched_tokens=4)
    requests = decode_only(world, [5, 5, 5, 0])
    batch = run(world)[0]
    assert [(e.request, e.num_tokens, e.max_drafts) for e in batch.entries] == [(r, 1, r.speculation.num_speculative_tokens) for r in requests]


def test_prompts_are_cut_to_what_the_caller_allows() -> None:
    """Beside requests that decode, whatever the budget would leave."""
    world = World(num_pages=32, page_size=4, max_batch_size=4, max_num_batched_tokens=32, caching=False)
    decoding = decode_only(world, [2])
    late, later = world.add(BASES[0][:20], 4), world.add(BASES[1][:9], 4)
    batch = world.scheduler.schedule(max_prompt_tokens=23)
    assert [(e.request, e.num_tokens) for e in batch.entries] == [(decoding[0], 1), (late, 20), (later, 3)]


def test_prompts_are_cut_so_that_a_step_has_whole_rows() -> None:
    """With those of requests that decode, each of which has as many as the widest."""
    world = World(num_pages=32, page_size=4, max_batch_size=4, max_num_batched_tokens=30, caching=False, row_unit=8)
    decode_only(world, [2, 0])
    world.add(BASES[0][:20], 4)
    world.add(BASES[1][:20], 4)
    assert [(e.num_tokens, e.max_drafts) for e in world.scheduler.schedule().entries] == [(1, 2), (1, 0), (20, 0), (6, 0)], "2 x 3 rows, and 26"


def test_what_is_left_of_prompts_is_not_cut_off_for_whole_rows() -> None:
    """Nor is anything where no row would be left."""
    world = World(num_pages=32, page_size=4, max_num_batched_tokens=14, caching=False, row_unit=8)
    world.add(BASES[0][:21], 4)
    assert [run(world)[0].entries[0].num_tokens for _ in range(2)] == [8, 13], "21 are more than 14, 13 are not"
    world.add(BASES[1][:13], 4)
    assert [e.num_tokens for e in run(world)[0].entries] == [1, 13], "of one that waits"
    small = World(num_pages=32, page_size=4, max_num_batched_tokens=5, caching=False, row_unit=8)
    small.add(BASES[0][:20], 4)
    assert run(small)[0].entries[0].num_tokens == 5


def test_prompts_of_other_nodes_are_not_cut_for_each_other() -> None:
    """One that ends here with its prompt waits for no token: a prefill node's steps have no limit of time."""
    world = World(num_pages=32, page_size=4, max_batch_size=4, max_num_batched_tokens=32, caching=False, num_ahead=1)
    first, second = world.add(BASES[0][:8], 4), world.add(BASES[1][:8], 4)
    first.is_prefill_only = True
    batch = world.scheduler.schedule()
    world.scheduler.launch(batch.entries)
    assert [r.is_decoding for r in (first, second)] == [True, True] and world.scheduler.num_decoding == 1


def test_a_request_that_is_held_sits_out_alone() -> None:
    world = World(num_pages=32, page_size=4, num_ahead=1)
    requests = [world.add([1 + i], 20, drafts=2) for i in range(3)]
    world.waits_for_host.add(requests[1].request_id)
    parts = [[e.request for e in batch.entries] for batch in run(world, 7)]
    others = [requests[0], requests[2]]
    assert parts == [requests, others, requests, others, requests, others, requests]


def test_drafts_stop_at_max_tokens_and_at_the_context() -> None:
    world = World(num_pages=32, page_size=4, max_num_batched_tokens=64, max_model_len=12)
    short, long = decode_only(world, [6, 6], max_tokens=4), decode_only(world, [6], max_tokens=12)
    while world.scheduler.num_open:
        for entry in world.step(random.Random(1)).entries:
            request = entry.request
            if request in short and request.num_output_tokens >= 1:
                assert entry.max_drafts <= 3
    # World._check_batch asserts the exact bounds; here: that they were reached.
    assert [r.num_output_tokens for r in short] == [4, 4]
    assert len(long[0].token_ids) == 12


def test_a_prompt_gets_no_drafts() -> None:
    """A prompt whose last chunk is one token looks like a decoding request; nothing was emitted that drafts could follow."""
    world = World(num_pages=16, page_size=4, max_num_batched_tokens=8)
    request = world.add(BASES[0][:9], 8, drafts=4)
    assert run(world)[0].entries[0].num_tokens == 8
    entry = run(world)[0].entries[0]
    assert (entry.request, entry.num_tokens, entry.max_drafts) == (request, 1, 0)


def test_drafts_never_preempt() -> None:
    """Room for one's own next token may be taken from others; room for a guess may not."""
    world = World(num_pages=4, page_size=4, max_batch_size=2, max_num_batched_tokens=32, caching=False)
    first, second = world.add([1] * 7, 8, drafts=5), world.add([2] * 5, 8)
    run(world)
    assert world.scheduler.pool.num_available == 0
    batch = world.scheduler.schedule()
    assert not batch.preempted
    assert [e.request for e in batch.entries] == [first, second]
    assert first.num_computed_tokens + 1 + batch.entries[0].max_drafts <= 4 * len(first.page_ids)


def test_oldest_request_always_progresses() -> None:
    """With pages for one and a half requests the oldest computes something in every step, and all end in order of arrival."""
    world = World(num_pages=6, page_size=4, max_batch_size=4, max_num_batched_tokens=8)
    requests = [world.add(BASES[i % 2][: 6 + i], 14, drafts=3) for i in range(5)]
    numbers = random.Random(3)
    while world.scheduler.num_open:
        oldest = min(world.scheduler.open_requests(), key=lambda r: r.arrival)
        before = len(oldest.token_ids) + oldest.num_computed_tokens
        batch = world.step(numbers)
        assert oldest in [e.request for e in batch.entries]
        assert oldest not in batch.preempted
        assert len(oldest.token_ids) + oldest.num_computed_tokens > before
    assert world.seen["preemptions"] > 0
    assert list(world.ended) == [r.request_id for r in requests]
    world.check_answers()


def test_the_youngest_of_the_lowest_priority_is_preempted() -> None:
    world = World(num_pages=6, page_size=2, max_batch_size=3, max_num_batched_tokens=32, caching=False)
    low_old, low_young = world.add([1, 2, 3], 8, priority=1), world.add([2, 3, 4], 8, priority=1)
    high = world.add([3, 4, 5], 8, priority=0)
    assert [e.request for e in run(world)[0].entries] == [high, low_old, low_young]
    preempted = []
    while not preempted:
        preempted = run(world)[0].preempted
    assert preempted == [low_young]
    world.drain(random.Random(0))
    assert next(iter(world.ended)) == high.request_id
    world.check_answers()


def test_waiting_goes_by_priority_then_arrival() -> None:
    world = World(num_pages=16, page_size=4, max_batch_size=1)
    running = world.add([1], 3)
    run(world)
    late, urgent, later = world.add([2], 3), world.add([3], 3, priority=-5), world.add([4], 3)
    world.drain(random.Random(0))
    assert list(world.ended) == [r.request_id for r in (running, urgent, late, later)]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    """Pages that were just taken from a running request must not go to a waiting one."""
    world = World(num_pages=6, page_size=2, max_batch_size=4, max_num_batched_tokens=32, caching=False)
    for i in range(3):
        world.add([1 + i, 2, 3], 8)
    late = world.add([5], 2)
    for _ in range(40):
        batch = run(world)[0]
        if batch.preempted:
            assert late not in [e.request for e in batch.entries]
            break
    else:
        pytest.fail("nobody was preempted")


def test_a_preempted_request_goes_on_where_it_was() -> None:
    world = World(num_pages=6, page_size=2, max_batch_size=2, max_num_batched_tokens=32)
    first, second = world.add([1, 2, 3], 8), world.add([2, 3, 4], 8)
    while not second.num_preemptions:
        run(world)
    emitted = list(second.token_ids)
    assert second.num_output_tokens > 0
    assert second.page_ids == [] and second.page_hashes == []
    world.drain(random.Random(0))
    assert second.token_ids[: len(emitted)] == emitted
    assert (first.num_preemptions, world.scheduler.num_prompt_tokens) == (0, 6), "a prompt is counted once, however often it starts"
    world.check_answers()


def test_admission_waits_for_pages_of_the_whole_prompt() -> None:
    world = World(num_pages=5, page_size=4, max_batch_size=4, max_num_batched_tokens=32, caching=False)
    world.add([1] * 9, 4)
    waiting = world.add([2] * 9, 4)
    run(world)
    assert world.scheduler.num_waiting == 1
    assert waiting.page_ids == []


def test_admission_takes_no_more_pages_than_the_prompt_fills() -> None:
    world = World(num_pages=5, page_size=4, max_batch_size=4, max_num_batched_tokens=2, caching=False)
    request = world.add([1] * 8, 4)
    world.scheduler.schedule()
    assert len(request.page_ids) == 2


def test_full_pages_are_shared_and_tails_are_copied() -> None:
    world = World(num_pages=16, page_size=4, max_num_batched_tokens=32)
    first = world.add(BASES[0][:11], 5)
    run(world)
    second = world.add([*BASES[0][:10], 5, 5], 3)
    batch = world.scheduler.schedule()
    assert second.page_ids[:2] == first.page_ids[:2]
    assert [copy[:2] for copy in batch.page_copies] == [(first.page_ids[2], second.page_ids[2])]
    assert second.num_cached_tokens == second.num_computed_tokens == 10
    assert world.scheduler.num_cached_tokens == 10


def test_a_prompt_is_never_cached_whole() -> None:
    """One token must be computed, for there would be no logits otherwise: also at a page's border."""
    world = World(num_pages=16, page_size=4, max_num_batched_tokens=32)
    for _ in range(2):
        request = world.add(BASES[0][:8], 1)
        world.drain(random.Random(0))
    assert request.num_cached_tokens == 7
    assert request.request_id in world.ended


def test_generated_tokens_are_found_again() -> None:
    """The next turn of a conversation goes on from prompt and output."""
    world = World(num_pages=16, page_size=4, max_num_batched_tokens=64)
    first = world.add(BASES[0][:6], 12)
    world.drain(random.Random(0))
    second = world.add([*first.token_ids, 1, 2], 2)
    world.drain(random.Random(0))
    assert second.num_cached_tokens == len(first.token_ids) - 1, "the last token of an answer was never computed"


def test_no_sharing_without_the_cache() -> None:
    world = World(num_pages=16, page_size=4, caching=False)
    for _ in range(2):
        request = world.add(BASES[0][:10], 2)
        world.drain(random.Random(0))
    assert request.num_cached_tokens == 0
    assert world.scheduler.prefix_cache is None


def test_cancel_before_during_and_after_waiting() -> None:
    world = World(num_pages=16, page_size=4, max_batch_size=1)
    running, waiting, last = world.add([1, 2], 9), world.add([2, 3], 9), world.add([3, 4], 9)
    run(world, 2)
    world.cancel(waiting)
    world.cancel(running)
    world.check()
    assert world.scheduler.num_open == 1
    assert world.scheduler.pool.num_held == 0
    world.drain(random.Random(0))
    assert world.ended[last.request_id] == "length"


def test_the_id_of_a_cancelled_request_may_come_again() -> None:
    """Also while the cancelled one's place in the queue is still there."""
    world = World(num_pages=16, page_size=4, max_batch_size=1)
    running, waiting = world.add([1, 2], 9), world.add([2, 3], 9)
    run(world)
    world.cancel(waiting)
    again = Request(waiting.request_id, [2, 3], SamplingParams(max_tokens=2))
    world.scheduler.add(again)
    world.scheduler.finish(running)
    batch = world.scheduler.schedule()
    assert [e.request for e in batch.entries] == [again]
    world.scheduler.check()


def test_ids_in_use_and_full_queues_are_refused() -> None:
    world = World(num_pages=16, page_size=4, max_batch_size=2, max_waiting=1)
    first = world.add([1], 4)
    with pytest.raises(RequestError, match=r"'r0'.*in use"):
        world.scheduler.add(Request(first.request_id, [1], SamplingParams()))
    world.add([2], 4)
    world.add([3], 4)
    with pytest.raises(CapacityError, match=r"3 requests are open.*limit.*\b2 running\b.*\b1 waiting\b.*--max-waiting"):
        world.add([4], 4)
    world.check()
    world.cancel(first)
    world.add([5], 4)


def test_check_fits_names_the_number_and_the_limit() -> None:
    limits = World(num_pages=4, page_size=4, max_model_len=32).scheduler.limits
    limits.check_fits(8, 8)
    with pytest.raises(RequestError, match=r"8 prompt tokens and max_tokens 9 need 5 KV pages of 4 tokens.*has 4.*--kv-cache-memory"):
        limits.check_fits(8, 9)
    with pytest.raises(RequestError, match=r"the prompt has 32 tokens; the context holds 32"):
        limits.check_fits(32, 1)
    roomy = World(num_pages=8, page_size=4, max_model_len=32).scheduler.limits
    roomy.check_fits(31, 32)  # the context's end comes first
    with pytest.raises(RequestError, match=r"max_tokens is 33; the context holds 32 tokens"):
        roomy.check_fits(1, 33)
    few = World(num_pages=8, page_size=4, max_batch_size=2, max_waiting=1).scheduler.limits
    few.check_fits(1, 1, 3)
    with pytest.raises(RequestError, match=r"n is 4; the limit is 2 running and 1 waiting: lower n, or raise --max-waiting"):
        few.check_fits(1, 1, 4)


# -- cut_at_end -----------------------------------------------------------------------------------------------------------------


def at(num_prompt: int, num_output: int, *, max_tokens: int = 100, min_tokens: int = 0) -> Request:
    """A request with 7 and 9 as stop ids that has emitted some tokens."""
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    return Request("r", [1] * num_prompt, params, stop_ids=frozenset({7, 9}), token_ids=[1] * (num_prompt + num_output))


@pytest.mark.parametrize(
    ("request_", "span", "expected"),
    [
        pytest.param(at(4, 3), [5, 6], ([5, 6], None), id="goes on"),
        pytest.param(at(4, 3), [7], ([7], "stop"), id="stop id alone"),
        pytest.param(at(4, 3), [5, 7, 6, 8], ([5, 7], "stop"), id="stop id inside the span: nothing after it counts"),
        pytest.param(at(4, 3), [5, 9, 7], ([5, 9], "stop"), id="the first of two stop ids"),
        pytest.param(at(4, 0, min_tokens=2), [7, 7, 7, 5], ([7, 7, 7], "stop"), id="min_tokens holds off inside the span"),
        pytest.param(at(4, 2, min_tokens=2), [7, 5], ([7], "stop"), id="min_tokens are out"),
        pytest.param(at(4, 1, min_tokens=2), [7, 5], ([7, 5], None), id="min_tokens are not out"),
        pytest.param(at(4, 97), [5, 6, 8, 5], ([5, 6, 8], "length"), id="max_tokens inside the span"),
        pytest.param(at(4, 97), [5, 6, 8], ([5, 6, 8], "length"), id="max_tokens at the end of the span"),
        pytest.param(at(4, 97), [5, 6], ([5, 6], None), id="one token before max_tokens"),
        pytest.param(at(4, 97), [5, 6, 7, 7], ([5, 6, 7], "stop"), id="stop and max_tokens at once: stop"),
        pytest.param(at(4, 97), [5, 6, 8, 7], ([5, 6, 8], "length"), id="stop id after max_tokens"),
        pytest.param(at(195, 2), [5, 6, 8, 5], ([5, 6, 8], "length"), id="context's end inside the span"),
        pytest.param(at(195, 2), [5, 6], ([5, 6], None), id="one token before the context's end"),
        pytest.param(at(199, 0), [5], ([5], "length"), id="room for one token"),
    ],
)
def test_cut_at_end(request_: Request, span: list[int], expected: tuple[list[int], str | None]) -> None:
    assert cut_at_end(request_, span, 200) == expected


@given(
    span=st.lists(st.integers(4, 10), min_size=1, max_size=6),
    num_output=st.integers(0, 9),
    min_tokens=st.integers(0, 10),
    context=st.integers(14, 30),
)
@settings(deadline=None)
def test_a_span_is_cut_as_its_tokens_would_be_one_by_one(span: list[int], num_output: int, min_tokens: int, context: int) -> None:
    """Speculation emits spans and plain decoding single tokens: both end at the same place for the same reason."""
    whole, single = (at(4, num_output, max_tokens=10, min_tokens=min_tokens) for _ in range(2))
    counted, reason = [], None
    for token_id in span:
        (token_id,), reason = cut_at_end(single, [token_id], context)
        counted.append(token_id)
        single.token_ids.append(token_id)
        if reason is not None:
            break
    assert cut_at_end(whole, span, context) == (counted, reason)


# -- pages ----------------------------------------------------------------------------------------------------------------------


class PoolHistory(RuleBasedStateMachine):
    """PagePool against the plainest model of it: how many hold each page, and which ones are worth keeping, oldest first."""

    @initialize(num_pages=st.integers(1, 8))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages, 4)
        self.evicted: list[int] = []
        self.pool.on_evict = self.evicted.append
        self.holders: Counter[int] = Counter()
        self.kept: set[int] = set()
        self.cached: list[int] = []

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        available = self.pool.num_pages - len(self.holders)
        num_free = available - len(self.cached)
        pages = self.pool.allocate(count)
        if count > available:
            assert pages is None
            assert self.evicted == []
            return
        assert pages is not None and len(set(pages)) == count and not set(pages) & set(self.holders)
        expected, self.cached = self.cached[: max(0, count - num_free)], self.cached[max(0, count - num_free) :]
        assert self.evicted == expected, "cached pages go last, least recently released first"
        self.evicted.clear()
        self.kept -= set(expected)
        self.holders.update(pages)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99), is_worth=st.none() | st.booleans())
    def release(self, which: int, is_worth: bool | None) -> None:
        page = sorted(self.holders)[which % len(self.holders)]
        if is_worth is not None:
            self.pool.keep(page, is_worth)
            (self.kept.add if is_worth else self.kept.discard)(page)
        self.pool.release(page)
        self.holders[page] -= 1
        if not self.holders[page]:
            del self.holders[page]
            if page in self.kept:
                self.cached.append(page)

    @precondition(lambda self: self.holders or self.cached)
    @rule(which=st.integers(0, 99))
    def share(self, which: int) -> None:
        pages = sorted([*self.holders, *self.cached])
        page = pages[which % len(pages)]
        self.pool.share(page)
        self.holders[page] += 1
        if page in self.cached:
            self.cached.remove(page)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(dict(self.holders))
            assert self.pool.num_held == len(self.holders)
            assert self.pool.num_available == self.pool.num_pages - len(self.holders)


def test_pool_history() -> None:
    run_state_machine_as_test(PoolHistory, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


def test_cached_pages_go_after_free_ones_and_the_oldest_first() -> None:
    pool = PagePool(4, 4)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    pages = pool.allocate(4)
    assert pages is not None
    for page in pages[:3]:
        pool.keep(page)
    for page in (pages[2], pages[3], pages[0], pages[1]):
        pool.release(page)
    pool.share(pages[2])  # used again: it is not the oldest any more
    pool.release(pages[2])
    assert [pool.allocate(1) for _ in range(4)] == [[pages[3]], [pages[0]], [pages[1]], [pages[2]]]
    assert evicted == [pages[0], pages[1], pages[2]]
    assert pool.allocate(1) is None


def test_pool_refuses_what_nobody_holds() -> None:
    pool = PagePool(2, 4)
    with pytest.raises(AssertionError, match="page 0 is released and nobody holds it"):
        pool.release(0)
    with pytest.raises(AssertionError, match="page 1 is not held"):
        pool.keep(1)


def test_pool_check_finds_a_leak() -> None:
    """The checks that the histories above rely on do find what they are for."""
    pool = PagePool(3, 4)
    pages = pool.allocate(2)
    assert pages is not None
    with pytest.raises(AssertionError, match=f"page {pages[0]} counts 1 holders and has 0"):
        pool.check({pages[1]: 1})
    pool._free.pop()
    with pytest.raises(AssertionError, match="idle pages"):
        pool.check({pages[0]: 1, pages[1]: 1})


def test_pages_for() -> None:
    pool = PagePool(2, 4)
    assert [pool.pages_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


# -- prefix cache ---------------------------------------------------------------------------------------------------------------


def filled(num_pages: int = 8, page_size: int = 8) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(num_pages, page_size)
    return pool, PrefixCache(pool)


def hold(pool: PagePool) -> int:
    pages = pool.allocate(1)
    assert pages is not None
    return pages[0]


def test_chain_hash_depends_on_what_came_before() -> None:
    assert chain_hash(ROOT, [1, 2]) != chain_hash(chain_hash(ROOT, [3]), [1, 2])
    assert chain_hash(ROOT, [1, 2]) == chain_hash(ROOT, (1, 2))
    assert chain_hash(ROOT, [1, 2]) != chain_hash(ROOT, [2, 1])


def test_a_page_is_found_only_after_its_own_beginning() -> None:
    pool, cache = filled(page_size=4)
    first, second = hold(pool), hold(pool)
    key = cache.insert(first, ROOT, [1, 2, 3, 4])
    assert key is not None
    cache.insert(second, key, [5, 6, 7, 8])
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 8, 9], 8).page_ids == [first, second]
    assert cache.match([9, 9, 9, 9, 5, 6, 7, 8, 9], 8).page_ids == []
    assert cache.match([5, 6, 7, 8, 9], 4).page_ids == []
    cache.check()


def test_limit_ends_the_match_inside_a_page() -> None:
    pool, cache = filled(page_size=4)
    page = hold(pool)
    cache.insert(page, ROOT, [1, 2, 3, 4])
    match = cache.match([1, 2, 3, 4], 3)
    assert (match.page_ids, match.copy_from, match.num_copied) == ([], page, 3)


def test_the_longest_tail_wins_and_short_ones_are_not_worth_it() -> None:
    pool, cache = filled()
    pages = [hold(pool) for _ in range(3)]
    cache.insert(pages[0], ROOT, [1, 2, 3])
    cache.insert(pages[1], ROOT, [1, 2, 3, 4, 5])
    cache.insert(pages[2], ROOT, [1, 2, 9, 9, 9, 9])
    match = cache.match([1, 2, 3, 4, 6, 7], 5)
    assert (match.copy_from, match.num_copied) == (pages[1], 4)
    assert cache.match([1, 7, 7, 7], 4).copy_from == -1, "one token of eight is cheaper to compute than to copy"
    assert cache.match([1, 2, 7, 7], 4).num_copied == 2


def test_search_among_siblings_is_bounded() -> None:
    """The newest siblings are looked at: a popular prefix with thousands of endings must not slow every admission."""
    pool, cache = filled(num_pages=MAX_SIBLINGS_SEARCHED + 8)
    oldest = hold(pool)
    cache.insert(oldest, ROOT, [1, 2, 3, 4, 5])
    for i in range(MAX_SIBLINGS_SEARCHED):
        cache.insert(hold(pool), ROOT, [9, i])
    assert cache.match([1, 2, 3, 4, 5, 6], 5).copy_from == -1
    newest = hold(pool)
    cache.insert(newest, ROOT, [1, 2, 3])
    assert cache.match([1, 2, 3, 4, 5, 6], 5).copy_from == newest


def test_the_same_content_is_kept_once() -> None:
    pool, cache = filled(page_size=2)
    first, second = hold(pool), hold(pool)
    assert cache.insert(first, ROOT, [1, 2]) == cache.insert(second, ROOT, [1, 2])
    assert cache.match([1, 2, 3], 2).page_ids == [first]
    pool.release(second)
    assert pool.num_available == 7
    cache.check()
    pages = pool.allocate(7)
    assert pages is not None and second in pages and first not in pages


def test_an_evicted_page_is_not_found() -> None:
    pool, cache = filled(num_pages=2, page_size=2)
    page = hold(pool)
    key = cache.insert(page, ROOT, [1, 2])
    pool.release(page)
    assert cache.match([1, 2, 3], 2).page_ids == [page]
    pool.allocate(2)
    match = cache.match([1, 2, 3], 2)
    assert (match.page_ids, match.copy_from) == ([], -1)
    assert key == chain_hash(ROOT, [1, 2])
    assert not (cache._entries or cache._by_hash or cache._children), "what is forgotten takes no memory"


def test_a_tail_that_fills_up_is_found_as_a_full_page() -> None:
    pool, cache = filled(page_size=4)
    page = hold(pool)
    assert cache.insert(page, ROOT, [1, 2, 3]) is None
    assert cache.match([1, 2, 3, 4, 5], 4).copy_from == page
    assert cache.insert(page, ROOT, [1, 2, 3, 4]) is not None
    match = cache.match([1, 2, 3, 4, 5], 4)
    assert (match.page_ids, match.copy_from) == ([page], -1)
    cache.check()


def test_a_waiting_request_is_not_starved_by_drafts() -> None:
    """While it does not fit, drafts may have the room; once pages are free, it must get in beside a request that drafts all it can."""
    world = World(num_pages=15, page_size=4, max_batch_size=4, max_num_batched_tokens=64, caching=False)
    (eager,) = decode_only(world, [6], max_tokens=40)
    holder = world.add([4] * 44, 3)
    while holder.num_output_tokens == 0:
        run(world)
    late = world.add([3] * 16, 2)
    run(world)
    assert late not in world.scheduler.running, "there is no room for it yet"
    while late not in world.scheduler.running:
        assert eager in world.scheduler.running, "it waited until the other had ended"
        run(world)


def test_hashes_made_beforehand_are_those_of_pages() -> None:
    token_ids = [3, 1, 2**31 - 1, 5, 0, 2, 4]
    first = chain_hash(ROOT, token_ids[:3])
    assert chain_hashes(token_ids, 3) == [first, chain_hash(first, token_ids[3:6])]
    assert chain_hashes(token_ids[:2], 3) == []


@pytest.mark.parametrize("has_hashes", [True, False])
def test_pages_of_a_fetched_prompt_are_found(has_hashes: bool) -> None:
    """By whoever comes next, whether the request goes on, has ended before the next step, or was never looked for until then."""
    scheduler = Scheduler(num_pages=12, page_size=4, max_batch_size=4, max_num_batched_tokens=64, max_model_len=40, max_waiting=8)
    for number, (ends_early, is_stepped) in enumerate([(False, False), (True, False), (False, True)]):
        prompt = [number, *range(1, 11)]
        request = Request(f"fetched {number}", prompt, SamplingParams(max_tokens=5), is_remote=True)
        scheduler.add(request)
        assert scheduler.schedule().fetches == [request]
        request.prompt_hashes = chain_hashes(prompt, 4) if has_hashes else []
        entry = scheduler.take_first(request)
        scheduler.end_fetch(request)
        scheduler.commit(entry, [7])
        if ends_early:
            scheduler.finish(request)
        if is_stepped:
            scheduler.launch(batch := scheduler.schedule().entries)
            scheduler.commit(batch[0], [8])
        other = Request(f"other {number}", prompt, SamplingParams(max_tokens=5))
        scheduler.add(other)
        batch = scheduler.schedule()
        assert other.num_computed_tokens == 10 and other.page_hashes == chain_hashes(prompt, 4)
        scheduler.check()
        for own in scheduler.open_requests():
            scheduler.finish(own)
        scheduler.check()
        assert scheduler.pool.num_held == 0


def test_a_fetch_gets_no_page_that_the_step_copies_from() -> None:
    """Nobody says which comes first, the step or the other node's page. There are as many without it as it needs, or it waits for the next step."""
    for num_pages, is_at_once in ((9, True), (8, False)):
        scheduler = Scheduler(num_pages=num_pages, page_size=4, max_batch_size=4, max_num_batched_tokens=64, max_model_len=40, max_waiting=8)
        first = Request("first", [1, 2, 3], SamplingParams(max_tokens=1))
        scheduler.add(first)
        scheduler.launch(batch := scheduler.schedule().entries)
        scheduler.commit(batch[0], [7])
        scheduler.finish(first)
        local = Request("local", [1, 2, 3, 9], SamplingParams(max_tokens=1))
        fetched = Request("fetched", list(range(20, 47)), SamplingParams(max_tokens=1), is_remote=True)
        for request in (local, fetched):
            scheduler.add(request)
        batch = scheduler.schedule()
        (source,) = (copy[0] for copy in batch.page_copies)
        assert source not in fetched.page_ids and bool(batch.fetches) == is_at_once
        scheduler.launch(batch.entries)
        if not is_at_once:
            assert scheduler.schedule().fetches == [fetched]
        scheduler.finish(local)
        scheduler.finish(fetched)
        scheduler.check()
