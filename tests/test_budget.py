"""Who drafts and how many, on simulated machines: no clock, no model. What is asked of it: as fast as the best fixed choice."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from backend.budget import Ability, CostClass, DraftBudget, by_branch, by_match, by_place, by_probability, by_shares
from backend.budget.costs import StepCosts
from backend.budget.line import Line
from backend.budget.observing import StepSeen
from backend.budget.padded import PaddedStep
from backend.budget.rule import level, share
from backend.budget.survival import MAX_AGE, Survival
from backend.budget.times import Times
from backend.core import NEVER, Branches, Chain, DraftFaults, Evidence, Request, Scheduled, Speculation
from backend.drafters.hybrid import HybridDrafter
from backend.drafters.lookup import StepDrafts
from backend.drafters.ngram import NgramLookup
from backend.planned import Drafted
from backend.sampling_params import SamplingParams

Cost = Callable[[int], float]
TOP, STEPS = 6, 4
"""Drafts at most, and those of them that a model makes."""
MEAN_NOISE = 1.05
"""One step in twenty takes up to three times as long."""


def memory_bound(rows: int) -> float:
    """A GPU: reading the weights takes 4 ms, whatever the batch."""
    return 4e-3 + 1e-6 * rows


def compute_bound(rows: int) -> float:
    """A CPU: every row is paid for, past the first few."""
    return 4e-3 + 0.4e-3 * max(0, rows - 4)


def half_bound(rows: int) -> float:
    return 4e-3 + 0.08e-3 * max(0, rows - 4)


def learn(budget: DraftBudget, request: Request, chain: Chain, right: int, has_model: bool, tree: Branches | None = None) -> None:
    if budget.note_verified(request, len(chain)):
        budget.learn(request, chain, right, has_model, tree)


@dataclass
class Text:
    """What drafts for a request are worth."""

    model: tuple[float, ...] = (0.7,)
    """A model's chances to be right, as it says them itself: one of these for each draft."""
    copied: float = 0.0
    """Share of steps in which a lookup matches ten tokens and is right nine times in ten; else it matches one, and is wrong."""


ABILITIES = {
    "none": Ability(),
    "mtp": Ability("mtp", STEPS),
    "ngram": Ability(lookup="ngram"),
    "both": Ability("mtp", STEPS, "ngram"),
}


def make_requests(count: int, method: str = "mtp", text: Text | None = None, first: int = 0, **speculation: object) -> list[tuple[Request, Text]]:
    wanted = 0 if method == "none" else TOP
    own = Speculation(method, **{"num_speculative_tokens": wanted, "num_model_steps": STEPS, **speculation})  # type: ignore[arg-type]
    return [(Request(f"{method} {first + i}", [1, 2], SamplingParams(), speculation=own), text or Text()) for i in range(count)]


@dataclass
class Machine:
    """Steps of requests as the engine makes them, and their time."""

    cost: Cost
    draft_cost: float = 0.3e-3
    """Of each draft of the model."""
    is_exact: bool = True
    fixed: tuple[int, int] | None = None
    """Drafts of the model, and of all, in the place of what the planner says."""
    numbers: random.Random = field(default_factory=lambda: random.Random(0))
    seconds: float = 0.0
    emitted: int = 0
    verified: list[dict[str, int]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.budget = DraftBudget(lambda request: ABILITIES[request.speculation.method], is_exact=self.is_exact)
        self.waiting: dict[str, tuple[list[Evidence], list[bool]]] = {}

    def step(self, requests: list[tuple[Request, Text]], num_prompt_rows: int = 0) -> None:
        budget, own, num_prompts = self.budget, [request for request, _ in requests], int(num_prompt_rows > 0)
        budget.begin(own)
        limits = [min(budget.limit(r), r.speculation.num_speculative_tokens) for r in own]
        chains = [self.waiting.get(r.request_id, ([], []))[0][:limit] for r, limit in zip(own, limits)]
        counts = budget.allot(own, chains, [0] * len(own), len(own))
        if self.fixed is not None:
            counts = [min(len(chain), self.fixed[1]) for chain in chains]
        outcomes, learned = [], []
        for request, chain, count in zip(own, chains, counts):
            rights = self.waiting.get(request.request_id, ([], []))[1][:count]
            right = rights.index(False) if False in rights else len(rights)
            outcomes.append((count, right))
            learned.append((request, chain[:count], right))
        made, num_asked = self._draft(requests)
        noise = 1 + (self.numbers.random() < 0.05) * 2 * self.numbers.random()
        drafts = [count for count, _ in outcomes]
        rows = num_prompt_rows + (len(own) + sum(drafts) if self.is_exact else len(own) * (1 + max(drafts)))
        verify, draft = noise * self.cost(rows), noise * made * self.draft_cost * (0.97 + 0.03 * num_asked)
        following = self.draft_cost * num_prompt_rows / 50
        for (request, chain, right), whole in zip(learned, chains):
            learn(budget, request, chain, right, bool(whole) and whole[0].source == "mtp")
        may = [n for n, limit in enumerate(limits) if limit]
        budget.observe(
            [(own[n], limits[n], bool(chains[n]) and chains[n][0].source == "mtp") for n in may],
            [outcomes[n] for n in may],
            StepSeen(
                num_requests=len(own) + num_prompts,
                num_rows=len(own) + num_prompts + sum(drafts) if self.is_exact else rows,
                num_keys=2 * len(own),
                num_prompts=num_prompts,
                num_prompt_rows=num_prompt_rows,
                verify_seconds=verify,
                draft_seconds=following + draft,
                num_model=made,
                num_asked=num_asked,
                draft_ends=[following + draft * (count + 1) / made for count in range(made)] if self.is_exact else (),
                padded=None if self.is_exact else PaddedStep(max(drafts), False, False, [False] * len(may)),
            ),
        )
        self.seconds += verify + following + draft
        self.emitted += len(own) + sum(right for _, right in outcomes)
        self.verified.append({r.request_id: count for r, (count, _) in zip(own, outcomes)})
        self.asked.append(num_asked)

    def _draft(self, requests: list[tuple[Request, Text]]) -> tuple[int, int]:
        """Drafts for the next step -> the most that the model made for one request, and for how many."""
        budget, asked, counts = self.budget, dict[str, Text](), dict[str, int]()
        for request, text in requests:
            ability = ABILITIES[request.speculation.method]
            count = budget.num_model(request) if ability.num_model else 0
            alone = budget.alone_score(request, count, limit) if ability.lookup and (limit := budget.limit(request)) else NEVER
            if self.fixed is not None and ability.num_model:
                count, alone = self.fixed[0], NEVER if self.fixed[0] else 1
            score, chance = (10, 0.9) if self.numbers.random() < text.copied else (1, 0.03)
            chain: list[Evidence] = []
            rights: list[bool] = []
            if ability.lookup and score >= alone:
                chain, rights = [*by_match("ngram", score, TOP)], [self.numbers.random() < chance for _ in range(TOP)]
            elif count:
                asked[request.request_id], counts[request.request_id] = text, count
            self.waiting[request.request_id] = chain, rights
        least, trust = budget.least_standing() if self.fixed is None else 0.0, budget.trust
        chances: dict[str, list[float]] = {name: [] for name in asked}
        most = 0
        while most < max(counts.values(), default=0) and (not most or sum(math.prod(own) ** trust for own in chances.values()) >= least):
            most += 1
            for name, text in asked.items():
                chances[name].append(self.numbers.choice(text.model))
        for name, own in chances.items():
            made = own[: counts[name]]
            self.waiting[name] = by_probability("mtp", made), [self.numbers.random() < one for one in made]
        budget.expect_drafts(most, len(asked))
        return most, len(asked)

    def speed(self, requests: list[tuple[Request, Text]], steps: int) -> float:
        self.seconds, self.emitted, self.verified, self.asked = 0.0, 0, [], []
        for _ in range(steps):
            self.step(requests)
        return self.emitted / self.seconds

    def mean(self, name: str) -> float:
        """Drafts of a request, or of all of a method, that a step verified."""
        values = [count for step in self.verified for request, count in step.items() if request.startswith(name)]
        return sum(values) / len(values)


def best_fixed(requests: list[tuple[Request, Text]], choices: list[tuple[int, int]], **machine: object) -> float:
    return max(Machine(fixed=choice, **machine).speed(requests, 150) for choice in choices)  # type: ignore[arg-type]


SURE, UNSURE, BAD = Text((0.95,)), Text((0.98, 0.5, 0.1)), Text((0.03,))


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "padded"])
@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("text", [SURE, UNSURE, BAD], ids=["sure", "unsure", "bad"])
def test_as_fast_as_the_best_fixed_number(text: Text, batch: int, cost: Cost, is_exact: bool) -> None:
    requests, machine = make_requests(batch, text=text), Machine(cost, is_exact=is_exact)
    machine.speed(requests, 150)  # a server's first steps
    fixed = best_fixed(requests, [(count, count) for count in range(STEPS + 1)], cost=cost, is_exact=is_exact)
    assert machine.speed(requests, 300) > 0.87 * fixed


def test_it_notices_when_the_batch_grows_and_shrinks() -> None:
    machine, means = Machine(compute_bound), []
    for batch in (1, 64, 1):
        requests = make_requests(batch, text=Text((0.6,)))
        machine.speed(requests, 150)
        machine.speed(requests, 150)
        means.append(machine.mean("mtp"))
    assert means[1] < 0.5 and min(means[0], means[2]) > 1.5


def test_a_drafter_that_becomes_bad_stops_costing_and_one_that_becomes_good_is_found() -> None:
    machine, text = Machine(compute_bound, draft_cost=1e-3), Text((0.9,))
    requests = make_requests(4, text=text)
    machine.speed(requests, 200)
    assert sum(machine.asked[-50:]) > 150
    text.model = (0.03,)
    machine.speed(requests, 600)
    assert sum(machine.asked[-300:]) < 0.1 * 300 * 4, "trials go on"
    text.model = (0.95,)
    machine.speed(requests, 3000)
    assert sum(machine.asked[-100:]) > 300


@pytest.mark.parametrize(("text", "least", "most"), [(SURE, 3.0, STEPS), (BAD, 0.0, 0.1)], ids=["sure", "bad"])
def test_steps_that_all_have_prompts_say_what_drafts_are_worth(text: Text, least: float, most: float) -> None:
    """Many requests with short answers: a server's steps may have none without."""
    machine, requests = Machine(half_bound), make_requests(32, text=text)
    for _ in range(300):
        machine.step(requests, num_prompt_rows=machine.numbers.randrange(50, 400))
    machine.verified = machine.verified[-100:]
    assert least <= machine.mean("mtp") <= most


def test_trials_take_few_requests() -> None:
    machine, requests = Machine(compute_bound, draft_cost=1e-3), make_requests(64, text=BAD)
    machine.speed(requests, 600)
    machine.speed(requests, 200)
    assert sum(count > 2 for count in machine.asked) <= 10, "until it is measured what asking for all of them takes"


def test_requests_of_one_batch_each_get_what_is_best_for_them() -> None:
    """Copied text the lookup alone, other text the model, hopeless text nothing; together faster than any one choice for all."""
    copying, new = make_requests(4, "both", Text((0.5,), copied=1.0)), make_requests(4, "both", Text((0.9,)), first=4)
    bad, plain = make_requests(4, "mtp", BAD), make_requests(2, "none")
    requests, machine = copying + new + bad + plain, Machine(half_bound)
    machine.speed(requests, 200)
    speed = machine.speed(requests, 600)
    assert machine.mean("both 0") > 3 and machine.mean("both 5") > 1.5 and machine.mean("mtp") < 0.3 and machine.mean("none") == 0
    assert sum(machine.asked) / 600 < 5, "the model is spared copied and hopeless text"
    choices = [(model, count) for model in (0, 2, STEPS) for count in (0, 2, 4, TOP)]
    assert speed > 1.1 * best_fixed(requests, choices, cost=half_bound)


def test_a_lookup_drafts_alone_from_the_score_on_that_pays() -> None:
    machine, requests = Machine(half_bound), make_requests(2, "both", Text((0.6,), copied=0.5))
    machine.speed(requests, 400)
    assert 1 < machine.budget.alone_score(requests[0][0], STEPS, TOP) <= 10


@pytest.mark.parametrize("choice", [{"verify_strategy": "topp"}, {"is_adaptive": False}], ids=["topp", "fixed"])
def test_what_is_fixed_is_left_alone(choice: dict[str, object]) -> None:
    """Under topp answers would follow the load. The others in the batch are limited all the same, and know what it costs."""
    fixed, others = make_requests(4, text=BAD, **choice), make_requests(4, text=BAD, first=4)
    machine = Machine(compute_bound, draft_cost=1e-3)
    machine.speed(fixed + others, 500)
    machine.budget.begin([request for request, _ in fixed + others])
    assert all(machine.budget.limit(r) == TOP and machine.budget.num_model(r) == STEPS for r, _ in fixed)
    chains = [by_probability("mtp", [0.03] * STEPS)] * 8
    counts = machine.budget.allot([r for r, _ in fixed + others], chains, [0] * 8, 8)
    assert counts[:4] == [STEPS] * 4 and sum(counts[4:]) <= 2 * STEPS


def test_good_drafts_are_not_held_against_the_speed_that_they_brought() -> None:
    """The first rows of a step take most, and answers come twelve tokens a step: a row's time is worth more than a token at that speed, and the
    lookup that it comes from is the best there is all the same."""
    budget = DraftBudget(lambda request: Ability("mtp", STEPS, has_host=True), is_exact=True)
    ((request, _),) = make_requests(1, num_speculative_tokens=12)
    copied = by_match("suffix", 16, 12)
    verified = []
    for number in range(200):
        budget.begin([request])
        drafts = (12, 0, 3)[number % 3] if number < 30 else 12
        assert budget.pick(request, [by_probability("mtp", [0.6] * STEPS), copied]) == 1
        verified += budget.allot([request], [copied], [0], 1)
        learn(budget, request, copied[:drafts], drafts, has_model=False)
        seconds = 0.044 - 0.022 * (1 - drafts / 12) ** 3
        budget.observe([(request, 12, False)], [(drafts, drafts)], StepSeen(1, 1 + drafts, 2, seconds, 1e-4, num_model=0, num_asked=0))
    assert verified[30:].count(12) >= 0.97 * len(verified[30:]), "but for trials"


def test_a_step_that_is_the_first_of_its_kind_says_nothing_of_times() -> None:
    budget = DraftBudget(lambda request: Ability("mtp", STEPS, has_host=True), is_exact=True)
    ((request, _),) = make_requests(1, num_speculative_tokens=4)
    for seconds, is_first in ((9.0, True), (1e-3, False), (9.0, True), (9.0, True)):
        budget.begin([request])
        budget.observe([], [], StepSeen(1, 1, 2, seconds, 0.0, num_model=0, num_asked=0, is_first=is_first))
    assert budget._costs.verify(1) == pytest.approx(1e-3)


def test_fixed_counts_do_not_ask_a_model_whose_drafts_are_left_aside() -> None:
    """While a lookup of the host promises more at every step; the model is tried now and then, and asked again when the lookup finds nothing."""
    budget = DraftBudget(lambda request: Ability("mtp", STEPS, has_host=True), is_exact=True)
    ((request, _),) = make_requests(1, is_adaptive=False)

    def ask(copied: Sequence[Evidence], steps: int) -> int:
        """Steps in which the model was asked."""
        asked = 0
        for _ in range(steps):
            budget.begin([request])
            best = budget.pick(request, [by_probability("mtp", [0.6] * STEPS), *([copied] if copied else [])])
            learn(budget, request, by_match("ngram", 16, TOP) if best else (), TOP * best, has_model=not best)
            asked += budget.num_model(request) > 0
        return asked

    ask(by_match("ngram", 16, TOP), 150)
    assert 1 <= ask(by_match("ngram", 16, TOP), 96) <= 6
    ((new, _),) = make_requests(1, first=1, is_adaptive=False)
    for promised, is_asked in (((), True), (by_match("ngram", 16, TOP), False), ((), True)):
        budget.foresee(new, [promised])  # at a prompt's end
        assert (budget.num_model(new) > 0) == is_asked
    assert ask((), 20) >= 19


@pytest.mark.parametrize(
    ("found", "following", "is_asked"), [(0, 0.0, True), (3, 0.0, False), (0, 30e-3, False)], ids=["alone", "beside", "followed"]
)
def test_a_model_is_asked_for_what_it_adds_to_lookups_against_all_that_it_takes(found: int, following: float, is_asked: bool) -> None:
    """found: drafts of a lookup that are right nearly as often; following: seconds that the model takes for each prompt, in a third of the steps."""
    budget, numbers = DraftBudget(lambda request: Ability("mtp", STEPS, has_host=True), is_exact=True), random.Random(5)
    requests = [request for request, _ in make_requests(4)]
    model, lookup = by_probability("mtp", [0.75] * STEPS), by_match("suffix", 8, found)
    made, asked = [True] * 4, list[bool]()
    for step in range(400):
        budget.begin(requests)
        outcomes = []
        for request, has_model in zip(requests, made):
            chains = [model if has_model else (), *([lookup] if found else [])]
            best = budget.pick(request, chains)
            verified = chains[best]
            right = next((place for place in range(len(verified)) if numbers.random() > (0.7 if best else 0.75)), len(verified))
            learn(budget, request, verified, right, has_model=has_model and not best)
            outcomes.append((len(verified), right))
        num_asked, has_prompts = sum(made), step % 3 == 0
        made = [budget.num_model(request) > 0 for request in requests]
        rows = 4 + sum(count for count, _ in outcomes)
        budget.observe(
            [(request, TOP, own) for request, own in zip(requests, made)],
            outcomes,
            StepSeen(
                num_requests=4,
                num_rows=rows,
                num_keys=8,
                num_prompts=int(has_prompts),
                num_prompt_rows=int(has_prompts),
                verify_seconds=half_bound(rows),
                draft_seconds=2e-3 * (num_asked > 0) + following * has_prompts * (num_asked > 0),
                num_model=STEPS * (num_asked > 0),
                num_asked=num_asked,
            ),
        )
        asked.append(num_asked == 4)
    assert sum(asked[-200:]) > 150 if is_asked else sum(asked[-200:]) < 20


def test_drawn_drafts_are_not_judged_by_what_was_drawn() -> None:
    """What a lookup found behind drawn drafts follows from them: it may be left out, but changes nothing for those before it."""
    machine, requests = Machine(compute_bound), make_requests(8, text=UNSURE)
    machine.speed(requests, 300)
    own = [request for request, _ in requests]
    for chances in ((0.95, 0.9, 0.4), (0.3, 0.3), (0.99,)):
        drawn = by_probability("mtp", chances)
        longer = [*drawn, *by_place("ngram", 6, 0.95)[len(drawn) :]]
        alone = machine.budget.allot(own, [drawn] * 8, [len(drawn)] * 8, 8)
        with_more = machine.budget.allot(own, [longer] * 4 + [drawn] * 4, [len(drawn)] * 8, 8)
        assert [min(count, len(drawn)) for count in with_more] == alone


@pytest.mark.parametrize("strategy", ["rejection", "target_match"])
def test_a_lookup_takes_the_place_of_drawn_drafts_whatever_was_drawn(strategy: str) -> None:
    """What the model says of its second draft follows from the first one, and what the step's lookup found behind them from both."""

    class Copied(NgramLookup):
        def lookup_judged(self, requests: Sequence[Request], counts: Sequence[int]) -> list[tuple[list[int], Chain]]:
            return [([7] * 3, by_match("suffix", 3, 3)) for _ in requests]

        def lookup(self, request: Request, drafts: Sequence[int], count: int) -> list[int]:
            return []

    steps, budget = StepDrafts(), DraftBudget(lambda request: ABILITIES["mtp"], is_exact=False)
    hybrid, found = HybridDrafter(steps, {"default": [Copied(2, 1)]}, budget, "mtp", asks=False), set()
    for chances, num_longer in (((0.7, 0.99, 0.99), 3), ((0.7, 0.02), 0)):
        speculation = Speculation("mtp", 6, strategy, num_model_steps=3)
        request = Request("r", [1, 2, 3], SamplingParams(), speculation)
        chain = [*by_probability("mtp", chances), *by_place("ngram", 6, 0.95)[:num_longer]]
        steps.put(request, [5] * len(chain), [evidence.source for evidence in chain], chain)
        found.add(hybrid.propose([Scheduled(request, 1, 6)], DraftFaults()).sources[0][0])
    assert len(found) == (1 if strategy == "rejection" else 2)


def test_prompts_and_plain_requests_change_nothing() -> None:
    machine, requests = Machine(memory_bound, draft_cost=0.1e-3), make_requests(4, text=SURE)
    for _ in range(20):
        machine.step(requests, num_prompt_rows=500)
    assert all(sum(step.values()) == 16 for step in machine.verified[2:]), "nothing is known of times, so nothing is tried"
    machine.speed(requests, 200)
    assert machine.mean("mtp") > 3
    machine.budget.begin([request for request, _ in make_requests(4, "none")])
    assert machine.budget.limit(requests[0][0]) == TOP


def test_calibration_and_regret() -> None:
    machine, requests = Machine(compute_bound), make_requests(8, text=UNSURE)
    machine.speed(requests, 300)
    before = machine.budget.predicted["mtp"]
    machine.speed(requests, 600)
    predicted = machine.budget.predicted["mtp"] - before
    assert abs(predicted / (machine.emitted - 600 * 8) - 1) < 0.2
    assert machine.budget.regret < 0.05 and machine.budget.chosen.count == 900 * 8


# -- its parts -----------------------------------------------------------------------------------------------------------


def test_drafts_are_shared_by_survival() -> None:
    chains = [[0.9, 0.8, 0.1], [0.5, 0.4], []]
    assert share(chains, 3, lambda number: 1 + 0.11 * number)[0] == [2, 1, 0]
    assert share(chains, 3, lambda number: 1.0)[0] == [3, 2, 0]
    assert share(chains, 3, lambda number: 1.0 + number)[0] == [0, 0, 0]
    assert share(chains, 3, lambda number: 1 if number in (0, 4) else 2)[0] == [2, 2, 0], "a step of costs that one more draft does not show"


def test_of_many_drafts_none_is_taken_or_left_for_the_one_behind_it() -> None:
    """That one's survival follows from which token was drawn: `rejection` would prefer those that are drafted well after."""
    counts = [share([[0.9]] * 64 + [[0.55, behind]], 65, lambda number: 1 + 0.0057 * number)[0][-1] for behind in (0.54, 0.1)]
    assert counts == [2, 1]


def test_times_between_and_beyond_what_was_measured() -> None:
    times = Times()
    assert times.at(5) == 0.0
    times.add(8, 2.0)
    assert times.at(8) == times.at(16) == 2.0 and times.at(4) == 1.0
    for seconds in (9.0, 4.0, 5.0):
        times.add(16, seconds)
    assert times.at(12) == 3.0 and times.at(24) == 6.0
    for _ in range(3):
        times.add(4, 40.0)
    assert times.at(4) == 2.0, "a smaller step takes no longer"


def test_a_line_tells_rows_from_keys() -> None:
    """Rows and keys grow together, as with requests of long answers; one step in ten is held up."""
    line, numbers = Line(), random.Random(1)
    assert not line and line.curve(100).at(4) == 0.0
    line.add(8, 100, 8.0)
    assert line.curve(100).at(16) == 8.0 and line.curve(100).at(4) == 4.0, "hopeful where nothing was measured"
    for _ in range(300):
        rows = numbers.randint(4, 40)
        keys = 20 * rows + numbers.randint(0, 800)
        line.add(rows, keys, (10 + 0.3 * rows + 0.01 * keys) * (3 if numbers.random() < 0.1 else 1 + 0.1 * numbers.random()))
    known = line.curve(800)
    assert known.at(30) - known.at(10) == pytest.approx(6, rel=0.4) and line.curve(1200).at(20) - line.curve(400).at(20) == pytest.approx(8, rel=0.4)
    for _ in range(300):
        line.add(20, 800, 24.0)
    assert line.curve(800).at(40) - line.curve(800).at(20) == pytest.approx(6, rel=0.4), "what rows took when they differed stands"


@pytest.mark.parametrize(("kind", "expected"), [(CostClass.PER_DRAFT, (1.0, 4.0)), (CostClass.BLOCK, (2.0, 2.0)), (CostClass.FREE, (0.0, 0.0))])
def test_a_method_brings_its_cost_class(kind: CostClass, expected: tuple[float, float]) -> None:
    costs = StepCosts(kind)
    costs.add_draft(2, 4, 2.0)
    assert (costs.draft(1, 4), costs.draft(4, 4)) == expected and costs.draft(0, 4) == 0.0


def test_fewer_drafts_are_timed_in_the_step_that_makes_more() -> None:
    """So that what one more takes is not the difference of two steps that had nothing in common; what follows the last one belongs to each."""
    costs = StepCosts()
    costs.add_draft(3, 4, 10.0, (4.0, 6.0, 9.0))
    assert [costs.draft(count, 4) for count in range(5)] == pytest.approx([0.0, 5.0, 7.0, 10.0, 40 / 3])


def test_how_likely_drafts_stand_is_learned_from_what_the_model_says_of_them() -> None:
    """Of one that is right more often than it says, and of one that is right less often; what says nothing of its drafts teaches nothing."""
    for chance, low, high in ((0.75, 0.3, 0.5), (0.3, 1.4, 2.2)):
        budget, numbers = DraftBudget(lambda request: ABILITIES["mtp"], is_exact=True), random.Random(3)
        ((request, _),) = make_requests(1)
        before = budget.trust
        learn(budget, request, by_place("mtp", 3), 3, has_model=True)
        assert budget.trust == before
        means = list[float]()
        for _ in range(1000):
            learn(budget, request, by_probability("mtp", [0.5]), int(numbers.random() < chance), has_model=True)
            means.append(budget.trust)
        assert low < sum(means[500:]) / 500 < high and 0.55**budget.trust == pytest.approx(chance, abs=0.15)


def test_drafts_behind_a_model_that_stopped_early_are_the_lookups() -> None:
    def made() -> Drafted:
        return Drafted(["mtp"] * 5 + ["ngram"] * 3, num_model=5)

    early, whole, unknown, nothing = made(), made(), made(), made()
    early.note(0, [0.9, 0.4], "mtp", "ngram")
    whole.note(0, [0.9] * 5, "mtp", "ngram")
    unknown.note(0, None, "mtp", "ngram")
    nothing.note(0, [], "mtp", "ngram")
    assert early.sources == ["mtp"] * 2 + ["ngram"] * 6 and whole.sources == unknown.sources == made().sources
    assert nothing.sources == ["ngram"] * 8
    assert [evidence.source for evidence in early.judge(4, "mtp", "ngram")] == ["mtp"] * 2 + ["ngram"] * 2


@pytest.mark.parametrize("chances", [[], [0.9]])
def test_what_a_grammar_forces_stands_where_what_is_before_it_does(chances) -> None:
    """From the first answer on: nothing has to be learned of it."""
    behind = Drafted(["mtp", "grammar", "grammar"], chances=chances, token_ids=[1, 2, 3], num_model=1)
    survival = Survival()
    first, second, third = survival.survivals("a", behind.judge(3, "mtp", "ngram"))
    assert third == pytest.approx(second, rel=2e-3) == pytest.approx(first, rel=4e-3)
    alone = Drafted(["grammar"] * 4, token_ids=[1, 2, 3, 4])
    assert survival.survivals("b", alone.judge(4, "mtp", "ngram"))[3] > 0.99
    longer = Drafted(["mtp", "ngram", "grammar"], chances=chances, token_ids=[1, 2, 3], num_model=1)
    assert [evidence.source for evidence in longer.judge(3, "mtp", "ngram")] == longer.sources


def test_survival_is_what_stood_and_a_requests_own() -> None:
    survival, chain = Survival(), by_probability("mtp", [0.95, 0.55])
    assert survival.survivals("a", chain)[0] == pytest.approx(0.95)
    for _ in range(200):
        survival.learn("a", chain, 2)
        survival.learn("b", chain, 0)
    own, other, new = (survival.survivals(name, chain)[0] for name in "abc")
    assert own > 0.75 > 0.25 > other and new == pytest.approx(0.5, abs=0.1)
    survival.stop("a")
    assert survival.survivals("a", chain)[0] == pytest.approx(new)
    assert by_match("ngram", 12, 3)[0].guess > by_match("ngram", 2, 3)[0].guess


def test_what_drafts_promise_together_is_found_once_for_all_alike() -> None:
    survival, rng = Survival(), random.Random(2)
    chains = [by_match("ngram", 5, 4), by_shares("suffix", bytes([9, 3, 10, 10]), 7), (*by_place("mtp", 2), *by_match("ngram", 3, 3))]
    assert by_shares("suffix", bytes([9, 3, 10, 10]), 7) is chains[1] == by_probability("suffix", [0.95, 0.3, 1.0, 1.0], 7)
    for step in range(300):
        survival.step = step
        for name, chain in itertools.product("ab", chains):
            survival.learn(name, chain, rng.choice([0, 1, 2, 4] if name == "a" else [3, 4]))
    survival.step += MAX_AGE
    for name, chain in itertools.product("abc", [*chains, [*chains[0]]]):
        expected = sum(survival.survivals(name, chain))
        assert survival.promised(name, chain) == pytest.approx(expected, rel=0.15), "shifts are told apart in quarters"
        kept = survival.promised(name, chain)
        survival.learn("d", chain, 0)
        assert type(chain) is list or survival.promised(name, chain) == kept, "what stood since then is left out"
    survival.step += MAX_AGE
    assert survival.promised("c", chains[0]) < kept


PARENTS, CHANCES = [-1, -1, 0, 2, 1, 0], [0.75, 0.15, 0.85, 0.75, 0.55, 0.05]
"""A tree: 0 - 2 - 3, 0 - 5, and 1 - 4; each draft's chance after the one before it."""


def test_survival_in_a_tree_goes_by_the_path() -> None:
    survival, tree = Survival(), by_branch("mtp", CHANCES, PARENTS)
    found = survival.survivals("a", tree, PARENTS)
    assert found == pytest.approx([0.75, 0.15, 0.75 * 0.85, 0.75 * 0.85 * 0.75, 0.15 * 0.55, 0.75 * 0.05])
    for _ in range(300):
        survival.learn_tree("a", tree, PARENTS, [0, 5])
    learned = survival.survivals("b", tree, PARENTS)
    assert learned[0] > 0.9 and learned[1] < 0.05 and learned[2] < 0.05 and learned[5] > 0.85
    conditional = learned[3] / learned[2], learned[4] / learned[1]
    assert conditional == pytest.approx((0.75, 0.55)), "what follows a draft that fell says nothing"


@pytest.mark.parametrize("is_right", [True, False], ids=["right", "wrong"])
@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
def test_of_a_tree_the_drafts_that_are_worth_it_are_verified(cost: Cost, is_right: bool) -> None:
    """Its best ones come first. Rows past the fourth take a tenth of a step each, or next to nothing."""
    ability = Ability("mtp", len(PARENTS))
    budget, rng = DraftBudget(lambda request: ability, is_exact=True), random.Random(2)
    requests = [Request(f"{i}", [1, 2], SamplingParams(), speculation=Speculation("mtp", 3, num_nodes=len(PARENTS))) for i in range(8)]
    order = sorted(range(len(PARENTS)), key=lambda n: -Survival().survivals("", by_branch("mtp", CHANCES, PARENTS), PARENTS)[n])
    parents, tree = [-1 if PARENTS[n] < 0 else order.index(PARENTS[n]) for n in order], by_branch("mtp", CHANCES, PARENTS)
    chain, made, verified = [tree[n] for n in order], len(PARENTS), list[float]()
    for _ in range(150):
        budget.begin(requests)
        counts = budget.allot(requests, [chain if made else []] * 8, [0] * 8, 8, [parents] * 8) if made else [0] * 8
        outcomes = []
        for request, count in zip(requests, counts):
            path: list[int] = []
            for number in range(count):
                is_next = parents[number] == (path[-1] if path else -1)
                if is_right and is_next and rng.random() < CHANCES[order[number]]:
                    path.append(number)
            learn(budget, request, chain[:count], len(path), made > 0, Branches(parents[:count], path))
            outcomes.append((count, len(path)))
        verified.append(sum(counts) / 8)
        made = max(budget.num_model(request) for request in requests)
        rows, limits = 8 + sum(counts), [(request, len(PARENTS), made > 0) for request in requests]
        seen = StepSeen(8, rows, 16, cost(rows), 0.3e-3 * (made > 0), num_model=made, num_asked=8 * (made > 0))
        budget.observe(limits, outcomes, seen)
    mean = sum(verified[50:]) / 100
    if not is_right:
        assert mean < 0.2
    elif cost is memory_bound:
        assert mean > 0.97 * len(PARENTS)
    else:
        assert 0.4 < mean < 2.5


def test_leading_drafts_are_judged_by_their_means_where_later_ones_are_better() -> None:
    assert level([0.1, 0.5, 0.2]) == pytest.approx([0.3, 0.3, 0.2]) and level([0.9, 0.5, 0.5]) == [0.9, 0.5, 0.5]
    assert share([level([0.1, 0.5, 0.2])], 1, lambda number: 1 + 0.25 * number) == ([2], pytest.approx(1.6 / 1.5))
    assert share([level([0.1, 0.3, 0.1])], 1, lambda number: 1 + 0.25 * number)[0] == [0]
