"""Projections whose weights are stored in 8 or 4 bits, by groups of inputs that share a scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels import reference


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [N, K] as kernels read it: (digit - zero) * scale."""

    codes: torch.Tensor
    """[N, K] int8 or float8_e4m3fn; of 4 bits [N, K / 2] uint8, whose byte j holds the digits 0 to 15 of columns j (low) and j + K / 2 (high)."""
    scales: torch.Tensor
    """[N, G] float32: each is of K / G neighbouring columns."""
    zeros: torch.Tensor | None = None
    """[N, G] float32; None: 0, and 8 of 4 bits."""
    order: torch.Tensor | None = None
    """[K] int64: which column of x each column is multiplied with; one past x's last is a padding of zeros. None: they lie as x's do."""
    bits: int = 8

    @property
    def num_columns(self) -> int:
        """K, paddings included."""
        return self.codes.shape[1] * (2 if self.bits == 4 else 1)

    def ordered(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, in] -> [M, K] as the columns lie. A column of zeros is there for the paddings."""
        return x if self.order is None else F.pad(x, (0, 1)).index_select(1, self.order)

    def expand(self) -> torch.Tensor:
        """The weights [N, K] in float32, in the stored order of columns."""
        shape = (len(self.scales), self.num_columns)
        return reference.expand_rows(self, slice(None), torch.empty(shape, dtype=torch.float32, device=self.scales.device))


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, in] times a quantized weight [N, in] transposed, plus bias [N] -> [M, N]."""
    return reference.quantized_linear(x, weight, bias)
