"""What steps say of drafts: how likely they are to stand, and what each way of drafting brings a request."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from backend.budget.forecast import Forecast, Kind, asking
from backend.budget.known import MAX_SCORE, Means, Own, Settled, share_of
from backend.budget.limits import FEW
from backend.budget.padded import PaddedStep
from backend.budget.prices import SMOOTHING, Prices
from backend.budget.survival import Survival, by_match
from backend.core import NEVER, Branches, Chain, Request
from backend.metrics import Histogram

OWN_SMOOTHING = 0.1
"""Share of the newest step in the means of one request, which begin where those of all are."""
MANY, MAX_TURN = 4, 8
"""Requests that learn from each step at most where the device is not to wait for Python: of more, some in turn, each for others like it, but each of
them once in so many steps at least."""
LISTEN_EVERY, LISTEN_OFTEN, MAX_OFTEN = 4, 2, 24
"""Steps between two times that a lookup of the host is asked though nobody waits for it, of few requests and of many, for which one of them speaks;
and how many requests' steps it speaks for at most."""
DRAFTS = tuple(float(n) for n in range(17))


def listen_every(num_requests: int) -> int:
    return LISTEN_EVERY if num_requests <= FEW else LISTEN_OFTEN


def often_of(num_requests: int) -> int:
    """Steps that one of a request speaks for, where the device is not to wait for Python."""
    return min(max(1, -(-num_requests // MANY)), MAX_TURN)


def _chances(num_drafts: int, right: int) -> list[float]:
    return [float(place < right) for place in range(num_drafts)]


class Learning:
    """Called by the engine thread only."""

    def __init__(self, survival: Survival, prices: Prices, forecast: Forecast, is_exact: bool) -> None:
        self._survival, self._prices, self._forecast, self._is_exact = survival, prices, forecast, is_exact
        self.means: dict[Kind, Means] = defaultdict(Means)
        """Of all requests of a kind."""
        self.predicted: Counter[str] = Counter()
        self.chosen = Histogram(DRAFTS)

    def learn(
        self,
        request: Request,
        own: Own,
        chain: Chain,
        num_accepted: int,
        has_model: bool,
        tree: Branches | None,
        *,
        matched: int,
        is_alone: bool,
        asked_host: bool,
        has_step: bool,
        often: int,
    ) -> None:
        """See `DraftBudget.learn`. often: see `often_of`."""
        if self._is_exact:
            self._learn_survival(request, chain, num_accepted, tree, 1)
            self._learn_exact(own, chain, num_accepted, has_model, tree)
            return
        self._learn_survival(request, chain, num_accepted, tree, often)
        if not own.ability.model:
            return
        if has_model or is_alone:
            for means, share in self._shares(own, often):
                means.note_model(num_accepted if has_model else means.model, num_accepted, share)
        if not own.ability.lookup or tree is not None:
            return
        if not asked_host:
            self._learn_lookup(request, own, num_accepted, has_model or is_alone, matched, often)
        # Where others are in its place, what it would have brought is watched.
        elif has_step and (not chain or chain[0].source == own.ability.lookup):
            count = next((number for number, evidence in enumerate(chain) if evidence.source != own.ability.lookup), len(chain))
            right = min(num_accepted, count)
            self._note_lookup(own, count, right, often * share_of(1 + num_accepted, right))

    def _shares(self, own: Own, often: float = 1.0) -> tuple[tuple[Means, float], ...]:
        """Of a step like so many in the means of a request and of all like it."""
        return (own.means, 1 - (1 - OWN_SMOOTHING) ** often), (own.common, 1 - (1 - SMOOTHING) ** often)

    def _learn_survival(self, request: Request, chain: Chain, num_accepted: int, tree: Branches | None, often: int) -> None:
        if not chain:
            return
        if tree is None:
            promised = self._survival.learn(request.request_id, chain, num_accepted)
        else:
            promised = sum(self._survival.survivals(request.request_id, chain, tree.parents))
            self._survival.learn_tree(request.request_id, chain, tree.parents, tree.path)
        self.predicted[request.speculation.method] += often * promised  # type: ignore[assignment]

    def _learn_exact(self, own: Own, chain: Chain, num_accepted: int, has_model: bool, tree: Branches | None) -> None:
        if not own.ability.model:
            for means, share in self._shares(own):
                means.note_lookup(num_accepted, share)
        elif has_model:
            made = [evidence for evidence in chain if evidence.source == own.ability.model]
            right = min(num_accepted, len(made))
            self._prices.note_model(right, made if tree is None else (), len(chain) - own.beside.rows)
            for means, share in self._shares(own):
                means.note_model(right, num_accepted - own.beside.tokens, share)

    def _learn_lookup(self, request: Request, own: Own, num_accepted: int, is_asked: bool, matched: int, often: int) -> None:
        """What the step's lookup alone brings, or would have brought: how long its match was says that too where the model was asked."""
        right, weight = float(num_accepted), float(often)
        if is_asked:
            count = request.speculation.num_speculative_tokens
            chances, right = self._survival.of_match(request.request_id, own.ability.lookup, matched, count)
            weight *= share_of(1 + num_accepted, right)
            self._forecast.add_expected(asking(own.kind, False), count, chances, weight)
        for means, share in self._shares(own, weight):
            means.note_lookup(right, share)

    def forecast(self, limits: Sequence[tuple[Request, int, bool]], outcomes: Sequence[tuple[int, int]], padded: PaddedStep | None) -> None:
        """See `DraftBudget.observe`."""
        alike: dict[tuple[Means, bool, bool], tuple[Kind, list[tuple[int, int, int]]]] = {}  # by the means, which each kind has its own of
        for number, ((request, limit, has_model), (drafts, accepted)) in enumerate(zip(limits, outcomes, strict=True)):
            known: Own | None = request.drafting
            if known is None or request.speculation.num_nodes:
                continue  # it ended with this step; or limits on a chain's drafts say nothing of it
            kind = known.kind
            if padded is None:
                key = known.common, kind.has_model, kind.has_host
            else:
                key = known.common, has_model, known.ability.may_wait and padded.asked_host[number]
                if key[2]:
                    self.note_host(known, accepted)
            if key not in alike:
                alike[key] = kind, []
            alike[key][1].append((limit, drafts, accepted))
        for (_, has_model, has_host), (kind, rows) in alike.items():
            self._forecast.add(asking(kind, has_model, has_host), *zip(*rows))

    def least_score(self, request: Request, lookup: str, count: int, worth: float) -> int:
        """The least score from which so many drafts of a lookup are worth as much as the model's."""
        low, high = 1, MAX_SCORE + 1
        while low < high:
            middle = (low + high) // 2
            survivals = self._survival.survivals(request.request_id, by_match(lookup, middle, count))
            if self._prices.worth(survivals, worth) >= worth:
                high = middle
            else:
                low = middle + 1
        return low if low <= MAX_SCORE else NEVER

    # -- lookups of the host ------------------------------------------------------------------------------------------

    def _note_lookup(self, own: Own, num_drafts: int, right: int, weight: float) -> None:
        """Of drafts of the step's lookup, which the host's may have lengthened or taken the place of: none, if it found nothing."""
        self._forecast.add_expected(asking(own.kind, False), own.cohort.group.num_wanted, _chances(num_drafts, right), weight)
        for means, share in self._shares(own, weight):
            means.note_lookup(right, share)

    def compare(self, request: Request, own: Own, often: int) -> list[Settled]:
        """Learns from drafts that were watched and that the text by now says all of -> those that were the host's."""
        found = []
        for settled in own.settle(request.token_ids):
            if settled.chain:
                self._survival.learn(request.request_id, settled.chain, settled.right, is_own=False)
            if settled.is_step:
                self._note_lookup(own, len(settled.chain), settled.right, often * settled.share)
            else:
                found.append(settled)
        return found

    def note_listened(self, request: Request, own: Own, settled: Settled, often: int) -> None:
        """What lookups of the host would have brought a request that did not wait for them: one step of so many."""
        weight = settled.share * min(often, MAX_OFTEN)
        kind, count = asking(own.kind, False, True), request.speculation.num_speculative_tokens
        self._forecast.add_expected(kind, count, _chances(len(settled.chain), settled.right), weight)
        self.note_host(own, settled.right, weight)

    def note_host(self, own: Own, right: int, weight: float = 1.0) -> None:
        """Drafts that were right in a step, lookups of the host's among them."""
        for means, share in self._shares(own, weight):
            means.note_host(right, share)
