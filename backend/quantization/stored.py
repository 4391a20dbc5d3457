"""Quantized weights as they come from a checkpoint or from rounding, before they are cut for ranks and packed for kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels import ops

SMALLEST_GROUP = 16
"""Of groups that are cut into pieces of one size. Below it they are padded."""
PADDED_GROUP = 32
"""To multiples of this."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight [out, in]: (digit - zero) * scale."""

    codes: torch.Tensor
    """[out, in]: int8 or float8_e4m3fn; of 4 bits digits 0 to 15 as int8."""
    scales: torch.Tensor
    """[out, G] float32."""
    zeros: torch.Tensor | None
    """[out, G] float32; None: 0, and 8 of 4 bits."""
    groups: torch.Tensor
    """[in] int64: which group each input belongs to."""
    bits: int = 8

    def rows(self, rows: slice | torch.Tensor) -> Quantized:
        return replace(self, codes=take_rows(self.codes, rows), scales=self.scales[rows], zeros=None if self.zeros is None else self.zeros[rows])

    def columns(self, columns: slice) -> Quantized:
        """Of these inputs alone, with the groups that they belong to."""
        held, groups = self.groups[columns].unique(return_inverse=True)
        zeros = None if self.zeros is None else self.zeros[:, held]
        return replace(self, codes=self.codes[:, columns], scales=self.scales[:, held], zeros=zeros, groups=groups)

    def to(self, device: torch.device) -> Quantized:
        """Copied, even to where it is: it may be a view of a file."""
        codes, scales = self.codes.to(device, copy=True), self.scales.to(device, copy=True)
        zeros = None if self.zeros is None else self.zeros.to(device, copy=True)
        return replace(self, codes=codes, scales=scales, zeros=zeros, groups=self.groups.to(device))

    def expand(self) -> torch.Tensor:
        """[out, in] float32."""
        zero = self.zeros[:, self.groups] if self.zeros is not None else 8.0 if self.bits == 4 else 0.0
        return (self.codes.float() - zero) * self.scales[:, self.groups]

    def pack(self) -> ops.QuantizedWeight:
        """As kernels read it: neighbouring columns in groups of one size."""
        order, counts = self.groups.argsort(stable=True), self.groups.bincount(minlength=self.scales.shape[1])
        codes, scales, zeros, kept = self.codes, self.scales, self.zeros, None
        size = math.gcd(*counts.tolist())
        if (size < SMALLEST_GROUP and len(counts) > 1) or (self.bits == 4 and codes.shape[1] % 2):
            size, order = PADDED_GROUP, _pad_groups(order, counts)
            codes = torch.cat([codes.view(torch.int8), codes.new_zeros(len(codes), 1).view(torch.int8)], dim=1).view(codes.dtype)
        if not torch.equal(order, torch.arange(self.codes.shape[1], device=order.device)):  # which a padded one never is
            codes, kept = codes.view(torch.int8)[:, order].view(codes.dtype), order
        pieces = -(-counts // size)
        scales = scales.repeat_interleave(pieces, dim=1)
        zeros = None if zeros is None else zeros.repeat_interleave(pieces, dim=1)
        if self.bits == 4:
            half = codes.shape[1] // 2
            codes = codes[:, :half].to(torch.uint8) | codes[:, half:].to(torch.uint8) << 4
        packed = ops.QuantizedWeight(codes.contiguous(), scales.contiguous(), None if zeros is None else zeros.contiguous(), kept, self.bits)
        return packed.interleave() if codes.is_cuda else packed


def _pad_groups(order: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The columns of each group, and behind them so many times the number of columns, which is a padding, as whole groups need."""
    parts = []
    for own in order.split(counts.tolist()):
        parts += [own, own.new_full((-len(own) % PADDED_GROUP,), len(order))]
    return torch.cat(parts)


def pad_rows(weight: Quantized, count: int) -> Quantized:
    """With so many outputs more, which are zero."""

    def pad(part: torch.Tensor) -> torch.Tensor:
        return torch.cat([part, part.new_zeros(count, part.shape[1])])

    codes = pad(weight.codes.view(torch.int8)).view(weight.codes.dtype)
    return replace(weight, codes=codes, scales=pad(weight.scales), zeros=None if weight.zeros is None else pad(weight.zeros))


def pad_columns(weight: Quantized, count: int) -> Quantized:
    """With so many inputs more, of the last group: for an x that is zero there."""
    codes = weight.codes.view(torch.int8)
    codes = torch.cat([codes, codes.new_zeros(len(codes), count)], dim=1).view(weight.codes.dtype)
    return replace(weight, codes=codes, groups=torch.cat([weight.groups, weight.groups[-1:].expand(count)]))


Stored = torch.Tensor | Quantized
"""A weight [out, in] as it is held."""


def take_rows(weight: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Rows of any dtype: torch indexes no 8-bit floats on CPU."""
    if weight.dtype == torch.float8_e4m3fn:
        return weight.view(torch.int8)[rows].view(weight.dtype)
    return weight[rows]


def cut_rows(weight: Stored, rows: slice | torch.Tensor) -> Stored:
    return weight.rows(rows) if isinstance(weight, Quantized) else weight[rows]


def cut_columns(weight: Stored, columns: slice) -> Stored:
    return weight.columns(columns) if isinstance(weight, Quantized) else weight[:, columns].contiguous()


def join(weights: Sequence[Stored]) -> list[Stored]:
    """Weights of one input as few, one below the other: neighbours that are stored alike become one."""
    joined: list[Stored] = []
    for weight in weights:
        last = joined[-1] if joined else None
        if isinstance(last, torch.Tensor) and isinstance(weight, torch.Tensor):
            joined[-1] = torch.cat([last, weight])
        elif isinstance(last, Quantized) and isinstance(weight, Quantized) and _is_alike(last, weight):
            joined[-1] = _cat(last, weight)
        else:
            joined.append(weight)
    return joined


def _is_alike(one: Quantized, other: Quantized) -> bool:
    return one.bits == other.bits and one.codes.dtype == other.codes.dtype and torch.equal(one.groups, other.groups)


def _cat(one: Quantized, other: Quantized) -> Quantized:
    codes = torch.cat([one.codes.view(torch.int8), other.codes.view(torch.int8)]).view(one.codes.dtype)
    zeros = None
    if one.zeros is not None or other.zeros is not None:
        middle = 8.0 if one.bits == 4 else 0.0
        zeros = torch.cat([torch.full_like(w.scales, middle) if w.zeros is None else w.zeros for w in (one, other)])
    return Quantized(codes, torch.cat([one.scales, other.scales]), zeros, one.groups, one.bits)
