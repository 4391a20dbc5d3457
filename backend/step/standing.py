"""How likely drafts are to stand, by the model drafter's own word: on CPU, where the host looks at it."""

from __future__ import annotations

import numpy as np
import torch

from kernels import cpu_drafts


class Standing:
    """Of each draft for the planner, at least 1e-6: a number that is none costs a drafter its drafts and nothing else; and of whole chains."""

    def __init__(self, kept: torch.Tensor, indices: torch.Tensor, bounds: torch.Tensor, together: torch.Tensor) -> None:
        """kept [S, K] float32: where that of each request's drafts goes; indices [B] int32; bounds [2] float32: the power that the drafter's word is
        taken to, and how many chains have to stand for more drafts to be worth it; together [B] float32 of ones: the drafts' so far."""
        self._kept, self._indices, self._trust, self._least, self._together = kept, indices, bounds[:1], bounds[1:], together

    def note(self, number: int, chances: torch.Tensor, is_ended: torch.Tensor | None) -> None:
        """Of draft `number` of each request [B], the first ones first; is_ended [B] int32: where it is not 0 it is none."""
        if cpu_drafts.is_usable():
            cpu_drafts.note_draft(self._kept, self._indices, number, chances.float().contiguous(), is_ended, self._trust, self._together)
            return
        kept, places, own = self._kept.numpy(), self._indices.numpy(), np.fmax(chances.float().numpy(), np.float32(1e-6))
        if not number:
            kept[places] = 0
        kept[places, number] = own if is_ended is None else own * (is_ended.numpy() == 0)
        self._together *= torch.from_numpy(own ** float(self._trust))

    def is_enough(self) -> bool:
        """Whether so few chains stand by now that no more drafts are worth it."""
        if cpu_drafts.is_usable():
            return cpu_drafts.is_enough(self._together, self._least)
        return float(self._together.sum()) < float(self._least)
