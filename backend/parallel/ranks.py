"""The group of processes that hold one model's parts. Layers are built for `size` parts; with one, nothing is exchanged."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process's place in the group, and the group's exchanges."""

    rank: int = 0
    size: int = 1

    def part(self, count: int, what: str) -> slice:
        """This rank's share of `count` rows or heads. Raises ValueError when it does not divide."""
        if count % self.size:
            raise ValueError(f"{what}: {count} does not divide by {self.size} ranks")
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' parts side by side along the last axis."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, in place."""
        return x
