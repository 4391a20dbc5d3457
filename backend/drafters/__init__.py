"""Drafters: what proposes tokens for the target to verify. One Protocol; nothing outside this package names a method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from backend.config import SpeculativeConfig
from backend.core import Draft, Request, Scheduled, Verdict


class Drafter(Protocol):
    """Proposes tokens for requests that chose its method. Called by the engine thread only."""

    name: str
    """As in `token_sources`."""
    taps: tuple[str, ...]
    """Hidden states it wants of each target step (the runner's names); () for lookup drafters."""

    def start(self, request: Request) -> None:
        """A request was admitted; its prompt is known."""
        ...

    def propose(self, entries: Sequence[Scheduled]) -> list[list[int]]:
        """At most `max_drafts` tokens for each entry, to follow its last known token."""
        ...

    def observe(self, entries: Sequence[Scheduled], emitted: Sequence[Sequence[int]], hidden: torch.Tensor | None) -> None:
        """What the target emitted, after each step, with the hidden states asked for."""
        ...

    def stop(self, request: Request) -> None:
        """A request ended."""
        ...


class Drafters:
    """The loaded drafters as one: sends each entry of a batch to the drafter that its request chose."""

    def __init__(self, config: SpeculativeConfig) -> None:
        from backend.drafters.ngram import NgramDrafter

        self._loaded: dict[str, Drafter] = {}
        if config.method == "ngram":
            self._loaded["ngram"] = NgramDrafter(config.max_ngram_size, config.min_ngram_size)

    def start(self, request: Request) -> None:
        if drafter := self._loaded.get(request.speculation.method):
            drafter.start(request)

    def stop(self, request: Request) -> None:
        if drafter := self._loaded.get(request.speculation.method):
            drafter.stop(request)

    def propose(self, entries: Sequence[Scheduled]) -> Draft:
        """A row of drafts per entry, empty for those that take none."""
        draft = Draft([[] for _ in entries], [[] for _ in entries])
        for method, drafter in self._loaded.items():
            own = [b for b, e in enumerate(entries) if e.max_drafts and e.request.speculation.method == method]
            if not own:
                continue
            for b, token_ids in zip(own, drafter.propose([entries[b] for b in own]), strict=True):
                draft.token_ids[b] = token_ids[: entries[b].max_drafts]
                draft.sources[b] = [drafter.name] * len(draft.token_ids[b])
        return draft

    def observe(self, entries: Sequence[Scheduled], verdict: Verdict, hidden: torch.Tensor) -> None:
        for method, drafter in self._loaded.items():
            own = [b for b, e in enumerate(entries) if e.request.speculation.method == method]
            if own:
                emitted = [verdict.token_ids[b] for b in own]
                drafter.observe([entries[b] for b in own], emitted, hidden if drafter.taps else None)
