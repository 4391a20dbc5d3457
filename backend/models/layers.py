"""A checkpoint's weights as layers take them, already split for the rank that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backend.errors import ModelError
from backend.heap import give_back
from backend.models.latent_spec import LatentSpec
from backend.models.loader import Checkpoint
from backend.models.spec import AttentionSpec, Projection
from backend.parallel.ranks import Ranks
from backend.quantization import PIECE, Linear, Quantized, Stored, count_written, cut_columns, cut_rows, make_linear, quantize
from backend.quantization_config import QuantizationConfig
from kernels import ops

ATTENTION = "attention"
"""The cache spec of a model's keys and values: two planes a layer."""


@dataclass(slots=True)
class Wanted:
    """Of which tokens the states are wanted, where it is not all: the last layer computes but keys and values for the others."""

    rows: torch.Tensor
    """[R] int64"""
    plan: ops.Plan
    """Of the attention of these rows alone."""


@dataclass(frozen=True, slots=True)
class Part:
    """Output rows that are split over the ranks in units, such as a head's."""

    name: str
    rows: int
    unit: int = 1
    order: torch.Tensor | None = None
    """[unit]: in which order a unit's rows are wanted."""
    can_repeat: bool = False
    """Several ranks may hold the same unit: see `Ranks.part`."""


def own_heads(attention: AttentionSpec | LatentSpec, ranks: Ranks) -> ops.Heads:
    """Of a layer's attention, on this rank."""
    num_q, num_kv, size = attention.heads
    own_q, own_kv = ranks.part(num_q, "num_attention_heads"), ranks.part(num_kv, "num_key_value_heads", can_repeat=True)
    return ops.Heads(own_q.stop - own_q.start, own_kv.stop - own_kv.start, size, *attention.latent)


class Weights:
    """A checkpoint seen from one rank: reads, splits, converts."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks,
        quantization: QuantizationConfig | None = None,
        *,
        is_expert_parallel: bool = False,
    ) -> None:
        """quantization: how plain weights are rounded; is_expert_parallel: whole experts are spread over the ranks; else each is split."""
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.ranks = ranks
        self.quantization = quantization or QuantizationConfig()
        self.is_expert_parallel = is_expert_parallel
        self.most_written = 0
        """Weights that one product writes out, at most."""
        self.num_multiplied = 0
        """Weights of projections, of this rank, that every token is multiplied with."""
        self._num_rounded = 0
        """Weights, since freed memory was given back."""

    def empty(self, *shape: int) -> torch.Tensor:
        """Room for what is read piece by piece."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def exact(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A weight in float32, whatever the model's dtype."""
        return self._watched(name, self._plain(name, shape).to(self.device, torch.float32, copy=True))

    def whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Copied, as all that stays: no view of a file, which would keep all of it mapped, and change when somebody overwrites it."""
        return self._watched(name, self._plain(name, shape).to(self.device, self.dtype, copy=True))

    def _watched(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """As it is used: NaN or infinity would spoil answers long after the start, and what does not fit the dtype has become infinity."""
        self.checkpoint.watch([name], weight)
        return weight

    def _plain(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """As numbers, however they are stored."""
        if len(shape) != 2 or not name.endswith(".weight"):
            return self.checkpoint.get(name, shape)
        stored = self.checkpoint.get_projection(name.removesuffix(".weight"), *shape)
        return stored.expand() if isinstance(stored, Quantized) else stored

    def linear(self, name: str, out_features: int, in_features: int) -> Linear:
        """A projection that every rank holds whole, and that is never rounded."""
        return make_linear(self.whole(f"{name}.weight", (out_features, in_features)))

    def stored(self, projection: Projection, scheme: str | None) -> Stored:
        """A projection's weight [out, in], rounded as `scheme` says. Raises ModelError where it is rounded already."""
        weight = self.checkpoint.get_projection(projection.name, projection.out_features, projection.in_features)
        return self.hold(projection.name, weight, scheme)

    def hold(self, name: str, weight: Stored, scheme: str | None) -> Stored:
        """The same of one that has been read, called `name`."""
        if isinstance(weight, Quantized):
            if scheme is not None:
                raise ModelError(f"{self.checkpoint.directory}: {name} is quantized already; leave its type ({scheme}) out of quantization")
            return weight.to(self.device)
        if scheme is None:
            return self._watched(f"{name}.weight", weight.to(self.device, self.dtype))
        rounded = self.round(name, weight.to(self.device), scheme)
        self._num_rounded += weight.numel()
        if self._num_rounded >= 4 * PIECE:  # what they took for a while is much beside what stays
            self._num_rounded = 0
            give_back()
        return rounded

    def norm(self, name: str, size: int, offset: float = 0.0) -> torch.Tensor:
        """A norm's weights; offset: what is added to the stored ones."""
        stored = self.checkpoint.get(name, (size,))
        return self._watched(name, (stored.float() + offset if offset else stored).to(self.device, self.dtype, copy=True))

    def round(self, name: str, weight: torch.Tensor, scheme: str) -> Quantized:
        """A weight [out, in] that is stored under `name`, rounded. Raises ModelError for one that is not finite."""
        try:
            return quantize(weight, scheme)
        except ValueError as error:
            raise ModelError(f"{self.checkpoint.directory}: {name} cannot be rounded to {scheme}: {error}") from None

    def split_rows(self, projections: Sequence[Projection], parts: Sequence[Part] | None = None) -> Linear:
        """Projections of one input as one, each with its share of output rows on this rank.

        parts: what the rows are split in, of one projection that holds several or of each projection; None: each is one.
        """
        stored = [self._read(projection, self.quantization.dense_quant_type) for projection in projections]
        parts = parts or [Part(projection.name, projection.out_features) for projection in projections]
        has_bias = any(bias is not None for _, bias in stored)  # the others' are zeros
        weights, biases, begin = [], [], 0
        for i, part in enumerate(parts):
            weight, bias = stored[i if len(stored) > 1 else 0]
            own = self.ranks.part(part.rows // part.unit, part.name, can_repeat=part.can_repeat)
            rows: slice | torch.Tensor = slice(begin + own.start * part.unit, begin + own.stop * part.unit)
            if part.order is not None:
                rows = (begin + torch.arange(own.start, own.stop)[:, None] * part.unit + part.order).flatten()
            weights.append(cut_rows(weight, rows))
            if has_bias:
                whole = bias if bias is not None else torch.zeros(projections[i].out_features)
                biases.append(whole[rows].to(self.device, self.dtype))
            begin += part.rows if len(stored) == 1 else 0
        return self._make(weights, torch.cat(biases) if biases else None)

    def head(self, projection: Projection, token_ids: torch.Tensor | None = None) -> Linear:
        """The projection that scores the vocabulary, or of it the tokens `token_ids` [N], on the host, alone: this rank's share of them."""
        weight, bias = self._read(projection, self.quantization.head_quant_type)
        own = self.ranks.vocabulary(projection.out_features if token_ids is None else len(token_ids))
        rows = own if token_ids is None else token_ids[own]
        return self._make([cut_rows(weight, rows)], None if bias is None else bias[rows].to(self.device, self.dtype))

    def _read(self, projection: Projection, scheme: str | None) -> tuple[Stored, torch.Tensor | None]:
        name = f"{projection.name}.bias"
        bias = self.checkpoint.get(name, (projection.out_features,)) if projection.has_bias or name in self.checkpoint else None
        if bias is not None:
            bias = self._watched(name, bias.to(self.device, self.dtype))
        return self.stored(projection, scheme), bias

    def split_columns(self, projection: Projection) -> Linear:
        """A projection of an input that is split over the ranks; its results add up (`Ranks.all_reduce`)."""
        weight, bias = self._read(projection, self.quantization.dense_quant_type)
        own = self.ranks.part(projection.in_features, projection.name)
        if bias is not None:
            bias = bias.to(self.device, self.dtype) if self.ranks.rank == 0 else None
        return self._make([cut_columns(weight, own)], bias)

    def _make(self, weights: Sequence[Stored], bias: torch.Tensor | None) -> Linear:
        if len(weights) == 1 and isinstance(weights[0], torch.Tensor):  # several are put together anew
            weights = [_apart(weights[0])]
        linear = make_linear(weights, bias)
        self.most_written = max(self.most_written, count_written(linear))
        self.num_multiplied += sum((own if isinstance(own, torch.Tensor) else own.codes).numel() for own in weights)
        return linear


def _apart(weight: torch.Tensor) -> torch.Tensor:
    """Without what it is a part of: a rank's share of a projection, as of the head, would keep all of it on its GPU. (On CPU layers copy.)"""
    is_part = weight.device.type != "cpu" and weight.untyped_storage().nbytes() > weight.nbytes
    return weight.clone() if is_part else weight
