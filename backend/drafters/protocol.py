"""What the engine asks of drafters, and what they ask of lookups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from backend.core import Batch, Draft, DraftFaults, Request, Scheduled


class Drafter(Protocol):
    """Proposes tokens for requests that chose its method. Called by the engine thread only."""

    taps: tuple[str, ...]
    """What it reads of every token that the target computed (`Runner.allocate_cache`); () for lookups."""
    page_entries: list[tuple[int, ...]]
    """Shapes of what it keeps of each token in this process, so that the memory for pages can be shared out."""

    def attach(self, num_pages: int, page_size: int, taps: dict[str, torch.Tensor]) -> None:
        """The paged memory is made: taps [P, page, ...] by name."""
        ...

    def start(self, request: Request) -> None:
        """A request was admitted; its prompt is known."""
        ...

    def begin_step(self, batch: Batch) -> None:
        """A step begins: its pages are given out, and what it says of copies and fresh pages is done."""
        ...

    def propose(self, entries: Sequence[Scheduled], faults: DraftFaults) -> Draft:
        """At most `max_drafts` tokens for each entry, to follow its last known token."""
        ...

    def stop(self, request: Request) -> None:
        """A request ended."""
        ...

    def close(self) -> None:
        """The engine was shut down."""
        ...


class Lookup(Protocol):
    """Finds a continuation in what was written before."""

    name: str
    """As in `token_sources`."""

    def start(self, request: Request) -> None: ...

    def lookup(self, request: Request, drafts: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens to follow the request's tokens and `drafts`, which another drafter proposed."""
        ...

    def lookup_scored(self, request: Request, drafts: Sequence[int], count: int) -> tuple[list[int], float]:
        """As `lookup`, with how good a match it comes from: greater is better, on a scale of the lookup's own."""
        ...

    def stop(self, request: Request) -> None: ...

    def close(self) -> None: ...
