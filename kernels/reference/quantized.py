"""Products of quantized weights, expanded tile by tile: the specification of what `linear.cu` and
`wide_quantized.cu` do with them, and what runs on CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from kernels.quantized import QuantizedWeight

FEW_TOKENS = 32
TILE_BYTES, WIDE_TILE_BYTES, GPU_TILE_BYTES = 2**20, 2**24, 2**26
"""Of a tile in float32. Few tokens: it stays in a core's own cache until it is multiplied. Many, and other dtypes: products of long
tiles are the faster ones."""


def expand_rows(weight: QuantizedWeight, rows: slice, out: torch.Tensor, *, is_scaled: bool = True) -> torch.Tensor:
    """Writes (digit - zero) * scale of these rows, or what is scaled, to out [n, K] float32 and returns it; columns lie in the stored order."""
    codes, scales = weight.natural_codes(rows), weight.scales[rows]
    if weight.bits == 4:
        half = codes.shape[1]
        out[:, :half] = codes & 15
        out[:, half:] = codes >> 4
    elif codes.dtype == torch.float8_e4m3fn:
        # Sign, exponent and fraction of e4m3 lie in a float16 as they are, 2^8 too small; torch's own conversion is several times slower.
        bits = codes.view(torch.int8).to(torch.int16).mul_(128).bitwise_and_(-16512)
        out.copy_(bits.view(torch.float16))
        scales = scales * 256.0
        if not is_scaled:
            out.mul_(256.0)
    else:
        out.copy_(codes)
    grouped = out.view(len(out), scales.shape[1], -1)
    if weight.zeros is not None:
        grouped.sub_(weight.zeros[rows].unsqueeze(-1))
    elif weight.bits == 4:
        grouped.sub_(8.0)
    if is_scaled:
        grouped.mul_(scales.unsqueeze(-1))
    return out


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K], in the stored order of columns, times the expanded weights [N, K], rounded to x's dtype, transposed, plus bias [N] -> [M, N].

    Where a row has one scale its digits are multiplied, which 16-bit dtypes hold as they are, and the result is scaled. What they add up to before
    that may be beyond float16's range: such products are float32's.
    """
    (num_rows, num_groups), num_columns = weight.scales.shape, x.shape[1]
    is_short = len(x) <= FEW_TOKENS and x.dtype == torch.float32
    size = GPU_TILE_BYTES if x.is_cuda else TILE_BYTES if is_short else WIDE_TILE_BYTES
    tile, is_scaled = max(16, size // (4 * num_columns)), num_groups > 1
    dtype = torch.float32 if x.dtype == torch.float16 and not is_scaled else x.dtype
    inputs = x.to(dtype)
    expanded = torch.empty(min(tile, num_rows), num_columns, dtype=torch.float32, device=x.device)
    parts = []
    for begin in range(0, num_rows, tile):
        rows = slice(begin, min(begin + tile, num_rows))
        own = weight.natural_codes(rows) if weight.codes.dtype == torch.int8 and weight.zeros is None and not is_scaled else None
        if own is None:
            own = expand_rows(weight, rows, expanded[: rows.stop - begin], is_scaled=is_scaled)
        parts.append(F.linear(inputs, own.to(dtype)))
    made = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    total = made if is_scaled else made.float() * weight.scales.squeeze(1)
    return (total if bias is None else total + bias).to(x.dtype)
