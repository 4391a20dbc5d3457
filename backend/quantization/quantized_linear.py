"""Projections of quantized weights: activations stay in the model's dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from backend.quantization.stored import Quantized
from backend.quantization.unfused import UnfusedLinear, put
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

    def takes_pieces(self, x: torch.Tensor) -> bool:
        return ops.is_rounded(x, self.weight)  # others write their weights out for each product of many tokens

    def after_norm(self, x: torch.Tensor, norm: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
        return put(ops.quantized_norm_linear(x, norm, eps, self.weight, self.bias), out)

    def gated_after_norm(self, x: torch.Tensor, norm: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.bias is not None:
            return super().gated_after_norm(x, norm, eps, out)
        return put(ops.quantized_norm_gated_linear(x, norm, eps, self.weight), out)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        ops.quantized_add_linear(residual, x, self.weight, self.bias)

    def write_to(self, out: torch.Tensor, x: torch.Tensor, is_ready: bool = False) -> None:
        ops.write_quantized_linear(out, x, self.weight, self.bias, is_ready)


def count_written(linear: object) -> int:
    """Weights that a product of this projection may write out at a time."""
    return linear.num_weights if isinstance(linear, (QuantizedLinear, JoinedLinear)) else 0


class Single(Protocol):
    """What is asked of each part of a `JoinedLinear`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def takes_pieces(self, x: torch.Tensor) -> bool: ...


class JoinedLinear(UnfusedLinear):
    """Projections of one input that are stored differently, side by side in the result."""

    __slots__ = ("parts",)

    @property
    def num_weights(self) -> int:
        return max(count_written(part) for part in self.parts)

    def __init__(self, parts: Sequence[Single]) -> None:
        self.parts = parts

    def takes_pieces(self, x: torch.Tensor) -> bool:
        return all(part.takes_pieces(x) for part in self.parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)
