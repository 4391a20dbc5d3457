"""Projections whose inputs are rounded to e4m3 (`round_rows.py`), so that tensor cores take codes on both sides and nothing is unpacked.

Inside `rounding_activations` products with e4m3 weights (w8a8) and with digits of 4 bits (w4a8) are these. On Hopper rows are multiplied by
`wide_linear.cu`, and more than 192 by `prompt_linear.cu`, where a weight's rows have a scale each; where groups have, up to 128 or 192 in up to two
turns by `wide_quantized.cu`. Up to 192 a row of a result does not depend on how many there are. What is left is cuBLAS's, in e4m3 or, where scales
are of groups, as the rounded numbers in bfloat16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from kernels import prompt_linear, wide_linear, wide_quantized
from kernels._load import gpu_of
from kernels.activation import silu_mul
from kernels.quantized_weight import PIECE, QuantizedWeight, is_grouped
from kernels.round_rows import MAX_COLUMNS, Norm, RoundedRows, round_rows

MIN_ROWS = 385
"""Where `wide_linear.cu` has no form for a product, rows from which on they are rounded: fewer are multiplied with the stored weights alone."""

_is_on: ContextVar[bool] = ContextVar("is_on", default=False)


@contextlib.contextmanager
def rounding_activations(is_on: bool) -> Iterator[None]:
    """Around a phase of a step, in the thread that calls it."""
    token = _is_on.set(is_on)
    try:
        yield
    finally:
        _is_on.reset(token)


def _may_round(x: torch.Tensor) -> bool:
    return _is_on.get() and x.is_cuda and len(x) > 0 and x.dtype == torch.bfloat16 and x.shape[1] <= MAX_COLUMNS


def is_rounded_for_groups(x: torch.Tensor, weight: QuantizedWeight, is_gated: bool = False) -> bool:
    """Whether x [M, K], as the columns lie, is rounded for its product with a weight of 4 bits, or of e4m3 with scales of groups."""
    is_one = weight.bits == 4 or (weight.codes.dtype == torch.float8_e4m3fn and is_grouped(weight))
    return is_one and _may_round(x) and wide_quantized.is_wide(x, weight, is_gated, is_rounded=True)


def is_rounded_by_twin(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """Whether x [M, K] on CPU is rounded for its product with the weight: for all that a GPU has a kernel for at some size. No server asks for it: it
    is for measuring what rounding costs."""
    return _is_on.get() and not x.is_cuda and len(x) > 0 and weight.codes.dtype != torch.int8


def is_rounded(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """Whether x [M, K] is rounded for its product with a weight of e4m3 whose rows have a scale each (`multiply_rounded`)."""
    return (
        _may_round(x)
        and weight.codes.dtype == torch.float8_e4m3fn
        and not is_grouped(weight)
        and weight.is_interleaved
        and weight.order is None
        and len(weight.codes) % 16 == 0
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and gpu_of(x.device).generation >= 9
        and (len(x) >= MIN_ROWS or (gpu_of(x.device).generation == 9 and weight.codes.shape[1] % wide_linear.LINE == 0))
    )


def _has_form(weight: QuantizedWeight, is_gated: bool) -> bool:
    """Whether kernels of ours multiply codes by this weight."""
    out_size, in_size = weight.codes.shape
    is_fit = in_size % wide_linear.LINE == 0 and out_size % (32 if is_gated else 16) == 0
    return is_fit and gpu_of(weight.codes.device).generation == 9


def multiply_rounded(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: Norm | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """x [M, K], for which `is_rounded` holds, or rms_norm(x, *norm), times the weight [N, K] transposed, plus bias [N] -> [M, N]; added, rounded, to
    residual [M, N] in place; gated: silu(gate) * up [M, N / 2]."""
    rounded = round_rows(x, norm)
    operands = (rounded, weight.codes, weight.scales, x.dtype)
    launch_codes = wide_linear.launch_codes if len(x) <= wide_linear.MAX_TOKENS else prompt_linear.launch_codes
    most = prompt_linear.MAX_PLAIN_CODES if residual is None and not is_gated else prompt_linear.MAX_CODES
    if len(x) <= most and _has_form(weight, is_gated) and (residual is None or residual.data_ptr() % PIECE == 0):
        return launch_codes(*operands, bias, residual, is_gated)
    if len(x) <= most and _has_form(weight, False):
        made = launch_codes(*operands, bias)
    else:
        made = _multiply_by_cublas(x, rounded, weight, bias)
    if is_gated:
        return silu_mul(made)
    return made if residual is None else residual.add_(made)


def _multiply_by_cublas(x: torch.Tensor, rounded: RoundedRows, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    codes, scales = rounded.codes[: len(x)], (rounded.scales, weight.scales.view(1, -1))
    return torch._scaled_mm(codes, weight.codes.t(), *scales, bias, out_dtype=x.dtype, use_fast_accum=True)
