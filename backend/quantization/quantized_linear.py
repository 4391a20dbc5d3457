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

    @property
    def num_weights(self) -> int:
        """Of them all, which products of many tokens write out."""
        return len(self.weight.scales) * self.weight.num_columns

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.quantized_linear(x, self.weight, self.bias)

    def after_norm(self, x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        return ops.quantized_norm_linear(x, norm, eps, self.weight, self.bias)

    def gated_after_norm(self, x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        if self.bias is not None:
            return super().gated_after_norm(x, norm, eps)
        return ops.quantized_norm_gated_linear(x, norm, eps, self.weight)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        ops.quantized_add_linear(residual, x, self.weight, self.bias)

    def write_to(self, out: torch.Tensor, x: torch.Tensor, is_ready: bool = False) -> None:
        ops.write_quantized_linear(out, x, self.weight, self.bias, is_ready)


def count_written(linear: object) -> int:
    """Weights that a product of this projection may write out at a time."""
    return linear.num_weights if isinstance(linear, (QuantizedLinear, JoinedLinear)) else 0


class JoinedLinear(UnfusedLinear):
    """Projections of one input that are stored differently, side by side in the result."""

    __slots__ = ("parts",)

    @property
    def num_weights(self) -> int:
        return max(count_written(part) for part in self.parts)

    def __init__(self, parts: Sequence[Callable[[torch.Tensor], torch.Tensor]]) -> None:
        self.parts = parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)
