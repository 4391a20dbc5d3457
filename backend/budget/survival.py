"""How likely drafts are to stand, from what stood before.

A drafter says of each of its drafts what it knows (`Evidence`): a bucket of like drafts, and its own guess. How many of a bucket stood, of
all requests, corrects the guess; a request's own drafts of that source shift it for the request alone (a logistic regression with the
buckets' log-odds as offset, and one weight). Nothing of it depends on which token was drawn.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from backend.core import Chain, Evidence

MEMORY = 0.998
"""What is left of a bucket's old counts after one draft more of it."""
GUESS_WEIGHT = 6.0
"""Drafts that a drafter's own guess is worth."""
OWN_RATE, OWN_MEMORY, MAX_OWN = 0.25, 0.98, 2.5
"""Of the shift of a request's log-odds: what one draft moves it, what is left of it after that, and the most."""
MIN_SHARE = 1e-3
"""Of a bucket that is held to stand, and to fall."""
PLACES = 10000
"""Buckets from there on are of places."""
PARTS, MAX_AGE = 4, 32
"""Parts of a shift of log-odds that are told apart where many ask in every step, and the steps for which what stood since then is left out."""
MAX_MATCH, MAX_PLACES, NUM_SHARES = 16, 4, 10
"""Matches, places and probabilities that are told apart."""


class Shift(NamedTuple):
    """Of a request's log-odds for the drafts of one source."""

    shift: float = 0.0
    against: float = 1.0
    """What the odds against a draft are multiplied with for it."""


NO_SHIFT = Shift()
NO_SHIFTS: dict[str, Shift] = {}
"""Of a request of which nothing was learned."""


@functools.cache
def by_place(source: str, count: int, guess: float = 0.7) -> tuple[Evidence, ...]:
    """Of a drafter that says nothing of its drafts."""
    return tuple(Evidence(source, PLACES + place, guess) for place in range(count))


@functools.cache
def by_match(source: str, num_matched: int, count: int) -> tuple[Evidence, ...]:
    """Of a lookup: by the tokens that matched, those that stood before a draft among them."""
    found = []
    for place in range(count):
        matched = min(num_matched + place, MAX_MATCH)
        found.append(Evidence(source, matched * MAX_PLACES + min(place, MAX_PLACES - 1), matched / (2 + matched)))
    return tuple(found)


@functools.cache
def _by_share(source: str, num_matched: int) -> list[list[Evidence]]:
    """Of each place, by how likely the draft is, in tenths."""
    trust = num_matched / (1 + num_matched) if num_matched else 1.0
    guesses = [min(max(trust * (share + 0.5) / NUM_SHARES, 0.02), 0.98) for share in range(NUM_SHARES + 1)]
    first = num_matched * MAX_PLACES
    return [[Evidence(source, (first + place) * len(guesses) + share, guess) for share, guess in enumerate(guesses)] for place in range(MAX_PLACES)]


def by_probability(source: str, chances: Sequence[float], num_matched: int = 0) -> tuple[Evidence, ...]:
    """Of a drafter that says how likely each draft is after those before it; num_matched: of a lookup's, the tokens that matched."""
    return by_shares(source, bytes([min(int(NUM_SHARES * chance), NUM_SHARES) for chance in chances]), num_matched)


def by_shares(source: str, shares: bytes, num_matched: int = 0) -> tuple[Evidence, ...]:
    """The same by how many of NUM_SHARES parts each chance has, rounded down. Equal ones are one object, mostly."""
    return _of_shares(source, shares, min(num_matched, MAX_MATCH))


@functools.lru_cache(maxsize=2**14)
def _of_shares(source: str, shares: bytes, num_matched: int) -> tuple[Evidence, ...]:
    kinds = _by_share(source, num_matched)
    return tuple([kind[share] for kind, share in zip(itertools.chain(kinds, itertools.repeat(kinds[-1])), shares)])


def has_probability(evidence: Evidence) -> bool:
    """Its guess is how likely its drafter said that the draft is."""
    return evidence.bucket < PLACES


def by_branch(source: str, chances: Sequence[float], parents: Sequence[int]) -> list[Evidence]:
    """Of the drafts of a tree, by how likely its drafter says that each is after the one before it. parents: as `Survival.survivals` takes them."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    kinds = _by_share(source, 0)
    return [kinds[min(depth, MAX_PLACES - 1)][min(int(NUM_SHARES * chance), NUM_SHARES)] for depth, chance in zip(depths, chances)]


class _Bucket:
    __slots__ = ("accepted", "against", "source", "tries")

    def __init__(self, source: str, guess: float) -> None:
        self.source, self.tries, self.accepted = source, GUESS_WEIGHT, GUESS_WEIGHT * guess
        self.against = (1.0 - guess) / guess  # the odds against one more that stands

    def add(self, is_accepted: float) -> None:
        """1.0 or 0.0."""
        self.tries = tries = self.tries * MEMORY + 1.0
        self.accepted = accepted = self.accepted * MEMORY + is_accepted
        share = accepted / tries
        if not MIN_SHARE < share < 1 - MIN_SHARE:
            share = min(max(share, MIN_SHARE), 1 - MIN_SHARE)
        self.against = (1.0 - share) / share


class _Buckets(dict[Evidence, _Bucket]):
    """By all evidence of them that has come. A bucket's first guess is that of the first."""

    def __init__(self) -> None:
        self._by_kind: dict[tuple[str, int], _Bucket] = {}

    def __missing__(self, evidence: Evidence) -> _Bucket:
        found = self._by_kind.get(evidence[:2])
        if found is None:
            found = self._by_kind[evidence[:2]] = _Bucket(evidence.source, evidence.guess)
        self[evidence] = found
        return found


class Promise(NamedTuple):
    """What drafts are likely to bring."""

    survivals: Sequence[float]
    tokens: float
    """All together."""


NO_PROMISE = Promise((), 0.0)


class Survival:
    """Called by the engine thread only."""

    def __init__(self) -> None:
        self._buckets = _Buckets()
        self._own: dict[str, dict[str, Shift]] = {}
        # What stood lately, for when many ask in every step. Of lookups: by source, drafts and the request's own shift, in parts.
        self._promises: dict[tuple[str, int, int], list[Promise]] = {}
        # Tokens that a chain promises: by its identity, which is kept with them, and the shifts for its first and its last draft.
        self._sums: dict[tuple[int, int, int], tuple[Chain, float]] = {}
        self._asked = 0  # the step since when they are kept
        self.step = 0
        """Steps so far."""

    def stop(self, request_id: str) -> None:
        self._own.pop(request_id, None)

    def survivals(self, request_id: str, chain: Chain, parents: Sequence[int] = ()) -> list[float]:
        """The chance that each draft of a request is accepted, all before it with it. parents: of a tree, the number of the draft before each,
        which is smaller; -1: the newest token; none: each follows the one before it."""
        shift_of, left, buckets = self._own.get(request_id, NO_SHIFTS).get, 1.0, self._buckets
        weights = [1.0 + buckets[evidence].against * shift_of(evidence[0], NO_SHIFT)[1] for evidence in chain]
        if not parents:
            return [left := left / weight for weight in weights]
        found: list[float] = []
        for parent, weight in zip(parents, weights):
            found.append((found[parent] if parent >= 0 else 1.0) / weight)
        return found

    def promised(self, request_id: str, chain: Chain) -> float:
        """Tokens that drafts of one or two sources are likely to bring, one behind the other: by what stood lately, where the chain is one object for
        all alike."""
        if type(chain) is not tuple:
            return sum(self.survivals(request_id, chain))
        shift_of, first, last = self._own.get(request_id, NO_SHIFTS).get, chain[0][0], chain[-1][0]
        part = round(shift_of(first, NO_SHIFT)[0] * PARTS)
        other = part if last == first else round(shift_of(last, NO_SHIFT)[0] * PARTS)
        self._forget_old()
        found = self._sums.get((id(chain), part, other))
        if found is None or found[0] is not chain:
            against, behind, left, total = math.exp(-part / PARTS), math.exp(-other / PARTS), 1.0, 0.0
            for evidence in chain:
                left /= 1.0 + self._buckets[evidence].against * (against if evidence[0] == first else behind)
                total += left
            found = self._sums[id(chain), part, other] = chain, total
        return found[1]

    def _forget_old(self) -> None:
        if self.step - self._asked >= MAX_AGE:
            self._promises.clear()
            self._sums.clear()
            self._asked = self.step

    def of_match(self, request_id: str, source: str, matched: int, count: int) -> Promise:
        """The same of so many drafts of a lookup, by what stood lately: for when many ask in every step."""
        return self._of_matches(request_id, source, count)[min(matched, MAX_MATCH) - 1] if matched > 0 and count else NO_PROMISE

    def least_match(self, request_id: str, source: str, count: int, worth: float) -> int:
        """The least match of a lookup from which so many drafts of it are worth as many tokens; 0: none is."""
        promises = self._of_matches(request_id, source, count) if count else ()
        return next((matched for matched, promise in enumerate(promises, 1) if promise.tokens >= worth), 0)

    def _of_matches(self, request_id: str, source: str, count: int) -> Sequence[Promise]:
        """Of a match of 1 token, of 2, up to MAX_MATCH."""
        self._forget_old()
        part = round(self._own.get(request_id, NO_SHIFTS).get(source, NO_SHIFT).shift * PARTS)
        found = self._promises.get((source, count, part))
        if found is None:
            against, buckets, found = math.exp(-part / PARTS), self._buckets, list[Promise]()
            for matched in range(1, MAX_MATCH + 1):
                left = 1.0
                survivals = [left := left / (1.0 + buckets[evidence].against * against) for evidence in by_match(source, matched, count)]
                found.append(Promise(survivals, sum(survivals)))
            self._promises[source, count, part] = found
        return found

    def learn(self, request_id: str, chain: Chain, num_accepted: int, is_own: bool = True) -> float:
        """chain: of the drafts that were verified. Those past the first one that fell say nothing. is_own: they shift the request's odds too.
        -> tokens that they promised before."""
        own = self._own.setdefault(request_id, {}) if chain else {}
        buckets, left, promised = [self._buckets[evidence] for evidence in chain], 1.0, 0.0
        for bucket in buckets:
            left /= 1.0 + bucket.against * own.get(bucket.source, NO_SHIFT).against
            promised += left
        for place, bucket in enumerate(buckets[: num_accepted + 1]):
            self._add(own, bucket, 1.0 if place < num_accepted else 0.0, is_own)
        return promised

    def learn_tree(self, request_id: str, chain: Chain, parents: Sequence[int], path: Collection[int]) -> None:
        """The same of a tree; path: the numbers of the drafts that were accepted. Those that follow none of them say nothing."""
        own = self._own.setdefault(request_id, {})
        for number, (bucket, parent) in enumerate(zip((self._buckets[evidence] for evidence in chain), parents)):
            if parent < 0 or parent in path:
                self._add(own, bucket, 1.0 if number in path else 0.0, True)

    @staticmethod
    def _add(own: dict[str, Shift], bucket: _Bucket, is_accepted: float, is_own: bool) -> None:
        if is_own:
            shift, against = own.get(bucket.source, NO_SHIFT)
            shift = OWN_MEMORY * shift + OWN_RATE * (is_accepted - 1.0 / (1.0 + bucket.against * against))
            shift = min(max(shift, -MAX_OWN), MAX_OWN)
            own[bucket.source] = Shift(shift, math.exp(-shift))
        bucket.add(is_accepted)
