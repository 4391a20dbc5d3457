"""DFlash and DSpark drafters (Chen et al. 2026; DeepSeek 2026) over paged memory.

Keys and values of known tokens are made of the target's states alone: fc of some layers' states, normed, goes through each layer's own
projections. A block of the newest token and of mask tokens then runs through the layers over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F

from backend.drafter_checks import read_dflash_spec
from backend.errors import ModelError
from backend.models.decoder_layer import DecoderLayer, find_kinds
from backend.models.dflash_spec import MAP, MarkovSpec
from backend.models.drafter_weights import load_embedding, load_head, spread_over
from backend.models.layers import Weights, own_heads
from backend.models.loading import Model, open_drafter
from backend.models.parts import Attention
from backend.models.rope import RopeTables
from backend.models.spec import BlockView
from backend.parallel.ranks import Ranks
from backend.quantization import make_linear
from backend.quantization_config import QuantizationConfig
from kernels import ops

MASK_FILE = "mask_embedding.pt"
"""An embedding of the mask token apart from the others, which is not read."""


class MarkovHead:
    """DSpark's: scores of the draft vocabulary that the token before adds. Over a block it may go on from a state of its own."""

    def __init__(
        self, spec: MarkovSpec, hidden_size: int, vocab_sizes: tuple[int, int], weights: Weights, draft_ids: torch.Tensor | None = None
    ) -> None:
        """vocab_sizes: of the target and of the drafter; draft_ids: of the latter's tokens those that are scored."""
        self._kind, self._rank = spec.kind, spec.rank
        self._embedding = weights.whole(f"{spec.prefix}markov_w1.weight", (vocab_sizes[0], spec.rank))
        scores = weights.whole(f"{spec.prefix}markov_w2.weight", (vocab_sizes[1], spec.rank))
        self._scores = make_linear(scores if draft_ids is None else scores[draft_ids])
        self._mixer = None if spec.kind == "vanilla" else weights.split_rows([spec.mixer(hidden_size)])

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[B] -> [B, rank]"""
        return self._embedding[token_ids]

    def begin(self, batch: int) -> torch.Tensor:
        """The state before a block [B, rank]."""
        return self._embedding.new_zeros(batch, self._rank)

    def mix(self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `score` takes [B, rank], of the token before [B, rank], the block's row [B, hidden] and the state; and the state after it."""
        if self._mixer is None:
            return embedded, state
        if self._kind == "gated":
            return self._mixer(torch.cat([hidden, embedded], dim=-1)).sigmoid() * embedded, state
        gate, candidate, out = self._mixer(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return out.tanh(), gate * state + (1 - gate) * candidate.tanh()

    def score(self, mixed: torch.Tensor) -> torch.Tensor:
        """[B, draft vocabulary]"""
        return self._scores(mixed)


class Dflash:
    """The weights of a drafter for one target."""

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
        num_drafts: int,
        is_spark: bool,
    ) -> None:
        """ranks: that its layers are split over; None: they are whole; num_drafts: of a step, at most. Raises ModelError for what is missing,
        damaged, or not a drafter of this target."""
        if (path := Path(directory) / MASK_FILE).exists():
            raise ModelError(f"{path}: a mask token with an embedding apart is not served")
        own = ranks or Ranks()
        with open_drafter(directory, dtype, device, load_format) as checkpoint:
            sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "num_layers": target.num_layers}
            spec = self.spec = read_dflash_spec(directory, checkpoint.names, is_spark=is_spark, **sizes)
            self.max_drafts, self.num_skipped = min(num_drafts, spec.max_drafts), 0 if spec.is_anchor_sampled else 1
            layer_weights = Weights(checkpoint, dtype, device, own, quantization)
            self._layers = [DecoderLayer(layer, layer_weights, target.context_len) for layer in spec.bound_layers(self.num_rows)]
            weights = Weights(checkpoint, dtype, device, Ranks(), quantization)
            self._target, self._fc = target, weights.split_rows([spec.fc])
            self._hidden_norm, self._norm = (weights.norm(name, spec.hidden_size) for name in (spec.hidden_norm, spec.norm))
            self._embedding = load_embedding(spec.embedding, spec.hidden_size, checkpoint, target, weights)
            head, target_ids = load_head(spec.head, MAP, spec.draft_vocab_size, spec.hidden_size, checkpoint, target, weights)
            self._head = None if head is None else make_linear(head)
            self._spread = spread_over(target, target_ids)
            vocab_sizes = (spec.vocab_size, spec.draft_vocab_size)
            self.markov = None if spec.markov is None else MarkovHead(spec.markov, spec.hidden_size, vocab_sizes, weights, target.draft_ids)
            self._confidence: tuple[torch.Tensor, torch.Tensor] | None = None
            if spec.confidence is not None:
                found = (("weight", (1, spec.confidence)), ("bias", (1,)))
                weight, bias = (weights.exact(f"{spec.confidence_name}.{part}", shape) for part, shape in found)
                self._confidence = weight, bias
        self.attention_kinds = find_kinds(self._layers)
        part = spec.layers[0].attention
        self.heads = own_heads(part, own)
        self.token_shape, self.num_planes = part.token_shape(self.heads.num_kv), part.num_planes * len(spec.layers)
        rope, size, scale = part.turning
        self._tables = RopeTables(rope, size, target.context_len, dtype, device, scale)

    @property
    def num_rows(self) -> int:
        """Of a block."""
        return self.max_drafts + self.num_skipped

    def _caches(self, planes: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, ...]]:
        """Of each layer."""
        count = len(planes) // len(self._layers)
        return [planes[i : i + count] for i in range(0, len(planes), count)]

    def keep(self, entering: Mapping[int, torch.Tensor], positions: torch.Tensor, slots: torch.Tensor, planes: tuple[torch.Tensor, ...]) -> None:
        """Keys and values of the target's states at tokens [T] go to their slots."""
        joined = torch.cat([entering[layer] for layer in self.spec.tapped_layers], dim=-1)
        states, angles = ops.rms_norm(self._fc(joined), self._hidden_norm, self.spec.eps), self._tables.at(positions)
        for layer, cache in zip(self._layers, self._caches(planes), strict=True):
            assert isinstance(layer.attention, Attention)
            layer.attention.keep(states, angles, slots, cache)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        planes: tuple[torch.Tensor, ...],
        plans: Mapping[BlockView, ops.Plan],
    ) -> torch.Tensor:
        """States [T, hidden] of a block's rows after the norm before the head. plans: by what layers see."""
        x = self._target.embed(token_ids) if self._embedding is None else self._embedding[token_ids]
        angles = self._tables.at(positions)
        for layer, view, cache in zip(self._layers, self.spec.views, self._caches(planes), strict=True):
            x = layer.forward(x, angles, slots, cache, plans[view])
        return ops.rms_norm(x, self._norm, self.spec.eps)

    def score(self, states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, draft vocabulary]"""
        scores = self._target.draft_scores(states) if self._head is None else self._head(states)
        return scores if self.spec.logit_scale == 1.0 else scores * self.spec.logit_scale

    def spread(self, scores: torch.Tensor) -> torch.Tensor:
        """[R, draft vocabulary] -> [R, V] over the target's vocabulary; -inf: a token that is never drafted."""
        return self._spread(scores)

    def judge(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor | None:
        """How likely drafts are to stand [B] float32, of their rows [B, hidden] and of the tokens before them [B, rank]; None: nobody says."""
        if self._confidence is None:
            return None
        weight, bias = self._confidence
        seen = hidden if weight.shape[1] == hidden.shape[1] or embedded is None else torch.cat([hidden, embedded], dim=-1)
        return F.linear(seen.float(), weight, bias)[:, 0].sigmoid()
