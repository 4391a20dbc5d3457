"""A step plan as one array of integers: another process reads what was written, and computes the same of it."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend import SamplingParams
from backend.core import Batch, Request, Scheduled, Speculation
from backend.drafters import Drafters
from backend.planner import Planner
from backend.prefixes import MANY_SHARED_TOKENS, find_shared
from backend.speculative_config import SpeculativeConfig
from backend.step.options import Options
from backend.step.plan import VERSION, Arrival, StepPlan
from backend.step.worker import Begun, Worker
from kernels.request_state import Admission
from kernels.structs import COUNT, DRAFTER_COUNT, EMITS, FIRST, INDEX, LOOKUP_LIMIT, MODEL_LIMIT, NUM_FIELDS, VERIFY_LIMIT
from tests.conftest import EVERY_METHOD
from tests.small import LLM
from tests.test_methods import METHODS, Asked, ids_of, mixed, params_of, run
from tests.test_methods import prompts as prompts  # a fixture
from tests.test_methods import texts as texts  # a fixture

words = st.integers(-(2**31), 2**31 - 1)
counts = st.integers(0, 2**31 - 1)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def admissions(draw: st.DrawFn) -> Arrival:
    admission = Admission(
        index=draw(counts),
        token_ids=draw(st.lists(counts, max_size=8)),
        num_prompt_tokens=draw(counts),
        max_total_tokens=draw(counts),
        is_greedy=draw(st.booleans()),
        temperature=draw(floats),
        top_k=draw(words),
        top_p=draw(floats),
        min_p=draw(floats),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        repetition=draw(floats),
        presence=draw(floats),
        frequency=draw(floats),
        logit_bias=draw(st.dictionaries(counts, floats, max_size=4)),
        banned_ids=draw(st.lists(counts, max_size=4)),
        min_known=draw(counts),
        is_rejection=draw(st.booleans()),
        is_top_p=draw(st.booleans()),
        num_drafter_tokens=draw(counts),
    )
    return Arrival(admission, draw(st.lists(st.lists(words, min_size=1, max_size=3), max_size=3)))


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    values: dict[str, Any] = {}
    for f in dataclasses.fields(StepPlan):
        default = getattr(StepPlan(), f.name)
        if f.name == "fields":
            width = draw(st.integers(0, 5))
            flat = draw(st.lists(words, min_size=NUM_FIELDS * width, max_size=NUM_FIELDS * width))
            values[f.name] = np.array(flat, dtype=np.int32).reshape(NUM_FIELDS, width)
        elif f.name == "masks":
            values[f.name] = np.array(draw(st.lists(words, max_size=6)), dtype=np.int32).reshape(-1, 1)
        elif f.name == "admissions":
            values[f.name] = draw(st.lists(admissions(), max_size=3))
        elif f.name in ("page_copies", "scored"):
            values[f.name] = draw(st.lists(st.tuples(*[words] * (3 if f.name == "page_copies" else 2)), max_size=4))
        elif isinstance(default, list):
            values[f.name] = draw(st.lists(words, max_size=6))
        else:
            values[f.name] = draw(st.booleans() if isinstance(default, bool) else words)
    return StepPlan(**values)


def assert_same(one: StepPlan, other: StepPlan) -> None:
    for f in dataclasses.fields(StepPlan):
        mine, theirs = getattr(one, f.name), getattr(other, f.name)
        if f.name in ("fields", "masks"):
            assert mine.dtype == theirs.dtype == np.int32 and np.array_equal(mine, theirs)
        elif f.name == "admissions":
            assert [dataclasses.asdict(a) for a in mine] == [dataclasses.asdict(a) for a in theirs]
        else:
            assert mine == theirs and type(mine) is type(theirs), f.name


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_what_is_written_is_read(plan: StepPlan) -> None:
    array = plan.to_array()
    assert array.dtype == np.int32 and array.ndim == 1
    assert_same(StepPlan.from_array(array), plan)


@settings(max_examples=30, deadline=None)
@given(plan=plans(), seed=st.integers(0, 2**16))
def test_plans_that_cannot_be_read_are_refused(plan: StepPlan, seed: int) -> None:
    array = plan.to_array()
    for cut in {0, 1, random.Random(seed).randrange(len(array)), len(array) - 1}:
        with pytest.raises(ValueError, match="step plan"):
            StepPlan.from_array(array[:cut])
    with pytest.raises(ValueError, match=f"has {len(array) + 1} words, {len(array)} of them known"):
        StepPlan.from_array(np.append(array, np.int32(0)))
    array[0] = VERSION + 1
    with pytest.raises(ValueError, match=f"is of version {VERSION + 1}; this worker reads version {VERSION}"):
        StepPlan.from_array(array)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Every plan goes to the worker by way of its array; those that did."""
    plans: list[StepPlan] = []
    begin = Worker.begin

    def begin_sent(worker: Worker, plan: StepPlan) -> Begun:
        plans.append(StepPlan.from_array(plan.to_array().copy()))
        return begin(worker, plans[-1])

    monkeypatch.setattr(Worker, "begin", begin_sent)
    return plans


@pytest.mark.parametrize("is_ahead", [False, True], ids=["waiting", "ahead"])
def test_a_worker_fed_with_sent_plans_gives_the_same_tokens(llm_all, prompts, texts, sent, is_ahead) -> None:
    """Requests of all methods and parameters, with prefix hits, chunks and preemptions among them."""
    asked = [Asked(p, mixed(i), list(METHODS.values())[i % len(METHODS)]) for i, p in enumerate(prompts[:12])]
    asked += [Asked(texts[n % 2], params_of(n, n % 2), {"method": ("mtp", "ngram")[n % 2]}) for n in range(4, 16)]
    expected = run(llm_all, asked)
    sent.clear()
    memory = 30 * llm_all.engine.worker.store.page_bytes
    llm = LLM(speculative_config=EVERY_METHOD, async_scheduling=is_ahead, max_num_batched_tokens=64, max_batch_size=32, kv_cache_memory=memory)
    outputs = run(llm, asked)
    assert ids_of(outputs) == ids_of(expected) and [o.text for o in outputs] == [o.text for o in expected]
    assert llm.engine.metrics.preemptions > 0
    for what in ("admissions", "page_copies", "page_writes", "draft_writes", "options", "has_lookup", "num_model_drafts", "cleared_pages"):
        assert any(getattr(plan, what) for plan in sent), f"no plan had {what}"


# -- what the planner says ---------------------------------------------------------------------------------------------


def make_planner(method: str = "ngram", **options: Any) -> Planner:
    config = SpeculativeConfig(method=method, num_speculative_tokens=4)
    has_model = method == "mtp"
    drafters = Drafters(config, 100, has_step_drafter=has_model, make_service=lambda: pytest.fail("nobody needs it"), fingerprint="", encode=list)
    sizes = {"max_batch_size": 4, "max_model_len": 64, "num_pages": 16, "page_size": 8, "max_drafter_tokens": 32}
    return Planner(config, drafters, **{**sizes, "has_step_drafter": has_model, "is_layout_exact": True, **options})


def make_request(name: str, count: int, pages: list[int], method: str = "ngram", **params: Any) -> Request:
    speculation = Speculation(method, 0 if method == "none" else 4, num_model_steps=4)
    return Request(name, list(range(count)), SamplingParams(max_tokens=20, **params), speculation, page_ids=pages)


def test_prompts_come_first_and_decoding_rows_name_no_position() -> None:
    planner = make_planner("mtp")
    first, second = make_request("a", 9, [3, 4], "mtp"), make_request("b", 20, [5, 6, 7], "mtp")
    plan = planner.plan(Batch([Scheduled(first, 9)])).plan
    assert [a.admission.token_ids for a in plan.admissions] == [first.token_ids] and plan.num_prompts == 1
    index = plan.fields[INDEX, 0]
    assert plan.page_writes == [index * 8, 3, index * 8 + 1, 4]
    assert plan.fields[[FIRST, COUNT, EMITS, VERIFY_LIMIT, DRAFTER_COUNT, MODEL_LIMIT, LOOKUP_LIMIT], 0].tolist() == [0, 9, 1, 0, 10, 4, -1]
    first.token_ids.append(1)
    batch = Batch([Scheduled(first, 1, 4, 9, is_decoding=True), Scheduled(second, 12, emits=False)])
    step = planner.plan(batch)
    assert [e.request for e in step.entries] == [second, first] and step.plan.num_prompts == 1
    rows = step.plan.fields[[FIRST, COUNT, EMITS, VERIFY_LIMIT, DRAFTER_COUNT, MODEL_LIMIT]].T.tolist()
    assert rows == [[0, 12, 0, 0, 12, 0], [-1, 1, 1, 4, -1, 4]], "a chunk that emits nothing drafts nothing, but the drafter computes it"
    assert step.plan.num_queries == 5 and step.plan.prompt_rows == 12 and not any(p for p in step.plan.page_writes[::2] if p // 8 == index)


def test_places_in_the_request_table_are_given_back() -> None:
    planner = make_planner()
    requests = [make_request(str(i), 3, [i]) for i in range(6)]
    planner.plan(Batch([Scheduled(r, 3) for r in requests[:4]]))
    planner.stop(requests[1])
    plan = planner.plan(Batch([Scheduled(requests[4], 3)])).plan
    assert plan.fields[INDEX, 0] == 1
    planner.stop(requests[5])  # that it never saw


def test_options_are_those_of_the_requests_in_the_step() -> None:
    planner = make_planner()
    plain, scored = make_request("a", 3, [0]), make_request("b", 3, [1], logprobs=2, presence_penalty=0.1)
    assert planner.plan(Batch([Scheduled(plain, 3)])).plan.options == 0
    assert planner.plan(Batch([Scheduled(scored, 3)])).plan.options == Options.LOGPROBS | Options.FLOAT32


def test_requests_that_share_a_prefix_are_grouped() -> None:
    """By their first pages, as far as all of a group agree and have computed; groups that read little are left alone."""
    page, heads = 16, (8, 2)
    requests = [Request(str(b), [0] * 3000, SamplingParams(), num_computed_tokens=2999 - b, page_ids=[*range(180), 900 + b]) for b in range(4)]
    requests += [Request("5", [0] * 3000, SamplingParams(), num_computed_tokens=2999, page_ids=[500, *range(1, 188)])]
    requests[2].page_ids[170] = 700
    assert find_shared(requests, page, 1, heads) == [([0, 1, 2, 3], 170 * page)]
    assert find_shared(requests[:3], page, 1, heads) == [], "too few"
    assert 4 * 170 * page < MANY_SHARED_TOKENS and find_shared(requests, page, 5, heads) == [], "too little for wide steps"
    short = [Request(str(b), [0] * 60, SamplingParams(), num_computed_tokens=50, page_ids=[1, 2, 3, 4 + b]) for b in range(8)]
    assert find_shared(short, page, 1, heads) == []
