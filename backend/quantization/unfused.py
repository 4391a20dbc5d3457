"""What stands before and after projections, one operation after the other: for weights that no kernel fuses them with."""

from __future__ import annotations

import torch

from kernels import ops


def put(made: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """What was made, in `out` if that is given."""
    return made if out is None else out.copy_(made)


class UnfusedLinear:
    """The rest of a Linear, from its product alone."""

    __slots__ = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def takes_pieces(self, x: torch.Tensor) -> bool:
        return True

    def after_norm(self, x: torch.Tensor, norm: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
        return put(self(ops.rms_norm(x, norm, eps)), out)

    def gated_after_norm(self, x: torch.Tensor, norm: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
        return put(ops.silu_mul(self(ops.rms_norm(x, norm, eps))), out)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        residual.add_(self(x))

    def write_to(self, out: torch.Tensor, x: torch.Tensor, is_ready: bool = False) -> None:
        out.copy_(self(x))
