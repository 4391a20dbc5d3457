"""Layers that model families share, built already split for the rank that holds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from backend.errors import ModelError
from backend.models.loader import Checkpoint
from backend.parallel.ranks import Ranks
from backend.quantization import Linear, make_linear


class Weights:
    """A checkpoint seen from one rank: reads, splits, converts."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, ranks: Ranks, quantization: str | None = None) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.ranks = ranks
        self.quantization = quantization

    def whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.checkpoint.get(name, shape).to(self.device, self.dtype)

    def linear(self, name: str, out_features: int, in_features: int) -> Linear:
        """A projection that every rank holds whole."""
        return make_linear(self.whole(f"{name}.weight", (out_features, in_features)), None, self.quantization)

    def split_rows(self, parts: Sequence[tuple[str, int]], in_features: int, unit: int = 1) -> Linear:
        """Several projections of one input as one; each gives this rank its share of output rows, in units of `unit`."""
        weights, biases = [], []
        for name, out_features in parts:
            own = self.ranks.part(out_features // unit, name)
            rows = slice(own.start * unit, own.stop * unit)
            weights.append(self.checkpoint.get(f"{name}.weight", (out_features, in_features))[rows])
            if f"{name}.bias" in self.checkpoint:
                biases.append(self.checkpoint.get(f"{name}.bias", (out_features,))[rows])
        bias = torch.cat(biases).to(self.device, self.dtype) if biases else None
        return make_linear(torch.cat(weights).to(self.device, self.dtype), bias, self.quantization)

    def split_columns(self, name: str, out_features: int, in_features: int) -> Linear:
        """A projection of an input that is split over the ranks; its results add up (`Ranks.all_reduce`)."""
        own = self.ranks.part(in_features, name)
        weight = self.checkpoint.get(f"{name}.weight", (out_features, in_features))[:, own].contiguous()
        bias = None
        if f"{name}.bias" in self.checkpoint and self.ranks.rank == 0:
            bias = self.whole(f"{name}.bias", (out_features,))
        return make_linear(weight.to(self.device, self.dtype), bias, self.quantization)


def rope_frequencies(config: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Inverse frequencies [head_dim / 2] in float32, with the scaling that the config names: default, linear or llama3.

    Llama 3.1's rule keeps short wavelengths, divides long ones by `factor`, and blends between.
    Raises ModelError for a scaling that is not known.
    """
    # Newer files keep both in rope_parameters, older ones apart.
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or parameters
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / scaling["factor"]
    if kind != "llama3":
        raise ModelError(f"rope scaling {kind!r} is not supported; known: default, linear, llama3")
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    turns = original * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def rope_tables(frequencies: torch.Tensor, length: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [length, 1, D] as `kernels.reference.append_kv` wants them: sin negated in its first half."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    return cos[:, None].to(device, dtype), sin[:, None].to(device, dtype)
