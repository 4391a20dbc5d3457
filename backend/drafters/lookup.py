"""Host drafters that compute nothing: a lookup alone, and the step's own drafts as the host reads them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from backend.budget import Chain, by_place, by_probability
from backend.core import Batch, Draft, DraftFaults, Request, Scheduled
from backend.drafters.protocol import Lookup
from backend.kv_store import KvStore

LONGER_GUESS = 0.4
"""The chance of a lookup's draft behind a model's, before any is measured."""
NO_DRAFTS: tuple[list[int], list[str], Chain] = ([], [], ())


class LookupDrafter:
    """A lookup as a drafter."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def attach(self, store: KvStore) -> None:
        pass

    def start(self, request: Request) -> None:
        self._lookup.start(request)

    def begin_step(self, batch: Batch) -> None:
        pass

    def propose(self, entries: Sequence[Scheduled], faults: DraftFaults) -> Draft:
        found = self._lookup.lookup_judged([entry.request for entry in entries], [entry.max_drafts for entry in entries])
        return Draft([row for row, _ in found], [[self._lookup.name] * len(row) for row, _ in found], [chain for _, chain in found])

    def stop(self, request: Request) -> None:
        self._lookup.stop(request)

    def close(self) -> None:
        self._lookup.close()


class StepDrafts:
    """What the step made for the next one, for lookups on the host to lengthen or to replace."""

    def __init__(self) -> None:
        self._drafts: dict[str, tuple[list[int], list[str], Chain]] = {}

    def put(self, request: Request, token_ids: list[int], sources: list[str], chain: Chain) -> None:
        """sources, chain: who made each draft, and what is known of it."""
        self._drafts[request.request_id] = token_ids, sources, chain

    def attach(self, store: KvStore) -> None:
        pass

    def start(self, request: Request) -> None:
        pass

    def begin_step(self, batch: Batch) -> None:
        pass

    def propose(self, entries: Sequence[Scheduled], faults: DraftFaults) -> Draft:
        kept = [self._drafts.pop(entry.request.request_id, NO_DRAFTS) for entry in entries]
        rows, sources, chains = ([own[part][: e.max_drafts] for own, e in zip(kept, entries)] for part in range(3))
        return Draft(rows, sources, chains)  # type: ignore[arg-type]

    def stop(self, request: Request) -> None:
        self._drafts.pop(request.request_id, None)

    def close(self) -> None:
        pass


def judge_model(name: str, count: int, chances: Sequence[float]) -> Chain:
    """Evidence of the first `count` drafts of a model; chances: the greatest probability at each, where it was looked at."""
    return by_probability(name, chances[:count]) if len(chances) >= count else by_place(name, count)


@functools.cache
def judge_places(model: str, num_model: int, lookup: str, num_longer: int) -> Chain:
    """Of a model that says nothing of its drafts, and of the lookup that lengthened them."""
    return (*by_place(model, num_model), *judge_longer(lookup, num_model, num_longer))


def judge_longer(name: str, begin: int, count: int) -> Chain:
    """Evidence of a lookup's drafts from number `begin` on, behind those of a model."""
    return by_place(name, begin + count, LONGER_GUESS)[begin:]
