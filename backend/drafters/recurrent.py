"""Recurrent drafters in the step: a model's own layers over the step's rows, which go on from their own states (MTP, EAGLE, draft models).

Layer 1 takes what the tap kept of the token before, if anything; a later layer takes the state of the layer before it, which is kept
beside its keys and values. So it may go on from any token, whoever computed those before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from backend.drafters.protocol import ATTENTION, HIDDEN, BlockPass, CandidateMemory, DrafterRows, StateKeeper
from backend.kv_store import CacheSpec, KvStore
from backend.models.decoder_layer import AttentionKinds
from backend.speculative_config import MAX_SPECULATIVE_TOKENS
from kernels import ops

STATES = "drafter.states"


class RecurrentModel(Protocol):
    """A drafter's weights. T packed tokens, whose states go in and out with `hidden_size` numbers."""

    hidden_size: int
    num_layers: int
    """Modules that draft one token each; the last one goes on from its own state."""
    heads: ops.Heads
    """Of queries, of keys and values, and their size."""
    attention_kinds: AttentionKinds
    token_shape: tuple[int, ...]
    """Of what attention keeps of a token in one of num_planes planes a layer."""
    num_planes: int
    tap_width: int
    tapped_layers: tuple[int, ...]
    mask_token_id: int | None
    """Of drafts that are not known yet, where it was trained to make all of them at once (`backend.drafters.parallel`)."""
    mask_state: torch.Tensor | None
    """[hidden]: in the place of the state before a mask token; None: it takes none."""

    def tap(self, hidden: torch.Tensor, entering: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """As `StepDrafter.tap`."""
        ...

    def forward(
        self,
        layer: int,
        token_ids: torch.Tensor,
        previous: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: tuple[torch.Tensor, ...],
        plan: ops.Plan,
    ) -> torch.Tensor:
        """States [T, hidden] of one layer at tokens [T]; previous [T, hidden]: states at the tokens before them, of no use without a tap."""
        ...

    def logits(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, V] over the target's vocabulary; -inf: a token that is never drafted."""
        ...


class RecurrentDrafter:
    """A StepDrafter. Layers beyond `max_steps` drafts a step are left out, and whoever wants more goes on with the last one in use."""

    max_drafts = MAX_SPECULATIVE_TOKENS
    block: BlockPass | None = None
    memory: CandidateMemory | None = None
    attends_drafts = True
    keeper: StateKeeper | None = None

    def __init__(self, model: RecurrentModel, max_steps: int) -> None:
        self._model = model
        self.num_layers = min(model.num_layers, max_steps)
        self.heads, self.attention_kinds = model.heads, model.attention_kinds
        self.tap_width, self.tapped_layers = model.tap_width, model.tapped_layers
        self._planes: list[torch.Tensor] = []
        self._states: list[torch.Tensor] = []
        self._hidden = torch.empty(0)

    def tap(self, hidden: torch.Tensor, entering: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return self._model.tap(hidden, entering)

    def cache_specs(self, dtype: torch.dtype) -> list[CacheSpec]:
        specs = [CacheSpec(ATTENTION, self._model.token_shape, dtype, self._model.num_planes * self.num_layers)]
        if self.num_layers > 1:
            specs.append(CacheSpec(STATES, (self._model.hidden_size,), dtype, self.num_layers - 1))
        return specs

    def attach(self, store: KvStore) -> None:
        self._planes = store.planes(ATTENTION)
        self._states = [store.rows(STATES, number) for number in range(self.num_layers - 1)]
        if HIDDEN in store.specs:
            self._hidden = store.rows(HIDDEN)

    def advance(self, rows: DrafterRows, last: torch.Tensor, hidden: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Every layer over known tokens -> each layer's states [B, hidden] at rows last [B].

        hidden [T, hidden]: the target's states before the tokens; default: what the tap has of them.
        """
        is_first = (rows.positions == 0)[:, None]  # nothing comes before the first token
        if hidden is None:
            hidden = self._hidden[rows.before_slots].masked_fill_(is_first, 0) if self.tap_width else self._hidden
        states = self.compute(0, rows, hidden)
        newest = [states[last]]
        for layer in range(1, self.num_layers):
            kept = self._states[layer - 1]
            kept.index_copy_(0, rows.state_slots, states)
            states = self.compute(layer, rows, kept[rows.before_slots].masked_fill_(is_first, 0))
            newest.append(states[last])
        return newest

    def extend(self, rows: DrafterRows, states: list[torch.Tensor], step: int) -> list[torch.Tensor]:
        """The newest drafts [B] in the layers that draft number `step` and later ones need, from every layer's states [B, hidden] before them."""
        newest, last = list(states), self.num_layers - 1
        for layer in range(min(step, last), last + 1):
            newest[layer] = self.compute(layer, rows, states[layer - 1 if step <= layer else layer])
        return newest

    def logits(self, states: list[torch.Tensor], step: int) -> torch.Tensor:
        """What draft number `step` is chosen by [B, V], from every layer's states [B, hidden] at the token before it."""
        layer = min(step, self.num_layers - 1)
        return self._model.logits(layer, states[layer])

    def compute(self, layer: int, rows: DrafterRows, previous: torch.Tensor) -> torch.Tensor:
        """States [T, hidden] of one layer at rows; previous: as `RecurrentModel.forward` takes it."""
        assert rows.plan is not None
        count = self._model.num_planes
        cache = tuple(self._planes[count * layer : count * (layer + 1)])
        return self._model.forward(layer, rows.token_ids, previous, rows.positions, rows.kv_slots, cache, rows.plan)
