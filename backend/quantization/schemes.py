"""Rounding of weights to 8 or 4 bits, to the nearest, symmetric around zero.

wint8 and fp8 (e4m3) have a scale for each output channel, wint4 one for each GROUP inputs of a channel, block_wise_fp8 one for each block
of 128 x 128 (DeepSeek-V3, 2024, section 3.3.2). A projection is rounded whole, before it is cut for ranks: their number changes no weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from backend.quantization.stored import Quantized

GROUP = 64
BLOCK = 128
SMALLEST = 1e-12
"""A group whose largest weight is smaller counts as zeros."""


def quantize(weight: torch.Tensor, scheme: str) -> Quantized:
    """weight [out, in] rounded as `scheme` says: wint8, wint4, fp8 or block_wise_fp8."""
    values, (num_rows, num_columns) = weight.float(), weight.shape
    size = {"wint4": GROUP, "block_wise_fp8": BLOCK}.get(scheme, num_columns)
    groups = torch.arange(num_columns, device=weight.device) // size
    largest = F.pad(values.abs(), (0, -num_columns % size)).unflatten(1, (-1, size)).amax(dim=2)
    if scheme == "block_wise_fp8":
        rows = F.pad(largest, (0, 0, 0, -num_rows % BLOCK)).unflatten(0, (-1, BLOCK)).amax(dim=1)
        largest = rows.repeat_interleave(BLOCK, dim=0)[:num_rows]
    top = {"wint8": 127.0, "wint4": 7.0}.get(scheme, 448.0)
    scales = largest.clamp(min=SMALLEST) / top
    scaled = values.div_(scales[:, groups]) if values is not weight else values / scales[:, groups]
    if scheme == "wint8":
        return Quantized(scaled.round_().to(torch.int8), scales, None, groups)
    if scheme == "wint4":
        return Quantized(scaled.round_().to(torch.int8) + 8, scales, None, groups, bits=4)
    return Quantized(scaled.clamp_(-top, top).to(torch.float8_e4m3fn), scales, None, groups)
