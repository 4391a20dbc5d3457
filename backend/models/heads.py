"""Drafting heads over the target's state: Medusa, Hydra, and the MLP speculator, which goes on from a state of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

from backend.drafter_checks import read_heads_spec
from backend.errors import ModelError
from backend.models.decoder_layer import DecoderLayer, find_kinds
from backend.models.drafter_weights import refuse_token_map, spread_over
from backend.models.heads_spec import Block, HeadsSpec, LstmSpec, SpeculatorSpec
from backend.models.layers import Weights
from backend.models.loader import Checkpoint
from backend.models.loading import Model, check_gpu_layers, open_drafter
from backend.models.rope import RopeTables
from backend.parallel.ranks import Ranks
from backend.quantization import Linear, make_linear
from backend.quantization_config import QuantizationConfig
from kernels import ops

NORM_EPS = 1e-6
"""Of the MLP speculator's norms."""


class Heads(Protocol):
    """Weights that draft from one state of the target. B requests."""

    num_heads: int
    tap_width: int
    tapped_layers: tuple[int, ...]

    @property
    def prefix(self) -> PrefixLayer | None:
        """What the states go through first."""
        ...

    def tap(self, hidden: torch.Tensor, entering: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """As `backend.drafters.protocol.StepDrafter.tap`."""
        ...

    def begin(self, state: torch.Tensor, token_ids: torch.Tensor) -> list[torch.Tensor]:
        """What draft 0 is chosen from: the state [B, hidden] before the newest tokens [B]."""
        ...

    def go_on(self, states: list[torch.Tensor], token_ids: torch.Tensor, step: int) -> list[torch.Tensor]:
        """What draft `step` is chosen from, given draft step - 1 [B]."""
        ...

    def logits(self, states: list[torch.Tensor], step: int) -> torch.Tensor:
        """[B, V] over the target's vocabulary; -inf: a token that is never drafted."""
        ...


class PrefixLayer:
    """Hydra++'s layer of attention over the states; its keys and values are kept."""

    def __init__(self, spec: HeadsSpec, weights: Weights, context_len: int) -> None:
        assert spec.prefix is not None
        layer = spec.prefix.layer
        own = layer.attention
        self.heads, self.token_shape, self.num_planes = ops.Heads(*own.heads), own.token_shape(own.heads[1]), own.num_planes
        self._layer, self._eps = DecoderLayer(layer, weights), layer.eps
        self.attention_kinds = find_kinds([self._layer])
        self._norm = weights.norm(spec.prefix.norm, spec.hidden_size)
        rope, size, scale = own.turning
        self._tables = RopeTables(rope, size, context_len, weights.dtype, weights.device, scale)

    def forward(
        self, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, cache: tuple[torch.Tensor, ...], plan: ops.Plan
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; states is changed in place. A state of zeros, of the first token, leaves keys and values of zeros."""
        return ops.rms_norm(self._layer.forward(states, self._tables.for_one(positions), slots, cache, plan), self._norm, self._eps)


class ResidualHeads:
    """Medusa's heads, which look at the state alone, and Hydra's, which look at the tokens since then too."""

    def __init__(self, spec: HeadsSpec, checkpoint: Checkpoint, target: Model, weights: Weights) -> None:
        self._spec, self._target = spec, target
        self.num_heads, self.tap_width = len(spec.heads), spec.hidden_size
        self.tapped_layers: tuple[int, ...] = () if spec.tapped_layer is None else (spec.tapped_layer,)
        self._blocks = [[self._make_block(block, weights) for block in head.blocks] for head in spec.heads]
        scores = {head.scores: None for head in spec.heads}  # some have one for all
        made = {own: _make_scores(own.name, own.out_features, own.in_features, weights, None if spec.map else target.draft_ids) for own in scores}
        self._scores = [made[head.scores] for head in spec.heads]
        token_map = target.draft_ids
        if spec.map is not None:
            refuse_token_map(target, f"{checkpoint.directory}: {spec.map} names the tokens that the heads score")
            count = spec.heads[0].scores.out_features
            ids = checkpoint.get_ids(spec.map, count)
            low, high, num_double = int(ids.min()), int(ids.max()), count - len(ids.unique())
            if low < 0 or high >= target.vocab_size or num_double:
                raise ModelError(
                    f"{checkpoint.directory}: {spec.map} has token ids from {low} to {high}, {num_double} of them twice; the target has ids 0 to "
                    f"{target.vocab_size - 1}, and each may come once"
                )
            token_map = ids.to(weights.device)
        self._spread = spread_over(target, token_map)
        self.prefix = PrefixLayer(spec, weights, target.context_len) if spec.prefix is not None else None

    @staticmethod
    def _make_block(block: Block, weights: Weights) -> tuple[Linear, Linear | None]:
        shortcut = weights.split_rows([block.shortcut]) if block.shortcut is not None else None
        return weights.split_rows([block.linear]), shortcut

    def tap(self, hidden: torch.Tensor, entering: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return hidden if self._spec.tapped_layer is None else entering[self._spec.tapped_layer]

    def begin(self, state: torch.Tensor, token_ids: torch.Tensor) -> list[torch.Tensor]:
        return self.go_on([state], token_ids, 0)

    def go_on(self, states: list[torch.Tensor], token_ids: torch.Tensor, step: int) -> list[torch.Tensor]:
        return [*states, self._target.embed(token_ids)] if self._spec.is_grounded else states

    def logits(self, states: list[torch.Tensor], step: int) -> torch.Tensor:
        x = torch.cat(states, dim=-1) if len(states) > 1 else states[0]
        for linear, shortcut in self._blocks[step]:
            y = F.silu(linear(x))
            x = y + (x if shortcut is None else shortcut(x))
        return self._spread(self._scores[step](x))


class MlpSpeculator:
    """state = GELU(norm(projection(state) + weight * embedding(token))); the head scores the state."""

    prefix = None

    def __init__(self, spec: SpeculatorSpec, checkpoint: Checkpoint, target: Model, weights: Weights) -> None:
        self._spec, self._target = spec, target
        self.num_heads, self.tap_width = len(spec.embeddings), spec.hidden_size
        self.tapped_layers: tuple[int, ...] = ()
        shape, inner = (spec.vocab_size, spec.inner), spec.inner
        _check_copies(spec, checkpoint)
        widths = {name: spec.hidden_size if number == 0 else inner for number, name in reversed(list(enumerate(spec.projections)))}
        embeddings = {name: weights.whole(f"{name}.weight", shape) for name in dict.fromkeys(spec.embeddings)}
        projections = {name: weights.linear(name, inner, width) for name, width in widths.items()}
        norms = {name: [weights.whole(f"{name}.{part}", (inner,)) for part in ("weight", "bias")] for name in dict.fromkeys(spec.norms)}
        scores = {name: _make_scores(name, *shape, weights, target.draft_ids) for name in dict.fromkeys(spec.scores)}
        self._embeddings = [embeddings[name] for name in spec.embeddings]
        self._projections = [projections[name] for name in spec.projections]
        self._norms = [norms[name] for name in spec.norms]
        self._scores, self._spread = [scores[name] for name in spec.scores], spread_over(target, target.draft_ids)
        self._token_weight = token_weight(spec.num_predicted, inner)

    def tap(self, hidden: torch.Tensor, entering: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return hidden

    def begin(self, state: torch.Tensor, token_ids: torch.Tensor) -> list[torch.Tensor]:
        if self._spec.is_input_scaled:
            state = scale_input(state)
        return self.go_on([state], token_ids, 0)

    def go_on(self, states: list[torch.Tensor], token_ids: torch.Tensor, step: int) -> list[torch.Tensor]:
        x = self._projections[step](states[0]) + self._token_weight * self._embeddings[step][token_ids]
        return [_activate(x, self._norms[step])]

    def logits(self, states: list[torch.Tensor], step: int) -> torch.Tensor:
        return self._spread(self._scores[step](states[0]))


def _check_copies(spec: SpeculatorSpec, checkpoint: Checkpoint) -> None:
    """Raises ModelError where weights that all drafts are to share are several."""
    for copy, name in spec.copies.items():
        if copy not in checkpoint.names or name not in checkpoint:
            continue
        shape = (spec.inner,) if ".ln." in f".{name}" else (spec.inner, spec.inner) if ".proj." in f".{name}" else (spec.vocab_size, spec.inner)
        if not torch.equal(checkpoint.get(copy, shape), checkpoint.get(name, shape)):
            raise ModelError(f"{spec.where}: tie_weights is true, and weight {copy} is not {name}: say false, or take the weight out")


class LstmSpeculator:
    """Gates and a cell beside the state, which all tokens add the same embedding to: Arctic's LSTM variant of the MLP speculator."""

    prefix = None

    def __init__(self, spec: LstmSpec, target: Model, weights: Weights) -> None:
        self._spec, self._target, inner, prefix = spec, target, spec.inner, spec.prefix
        self.num_heads, self.tap_width = spec.num_drafts, spec.hidden_size
        self.tapped_layers: tuple[int, ...] = ()
        self._embedding = weights.whole(f"{prefix}forget_emb.0.weight", (spec.vocab_size, inner))
        self._projections = [weights.linear(f"{prefix}projs.{i}", 4 * inner, inner if i else spec.hidden_size) for i in range(2)]
        norms = ([weights.whole(f"{prefix}{name}_ln.0.{part}", (inner,)) for part in ("weight", "bias")] for name in ("cell", "state"))
        self._cell_norm, self._state_norm = norms
        self._scores = _make_scores(f"{prefix}head.0", spec.vocab_size, inner, weights, target.draft_ids)
        self._spread = spread_over(target, target.draft_ids)
        self._token_weight = token_weight(spec.num_predicted, inner)

    def tap(self, hidden: torch.Tensor, entering: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return hidden

    def begin(self, state: torch.Tensor, token_ids: torch.Tensor) -> list[torch.Tensor]:
        if self._spec.is_input_scaled:
            state = scale_input(state)
        return self.go_on([state, state.new_zeros(len(state), self._spec.inner)], token_ids, 0)

    def go_on(self, states: list[torch.Tensor], token_ids: torch.Tensor, step: int) -> list[torch.Tensor]:
        """State and cell."""
        state, cell = states
        added = self._projections[min(step, 1)](state).unflatten(1, (4, -1)) + self._token_weight * self._embedding[token_ids][:, None]
        forget, take, give = added[:, :3].sigmoid().unbind(1)
        cell = cell * forget + _activate(added[:, 3], self._cell_norm) * take
        return [_activate(cell, self._state_norm) * give, cell]

    def logits(self, states: list[torch.Tensor], step: int) -> torch.Tensor:
        return self._spread(self._scores(states[0]))


def token_weight(num_predicted: int, inner: int) -> float:
    """Shares of state and token that keep the sum's size: that of the token over that of the state; the norm after it takes care of the rest."""
    state_weight = 0.5 ** (0.5 / num_predicted)
    return math.sqrt((1 - state_weight**2) * (inner / 2)) / state_weight


def scale_input(state: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(state, (state.shape[-1],), None, NORM_EPS) / math.sqrt(2)


def _activate(x: torch.Tensor, norm: list[torch.Tensor]) -> torch.Tensor:
    weight, bias = norm
    return F.gelu(F.rms_norm(x, (x.shape[-1],), weight, NORM_EPS) + bias)


def _make_scores(name: str, rows: int, columns: int, weights: Weights, draft_ids: torch.Tensor | None) -> Linear:
    """A head, with its bias if it has one, of all its tokens or of draft_ids alone."""
    weight, bias = weights.whole(f"{name}.weight", (rows, columns)), None
    if f"{name}.bias" in weights.checkpoint:
        bias = weights.whole(f"{name}.bias", (rows,))
    if draft_ids is not None:
        weight, bias = weight[draft_ids], None if bias is None else bias[draft_ids]
    return make_linear(weight, bias)


def load_heads(
    method: str,
    directory: str | Path,
    target_directory: str | Path,
    target: Model,
    dtype: torch.dtype,
    device: torch.device,
    quantization: QuantizationConfig | None = None,
    load_format: str = "safetensors",
) -> Heads:
    """The heads in a folder. Raises ModelError for what is missing, damaged, or not made for this target."""
    with open_drafter(directory, dtype, device, load_format) as checkpoint:
        spec = read_heads_spec(method, directory, checkpoint.names, target_directory)
        weights = Weights(checkpoint, dtype, device, Ranks(), quantization)
        if isinstance(spec, SpeculatorSpec):
            return MlpSpeculator(spec, checkpoint, target, weights)
        if isinstance(spec, LstmSpec):
            return LstmSpeculator(spec, target, weights)
        if device.type == "cuda" and spec.prefix is not None:
            check_gpu_layers([spec.prefix.layer], spec.where, dtype)
        return ResidualHeads(spec, checkpoint, target, weights)
