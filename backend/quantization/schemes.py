"""Rounding of weights to 8 or 4 bits, without a zero of their own.

wint8 and fp8 (e4m3) have a scale for each output channel, wint4 one for each GROUP inputs of a channel, block_wise_fp8 one for each block
of 128 x 128 (DeepSeek-V3, 2024, section 3.3.2). A projection is rounded whole, before it is cut for ranks: their number changes no weight.

Four bits have one digit more below zero than above: a group's largest weight is -8 steps, whatever its sign, or a little more than there
are digits for where that makes the sum of squared errors smaller.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from backend.quantization.stored import Quantized

GROUP = 64
BLOCK = 128
SMALLEST = 1e-12
"""A group whose largest weight is smaller counts as zeros."""
STEPS = (1.0, 0.92, 0.85, 0.78)
"""Of 4 bits: factors of the step that are tried. Together with the sign they take a third of the divergence from the bundled model's answers."""


PIECE = 2**21
"""Weights that are rounded at a time, about: what that needs for a while is ten times as much as what stays of them."""


def quantize(weight: torch.Tensor, scheme: str) -> Quantized:
    """weight [out, in] rounded as `scheme` says: wint8, wint4, fp8 or block_wise_fp8.

    Raises ValueError for weights that are not finite: no digit stands for them, and their scale would take all that share it along.
    """
    rows = max(1, PIECE // (weight.shape[1] * BLOCK)) * BLOCK
    pieces = [_quantize(piece, scheme) for piece in weight.split(rows)]
    if len(pieces) == 1:
        return pieces[0]
    codes = torch.cat([piece.codes.view(torch.int8) for piece in pieces]).view(pieces[0].codes.dtype)
    return replace(pieces[0], codes=codes, scales=torch.cat([piece.scales for piece in pieces]))


def _quantize(weight: torch.Tensor, scheme: str) -> Quantized:
    """Of rows whose first one begins a block."""
    values, (num_rows, num_columns) = weight.float(), weight.shape
    size = {"wint4": GROUP, "block_wise_fp8": BLOCK}.get(scheme, num_columns)
    groups = torch.arange(num_columns, device=weight.device) // size
    grouped = F.pad(values, (0, -num_columns % size)).unflatten(1, (-1, size))
    if scheme == "wint4":
        digits, scales = _round_to_4_bits(grouped)
        return Quantized(digits.flatten(1)[:, :num_columns] + 8, scales, None, groups, bits=4)
    largest = _finite(grouped.abs().amax(dim=2))
    if scheme == "block_wise_fp8":
        rows = F.pad(largest, (0, 0, 0, -num_rows % BLOCK)).unflatten(0, (-1, BLOCK)).amax(dim=1)
        largest = rows.repeat_interleave(BLOCK, dim=0)[:num_rows]
    top = 127.0 if scheme == "wint8" else 448.0
    scales = largest.clamp(min=SMALLEST) / top
    scaled = values / scales[:, groups]
    if scheme == "wint8":
        return Quantized(scaled.round_().to(torch.int8), scales, None, groups)
    return Quantized(scaled.clamp_(-top, top).to(torch.float8_e4m3fn), scales, None, groups)


def _finite(largest: torch.Tensor) -> torch.Tensor:
    """The largest weights of groups. Raises ValueError."""
    if not bool((is_finite := largest.isfinite()).all()):
        raise ValueError(f"the weight has {largest[~is_finite][0].item()}; what is rounded must be finite")
    return largest


def _round_to_4_bits(grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """grouped [out, G, size] -> digits from -8 to 7 of the same shape, int8, and scales [out, G]."""
    largest = _finite(grouped.gather(2, grouped.abs().argmax(dim=2, keepdim=True)))
    largest = torch.where(largest.abs() < SMALLEST, SMALLEST, largest)
    digits, scales, least = None, largest, largest
    for factor in STEPS:
        step = largest * (factor / -8)
        found = (grouped / step).round_().clamp_(-8, 7)
        error = torch.addcmul(grouped, found, step, value=-1).square_().sum(dim=2, keepdim=True)
        if digits is None:
            digits, scales, least = found, step, error
            continue
        is_better = error < least
        digits, scales, least = (torch.where(is_better, new, old) for new, old in ((found, digits), (step, scales), (error, least)))
    assert digits is not None
    return digits.to(torch.int8), scales.squeeze(2)
