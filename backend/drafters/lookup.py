"""Drafters made of lookups: a lookup alone, and a model whose drafts lookups lengthen."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backend.core import Batch, Draft, DraftFaults, Request, Scheduled
from backend.drafters.protocol import Drafter, Lookup


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


class HybridDrafter:
    """A model's drafts, lengthened by the lookup that the request's mtp_strategy names (FastDeploy's MTP + ngram).

    The pattern ends in the model's drafts, so a lookup that goes on from a wrong one is rejected with it and costs nothing more.
    """

    def __init__(self, model: Drafter, lookups: dict[str, Lookup]) -> None:
        """lookups: by mtp_strategy."""
        self._model = model
        self._lookups = lookups
        self.taps = model.taps
        self.page_entries = model.page_entries

    def attach(self, num_pages: int, page_size: int, taps: dict[str, torch.Tensor]) -> None:
        self._model.attach(num_pages, page_size, taps)

    def start(self, request: Request) -> None:
        self._model.start(request)
        if lookup := self._lookups.get(request.speculation.mtp_strategy):
            lookup.start(request)

    def begin_step(self, batch: Batch) -> None:
        self._model.begin_step(batch)

    def propose(self, entries: Sequence[Scheduled], faults: DraftFaults) -> Draft:
        draft = self._model.propose(entries, faults)
        for entry, token_ids, sources in zip(entries, draft.token_ids, draft.sources):
            lookup = self._lookups.get(entry.request.speculation.mtp_strategy)
            room = entry.max_drafts - len(token_ids)
            if lookup is not None and room > 0:
                found = lookup.lookup(entry.request, token_ids, room)
                token_ids += found
                sources += [lookup.name] * len(found)
        return draft

    def stop(self, request: Request) -> None:
        self._model.stop(request)
        if lookup := self._lookups.get(request.speculation.mtp_strategy):
            lookup.stop(request)

    def close(self) -> None:
        self._model.close()  # the lookups are loaded as methods of their own, and closed there
