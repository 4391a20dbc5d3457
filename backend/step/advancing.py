"""The model drafter's way through the known tokens of a step with prompts, captured by the number of its rows, as the target's forward is."""

from __future__ import annotations

import bisect
import functools
import logging
import time
from collections.abc import Sequence

import torch

from backend.step.draft_phase import DraftPhase
from backend.step.pieces import capture
from backend.step.tensors import Advanced, StepTensors
from kernels import ops
from kernels.step_rows import DrafterRows

logger = logging.getLogger(__name__)


class Advancing:
    """Graphs of one worker's drafter, where its attention finds prompts by itself, or it has none."""

    def __init__(
        self, drafting: DraftPhase, split: ops.SplitRows, attention: ops.SplitAttention | None, counts: Sequence[int], pool: tuple[int, int]
    ) -> None:
        """counts: numbers of rows, ascending."""
        self._drafting, self._split, self._attention, self._counts, self._pool = drafting, split, attention, counts, pool
        self._packed = torch.zeros(5 * counts[-1], dtype=torch.long, device=split.seq_lens.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Advanced]] = {}

    def fit(self, num_rows: int) -> int:
        """The least number of rows that was captured and holds so many; 0: there is none."""
        place = bisect.bisect_left(self._counts, num_rows)
        return self._counts[place] if num_rows and place < len(self._counts) else 0

    def rows(self, batch: int, count: int) -> DrafterRows:
        """Room for the rows of so many requests, where the graph of `count` rows reads them."""
        lists = (
            torch.empty(batch + more, dtype=dtype, device=self._packed.device)
            for more, dtype in ((1, torch.int32), (0, torch.int32), (0, torch.long))
        )
        return DrafterRows(self._view(count), *lists)

    def run(self, step: StepTensors) -> None:
        """As `DraftPhase.advance`, of a step whose rows are such."""
        known = self._drafting.lay_out(step)
        ops.split_rows(self._split, known.cu_rows, known.seq_lens, step.indices, step.sizes.num_prompts, known.last_rows)
        graph, made = self._graphs[known.packed.shape[1]]
        graph.replay()
        if step.advanced is None:
            step.advanced = made.first(step.shape.batch)
        else:
            step.advanced.take(made)

    def capture_all(self) -> None:
        """The most rows first: the others' lie in the same memory."""
        started = time.perf_counter()
        for count in reversed(self._counts):
            self._compute(count)  # lets cuBLAS choose
            self._graphs[count] = capture(functools.partial(self._compute, count), self._pool)
        logger.info("captured the drafter's way through prompts of up to %d tokens in %.1f s", self._counts[-1], time.perf_counter() - started)

    def _view(self, count: int) -> torch.Tensor:
        return self._packed[: 5 * count].view(5, count)

    def _compute(self, count: int) -> Advanced:
        return self._drafting.compute(self._view(count), self._split.last_rows, self._attention)
