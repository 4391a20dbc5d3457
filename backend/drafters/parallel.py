"""Parallel drafting: one forward over mask tokens makes all drafts but the first (PARD, An et al. 2025; P-EAGLE, Hui et al. 2026).

Known tokens are computed as a recurrent drafter computes them, and the newest one's state gives the first draft. Each mask row stands for a
draft that is not known yet, at its place; it sees the rows before it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from backend.drafters.protocol import BlockPass, CandidateMemory, DrafterRows, StateKeeper
from backend.drafters.recurrent import RecurrentDrafter, RecurrentModel
from backend.kv_store import CacheSpec, KvStore
from backend.models.spec import BlockView
from backend.speculative_config import MAX_SPECULATIVE_TOKENS
from kernels import ops


class ParallelDrafter:
    """A StepDrafter, and the BlockPass over its mask tokens."""

    first, views = 1, frozenset({BlockView.CAUSAL})
    max_drafts = MAX_SPECULATIVE_TOKENS
    keeper: StateKeeper | None = None
    memory: CandidateMemory | None = None
    attends_drafts = False

    def __init__(self, model: RecurrentModel) -> None:
        """model: of one layer."""
        assert model.mask_token_id is not None
        self.mask_token_id, self._model, self._known = model.mask_token_id, model, RecurrentDrafter(model, 1)
        self.heads: ops.Heads | None = model.heads
        self.block_heads = model.heads
        self.attention_kinds = self.block_kinds = model.attention_kinds
        self.tap_width, self.tapped_layers = model.tap_width, model.tapped_layers

    @property
    def block(self) -> BlockPass:
        return self

    def tap(self, hidden: torch.Tensor, entering: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return self._known.tap(hidden, entering)

    def cache_specs(self, dtype: torch.dtype) -> list[CacheSpec]:
        return self._known.cache_specs(dtype)

    def attach(self, store: KvStore) -> None:
        self._known.attach(store)

    def advance(self, rows: DrafterRows, last: torch.Tensor) -> list[torch.Tensor]:
        return self._known.advance(rows, last)

    def count_rows(self, num_drafts: int) -> int:
        return num_drafts - 1

    def compute(self, rows: DrafterRows | None, states: list[torch.Tensor], num_drafts: int) -> list[torch.Tensor]:
        """Logits [B, K, V]."""
        (newest,) = states
        made = newest[:, None]
        if rows is not None:
            mask = self._model.mask_state
            before = newest if mask is None else mask.expand(len(rows.token_ids), -1)
            masked = self._known.compute(0, rows, before)
            made = torch.cat([made, masked.view(len(newest), num_drafts - 1, -1)], dim=1)
        return [self._model.logits(0, made.flatten(0, 1)).view(len(newest), num_drafts, -1)]

    def extend(self, rows: DrafterRows, states: list[torch.Tensor], step: int) -> list[torch.Tensor]:
        return states

    def logits(self, states: list[torch.Tensor], step: int) -> torch.Tensor:
        return states[0][:, step].contiguous()

    def judge(self, states: list[torch.Tensor], step: int) -> torch.Tensor | None:
        return None
