"""Projections of quantized weights: activations stay in the model's dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from backend.quantization.stored import Quantized
from backend.quantization.unfused import UnfusedLinear
from kernels import ops


class QuantizedLinear(UnfusedLinear):
    """One projection, in 8 or 4 bits."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Quantized, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight.pack(), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.quantized_linear(x, self.weight, self.bias)


class JoinedLinear(UnfusedLinear):
    """Projections of one input that are stored differently, side by side in the result."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Callable[[torch.Tensor], torch.Tensor]]) -> None:
        self.parts = parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)
