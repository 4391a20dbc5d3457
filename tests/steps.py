"""A worker's steps by hand: plans without scheduler and planner, and what the forward computed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backend.config import EngineConfig
from backend.core import NEVER
from backend.parallel.ranks import Projection, Ranks
from backend.step.plan import Arrival, StepPlan
from backend.step.worker import Results, Worker
from kernels.request_state import Admission
from kernels.structs import NUM_FIELDS


def make_worker(folder: Path, has_tap: bool = False, **options: Any) -> Worker:
    """In float32, with 4 MiB of pages of 8 tokens; has_tap: the target's states are kept for a drafter in another process."""
    values = {"model": str(folder), "device": "cpu", "dtype": "float32", "kv_cache_memory": "4MiB", "page_size": 8, "max_batch_size": 8, **options}
    if has_tap:
        values["speculative_config"] = {"method": "mtp", "placement": "bls"}
    return Worker(EngineConfig.from_dict(values), Ranks())


def make_sums_late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on products that are added to the states come as on GPUs that add shares: some rows first, and till all are there the others are no
    numbers. Returns a list that grows by how many rows there were."""
    counts: list[int] = []

    def add(ranks: Ranks, x: torch.Tensor, y: torch.Tensor, projection: Projection) -> Iterable[slice]:
        projection.add_to(x, y)
        made, cuts = x.clone(), [0, len(x) // 3, len(x) // 2, len(x)]
        x.fill_(math.nan)
        counts.append(len(x))

        def come() -> Iterator[slice]:
            for own in (slice(cuts[1], cuts[2]), slice(cuts[2], cuts[3]), slice(cuts[0], cuts[1])):
                x[own] = made[own]
                yield own

        return come()

    monkeypatch.setattr(Ranks, "add_product", add)
    return counts


@dataclass
class Row:
    """One request's share of a step. count: known tokens from `begin` on; 0: its newest token, with `drafts`."""

    index: int
    begin: int = 0
    count: int = 0
    drafts: Sequence[int] = ()
    parents: Sequence[int] = ()
    """Of drafts that are a tree."""
    is_end: bool = True
    """The chunk is the prompt's last."""


@dataclass
class Steps:
    worker: Worker
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """[T, hidden] of the last step's packed rows, or of those that logits are made of."""
    _plan: StepPlan = field(default_factory=StepPlan)
    _num_pages: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        program, forward = self.worker.program, self.worker.program.forward

        def watched(step: Any) -> None:
            forward(step)
            self.hidden = step.hidden

        program.forward = watched  # type: ignore[method-assign]

    def admit(self, index: int, token_ids: Sequence[int], page_ids: Sequence[int], **options: Any) -> None:
        """In the next step."""
        values = {"num_prompt_tokens": len(token_ids), "max_total_tokens": self.worker.max_model_len, "is_greedy": True, **options}
        self._plan.admissions.append(Arrival(Admission(index, list(token_ids), **values)))
        begin = index * self.worker.page_table.shape[1]
        self._plan.page_writes += [word for i, page in enumerate(page_ids) for word in (begin + i, page)]
        self._num_pages[index] = len(page_ids)

    def run(self, rows: Sequence[Row], copies: Sequence[tuple[int, int, int]] = (), cleared: Sequence[int] = (), is_whole: bool = True) -> Results:
        """Rows with known tokens come first. is_whole: the states of all tokens are wanted, not only of those that logits are made of."""
        plan, self._plan = self._plan, StepPlan()
        plan.page_copies, plan.cleared_pages = list(copies), list(cleared)
        fields = []
        for row in rows:
            first, count, end = (row.begin, row.count, row.begin + row.count) if row.count else (-1, 1, 0)
            head = (row.index, self._num_pages[row.index], self.worker.max_model_len, first, count, int(row.is_end), len(row.drafts))
            fields.append((*head, 0, 0, -1, NEVER, -1, 0, -1))
            if row.count:
                plan.num_prompts += 1
                plan.prompt_seq_lens.append(end)
                plan.drafter_seq_lens.append(0)
                plan.drafter_counts.append(0)
            place = row.index * self.worker.table.max_drafts
            plan.draft_writes += [word for i, token_id in enumerate(row.drafts) for word in (place + i, token_id)]
            plan.num_draft_writes += (row.index, len(row.drafts))
            plan.parent_writes += [word for i, parent in enumerate(row.parents) for word in (place + i, parent)]
            plan.has_trees |= bool(row.parents)
        if is_whole and plan.num_prompts:
            plan.scored = [(0, 0)]
        plan.fields = np.array(fields, dtype=np.int32).reshape(-1, NUM_FIELDS).T.copy()
        plan.num_queries = 1 + max(len(row.drafts) for row in rows)
        return self.worker.go_on(self.worker.begin(plan), plan.masks)()

    def logits(self) -> torch.Tensor:
        """[T, V] of the same rows."""
        with torch.inference_mode():
            return self.worker.model.logits(self.hidden).cpu()
