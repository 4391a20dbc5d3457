"""Rows of activations rounded to e4m3, each with a scale of its own (Micikevicius et al., 2022): see round_rows.cu."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels import reference
from kernels._load import ELEMENTS, load
from kernels.norm import NARROW_BYTES, rms_norm

THREADS = 256
MOST_VECTORS = (2, 4, 8, 16, 32)
"""Of 8 elements of a row, that a thread holds."""
MAX_COLUMNS = MOST_VECTORS[-1] * THREADS * 8

Norm = tuple[torch.Tensor, float]
"""An RMS norm's weight [K] and eps."""


class RoundedRows(NamedTuple):
    """Rows of x: codes times scales."""

    codes: torch.Tensor
    """[M rounded up to eight, K] float8_e4m3fn, interleaved as stored weights' are (`quantized_weight.ORDER`); in rows past M is anything: bulk
    copies past a tensor's end are slow."""
    scales: torch.Tensor
    """[M, 1] float32."""
    sums: torch.Tensor
    """[G, M rounded up to eight] float32: of each K / G neighbouring codes; empty unless asked for."""


def round_rows(x: torch.Tensor, norm: Norm | None = None, columns_to_sum: int = 0) -> RoundedRows:
    """x [M, K] in bfloat16 or float16 on a GPU, K a multiple of 16 up to 65,536, or rms_norm(x, *norm): a row's largest number is 448 steps.

    columns_to_sum: 0, or 64 or 128, of which K is a multiple then.
    """
    (num_rows, size), stride = x.shape, -(-len(x) // 8) * 8
    codes = torch.empty(stride, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    sums = torch.empty(size // columns_to_sum if columns_to_sum else 0, stride, dtype=torch.float32, device=x.device)
    _launch(x, norm, columns_to_sum, codes, 0, scales, sums if columns_to_sum else 0, stride)
    return RoundedRows(codes, scales, sums)


def as_rounded(x: torch.Tensor) -> torch.Tensor:
    """What the codes of `round_rows` stand for, in x's dtype and order, for products that take no codes."""
    if not x.is_cuda:
        return reference.round_activations(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, None, 0, 0, out, 0, 0, 0)
    return out


def _launch(
    x: torch.Tensor,
    norm: Norm | None,
    columns_to_sum: int,
    codes: torch.Tensor | int,
    out: torch.Tensor | int,
    scales: torch.Tensor | int,
    sums: torch.Tensor | int,
    sum_stride: int,
) -> None:
    num_rows, size = x.shape
    if norm is not None and size * x.element_size() <= NARROW_BYTES:
        x, norm = rms_norm(x, *norm), None  # a warp adds up such a row's squares, in another order
    vectors = next(most for most in MOST_VECTORS if size <= most * THREADS * 8)
    defines: dict[str, int | str] = {"ELEMENT": ELEMENTS[x.dtype], "VECTORS": vectors, "NORM": int(norm is not None)}
    defines |= {"SUMS": columns_to_sum, "BACK": int(isinstance(out, torch.Tensor))}
    kernel = load(x.device, "round_rows", "round_rows", defines, programmatic=True)
    weight, eps = (0, 0.0) if norm is None else norm
    kernel((num_rows, 1), (THREADS, 1, 1), codes, out, scales, sums, x, weight, size, x.stride(0), sum_stride, eps)
