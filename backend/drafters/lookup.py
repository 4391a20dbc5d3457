"""Host drafters that compute nothing: a lookup alone, and the step's own drafts as the host reads them."""

from __future__ import annotations

from collections.abc import Sequence

from backend.core import Batch, Draft, DraftFaults, Request, Scheduled
from backend.drafters.protocol import Lookup
from backend.kv_store import KvStore


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
        rows = [self._lookup.lookup(e.request, (), e.max_drafts) for e in entries]
        return Draft(rows, [[self._lookup.name] * len(row) for row in rows])

    def stop(self, request: Request) -> None:
        self._lookup.stop(request)

    def close(self) -> None:
        self._lookup.close()


class StepDrafts:
    """What the step's model drafter made for the next step, for a lookup on the host to lengthen."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._drafts: dict[str, list[int]] = {}

    def put(self, request: Request, token_ids: list[int]) -> None:
        self._drafts[request.request_id] = token_ids

    def attach(self, store: KvStore) -> None:
        pass

    def start(self, request: Request) -> None:
        pass

    def begin_step(self, batch: Batch) -> None:
        pass

    def propose(self, entries: Sequence[Scheduled], faults: DraftFaults) -> Draft:
        rows = [self._drafts.pop(e.request.request_id, [])[: e.max_drafts] for e in entries]
        return Draft(rows, [[self._name] * len(row) for row in rows])

    def stop(self, request: Request) -> None:
        self._drafts.pop(request.request_id, None)

    def close(self) -> None:
        pass
