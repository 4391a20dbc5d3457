"""Multi-token prediction in the step: the drafter's layers over the step's own rows, and what they keep of each token.

Follows vLLM's and FastDeploy's MTP in what it computes. Layer 1 takes the target's hidden state of the token before, after the
final norm, from the tap; a later layer takes that of the layer before it, which is kept beside its keys and values. So it may go on
from any token, whoever computed those before it.
"""

from __future__ import annotations

import torch

from backend.drafters.protocol import ATTENTION, HIDDEN, DrafterRows
from backend.kv_store import CacheSpec, KvStore
from backend.models.mtp import Mtp

STATES = "drafter.states"


class MtpDrafter:
    """A StepDrafter. Layers beyond `max_steps` drafts a step are left out, and whoever wants more goes on with the last one in use."""

    def __init__(self, model: Mtp, max_steps: int) -> None:
        self._model = model
        self.num_layers = min(model.num_layers, max_steps)
        self.heads = model.heads
        self._planes: list[torch.Tensor] = []
        self._states: list[torch.Tensor] = []
        self._hidden = torch.empty(0)

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
            hidden = self._hidden[rows.before_slots].masked_fill_(is_first, 0)
        states = self._compute(0, rows, hidden)
        newest = [states[last]]
        for layer in range(1, self.num_layers):
            kept = self._states[layer - 1]
            kept.index_copy_(0, rows.state_slots, states)
            states = self._compute(layer, rows, kept[rows.before_slots].masked_fill_(is_first, 0))
            newest.append(states[last])
        return newest

    def extend(self, rows: DrafterRows, states: list[torch.Tensor], step: int) -> list[torch.Tensor]:
        """The newest drafts [B] in the layers that draft number `step` and later ones need, from every layer's states [B, hidden] before them."""
        newest, last = list(states), self.num_layers - 1
        for layer in range(min(step, last), last + 1):
            newest[layer] = self._compute(layer, rows, states[layer - 1 if step <= layer else layer])
        return newest

    def logits(self, states: list[torch.Tensor], step: int) -> torch.Tensor:
        """What draft number `step` is chosen by [B, V], from every layer's states [B, hidden] at the token before it."""
        layer = min(step, self.num_layers - 1)
        return self._model.logits(layer, states[layer])

    def _compute(self, layer: int, rows: DrafterRows, previous: torch.Tensor) -> torch.Tensor:
        count = self._model.num_planes
        cache = tuple(self._planes[count * layer : count * (layer + 1)])
        return self._model.forward(layer, rows.token_ids, previous, rows.positions, rows.kv_slots, cache, rows.plan)
