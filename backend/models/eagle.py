"""EAGLE and EAGLE-3 drafters (Li et al. 2024, 2025) over paged memory.

A row pairs a token with the target's state before it, so what is kept of a token depends on the tokens up to that one alone (the
published code keeps the pair at the place before: angles differ by the same turn everywhere, which attention does not see). The first
token has no state before it, and no pair: its keys and values are zeros, which attention sees as one key more, of score 0 and of no value.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from backend.drafter_checks import read_eagle_spec
from backend.models.decoder_layer import DecoderLayer, find_kinds
from backend.models.drafter_weights import load_embedding, load_head, load_vector, spread_over
from backend.models.eagle_spec import MAP, EagleSpec, choose_parallel
from backend.models.layers import Weights, own_heads
from backend.models.loader import Checkpoint
from backend.models.loading import Model, check_gpu_layers, open_drafter
from backend.models.rope import RopeTables
from backend.parallel.ranks import Ranks
from backend.quantization import make_linear
from backend.quantization_config import QuantizationConfig
from kernels import ops


class Eagle:
    """A `backend.drafters.recurrent.RecurrentModel` of either kind."""

    num_layers = 1

    def __init__(
        self,
        directory: str | Path,
        target: Model,
        dtype: torch.dtype,
        device: torch.device,
        quantization: QuantizationConfig | None = None,
        load_format: str = "safetensors",
        ranks: Ranks | None = None,
        *,
        is_multi_layer: bool,
        is_parallel: bool | None = None,
    ) -> None:
        """ranks: that its layers are split over; None: they are whole. is_multi_layer: EAGLE-3; is_parallel: see `choose_parallel`.

        Raises ModelError for what is missing, damaged, or not a drafter of this target."""
        with open_drafter(directory, dtype, device, load_format) as checkpoint:
            sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "num_layers": target.num_layers}
            spec = self._spec = read_eagle_spec(directory, checkpoint.names, is_multi_layer=is_multi_layer, **sizes)
            if device.type == "cuda":
                check_gpu_layers(spec.layers, spec.where, dtype)
            own = ranks or Ranks()
            layer_weights = Weights(checkpoint, dtype, device, own, quantization)
            self._layers = [DecoderLayer(layer, layer_weights, target.context_len) for layer in spec.layers]
            self.heads, self.attention_kinds = own_heads(spec.layers[0].attention, own), find_kinds(self._layers)
            self._load(spec, checkpoint, target, Weights(checkpoint, dtype, device, Ranks(), quantization), is_parallel)

    def _load(self, spec: EagleSpec, checkpoint: Checkpoint, target: Model, weights: Weights, is_parallel: bool | None) -> None:
        self._target, self.eps = target, spec.eps
        self.hidden_size, self.tapped_layers = spec.hidden_size, spec.tapped_layers
        self.tap_width = spec.hidden_size
        own = spec.layers[0].attention
        self.token_shape, self.num_planes = own.token_shape(self.heads[1]), own.num_planes * len(spec.layers)
        self._fc = weights.split_rows([spec.fc])

        def norm(name: str | None, size: int = spec.hidden_size) -> torch.Tensor | None:
            return None if name is None else weights.norm(name, size)

        self._embedding_norm, self._hidden_norm, self._norm = norm(spec.embedding_norm), norm(spec.hidden_norm), norm(spec.norm)
        width = spec.target_hidden_size * (len(spec.tapped_layers) if len(spec.fc_norms) == 1 else 1)
        self._fc_norms = [weights.norm(name, width) for name in spec.fc_norms]
        rope, size, scale = own.turning
        self._tables = RopeTables(rope, size, target.context_len, weights.dtype, weights.device, scale)
        # Of EAGLE it is the target's, whatever the folder has.
        has_own = spec.tapped_layers or spec.hidden_size != target.hidden_size
        self._embedding = load_embedding(spec.embedding, spec.hidden_size, checkpoint, target, weights) if has_own else None
        sizes = (spec.draft_vocab_size, spec.hidden_size)
        head, target_ids = load_head(spec.head, MAP, *sizes, checkpoint, target, weights, can_have_own=bool(spec.tapped_layers))
        self._head, self._spread = None if head is None else make_linear(head), spread_over(target, target_ids)
        self.mask_token_id, self.mask_state = None, None
        if choose_parallel(spec, checkpoint.names, is_parallel):
            assert spec.mask_token_id is not None and spec.mask_hidden is not None
            self.mask_token_id = spec.mask_token_id
            width = spec.target_hidden_size * len(spec.tapped_layers)
            states = load_vector(spec.mask_hidden, width, checkpoint, weights).view(len(spec.tapped_layers), 1, -1)
            self.mask_state = self._join(list(states))[0]

    def tap(self, hidden: torch.Tensor, entering: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """What fc makes of the states, so that one of them is kept in the place of several."""
        if not self.tapped_layers:
            return hidden
        return self._join([entering[layer] for layer in self.tapped_layers])

    def _join(self, states: list[torch.Tensor]) -> torch.Tensor:
        """States [T, target's hidden] in the order of the tapped layers, of which one may come twice."""
        if len(self._fc_norms) > 1:
            states = [ops.rms_norm(state, weight, self.eps) for state, weight in zip(states, self._fc_norms)]
        joined = torch.cat(states, dim=-1)
        return self._fc(ops.rms_norm(joined, self._fc_norms[0], self.eps) if len(self._fc_norms) == 1 else joined)

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
        table, ids, factor = (self._embedding, token_ids, 1.0) if self._embedding is not None else self._target.embeddings(token_ids)
        pairs = ops.pair_rows(
            table,
            ids,
            previous,
            positions,
            embedding_norm=self._embedding_norm,
            hidden_norm=self._hidden_norm,
            eps=self.eps,
            masked=0 if self.tapped_layers else ops.NEVER_MASKED,
            masks_pair=True,
            keeps_states=bool(self.tapped_layers),
            keeps_normed=self._spec.is_norm_residual,
            factor=factor,
        )
        if pairs.states is not None:
            x, attended = pairs.states, pairs.rows
        else:
            x = self._fc(pairs.rows)
            attended = x.masked_fill((positions == 0)[:, None], 0)
        angles, count = self._tables.for_one(positions), len(cache) // len(self._layers)
        for number, own in enumerate(self._layers):
            x = own.forward(x, angles, slots, cache[count * number : count * (number + 1)], plan, attended=attended if number == 0 else None)
        return self._normalize(x) if self._spec.is_norm_recycled else x

    def _normalize(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._norm is None else ops.rms_norm(x, self._norm, self.eps)

    def logits(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        x = states if self._spec.is_norm_recycled else self._normalize(states)
        logits = self._target.draft_scores(x) if self._head is None else self._head(x)
        if self._spec.logit_scale != 1.0:
            logits = logits * self._spec.logit_scale
        return self._spread(logits)
