"""Linear layers and experts by weight scheme. Every projection of every model is built by `make_linear`, every mixture's experts by
`make_experts`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from backend.errors import ModelError
from backend.quantization.dense import DenseLinear, PackedLinear, PanelLinear
from backend.quantization.experts import Activation, Experts, QuantizedExperts, SingleExperts, StackedExperts, stack
from backend.quantization.quantized_linear import JoinedLinear, QuantizedLinear, count_written
from backend.quantization.schemes import PIECE, quantize
from backend.quantization.stored import Quantized, Stored, cut_columns, cut_rows, join, pad_columns, pad_rows
from kernels import ops

__all__ = [
    "PIECE",
    "Activation",
    "Experts",
    "JoinedLinear",
    "Linear",
    "Quantized",
    "QuantizedLinear",
    "Stored",
    "count_written",
    "cut_columns",
    "cut_rows",
    "make_experts",
    "make_linear",
    "make_stored_experts",
    "quantize",
]


class Linear(Protocol):
    """x [T, in] -> [T, out], alone and with what stands before and after projections in a layer: fused where a kernel does both."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def takes_pieces(self, x: torch.Tensor) -> bool:
        """Whether products of x's rows, some after the others, take about as long as that of all together."""
        ...

    def after_norm(self, x: torch.Tensor, norm: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
        """Of x normalised with the weights norm [in]; in `out` [T, out] if that is given."""
        ...

    def gated_after_norm(self, x: torch.Tensor, norm: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
        """silu(gate) * up [T, out / 2] of x normalised, in `out` if that is given; the weights are gate | up."""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the product to residual [T, out] in place."""
        ...

    def write_to(self, out: torch.Tensor, x: torch.Tensor, is_ready: bool = False) -> None:
        """Puts the product in the place of what out [T, out] has. is_ready: x is older than what runs right before, which out is not of: a kernel
        may run beside that (`kernels.linear.write_linear`)."""
        ...


def make_linear(weight: Stored | Sequence[Stored], bias: torch.Tensor | None = None) -> Linear:
    """The projection of weight [out, in], or of several of one input, one below the other, as each is stored; bias [out]."""
    parts = join([weight] if isinstance(weight, (torch.Tensor, Quantized)) else weight)
    if len(parts) == 1:
        return _make_single(parts[0], bias)
    biases = [None] * len(parts) if bias is None else bias.split([len(part.codes if isinstance(part, Quantized) else part) for part in parts])
    return JoinedLinear([_make_single(part, own) for part, own in zip(parts, biases, strict=True)])


def _make_single(weight: Stored, bias: torch.Tensor | None) -> Linear:
    if isinstance(weight, Quantized):
        return QuantizedLinear(weight, bias)
    for kind in (PanelLinear, PackedLinear):
        if kind.is_usable(weight):
            return kind(weight, bias)
    return DenseLinear(weight.clone() if weight.device.type == "cpu" else weight, bias)  # a view of a file would keep all of it mapped


def make_experts(gate_up: torch.Tensor, down: torch.Tensor, activation: Activation, first: int = 0, *, is_silu: bool = False) -> Experts:
    """Experts of weights gate_up [E, 2 inner, hidden] (gate | up) and down [E, hidden, inner], the first of which is number `first`.

    is_silu: whether activation is silu(gate) * up. The one place that chooses how their products run.
    """
    if gate_up.device.type == "cuda":
        return StackedExperts(gate_up, down, activation, first, is_silu)
    return SingleExperts([(make_linear(rows), make_linear(columns)) for rows, columns in zip(gate_up, down, strict=True)], activation, first)


def make_stored_experts(
    experts: Iterable[tuple[Sequence[Stored], Stored]],
    device: torch.device,
    activation: Activation,
    first: int = 0,
    *,
    is_silu: bool = False,
    where: str = "",
) -> Experts:
    """The same of experts that are not all plain tensors: of each gate and up, and down. where: what an error names. Raises ModelError."""
    if device.type != "cuda":
        return SingleExperts([(make_linear(gate_up), make_linear(down)) for gate_up, down in experts], activation, first)
    experts = list(experts)
    if all(isinstance(weight, torch.Tensor) for gate_up, down in experts for weight in (*gate_up, down)):  # 4-bit floats are kept so
        plain = [(torch.cat(list(gate_up)), down) for gate_up, down in experts]  # type: ignore[arg-type]
        gate_up, down = (torch.stack([pair[i] for pair in plain]) for i in (0, 1))  # type: ignore[misc]
        return StackedExperts(gate_up, down, activation, first, is_silu)

    def only(weights: Sequence[Stored]) -> Quantized:
        joined = join(weights)
        if len(joined) > 1 or isinstance(joined[0], torch.Tensor):
            raise ModelError(f"{where}: a GPU serves experts whose projections are all quantized, and alike; use --device cpu")
        return joined[0]

    def missing(down: Quantized) -> int:
        """Inputs up to whole steps of the kernels, which a rank's share of them may lack."""
        return -down.codes.shape[1] % (ops.STORED_STEP * (2 if down.bits == 4 else 1))

    def padded(gate_up: Sequence[Stored], down: Quantized) -> Sequence[Stored]:
        """With as many outputs as `down` has inputs then, all zero."""
        count = missing(down)
        return [pad_rows(part, count) if count and isinstance(part, Quantized) else part for part in gate_up]

    count = len(experts)
    downs = [only([down]) for _, down in experts]
    into = stack((only(padded(own, down)) for (own, _), down in zip(experts, downs, strict=True)), count, where)
    back = stack((pad_columns(down, missing(down)) if missing(down) else down for down in downs), count, where)
    return QuantizedExperts(into, back, count, activation, first, is_silu)
