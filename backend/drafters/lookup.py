"""A lookup alone as a drafter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backend.core import Batch, Draft, DraftFaults, Request, Scheduled
from backend.drafters.protocol import Lookup


class LookupDrafter:
    """A lookup as a drafter."""

    taps: tuple[str, ...] = ()
    page_entries: list[tuple[int, ...]] = []

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def attach(self, num_pages: int, page_size: int, taps: dict[str, torch.Tensor]) -> None:
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
