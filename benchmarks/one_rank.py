"""One rank of several, alone: what it computes of a step, with no exchange. For shapes whose other ranks have no GPU here.

Its answers mean nothing: sums lack the others' parts, and the scores of others' tokens are copies of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch

from backend import engine
from backend.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class OneRank(Ranks):
    """`Ranks` whose exchanges take what this rank has for everybody's."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add_sum(self, x: torch.Tensor, part: torch.Tensor) -> None:
        x.add_(part)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(self.size, *x.shape)

    def least(self, value: int, device: torch.device) -> int:
        return value


@contextlib.contextmanager
def one_rank_of(size: int) -> Iterator[None]:
    """Engines that are made inside are rank 0 of so many."""
    with mock.patch.object(engine, "Ranks", lambda: OneRank(0, size)) if size > 1 else contextlib.nullcontext():
        yield
