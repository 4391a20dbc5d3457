"""The planner of drafts where each request has as many rows as the one with most, and steps are planned ahead: as on a GPU, without one."""

from __future__ import annotations

from typing import Any

import pytest

from backend.budget import Ability, CostClass, DraftBudget, beside, by_match, by_place, trials
from backend.budget.budget import LEAVE_AFTER
from backend.budget.forecast import asking
from backend.budget.known import Settled
from backend.budget.limits import LEVELS, Choice
from backend.budget.observing import StepSeen
from backend.budget.padded import PaddedStep, PaddedTimes
from backend.core import Batch, Branches, Outcome, Request, Scheduled, Speculation
from backend.drafters import Drafters
from backend.planned import PlannedStep
from backend.planner import Planner
from backend.request_speculation import resolve
from backend.sampling_params import SamplingParams
from backend.speculative_config import SpeculativeConfig
from backend.step.captured_shapes import captured_drafting, fit_drafting, shapes_to_capture
from backend.step.tensors import StepShape
from backend.step.times import StepTimes
from backend.step.worker import steps_to_capture
from kernels.structs import DRAFTER_COUNT, FIRST, LOOKUP_LIMIT, MODEL_LIMIT
from tests.conftest import code_prompts, greedy
from tests.small import LLM

TOP, STEPS = 12, 5
TREE = {"method": "mtp", "num_speculative_tokens": 3, "tree_nodes": 8}
AUTO: dict[str, Any] = {"method": "auto", "request_methods": ["mtp", "suffix"], "suffix_decoding_max_cached_requests": 0}


# -- steps that are captured ---------------------------------------------------------------------------------------------


def make_drafters(**options: Any) -> tuple[SpeculativeConfig, Drafters]:
    config = SpeculativeConfig(**options)
    common = {"make_service": lambda: pytest.fail("nobody needs it"), "fingerprint": "", "encode": list, "is_layout_exact": False}
    return config, Drafters(config, 100, has_step_drafter=config.model_method != "", **common)


def make_planner(**options: Any) -> tuple[Planner, Drafters]:
    config, drafters = make_drafters(**options)
    sizes = {"max_batch_size": 4, "max_model_len": 640, "num_pages": 300, "page_size": 8, "max_drafter_tokens": 600}
    return Planner(config, drafters, **sizes, has_step_drafter=config.model_method != "", is_layout_exact=False), drafters


def make_auto() -> tuple[Planner, DraftBudget, Request]:
    """With suffix beside the model and ngram, and a request whose prompt was planned."""
    planner, drafters = make_planner(**AUTO)
    request = Request("a", list(range(20)), SamplingParams(max_tokens=600), resolve(SpeculativeConfig(**AUTO), None), page_ids=list(range(70)))
    drafters.start(request)
    planner.plan(Batch([Scheduled(request, 20)]))
    request.num_computed_tokens = 20
    return planner, drafters.budget, request


def shape_of(step: PlannedStep) -> StepShape:
    plan = step.plan
    wants = {"num_model_drafts": plan.num_model_drafts, "has_lookup": plan.has_lookup, "has_lookup_alone": plan.has_lookup_alone}
    return StepShape(plan.num_rows, plan.num_queries, **wants, reports_drafts=plan.reports_drafts)


def drafting_of(shape: StepShape) -> tuple[object, ...]:
    return shape.num_model_drafts, shape.has_lookup, shape.has_lookup_alone, shape.reports_drafts


@pytest.mark.parametrize("method", ["auto", "ngram", "mtp", "with_ngram"])
def test_what_is_planned_is_captured(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without a graph is launched kernel by kernel, which takes several times as long: whatever the planner chooses or tries."""
    monkeypatch.setattr(trials, "EXPLORE_EVERY", 3)
    options: dict[str, Any] = {"method": method, "num_speculative_tokens": 4}
    if method == "auto":
        options = {"method": "auto", "request_methods": ["mtp"]}
    if method == "with_ngram":
        options = {"method": "mtp", "mtp_strategy": "with_ngram", "num_speculative_tokens": 4, "num_model_steps": 2}
    planner, drafters = make_planner(**options)
    own = resolve(SpeculativeConfig(**options), None)
    requests = [Request(str(i), list(range(20)), SamplingParams(max_tokens=600), own, page_ids=list(range(70))) for i in range(2)]
    place = drafters.place(requests[0])
    counts, drafts = steps_to_capture(own, place, own.num_model_steps if place.has_model else 0)
    assert method != "auto" or {*LEVELS, TOP} == {0, *counts}, "the planner chooses among numbers that steps are captured for"
    captured = captured_drafting(drafts)
    graphs = shapes_to_capture([1, 2], [1, 5], captured)
    assert all(not shape.least_standing and shape.trust == 1 for shape in graphs)
    assert not place.has_lookup or any(shape.has_lookup for shape in graphs), "ngram's steps had no graph: they were captured without their lookup"
    planner.plan(Batch([Scheduled(r, 20) for r in requests]))
    seen = set()
    for number in range(120):
        for request in requests:
            request.num_computed_tokens, request.num_steps_ahead = 20 + number, 1
        drafters.budget.begin(requests)
        held = [planner.is_held(r) for r in requests]
        if any(held):  # it is read first
            for request in requests:
                request.num_steps_ahead = 0
        entries = [Scheduled(r, 1, drafters.budget.limit(r), 20, is_decoding=True) for r in requests]
        step = planner.plan(Batch(entries))
        if not step.plan.num_prompts:
            fitted = fit_drafting(shape_of(step), captured)
            seen.add(drafting_of(fitted))
            assert drafting_of(fitted) in {*map(drafting_of, graphs), (0, False, False, False)}
    assert len(seen) > 1


def test_the_least_graph_that_does_is_taken() -> None:
    captured = captured_drafting({(0, False), (1, True), (5, True)})
    lookup = fit_drafting(StepShape(4, 6, has_lookup=True), captured)
    assert drafting_of(lookup) == (0, True, False, True), "a lookup alone does not have the model compute"
    assert drafting_of(fit_drafting(StepShape(4, 6, num_model_drafts=2), captured)) == (5, True, True, True)
    prompt = fit_drafting(StepShape(4, 6, num_model_drafts=2, prompt_lens=(7,)), captured)
    assert drafting_of(prompt) == (5, True, True, True), "what follows a forward with prompts is captured as well"
    plain = StepShape(4, 1)
    assert fit_drafting(plain, captured) == plain


def test_a_model_that_a_trial_leaves_out_keeps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the step after it would be one with prompts for all requests. Who is not asked at all is not waited for either."""
    planner, drafters = make_planner(method="auto", request_methods=["mtp"])
    own, pages = resolve(SpeculativeConfig(method="auto", request_methods=["mtp"]), None), list(range(70))
    request = Request("a", list(range(20)), SamplingParams(max_tokens=600), own, page_ids=pages)
    planner.plan(Batch([Scheduled(request, 20)]))
    request.num_computed_tokens, request.num_steps_ahead, chosen = 20, 1, drafters.budget

    def plan(is_asked: bool, keeps_up: bool) -> list[int]:
        chosen.begin([request])
        chosen._applied.put(Choice(TOP, is_asked))
        chosen.keeps_up = keeps_up
        step = planner.plan(Batch([Scheduled(request, 1, TOP, 20, is_decoding=True)]))
        assert step.effort == {"has_drafts": True, "has_model": is_asked}, "what such a trial takes the host is what lookups alone take it"
        fields = step.plan.fields
        return fields[[FIRST, DRAFTER_COUNT, MODEL_LIMIT, LOOKUP_LIMIT], 0].tolist()

    assert plan(True, False) == [-1, -1, STEPS, TOP]
    assert plan(False, True) == [-1, -1, 0, TOP] and plan(True, False) == [-1, -1, STEPS, TOP]
    assert plan(False, False) == [-1, 0, 0, TOP] and not planner.is_held(request), "it runs ahead without the model"
    chosen._applied.put(Choice(TOP, True))
    assert planner.is_held(request), "to catch up, the host has to name its rows"


def test_drafts_are_held_against_the_limit_that_they_were_made_under(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not against the one that they are verified under: what is tried would look bad in the step before it can bring anything."""
    planner, drafters = make_planner(method="auto", request_methods=["mtp"])
    own = resolve(SpeculativeConfig(method="auto", request_methods=["mtp"]), None)
    request = Request("a", list(range(20)), SamplingParams(max_tokens=600), own, page_ids=list(range(70)))
    planner.plan(Batch([Scheduled(request, 20)]))
    request.num_computed_tokens, request.num_steps_ahead, chosen, seen = 20, 1, drafters.budget, []
    monkeypatch.setattr(chosen, "observe", lambda limits, outcomes, step: seen.append([limit for _, limit, _ in limits]))
    for limit in (2, 2, 7, 7):
        chosen.begin([request])
        chosen._applied.put(Choice(limit, True))
        step = planner.plan(Batch([Scheduled(request, 1, limit, 20, is_decoding=True)]))
        planner.observe(step, [Outcome([1], num_drafts=min(limit, 2))], StepTimes(forward=1e-3, draft=1e-3))
    assert seen[1:] == [[2], [2], [7]]


def test_a_report_is_read_where_somebody_looks_at_it() -> None:
    """To copy and read it takes the host as long as to plan the step. What it has not seen it does not draft in the place of."""
    planner, budget, request = make_auto()

    def plan(is_asked: bool, waits: bool) -> tuple[bool, bool]:
        """Whether the step reports, and whether the host drafted for it."""
        budget.begin([request])
        budget._applied.put(Choice(TOP, is_asked, waits))
        request.num_steps_ahead = not waits
        step = planner.plan(Batch([Scheduled(request, 1, TOP, 20, is_decoding=True)]))
        planner.read(step, 0, Outcome([1]))
        return step.plan.reports_drafts, step.verified[0].evidence is not None

    assert plan(True, False) == (True, False)
    assert plan(False, True) == (True, True)
    assert plan(False, False) == (False, False)
    assert plan(False, True) == (True, False), "the step's own drafts are verified: the host has not seen them"
    assert plan(False, True) == (True, True)


def test_the_steps_lookup_is_left_out_where_the_hosts_make_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request would be planned, reported and weighed twice for it. That it found nothing is not said of it then."""
    planner, budget, request = make_auto()

    def plan() -> tuple[bool, bool, bool]:
        """Whether the step's lookup drafts, whether the step reports, and whether the host drafted for it."""
        monkeypatch.setattr(budget._trials, "choose", lambda *_: Choice(TOP, False, True))
        budget.begin([request])
        step = planner.plan(Batch([Scheduled(request, 1, TOP, 20, is_decoding=True)]))
        planner.read(step, 0, Outcome([1], num_drafts=1, num_accepted=1))
        return step.plan.fields[LOOKUP_LIMIT, 0] > 0, step.plan.reports_drafts, step.verified[0].evidence is not None

    assert plan()[:2] == (True, True)
    assert plan() == plan() == (True, True, True), "nothing is known of either yet"
    for _ in range(100):
        budget._beside.note(5, False)
    assert plan() == (False, False, True)
    before = budget._means[budget._of(request).kind].lookup
    assert plan() == plan() == (False, False, True)
    assert budget._means[budget._of(request).kind].lookup == before
    assert [plan()[0] for _ in range(2 * beside.EVERY)].count(True) == 2, "text changes"
    for _ in range(200):
        budget._beside.note(5, True)
    assert plan() == (True, True, True)
    budget.begin([])
    assert not budget._beside.is_left_out


def test_what_always_waits_for_the_host_says_nothing_of_the_steps_lookup() -> None:
    chain = by_match("suffix", 8, 4)
    for may_wait in (False, True):
        budget = DraftBudget(lambda request, may_wait=may_wait: Ability(lookup="ngram", has_host=True, may_wait=may_wait), is_exact=False)  # type: ignore[misc]
        request = Request("a", [1, 2], SamplingParams(), Speculation("auto", TOP))
        for has_step in (True, False):
            budget.learn(request, chain, 4, False, asked_host=True, has_step=has_step)
        assert budget._beside._all == 4 * may_wait, "of both, one that the step's lookup had been asked for as well"


def test_prompts_are_kept_from_a_model_that_was_left_long_ago() -> None:
    planner, drafters = make_planner(method="auto", request_methods=["mtp"])
    own, limits = resolve(SpeculativeConfig(method="auto", request_methods=["mtp"]), None), drafters.budget._limits
    counts = []
    for number, (steps, options) in enumerate([(0, {}), (LEAVE_AFTER - 1, {}), (LEAVE_AFTER, {}), (LEAVE_AFTER, {"is_prefill_only": True})]):
        request = Request(str(number), list(range(20)), SamplingParams(max_tokens=600), own, page_ids=list(range(70)), **options)
        limits.num_unasked = steps
        drafters.budget._applied.put(Choice(TOP, False))
        step = planner.plan(Batch([Scheduled(request, 20)], fresh_pages=list(range(70))))
        counts.append(int(step.plan.fields[DRAFTER_COUNT, 0]))
    assert counts == [21, 21, 0, 21]


# -- what is chosen ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "steps"), [(4, 1), (5, 2), (15, 4), (16, 4), (64, 8), (128, 8)])
def test_of_many_requests_with_fixed_counts_some_are_learned_from_in_each_step(number: int, steps: int) -> None:
    budget = DraftBudget(lambda request: Ability(lookup="ngram"), is_exact=False)
    own = Speculation("ngram", TOP, is_adaptive=False)
    requests = [Request(str(n), [1, 2], SamplingParams(), speculation=own) for n in range(number)]
    learned = 0
    for _ in range(steps):
        budget.begin(requests)
        learned += sum(budget.note_verified(request, TOP) for request in requests)
    assert learned == number and budget.chosen.count == steps * number, "each once in so many steps"


@pytest.mark.parametrize(("number", "more"), [(1, 2), (4, 3), (4, 5)])
def test_choices_that_change_nothing_are_far_apart(number: int, more: int) -> None:
    """A choice takes the host longer than all else that is planned of a small step. One request more or less is no reason for another, others are."""
    budget, chosen = DraftBudget(lambda request: Ability("mtp", STEPS, "ngram"), is_exact=False), []
    of = [Request(str(n), [1, 2], SamplingParams(), Speculation("auto", TOP, num_model_steps=STEPS), num_steps_ahead=1) for n in range(8)]
    other = Request("other", [1, 2], SamplingParams(), Speculation("mtp", TOP, num_model_steps=STEPS), num_steps_ahead=1)

    def steps(requests: list[Request], count: int) -> int:
        chosen.clear()
        for _ in range(count):
            budget.begin(requests)
            chosen.append(budget._limits.is_fresh)
        return sum(chosen)

    assert steps(of[:number], 80) >= 7 and steps(of[:number], 64) == 4 and steps(of[:more], 15) <= 1
    assert steps([*of[:more], other], 1) == 1


def test_trials_become_rare_and_each_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing else is chosen. Those that are left out are nobody's: else every other kind of trial would never come."""
    budget, tried = DraftBudget(lambda request: Ability("mtp", STEPS, "ngram"), is_exact=False), list[int]()
    limits, own = budget._limits, budget._trials
    limits.chosen = Choice(TOP, True)
    monkeypatch.setattr(limits, "another", lambda trial, top: tried.append(trial) or Choice(0, True))
    request = Request("a", [1, 2], SamplingParams(), Speculation("auto", TOP, num_model_steps=STEPS), num_steps_ahead=1)
    for _ in range(trials.EXPLORE_EVERY * 48 + trials.TRIAL_STEPS):
        own.end()
        own.choose([request], TOP, True)
    assert tried[:: trials.TRIAL_STEPS] == tried[1 :: trials.TRIAL_STEPS] == list(range(1, 6 + (24 - 6) // 2 + (48 - 24) // 4 + 1))


def test_a_step_takes_the_devices_time_or_the_hosts() -> None:
    times = PaddedTimes(CostClass.PER_DRAFT)
    assert times.step(1, 5, 0, 0, False, 2.0) == 0
    for _ in range(50):
        times.add_device(1, 6, 0, 10, 2, 5e-4, 0.0, 0, 0)
        times.add_device(1, 6, 0, 10, 2, 5e-4, 3e-4, 5, 1)
        times.add_host(1, 2e-4, False, False)
        times.add_host(1, 3e-4, True, False)
    steps = [times.step(1, 5, num_model, num_model > 0, waits, 2.0) for num_model, waits in ((0, False), (5, False), (0, True))]
    assert steps == pytest.approx([5e-4, 8e-4, 8e-4])
    times.add_wait(1e-4, 5e-4, False)
    assert times.step(1, 5, 0, 0, True, 2.0) == pytest.approx(4e-4 * 1.25), "the host had something to do for most of the device's time"
    for _ in range(300):  # all are beside prompts now, which are launched kernel by kernel
        times.add_device(1, 40, 34, 10, 2, 3e-3, 1e-4, 0, 0)
        times.add_host(1, 4e-3, False, True)
    assert times.step(1, 5, 0, 0, False, 2.0) == pytest.approx(4e-3, rel=0.05), "the host bounds it"
    share = [times.step(1, 5, 0, 0, False, tokens) for tokens in (0.5, 2.0)]
    assert share[0] < 0.8 * share[1], "with fewer tokens a step, fewer steps have prompts"


def test_the_hosts_time_goes_by_what_drafts() -> None:
    """Drafts are planned and booked one by one. What was never seen is as long as its neighbour, so that it is tried."""
    times = PaddedTimes(CostClass.PER_DRAFT)
    for _ in range(20):
        times.add_device(16, 16, 0, 160, 16, 1e-4, 0.0, 0, 0)
        times.add_host(16, 1e-3, False, False, has_drafts=True, has_model=True)
    assert times.step(16, 0, 0, 0, False, 16.0) == times.step(16, 5, 3, 16, False, 16.0) == pytest.approx(1e-3)
    for _ in range(20):
        times.add_host(16, 4e-4, False, False)
    assert [times.step(16, *drafts, False, 16.0) for drafts in ((0, 0, 0), (5, 3, 16))] == pytest.approx([4e-4, 1e-3])


class Simulation:
    """A request's steps on a device whose model drafter takes its time, beside a host whose lookups are as good as they are said to be."""

    def __init__(self, draft: float, host: float, plain: float = 2e-4, asking: float = 2e-4) -> None:
        """Seconds of the model's drafts; of the host where the device waits for it; and where it does not, without the model's drafts and with
        them."""
        ability = Ability("mtp", STEPS, "ngram", has_host=True, may_wait=True)
        self.budget = DraftBudget(lambda request: ability, is_exact=False)
        self.draft, self.host, self.plain, self.asking = draft, host, plain, asking
        self.request = Request("a", [1, 2], SamplingParams(), Speculation("auto", TOP, num_model_steps=STEPS), num_steps_ahead=1)
        self.choices: list[Choice] = []

    def run(self, steps: int, *, model: int, matched: int, lookup: int, heard: int) -> Choice:
        """What is chosen mostly at the end. Drafts that are right: the model's, those of the step's lookup for such a match, the host's."""
        budget, request = self.budget, self.request
        for _ in range(steps):
            budget.begin([request])
            limit, num_model, waits = budget.limit(request), budget.num_model(request), budget.waits(request)
            if budget.listens:
                listened = Settled(by_match("suffix", matched, TOP), heard, False, 1.0)
                budget._learning.note_listened(request, budget._of(request), listened, 1)
            alone = budget.alone_score(request, num_model, limit) if limit else 99
            is_alone = num_model > 0 and matched >= alone
            right = min(limit, heard if waits else model if num_model and not is_alone else lookup)

            chain = (
                by_match("ngram", matched, limit) if is_alone or not num_model else [*by_place("mtp", num_model), *by_place("ngram", limit)][:limit]
            )
            if waits:
                chain, is_alone = by_match("suffix", matched, limit), False
            if budget.note_verified(request, len(chain)):
                has_model = num_model > 0 and not is_alone and not waits
                budget.learn(request, chain, right, has_model, matched=matched if num_model else 0, is_alone=is_alone, asked_host=waits)
            budget.observe(
                [(request, limit, num_model > 0)],
                [(limit, right)],
                StepSeen(
                    num_requests=1,
                    num_rows=1 + limit,
                    num_keys=100,
                    verify_seconds=4e-4,
                    draft_seconds=self.draft if num_model else 1e-5,
                    num_model=num_model,
                    num_asked=int(num_model > 0),
                    padded=PaddedStep(limit, waits, False, [waits]),
                ),
            )
            busy = self.host if waits else self.asking if num_model else self.plain
            budget.note_host(1, busy, waits, False, has_drafts=limit > 0, has_model=num_model > 0)
            self.choices.append(Choice(limit, num_model > 0, waits))
        last = [(choice.is_asked, choice.waits) for choice in self.choices[-100:]]
        return Choice(TOP, *max(set(last), key=last.count))


@pytest.mark.parametrize(
    ("draft", "host", "brings", "expected"),
    [
        (3e-4, 5e-4, {"model": 3, "matched": 2, "lookup": 0, "heard": 0}, (True, False)),
        (3e-4, 5e-4, {"model": 3, "matched": 16, "lookup": 9, "heard": 3}, (False, False)),
        (3e-4, 5e-4, {"model": 2, "matched": 2, "lookup": 0, "heard": 11}, (False, True)),
        (3e-4, 9e-3, {"model": 2, "matched": 2, "lookup": 0, "heard": 11}, (True, False)),
    ],
    ids=["model", "lookup alone", "the host's is worth the wait", "the host is slow"],
)
def test_the_way_that_brings_most_is_found(draft: float, host: float, brings: dict[str, int], expected: tuple[bool, bool]) -> None:
    simulation = Simulation(draft, host)
    assert simulation.run(600, **brings)[1:] == expected


def test_what_the_hosts_lookups_bring_is_not_the_steps_own() -> None:
    """Or a step that does not wait seems to bring as much."""
    simulation = Simulation(3e-4, 8e-4)
    assert simulation.run(1000, model=1, matched=2, lookup=1, heard=9).waits
    assert all(means.lookup < 2 and means.host > 7 for means in simulation.budget._means.values())


def test_lookups_of_the_host_are_asked_soon_where_they_are_waited_for() -> None:
    budget = DraftBudget(lambda request: Ability("mtp", STEPS, "ngram", has_host=True, may_wait=request.request_id == "a"), is_exact=False)
    requests = [Request(name, [1, 2], SamplingParams(), Speculation("auto", TOP, num_model_steps=STEPS)) for name in "ab"]
    found = []
    for chosen in (budget._limits.chosen, Choice(TOP, True), Choice(TOP, False, waits=True)):
        budget._limits.chosen = chosen
        found.append([budget.asks_soon(request) for request in requests])
    assert found == [[True, True], [False, True], [True, True]], "before anything is chosen; of one that always waits for them"


@pytest.mark.parametrize("advance", [1, 12])
def test_what_is_watched_counts_for_the_steps_that_it_would_take(advance: int) -> None:
    """Of 24 tokens 12 are copied and 12 new: a lookup takes 13 steps for them, 1.85 tokens each, however many whoever drafts instead takes. By places
    it would seem to have 3.75 where a step brings one."""
    budget = DraftBudget(lambda request: Ability("mtp", STEPS, "ngram", has_host=True, may_wait=True), is_exact=False)
    request = Request("a", [1, 2], SamplingParams(), Speculation("auto", TOP, num_model_steps=STEPS))
    budget.begin([request])
    text = list(range(100, 100 + 24 * 200))
    while len(request.token_ids) < len(text):
        known = len(request.token_ids) - 2
        found = text[known : known + 12 - known % 24] if known % 24 < 12 else []
        budget.watch(request, found, by_match("suffix", 3, len(found)))
        count = advance if known % 24 < 12 else 1
        request.token_ids += text[known : known + count - (known % 24 % 12 if count > 1 else 0)]
        budget.note_verified(request, 0)
        budget.compare(request)
    kind = asking(budget._of(request).kind, has_model=False, has_host=True)
    assert budget._limits.forecast.expect(kind, TOP)[-1][1] == pytest.approx(24 / 13 - 1, rel=0.3)


def test_a_step_whose_lookup_found_nothing_counts() -> None:
    """Where the host's lookups draft, it is seldom for anything else."""
    budget = DraftBudget(lambda request: Ability("", 0, "ngram", has_host=True, may_wait=True), is_exact=False)
    request = Request("a", [1, 2], SamplingParams(), Speculation("auto", TOP))
    budget.begin([request])
    for number in range(100):
        found = [7, 7] if number % 10 == 0 else []
        budget.watch_step(request, found, by_match("ngram", 2, len(found)))
        request.token_ids += [7] * 3
        budget.note_verified(request, 2)
        budget.compare(request)
    assert budget._of(request).common.lookup < 0.3
    assert budget._limits.forecast.expect(budget._of(request).kind, TOP)[-1][1] < 0.5


def test_a_model_that_takes_the_host_longer_than_it_brings_is_left_out() -> None:
    """Also for a little, where the host bounds every step: to leave the model out takes nothing. To begin with it again has to bring more."""
    assert not Simulation(1e-5, 9e-3, plain=1.02e-3, asking=1.1e-3).run(600, model=5, matched=2, lookup=4, heard=0).is_asked
    assert Simulation(1e-5, 9e-3, plain=1.1e-3, asking=1.1e-3).run(600, model=5, matched=2, lookup=4, heard=0).is_asked


@pytest.mark.parametrize(("right", "is_worth"), [(0, False), (3, True)])
def test_lookups_that_only_take_the_host_longer_are_left(right: int, is_worth: bool) -> None:
    """What the host takes for a step without any drafts was seen by chance, after thousands of steps: until then nothing seemed to be gained."""
    budget = DraftBudget(lambda request: Ability("", 0, "ngram"), is_exact=False)
    request = Request("a", [1, 2], SamplingParams(), Speculation("ngram", 10), num_steps_ahead=1)
    verified, limits = 0, list[int]()
    for _ in range(800):
        budget.begin([request])
        limits.append(budget.limit(request))
        stood, chain = min(right, verified), by_match("ngram", 3, verified)
        if verified and budget.note_verified(request, verified):
            budget.learn(request, chain, stood, False, matched=3)
        padded = PaddedStep(verified, False, False, [False])
        seen = StepSeen(1, 1 + verified, 100, 3e-4 + 1e-5 * verified, 1e-5, num_model=0, num_asked=0, padded=padded)
        budget.observe([(request, verified, False)] if verified else [], [(verified, stood)] if verified else [], seen)
        has_drafts = verified > 0 or limits[-1] > 0
        budget.note_host(1, 6e-4 if has_drafts else 4e-4, False, False, has_drafts=has_drafts)
        verified = limits[-1]  # made under the limit, and verified in the next step
    share = sum(limit > 0 for limit in limits[400:]) / 400
    assert share > 0.9 if is_worth else share < 0.1


def test_it_follows_the_text() -> None:
    simulation = Simulation(3e-4, 5e-4)
    assert simulation.run(500, model=3, matched=2, lookup=0, heard=0).is_asked
    assert not simulation.run(300, model=3, matched=16, lookup=9, heard=3).is_asked
    assert simulation.run(500, model=3, matched=2, lookup=0, heard=0).is_asked


class Trees:
    """Steps of requests whose drafts are trees of 15, on a device that computes so many rows for each as for the one with most."""

    def __init__(self, number: int, row_seconds: float, catching_up: float = 0.0) -> None:
        """catching_up: seconds of a step that asks the model where the one before did not."""
        self.row_seconds, self.catching_up, self.nodes = row_seconds, catching_up, 15
        self.seconds = self.behind = 0.0
        """Of the device; and in steps whose model caught up."""
        self.budget = DraftBudget(lambda request: Ability("mtp", self.nodes), is_exact=False)
        own = Speculation("mtp", 4, num_model_steps=4, num_nodes=self.nodes)
        self.requests = [Request(str(n), [1, 2], SamplingParams(), own, num_steps_ahead=1) for n in range(number)]
        self.was_asked = True

    def run(self, steps: int, right: int) -> float:
        """How many of a step's requests had theirs verified, lately. right: of each tree."""
        budget, requests, nodes, number = self.budget, self.requests, self.nodes, len(self.requests)
        parents, chain = list(range(-1, nodes - 1)), by_place("mtp", nodes)
        shares: list[float] = []
        for _ in range(steps):
            budget.begin(requests)
            limits = [budget.limit(request) for request in requests]
            asked = [budget.num_model(request) for request in requests]
            assert {*limits, *asked} <= {0, nodes}
            for request, limit in zip(requests, limits):
                if budget.note_verified(request, limit) and limit:
                    budget.learn(request, chain, right, True, Branches(parents, list(range(right))))
            most, is_behind = max(limits), any(asked) and not self.was_asked and self.catching_up > 0
            self.was_asked = any(asked)
            seen = StepSeen(
                num_requests=number,
                num_rows=number * (1 + most),
                num_keys=100 * number,
                verify_seconds=4e-4 + self.row_seconds * number * (1 + most),
                draft_seconds=self.catching_up if is_behind else 2e-4 if any(asked) else 1e-5,
                num_model=max(asked),
                num_asked=sum(count > 0 for count in asked),
                is_catching_up=is_behind,
                padded=PaddedStep(most, False, False, [False] * number),
            )
            self.seconds += seen.verify_seconds + seen.draft_seconds
            self.behind += seen.draft_seconds * is_behind
            drafted = [(r, limit, limit > 0) for r, limit in zip(requests, limits) if limit]
            budget.observe(drafted, [(limit, right) for _, limit, _ in drafted], seen)
            budget.note_host(number, 1e-4, False, False, has_drafts=most > 0, has_model=any(asked))
            shares.append(sum(limit > 0 for limit in limits) / number)
        return sum(shares[-200:]) / 200


@pytest.mark.parametrize(
    ("number", "row_seconds", "right", "is_worth"), [(1, 1e-6, 2, True), (1, 1e-6, 0, False), (64, 1e-5, 2, False), (64, 1e-7, 2, True)]
)
def test_a_tree_is_verified_whole_where_it_brings_more_than_it_takes(number: int, row_seconds: float, right: int, is_worth: bool) -> None:
    """What its drafts are nobody knows when the step is planned. Where it is left out it is tried now and then, and comes back with the text."""
    trees = Trees(number, row_seconds)
    share = trees.run(600, right)
    assert share > 0.9 if is_worth else share < 0.1, share
    if not right:
        assert trees.run(1500, 4) > 0.9


def test_a_model_that_takes_long_to_catch_up_is_tried_as_rarely() -> None:
    """As a tree's does on a GPU, where such a step is launched kernel by kernel: a trial at every 48th step made decoding half as fast."""
    trees = Trees(1, 1e-6, catching_up=3e-2)
    assert trees.run(8000, 0) < 0.1
    assert 0 < trees.behind < 0.06 * trees.seconds
    assert trees.run(12000, 4) > 0.9


# -- answers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [AUTO, TREE, {"method": "token_recycling"}], ids=lambda options: options["method"])
def test_answers_are_those_without_drafts(llm_plain: LLM, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is chosen and tried, with steps planned ahead and some waited for."""
    from backend import engine_parts

    for name in ("Planner", "Drafters"):
        make = getattr(engine_parts, name)

        def padded(*args: Any, make: Any = make, **options: Any) -> Any:
            return make(*args, **{**options, "is_layout_exact": False})

        monkeypatch.setattr(engine_parts, name, padded)
    monkeypatch.setattr(trials, "EXPLORE_EVERY", 4)
    monkeypatch.setattr(trials.Trials, "note", lambda *_, **__: None)  # what they take is of no account here
    llm = LLM(speculative_config=options, async_scheduling=True, enable_prefix_caching=False, max_num_batched_tokens=600)
    prompts = code_prompts(10, (100, 500), seed=3)
    chosen, limits = set[Choice](), llm.engine.budget._limits
    another = limits.another

    def noted(trial: int, top: int) -> Choice:
        chosen.add(found := another(trial, top))
        return found

    monkeypatch.setattr(limits, "another", noted)
    found = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy(40), use_tqdm=False)]
    assert found == [o.outputs[0].token_ids for o in llm_plain.generate(prompts, greedy(40), use_tqdm=False)]
    assert {choice.is_asked for choice in chosen} == {True, False}
    assert {choice.waits for choice in chosen} == ({True, False} if options is AUTO else {False})
    llm.engine.scheduler.check()
