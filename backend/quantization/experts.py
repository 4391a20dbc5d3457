"""Experts of a mixture by weight scheme. Those of every model are built by `make_experts`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from backend.errors import ModelError
from backend.quantization.stored import Quantized
from kernels import ops

Product = Callable[[torch.Tensor], torch.Tensor]
"""x [n, in] -> [n, out]."""
Activation = Callable[[torch.Tensor], torch.Tensor]
"""gate | up [n, 2 inner] -> [n, inner]."""


class Experts(Protocol):
    """The experts of one mixture that a rank holds, whole or in part."""

    def groups(self, x: torch.Tensor, num_chosen: int) -> ops.ExpertGroups | None:
        """How the router is to sort by expert what tokens x [T, hidden] choose; None: it is to leave that."""
        ...

    def __call__(self, routing: ops.Routing, residual: torch.Tensor | None = None, beside: torch.Tensor | None = None) -> torch.Tensor:
        """Of T tokens -> [T, hidden]: the rank's share of the sum; or residual [T, hidden], which it is added to in place. beside [T, hidden]:
        what is added to that, as of shared experts."""
        ...

    @property
    def num_written(self) -> int:
        """Weights that a product may write out at a time."""
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

    num_written = 0

    def groups(self, x: torch.Tensor, num_chosen: int) -> None:
        return None

    def __call__(self, routing: ops.Routing, residual: torch.Tensor | None = None, beside: torch.Tensor | None = None) -> torch.Tensor:
        made = ops.mix_experts(routing.x, routing.experts, routing.weights, self.experts, self._first)
        return ops.add_mixed(made, residual, beside)


class StackedExperts:
    """All experts' weights in one piece each way: for a GPU, where kernels find those that are hit."""

    num_written = 0

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation, first: int, is_silu: bool) -> None:
        self._gate_up, self._down, self._activation, self._first, self._is_silu = gate_up, down, activation, first, is_silu

    def groups(self, x: torch.Tensor, num_chosen: int) -> ops.ExpertGroups | None:
        num_own, *sizes = self._down.shape
        return ops.choose_groups(len(x), num_chosen, self._first, num_own, x.dtype, x.device, (sizes[0], sizes[1]))

    def __call__(self, routing: ops.Routing, residual: torch.Tensor | None = None, beside: torch.Tensor | None = None) -> torch.Tensor:
        own = (self._gate_up, self._down, self._activation, self._is_silu, self._first)
        return ops.mix_experts_on_gpu(routing.x, routing.experts, routing.weights, *own, residual, beside, routing.lists)


class QuantizedExperts:
    """The same of weights that are stored in 8 or 4 bits."""

    def __init__(
        self, gate_up: ops.QuantizedWeight, down: ops.QuantizedWeight, count: int, activation: Activation, first: int, is_silu: bool
    ) -> None:
        """gate_up, down: of all `count` experts, one below the other."""
        self._gate_up, self._down, self._activation, self._is_silu = gate_up, down, activation, is_silu
        self._first, self._count = first, count

    @property
    def num_written(self) -> int:
        return ops.count_expanded(self._gate_up, self._down)

    def groups(self, x: torch.Tensor, num_chosen: int) -> ops.ExpertGroups | None:
        return ops.choose_quantized_groups(len(x), num_chosen, self._first, self._count, self._gate_up, self._down, x.dtype)

    def __call__(self, routing: ops.Routing, residual: torch.Tensor | None = None, beside: torch.Tensor | None = None) -> torch.Tensor:
        own = (self._gate_up, self._down, self._activation, self._is_silu, self._first)
        return ops.mix_quantized_experts(routing.x, routing.experts, routing.weights, *own, residual, beside, routing.lists)


def stack(weights: Iterable[Quantized], count: int, where: str) -> ops.QuantizedWeight:
    """Of `count` experts the same projection, one below the other, as kernels read them. where: what an error names. Raises ModelError."""
    stacked: ops.QuantizedWeight | None = None
    for number, weight in enumerate(weights):
        own = weight.pack()
        if own.order is not None:
            raise ModelError(f"{where}: on a GPU experts' columns must lie in order, in groups of one size (no desc_act); use --device cpu")
        if stacked is None:
            codes = own.codes.new_empty(count * len(own.codes), own.codes.shape[1])
            scales, zeros = (None if part is None else part.new_empty(part.shape[1], count * len(part)).t() for part in (own.scales, own.zeros))
            assert scales is not None
            stacked = ops.QuantizedWeight(codes, scales, zeros, None, own.bits, own.is_interleaved)
        for target, part in zip((stacked.codes, stacked.scales, stacked.zeros), (own.codes, own.scales, own.zeros)):
            if target is None and part is None:
                continue
            if target is None or part is None or part.dtype != target.dtype or part.shape != (len(target) // count, target.shape[1]):
                kinds = " and ".join("no zeros" if t is None else f"{t.dtype} {list(t.shape)}" for t in (target, part))
                raise ModelError(f"{where}: experts are stored differently ({kinds}); a GPU serves such as are alike; use --device cpu")
            target[number * len(part) : (number + 1) * len(part)] = part
    assert stacked is not None, "a mixture has experts"
    return stacked
