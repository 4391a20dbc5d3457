"""Multi-token-prediction modules (DeepSeek-V3, 2024, section 2.2) over paged memory.

Layer k at token s takes the embedding of s and the state of layer k - 1 at the token before it (k = 1: the target's hidden state
after its final norm; before the first token: zeros), and scores what follows s. So what a layer keeps of a token depends on the
tokens up to that one alone, and a page of it is right for every request that shares the page's tokens. Past the last layer, the
last one goes on with its own state. Which state goes on, that before the norm of the head or that after it, is the family's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from backend.model_checks import check_drafter, check_fits_target, check_rounding
from backend.model_files import read_config
from backend.models import Model, open_checkpoint
from backend.models.decoder_layer import DecoderLayer, find_kinds
from backend.models.drafter_weights import spread_over
from backend.models.layers import Weights, own_heads
from backend.models.mtp_spec import MtpLayerSpec
from backend.models.rope import RopeTables
from backend.parallel.ranks import Ranks
from backend.quantization_config import QuantizationConfig
from kernels import ops


class _Layer:
    """One module: norms, projection, decoder layer, norm before the shared head."""

    def __init__(self, spec: MtpLayerSpec, weights: Weights, split: Weights) -> None:
        hidden = spec.decoder.hidden_size
        self.embedding_norm = weights.norm(spec.embedding_norm, hidden)
        self.hidden_norm = weights.norm(spec.hidden_norm, hidden)
        self.head_norm = weights.norm(spec.head_norm, hidden)
        self.projection = weights.split_rows([spec.projection])
        self.decoder = DecoderLayer(spec.decoder, split)


class Mtp:
    """The drafter's layers; embedding and head are the target's own tensors. Each layer keeps keys and values of each token."""

    mask_token_id: int | None = None
    mask_state: torch.Tensor | None = None

    def __init__(
        self,
        directory: str | Path,
        target: Model,
        dtype: torch.dtype,
        device: torch.device,
        quantization: QuantizationConfig | None = None,
        load_format: str = "safetensors",
        ranks: Ranks | None = None,
    ) -> None:
        """ranks: that its layers are split over; None: they are whole. quantization: how plain weights are rounded.

        Raises ModelError for what is missing, damaged, or not a drafter of this target."""
        config = read_config(directory)
        check_fits_target(config, directory, hidden_size=target.hidden_size, vocab_size=target.vocab_size, max_model_len=target.max_model_len)
        spec = check_drafter(directory, has_weights=load_format != "dummy")
        check_rounding(config, directory, quantization, spec)
        self._target, self._spread = target, spread_over(target, target.draft_ids)
        self.hidden_size: int = target.hidden_size
        self.num_layers = len(spec.layers)
        self.tap_width: int = target.hidden_size
        self.tapped_layers: tuple[int, ...] = ()
        self._is_hidden_first, self._is_norm_recycled = spec.is_hidden_first, spec.is_norm_recycled
        self._is_first_masked = spec.is_first_masked
        first = spec.layers[0].decoder
        own, self.eps = first.attention, first.eps
        ranks = ranks or Ranks()
        self.heads = own_heads(own, ranks)
        self.token_shape, self.num_planes = own.token_shape(self.heads.num_kv), own.num_planes
        with open_checkpoint(directory, dtype, device, load_format, is_drafter=True) as checkpoint:
            weights = Weights(checkpoint, dtype, device, Ranks(), quantization)
            split = Weights(checkpoint, dtype, device, ranks, quantization)
            self.layers = [_Layer(layer, weights, split) for layer in spec.layers]
        self.attention_kinds = find_kinds(layer.decoder for layer in self.layers)
        rope, size, scale = own.turning
        self._tables = RopeTables(rope, size, target.context_len, dtype, device, scale)

    def tap(self, hidden: torch.Tensor, entering: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The states after the final norm, as they are."""
        return hidden

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
        """States [T, hidden] of one layer at tokens [T]; previous [T, hidden]: states at the tokens before them."""
        own = self.layers[layer]
        table, ids, factor = self._target.embeddings(token_ids)
        pairs = ops.pair_rows(
            table,
            ids,
            previous,
            positions,
            embedding_norm=own.embedding_norm,
            hidden_norm=own.hidden_norm,
            eps=self.eps,
            masked=layer + 1 if self._is_first_masked else ops.NEVER_MASKED,
            is_hidden_first=self._is_hidden_first,
            factor=factor,
        )
        x = own.decoder.forward(own.projection(pairs.rows), self._tables.for_one(positions), slots, cache, plan)
        return ops.rms_norm(x, own.head_norm, self.eps) if self._is_norm_recycled else x

    def logits(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, V] in the model's dtype."""
        normed = states if self._is_norm_recycled else ops.rms_norm(states, self.layers[layer].head_norm, self.eps)
        return self._spread(self._target.draft_scores(normed))
