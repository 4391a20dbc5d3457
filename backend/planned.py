"""What the planner knows of requests and of the steps that it planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from backend.budget import Chain, by_branch, by_match, by_place
from backend.core import NEVER, Scheduled
from backend.drafters import Placement
from backend.drafters.lookup import judge_longer, judge_model, judge_places
from backend.grammar import SOURCE
from backend.step.plan import StepPlan

if TYPE_CHECKING:
    import torch

    from backend.grammar import Matcher

(FORCED,) = by_place(SOURCE, 1, 0.999)
"""A token that a grammar forces stands where those before it do."""


@dataclass(slots=True)
class Drafted:
    """Who made the drafts that the next step verifies. It may hold fewer than these."""

    sources: Sequence[str] = ()
    alone_score: int = NEVER
    score: int = 0
    """Of the lookup, once the step was read."""
    token_ids: list[int] | None = None
    """Where the host knows them: sources says who made them."""
    evidence: Chain | None = None
    """Of drafts that the host's drafters made."""
    chances: Sequence[float] = ()
    """What the model drafter says of its own, once the step was read."""
    parents: Sequence[int] = ()
    """Of a tree's drafts that have chances, the number of the one before each; -1: the newest token."""
    num_model: int = 0
    """Leading ones that the model drafter made."""
    has_model: bool = False
    """It made the first ones, as far as the host knew when their step was planned."""
    is_beside: bool = False
    """The model drafter was asked for some too, in the place of which the host's may have come."""
    has_step: bool = True
    """Beside what the host made, the step before was asked for some."""

    @property
    def is_alone(self) -> bool:
        """The step's lookup made them all."""
        return self.token_ids is None and self.score >= self.alone_score

    def note(self, score: int, chances: list[float] | None, model_name: str, lookup_name: str) -> None:
        """What the step reports. A model that stopped early made fewer drafts than it was asked for, and the lookup went on from there; chances: of
        those that it made; None: the step does not say."""
        self.score, self.chances = score, chances or ()
        if chances is not None and len(chances) < self.num_model:
            self.num_model = len(chances)
            others = [lookup_name if own == model_name else own for own in self.sources[self.num_model :]]
            self.sources = [*self.sources[: self.num_model], *others]

    def cut(self, count: int) -> None:
        """Leaves so many first ones."""
        self.sources, self.num_model = self.sources[:count], min(self.num_model, count)
        self.token_ids = None if self.token_ids is None else self.token_ids[:count]

    def who(self, count: int, lookup_name: str) -> list[str]:
        return [lookup_name] * count if self.is_alone else [*self.sources[:count]]

    def judge(self, count: int, model_name: str, lookup_name: str) -> Chain:
        """What is known of the first `count` drafts."""
        if self.evidence is not None:
            return self.evidence[:count]
        if self.is_alone:
            return by_match(lookup_name, self.score, count)
        if self.parents:
            return by_branch(model_name, self.chances[:count], self.parents[:count])
        sources = self.sources[:count]
        num_model = min(self.num_model, len(sources))
        num_longer = len(sources) - num_model
        if (len(self.chances) < num_model or not num_model) and sources.count(lookup_name) == num_longer:  # as on a GPU
            return judge_places(model_name, num_model, lookup_name, num_longer)
        chain = judge_model(model_name, num_model, self.chances)
        if num_model == len(sources):
            return chain
        others = enumerate(sources[num_model:], num_model)
        return [*chain, *(FORCED if source == SOURCE else judge_longer(source, place, 1)[0] for place, source in others)]


def follow(token_ids: Sequence[int], parents: Sequence[int], accepted: Sequence[int]) -> list[int]:
    """The numbers of the drafts of a tree that accepted tokens are, for as far as there are such drafts."""
    path: list[int] = []
    for token_id in accepted:
        last = path[-1] if path else -1
        found = (n for n in range(last + 1, len(token_ids)) if parents[n] == last and token_ids[n] == token_id)
        if (number := next(found, None)) is None:
            break
        path.append(number)
    return path


@dataclass(slots=True, eq=False)
class Known:
    """What the workers know of a running request."""

    index: int
    place: Placement
    end: int
    """Tokens that the request may have."""
    is_plain: bool = False
    """Nothing drafts for it, and no grammar masks it: its decoding rows differ in the pages alone."""
    options: int = 0
    num_pages: int = 0
    """Leading page ids in the page table."""
    is_admitted: bool = False
    is_reported: bool = False
    """The host, or another node, wants to see what every step drafted for it."""
    knows_drafts: bool = False
    """The host does see what the last step that was read drafted for it."""
    next_drafts: list[int] = field(default_factory=list)
    """That, where there is anything."""
    drafted: Drafted = field(default_factory=Drafted)
    num_drafter_tokens: int = 0
    """Leading tokens that the model drafter has computed, by the steps that were read or whose rows the host named."""
    forced_share: float = 0.0
    """Of its answer's newest tokens: drafts that its grammar alone makes."""
    is_followed: bool = False
    """The model drafter computes every token in the step that emits it; where not, it lags behind num_drafter_tokens."""

    @property
    def has_own_drafts(self) -> bool:
        """Steps make some for it."""
        return self.place.has_model or self.place.has_lookup

    @property
    def may_ask_host(self) -> bool:
        """Else what it drafted would take the place of drafts that it has not seen."""
        return self.knows_drafts or not self.has_own_drafts


class Masked(NamedTuple):
    """A row whose tokens a grammar chooses among."""

    row: int
    num_masks: int
    """Of the newest token and each draft."""
    is_late: bool
    """Its newest token is in the step before, which is not read yet."""


@dataclass(slots=True)
class PlannedStep:
    """A step's plan, and what the host needs to read its outcome."""

    plan: StepPlan
    entries: list[Scheduled]
    """In the plan's order."""
    verified: list[Drafted]
    """[B]: who made the drafts that each entry verifies."""
    made: list[Drafted]
    """[B]: who makes those for the next step."""
    limits: list[int] = field(default_factory=list)
    """[B]: most drafts that each entry might have verified, those that were not worth it with them."""
    host_probs: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """(request index, distributions) of drafts that the host writes."""
    masked: list[Masked] = field(default_factory=list)
    """Rows of requests with a grammar."""
    grammars: dict[int, tuple[Matcher, int]] = field(default_factory=dict)
    """By request index, of requests that the step's model drafter is to draft for: where they are in their grammar, and tokens until there."""
    num_asked: int = 0
    """Requests that the step's model drafter may draft for."""
    is_catching_up: bool = False
    """The model drafter computes tokens of earlier steps for one of them: its time says nothing of other steps."""
    host_seconds: float = 0.0
    """That it took to make them."""
    is_waited_for: bool = False
    """No step of its requests that decode was under way when it was planned."""

    @property
    def effort(self) -> dict[str, bool]:
        """What the host's time for it goes by (`PaddedTimes.add_host`). A model drafter that but keeps up has none of its drafts planned and booked:
        so trials without it tell what a step with lookups alone takes, which nothing else does while the model is chosen."""
        return {"has_drafts": self.plan.has_lookup or self.plan.num_queries > 1, "has_model": self.num_asked > 0}
