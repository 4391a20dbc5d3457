"""Weights that are stored in 8 or 4 bits, by groups of inputs that share a scale, as kernels read them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kernels import reference
from kernels._load import ELEMENTS

STEP, PIECE = 64, 16
"""Bytes of a row that kernels of few tokens take at a time, and that lie interleaved."""
KINDS = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.uint8: 2}
ORDER = [2 * (byte // 4) + byte % 2 + (8 if byte % 4 > 1 else 0) for byte in range(PIECE)]
"""Of PIECE neighbouring bytes of a row, which one lies where: what one thread needs for tensor cores' A operand lies together."""
NATURAL = [ORDER.index(byte) for byte in range(PIECE)]

Defines = dict[str, "int | str"]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [N, K]: (digit - zero) * scale."""

    codes: torch.Tensor
    """[N, K] int8 or float8_e4m3fn; of 4 bits [N, K / 2] uint8, whose byte j holds the digits 0 to 15 of columns j (low) and j + K / 2 (high)."""
    scales: torch.Tensor
    """[N, G] float32: each is of K / G neighbouring columns."""
    zeros: torch.Tensor | None = None
    """[N, G] float32; None: 0, and 8 of 4 bits."""
    order: torch.Tensor | None = None
    """[K] int64: which column of x each column is multiplied with; one past x's last is a padding of zeros. None: they lie as x's do."""
    bits: int = 8
    is_interleaved: bool = False
    """Whether bytes of codes lie as ORDER says, and scales and zeros a group after the other: as GPUs' kernels have them."""

    @property
    def num_columns(self) -> int:
        """K, paddings included."""
        return self.codes.shape[1] * (2 if self.bits == 4 else 1)

    @property
    def group_size(self) -> int:
        return self.num_columns // self.scales.shape[1]

    @property
    def scale_stride(self) -> int:
        """Where interleaved: rows between a group's scales and the next one's."""
        return self.scales.stride(1)

    def ordered(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, in] -> [M, K] as the columns lie. A column of zeros is there for the paddings."""
        return x if self.order is None else F.pad(x, (0, 1)).index_select(1, self.order)

    def part(self, number: int, count: int) -> QuantizedWeight:
        """One of so many parts of equal size, one below the other."""
        size = len(self.codes) // count
        rows = slice(number * size, (number + 1) * size)
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=None if self.zeros is None else self.zeros[rows])

    def expand(self) -> torch.Tensor:
        """The weights [N, K] in float32, in the stored order of columns."""
        shape = (len(self.scales), self.num_columns)
        return reference.expand_rows(self, slice(None), torch.empty(shape, dtype=torch.float32, device=self.scales.device))

    def interleave(self) -> QuantizedWeight:
        """As GPUs' kernels have it; itself where it is that already, or rows are no multiple of PIECE bytes."""
        if self.is_interleaved or self.codes.shape[1] % PIECE:
            return self
        zeros = None if self.zeros is None else _by_group(self.zeros)
        return replace(self, codes=_permute(self.codes, ORDER), scales=_by_group(self.scales), zeros=zeros, is_interleaved=True)

    def natural_codes(self, rows: slice) -> torch.Tensor:
        """Of these rows, not interleaved."""
        return _permute(self.codes[rows], NATURAL) if self.is_interleaved else self.codes[rows]


@functools.cache
def _order_on(device: torch.device, order: tuple[int, ...]) -> torch.Tensor:
    """Made once: nothing is copied from the host while a graph is captured."""
    return torch.tensor(order, device=device)


def _permute(codes: torch.Tensor, order: list[int]) -> torch.Tensor:
    pieces = codes.view(torch.uint8).unflatten(1, (-1, PIECE))
    return pieces.index_select(2, _order_on(codes.device, tuple(order))).flatten(1).view(codes.dtype)


def _by_group(scales: torch.Tensor) -> torch.Tensor:
    """The same [N, G], stored as [G, N]."""
    return scales.t().contiguous().t()


def is_grouped(weight: QuantizedWeight) -> bool:
    """Whether sums of a row's columns are scaled, or zeros subtracted, before all are added up."""
    return weight.scales.shape[1] > 1 or weight.zeros is not None


def kind_of(dtype: torch.dtype, weight: QuantizedWeight) -> Defines:
    """What quantized.cuh is compiled for."""
    return {"ELEMENT": ELEMENTS[dtype], "KIND": KINDS[weight.codes.dtype], "ZEROS": int(weight.zeros is not None)}


def pointer(tensor: torch.Tensor | None) -> torch.Tensor | int:
    """As kernels take it: 0 for none."""
    return 0 if tensor is None else tensor
