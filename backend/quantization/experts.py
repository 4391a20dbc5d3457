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

    @property
    def own(self) -> tuple[int, int] | None:
        """The first of them and their number, where the router is to sort what it chooses by expert."""
        ...

    def __call__(self, routing: ops.Routing, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Of T tokens -> [T, hidden]: the rank's share of the sum; or residual [T, hidden], which it is added to in place."""
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

    own = None

    def __call__(self, routing: ops.Routing, residual: torch.Tensor | None = None) -> torch.Tensor:
        made = ops.mix_experts(routing.x, routing.experts, routing.weights, self.experts, self._first)
        return made if residual is None else residual.add_(made)


class StackedExperts:
    """All experts' weights in one piece each way: for a GPU, where kernels find those that are hit."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation, first: int, is_silu: bool) -> None:
        self._gate_up, self._down, self._activation, self._first, self._is_silu = gate_up, down, activation, first, is_silu

    @property
    def own(self) -> tuple[int, int]:
        return self._first, len(self._down)

    def __call__(self, routing: ops.Routing, residual: torch.Tensor | None = None) -> torch.Tensor:
        own = (self._gate_up, self._down, self._activation, self._is_silu, self._first)
        return ops.mix_experts_on_gpu(routing.x, routing.experts, routing.weights, *own, residual, routing.lists)
