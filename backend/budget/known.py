"""What the planner of drafts knows of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from backend.budget.forecast import Kind
from backend.core import Chain, Speculation

UNPACED = ("topp",)
"""Strategies that accept whatever is likely: how many drafts they have decides how often the drafter's taste wins over the target's, so
that it must not follow the load."""
PRIOR_VALUE = 1.5
"""Before anything is measured: drafts that are right in a step."""
MAX_PENDING = 16
MAX_SCORE = 16
"""Scores of lookups, and half tokens that they promise, from which on they are alike."""


@dataclass(frozen=True, slots=True)
class Ability:
    """What may draft for a request."""

    model: str = ""
    """The model drafter's name; "": none."""
    num_model: int = 0
    """Drafts that it makes for the request at most."""
    lookup: str = ""
    """The lookup in the step; "": none."""
    has_host: bool = False
    """Lookups on the host draft as well."""
    may_wait: bool = False
    """They join where no step of the request is under way, which it need not wait for."""
    is_remote: bool = False
    """The model is asked when a step is planned, with all tokens known."""


@dataclass(slots=True, eq=False)
class Means:
    """Drafts that were right in a step, on average: of one request, which begins with that of others like it, or of all of a kind."""

    model: float = PRIOR_VALUE
    """The model's."""
    gain: float = PRIOR_VALUE
    """What they brought beyond the lookups' of the same steps."""
    lookup: float = PRIOR_VALUE
    """Lookups', where there is no model; where steps are padded, of the step's own where the model is not asked."""
    host: float = PRIOR_VALUE
    """There, of the host's lookups with the step's own."""

    def note_model(self, right: float, gain: float, share: float) -> None:
        """share: of this step in the means."""
        self.model += share * (right - self.model)
        self.gain += share * (gain - self.gain)

    def note_host(self, right: float, share: float) -> None:
        self.host += share * (right - self.host)

    def note_lookup(self, right: float, share: float) -> None:
        self.lookup += share * (right - self.lookup)


class Beside(NamedTuple):
    """Drafts of lookups that are worth their rows without a model's."""

    tokens: float = 0.0
    """Those that are likely to stand."""
    rows: float = 0.0


NO_LOOKUPS = Beside()


class Group(NamedTuple):
    """Requests of a step that are alike."""

    kind: Kind
    num_wanted: int
    """Most drafts that they want."""
    num_model: int
    """Those that the model drafter makes for them at most."""
    has_others: bool
    """Lookups draft for them as well."""
    is_paced: bool
    """The limit holds for them."""
    may_wait: bool = False
    """Lookups of the host would join, if they waited."""
    num_nodes: int = 0
    """Of their tree, which is one draft that is wanted: it is verified whole, or not at all. 0: they have chains."""


def group_of(speculation: Speculation, ability: Ability, *, is_exact: bool) -> Group:
    """is_exact: a step computes as many rows as it has tokens."""
    kind = Kind(speculation.method, speculation.mtp_strategy, ability.num_model > 0)
    is_paced = speculation.is_adaptive and speculation.verify_strategy not in UNPACED
    # Where a tree's drafts are not known it is whole or not at all: what fewer would bring nobody has seen.
    num_wanted = speculation.num_speculative_tokens if is_exact or not speculation.num_nodes else 1
    has_others = bool(ability.lookup) or ability.has_host
    return Group(kind, num_wanted, ability.num_model, has_others, is_paced, ability.may_wait, speculation.num_nodes)


def share_of(num_tokens: float, right: float) -> float:
    """Steps of a drafter that one step of another speaks for: the text of the step, num_tokens, by what its own step would bring there, with so many
    drafts right. Else text that it is good at, which it would pass in few steps, would count as often as others take steps through it."""
    return num_tokens / (1 + right)


@dataclass(slots=True, eq=False)
class Cohort:
    """What the choice for the next step means for each request of a group (`backend.budget.applied`)."""

    group: Group
    settled: int = -1
    """Choice, by number, that the rest is of."""
    limit: int = 0
    """Most drafts of a request that the next step verifies."""
    num_model: int = 0
    """Drafts that the model drafter makes for it."""


class Watched(NamedTuple):
    """Drafts that were not verified, whose text is not all there yet."""

    place: int
    token_ids: list[int]
    """[]: what would have drafted found nothing."""
    chain: Chain
    is_step: bool
    """The step's own lookup made them, or found nothing."""
    turn: int
    """Steps of the request until then."""
    pace: float = 0.0
    """Tokens of a step since then, until they were compared for the first time; 0: they were not yet."""


class Settled(NamedTuple):
    """The same once the text says all of them."""

    chain: Chain
    right: int
    """Leading ones that were right."""
    is_step: bool
    share: float
    """See `share_of`."""


@dataclass(slots=True)
class Own:
    """What is known of one request."""

    ability: Ability
    cohort: Cohort
    kind: Kind
    is_paced: bool
    is_limited: bool
    """That, of a request that is to be decoded here."""
    most: int
    """Drafts that it wants of a step."""
    means: Means
    common: Means
    """Of all requests of its kind."""
    beside: Beside = NO_LOOKUPS
    """What lookups on the host found when they were asked last."""
    mean_beside: Beside = NO_LOOKUPS
    num_steps: int = 0
    turn: int = 0
    """Steps whose drafts were learned from or left out."""
    alone: tuple[int, int] = (-1, 0)
    """A limit, and the least score from which a lookup drafts alone under it."""
    promised: int = 0
    """What the host's lookups promised when they were asked last, in half drafts."""
    was_asked: bool = True
    """The model, for the next step."""
    was_looked_up: bool = True
    """By the lookup in the step that was planned last."""
    pending: list[Watched] = field(default_factory=list)

    def watch(self, place: int, token_ids: list[int], chain: Chain, is_step: bool) -> None:
        """Drafts for the text from `place` on that are not verified."""
        self.pending.append(Watched(place, token_ids, chain, is_step, self.turn))
        del self.pending[:-MAX_PENDING]

    def settle(self, known: Sequence[int]) -> list[Settled]:
        """Of those that were watched, the ones that the text by now says all of."""
        waiting, settled = list[Watched](), list[Settled]()
        for own in self.pending:
            right, room = 0, len(known) - own.place
            while right < min(len(own.token_ids), room) and own.token_ids[right] == known[own.place + right]:
                right += 1
            pace = own.pace or room / max(1, self.turn - own.turn)
            if right == room and (right < len(own.token_ids) or not room):
                waiting.append(own._replace(pace=pace))  # all right so far
            else:
                settled.append(Settled(own.chain, right, own.is_step, share_of(pace, right)))
        self.pending = waiting
        return settled

    def note_beside(self, beside: Beside, share: float) -> None:
        """share: of this step in the mean."""
        self.beside = beside
        self.mean_beside = Beside(*(old + share * (new - old) for old, new in zip(self.mean_beside, beside)))


def as_promise(worth: Sequence[float]) -> int:
    """The most that lookups' drafts are worth, in half tokens."""
    return min(MAX_SCORE, max(0, round(2 * max((0.0, *worth)))))
