"""Projections of quantized weights for up to 192 tokens on Hopper GPUs: see wide_quantized.cu.

A row of a result does not depend on how many rows there are.
"""

from __future__ import annotations

import functools

import torch

from kernels._load import gpu_of, load
from kernels.quantized_weight import STEP, QuantizedWeight, is_grouped, kind_of, pointer
from kernels.round_rows import Norm, round_rows
from kernels.tensor_map import tensor_map

MAX_TOKENS, MAX_4_BIT_TOKENS = 192, 128
"""Of 4 bits stages have twice as many columns of x."""
MIN_TOKENS, MIN_GROUPED_TOKENS = 1, 9
"""Fewer are `linear.cu`'s, but for rounded x: where scales are of groups it is faster for them, and one request's drafts are verified with the sums
of plain decoding in either."""
SIZES, LEAST_SIZE, FEW = (32, 64, 128, 192), 16, 8
"""Tokens that a kernel has room for; LEAST_SIZE: where x is rounded and nothing is split; FEW: rows that stages of the least sizes may have."""
TILE, THREADS = 64, 384
SHARED = 222 * 1024
"""Bytes of dynamic shared memory: all but what two small blocks of other kernels need."""
MAX_STAGES, LEAST_STAGES, GROUPS = 16, 4, 2
"""GROUPS: warpgroups that take stages in turn."""

Defines = dict[str, "int | str"]


def most_tokens(weight: QuantizedWeight) -> int:
    """Rows of x that `launch` takes."""
    return MAX_4_BIT_TOKENS if weight.bits == 4 else MAX_TOKENS


def is_wide(x: torch.Tensor, weight: QuantizedWeight, is_gated: bool = False, is_rounded: bool = False) -> bool:
    """Whether `wide_quantized.cu` computes x [M, K], as the columns lie, times the weight, for M up to `most_tokens`."""
    return (
        x.is_cuda
        and len(x) >= (MIN_GROUPED_TOKENS if is_grouped(weight) and not is_rounded else MIN_TOKENS)
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.is_interleaved
        and weight.codes.shape[1] % STEP == 0
        and weight.group_size % STEP == 0
        and (weight.scales.shape[1] == 1 or weight.scale_stride % 4 == 0)
        and weight.scales.data_ptr() % 16 == 0
        and len(weight.codes) % (32 if is_gated else 16) == 0
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and gpu_of(x.device).generation == 9
    )


@functools.cache
def choose_shape(
    num_tokens: int,
    num_tiles: int,
    num_units: int,
    parts: int,
    lines: int,
    num_multiprocessors: int,
    is_rounded: bool = False,
    can_span: bool = False,
) -> Defines:
    """How `wide_quantized.cu` is compiled for a product. num_units: of STEP bytes in a row; parts: of a byte; lines: of scales and zeros of a
    unit; can_span: two units may have a scale in common. SPLIT and SPAN, which decide in which order terms are added, do not depend on the tokens."""
    split = 2 if 2 * num_tiles <= num_multiprocessors and num_units >= 8 else 1
    sizes = (LEAST_SIZE, *SIZES) if is_rounded and split == 1 else SIZES
    tokens = next(size for size in sizes if num_tokens <= size)
    rows = FEW if num_tokens <= FEW else tokens
    room = SHARED - 1024 - tokens * TILE * (6 if split > 1 else 4)  # but what sums are exchanged in
    span = 2 if is_rounded and can_span and num_units % (4 * split) == 0 else 1
    token_bytes, sum_bytes = (64, parts * tokens * 4 if parts == 2 else 0) if is_rounded else (128, 0)
    most = 8 if is_rounded and tokens <= SIZES[0] else 4  # parts of units to a step, which registers are for
    for units in (4, 2, 1):
        beside = units // span * (lines * TILE * 4 + sum_bytes)
        stage_bytes = -(-(units * (parts * rows * token_bytes + TILE * STEP) + beside) // 1024) * 1024
        stages = min(MAX_STAGES, room // stage_bytes // GROUPS * GROUPS)
        # Warpgroups have halves of a block's K, whatever the size of a step.
        is_even = num_units % (2 * split * units) == 0
        if units == span or (is_even and units * parts <= most and stages >= LEAST_STAGES):
            break
    return {"TOKENS": tokens, "ROWS": rows, "SPLIT": split, "UNITS": units, "STAGES": stages, "ROUNDED": int(is_rounded), "SPAN": span}


def launch(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    is_gated: bool = False,
    is_rounded: bool = False,
    norm: Norm | None = None,
    out: torch.Tensor | None = None,
    is_ready: bool = False,
) -> torch.Tensor:
    """x [M, K] times the weight [N, K] transposed, plus bias [N]; added to residual [M, N] in place; gated: silu(gate) * up [M, N / 2];
    in the place of what out has, where it is given.

    is_rounded: x, or rms_norm(x, *norm), is rounded to e4m3 first; the weight's scales are of groups then. is_ready, for x that is not rounded: see
    `linear.write_linear`."""
    num_tokens, (out_size, row_bytes) = len(x), weight.codes.shape
    num_outputs = out_size // 2 if is_gated else out_size
    if out is None:
        out = x.new_empty(num_tokens, num_outputs) if residual is None else residual
    num_multiprocessors = gpu_of(x.device).num_multiprocessors
    outputs = TILE // 2 if is_gated else TILE
    num_tiles, parts, grouped = -(-num_outputs // outputs), 2 if weight.bits == 4 else 1, is_grouped(weight) or is_rounded
    lines = parts * grouped * (1 if weight.zeros is None else 2)
    can_span = weight.group_size % (2 * STEP) == 0
    shape = choose_shape(num_tokens, num_tiles, row_bytes // STEP, parts, lines, num_multiprocessors, is_rounded, can_span)
    defines = kind_of(x.dtype, weight) | shape | {"GROUPED": int(grouped), "GATED": int(is_gated)}
    num_rows = -(-num_tokens // 8) * 8
    units = int(shape["UNITS"])
    line = min(2, units) * STEP
    block = (line, outputs, units * STEP // line)
    codes = tensor_map(weight.codes.data_ptr(), torch.uint8, (line, out_size, row_bytes // line), (row_bytes, line), block)
    rounded = round_rows(x, norm, int(shape["SPAN"]) * STEP if parts == 2 else 0) if is_rounded else None
    rows = x if rounded is None else rounded.codes.view(torch.uint8)  # of codes there are as many as are copied
    strides = (rows.stride(0) * rows.element_size(), STEP * rows.element_size())
    tokens = tensor_map(rows.data_ptr(), rows.dtype, (STEP, len(rows), rows.shape[1] // STEP), strides, (STEP, num_rows, units))
    kernel = load(x.device, "wide_quantized", "wide_quantized", defines, shared=SHARED, programmatic=True)
    split = int(shape["SPLIT"])
    grid = num_tiles * split if split > 1 else min(num_tiles, num_multiprocessors)
    of_rows = (0, 0) if rounded is None else (rounded.scales, rounded.sums)
    pointers = (weight.scales, pointer(weight.zeros), pointer(bias), pointer(residual), *of_rows)
    sizes = (num_tokens, out_size, row_bytes, weight.group_size, weight.scale_stride, num_tiles, num_rows, int(is_ready and not is_rounded))
    kernel((grid, 1), (THREADS, 1, 1), codes, tokens, out, *pointers, *sizes)
    return out
