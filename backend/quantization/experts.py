"""Experts of a mixture by weight scheme. Those of every model are built by `make_experts`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kernels import ops

Product = Callable[[torch.Tensor], torch.Tensor]
"""x [n, in] -> [n, out]."""
Activation = Callable[[torch.Tensor], torch.Tensor]
"""gate | up [n, 2 inner] -> [n, inner]."""


class Experts(Protocol):
    """The experts of one mixture that a rank holds, whole or in part."""

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], the experts of each token [T, k] int64, and the weights of what they add [T, k] float32 -> [T, hidden]: the
        rank's share of the sum."""
        ...


class _Expert:
    __slots__ = ("_activation", "down", "gate_up")

    def __init__(self, gate_up: Product, down: Product, activation: Activation) -> None:
        self.gate_up, self.down, self._activation = gate_up, down, activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._activation(self.gate_up(x)))


class SingleExperts:
    """One product after the other, of the experts that are hit: for CPU, where each expert's weights lie as its own product likes them."""

    def __init__(self, products: Sequence[tuple[Product, Product]], activation: Activation, first: int) -> None:
        """products: of each expert gate | up, and down."""
        self.experts = [_Expert(gate_up, down, activation) for gate_up, down in products]
        self._first = first

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return ops.mix_experts(x, experts, weights, self.experts, self._first)
