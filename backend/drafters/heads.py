"""Drafting heads in the step: each draft comes from one state of the target, so that nothing is computed of known tokens (Hydra++: one layer)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from backend.drafters.protocol import ATTENTION, HIDDEN, BlockPass, CandidateMemory, DrafterRows, StateKeeper
from backend.kv_store import CacheSpec, KvStore
from backend.models.heads import Heads


class HeadsDrafter:
    """A StepDrafter."""

    block: BlockPass | None = None
    memory: CandidateMemory | None = None
    attends_drafts = False
    keeper: StateKeeper | None = None

    def __init__(self, model: Heads) -> None:
        self._model, self._prefix = model, model.prefix
        self.heads = self._prefix.heads if self._prefix is not None else None
        self.attention_kinds = self._prefix.attention_kinds if self._prefix is not None else frozenset()
        self.max_drafts, self.tap_width, self.tapped_layers = model.num_heads, model.tap_width, model.tapped_layers
        self._hidden = torch.empty(0)
        self._planes: tuple[torch.Tensor, ...] = ()

    def tap(self, hidden: torch.Tensor, entering: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return self._model.tap(hidden, entering)

    def cache_specs(self, dtype: torch.dtype) -> list[CacheSpec]:
        own = self._prefix
        return [] if own is None else [CacheSpec(ATTENTION, own.token_shape, dtype, own.num_planes)]

    def attach(self, store: KvStore) -> None:
        self._hidden = store.rows(HIDDEN)
        if self._prefix is not None:
            self._planes = tuple(store.planes(ATTENTION))

    def advance(self, rows: DrafterRows, last: torch.Tensor) -> list[torch.Tensor]:
        if self._prefix is None:
            states = self._hidden[rows.before_slots[last]]
        else:
            assert rows.plan is not None
            before = self._hidden[rows.before_slots].masked_fill_((rows.positions == 0)[:, None], 0)
            states = self._prefix.forward(before, rows.positions, rows.kv_slots, self._planes, rows.plan)[last]
        return self._model.begin(states, rows.token_ids[last])

    def extend(self, rows: DrafterRows, states: list[torch.Tensor], step: int) -> list[torch.Tensor]:
        return self._model.go_on(states, rows.token_ids, step)

    def logits(self, states: list[torch.Tensor], step: int) -> torch.Tensor:
        return self._model.logits(states, step)
