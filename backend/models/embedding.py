"""What tokens become before the first layer."""

from __future__ import annotations

import torch

from backend.parallel.ranks import Ranks

MIN_SAVED_BYTES = 2**30
"""On each rank, for which what tokens become is gathered from all: that takes some microseconds of each step, and as long as a sum of prompts."""
COMPARED_ROWS = 8192


def splits_embedding(num_bytes: int, size: int, is_tied: bool) -> bool:
    """Whether each of `size` ranks holds a share of an embedding's columns alone. num_bytes: of all of it; is_tied: its rows are the head's weights,
    too, of which each rank then has its own."""
    return size > 1 and num_bytes - (2 if is_tied else 1) * num_bytes // size >= MIN_SAVED_BYTES


class Embedding:
    """Whole on each rank, or by its columns."""

    def __init__(self, weight: torch.Tensor, ranks: Ranks, scale: float | None, is_tied: bool) -> None:
        """weight [V, hidden]: kept if it is not split; scale: of what tokens become."""
        self._ranks, self._scale, self._width = ranks, scale, weight.shape[1]
        self.is_split = splits_embedding(weight.nbytes, ranks.size, is_tied)
        self._own = ranks.vocabulary(self._width) if self.is_split else slice(None)
        self._weight = weight[:, self._own].clone() if self.is_split else weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden]"""
        x = self._scaled(self._weight[token_ids])
        return self._ranks.gather_vocabulary(x, self._width) if self.is_split else x

    def rows(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, float]:
        """What tokens [T] become, as `ops.pair_rows` takes it: a table, its rows, and a factor. Split by columns: the rows themselves."""
        if self.is_split:
            return self(token_ids), None, 1.0
        return self._weight, token_ids, 1.0 if self._scale is None else self._scale

    def is_same(self, weight: torch.Tensor) -> bool:
        """Whether tokens become rows of this [V, hidden]; the same on every rank. Every rank has to ask, with the same."""
        rows = torch.arange(len(weight), device=weight.device).split(COMPARED_ROWS)
        is_own_same = all(torch.equal(weight[ids][:, self._own], self._scaled(self._weight[ids])) for ids in rows)
        return bool(self._ranks.least(int(is_own_same), weight.device)) if self.is_split else is_own_same

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._scale is None else x.mul_(self._scale)
