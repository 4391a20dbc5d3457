"""Projections of up to 192 tokens on Hopper GPUs, where cuBLAS leaves some of the memory's speed: see wide_linear.cu.

A row of a result does not depend on how many rows there are.
"""

from __future__ import annotations

import functools

import torch

from kernels._load import ELEMENTS, gpu_of, load
from kernels.round_rows import RoundedRows
from kernels.tensor_map import tensor_map

MIN_TOKENS, MAX_TOKENS = 17, 192
"""MIN_TOKENS: fewer are `linear.cu`'s, but for codes."""
SIZES, FEW = (64, 128, 192), (8, 32)
"""Tokens that a kernel has room for; that one of 64 may have room for in place of those."""
LINE = 128
"""Bytes of a row that are copied at a time."""
WIDTHS = (*range(32, 193, 16), 224, 256)
"""Rows of weights that a tile may have."""
MAX_STAGES = 32
"""At most: the narrowest tiles have 160 KB on their way by then."""
SHARED = 222 * 1024
"""Bytes of dynamic shared memory: all but what two small blocks of other kernels need."""

Defines = dict[str, "int | str"]


def takes_operands(x: torch.Tensor, weight: torch.Tensor, is_gated: bool = False) -> bool:
    """Whether x [M, K] and weight [N, K] are such as this kernel and `prompt_linear.cu` copy to shared memory, whatever M."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] * x.element_size() % LINE == 0
        and weight.shape[0] % (32 if is_gated else 16) == 0
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and gpu_of(x.device).generation == 9
    )


def is_wide(x: torch.Tensor, weight: torch.Tensor, is_gated: bool = False) -> bool:
    """Whether x weight^T is computed by `wide_linear.cu`."""
    return MIN_TOKENS <= x.shape[0] <= MAX_TOKENS and takes_operands(x, weight, is_gated)


def _estimate(tokens: int, width: int, split: int, out_size: int, row_bytes: int, num_multiprocessors: int) -> float:
    """Microseconds of a product on an H200: what was measured there in bf16, to within a tenth. row_bytes: of a row of weights."""
    memory = out_size * row_bytes / 4.0e6
    # Of one block for a line of K: weights from the memory, all that it copies, and the products.
    step = max(width * LINE / 4.5e4, (width + tokens) * LINE / 1.0e5, tokens * width * 64 / (2048 * 1400))
    turns = -(-(-(-out_size // width) * split) // num_multiprocessors)
    return max(memory, turns * -(-row_bytes // LINE // split) * step) + turns * (2.5 if split > 1 else 4)


@functools.cache
def choose_shape(num_tokens: int, out_size: int, row_bytes: int, dtype: torch.dtype, is_gated: bool, num_multiprocessors: int) -> Defines:
    """How `wide_linear.cu` is compiled for a product with results of this dtype; row_bytes: of a row of weights. SPLIT, which decides in which order
    terms are added, does not depend on the tokens."""
    tokens = next(size for size in SIZES if num_tokens <= size)

    def best(tokens: int, split: int) -> tuple[float, int]:
        unit = 16 * split if is_gated else 16
        widths = (width for width in WIDTHS if width % unit == 0 and (tokens < 192 or width < 256))  # a thread has registers for so many sums
        return min((round(_estimate(tokens, width, split, out_size, row_bytes, num_multiprocessors), 1), width) for width in widths)

    split = 2 if row_bytes >= 4 * LINE and best(128, 2) < best(128, 1) else 1
    width = best(tokens, split)[1]
    rows = next((size for size in FEW if num_tokens <= size), tokens)
    stages = (SHARED - 1024 - max(64 - rows, 0) * LINE) // ((rows + width) * LINE)  # products read 64 rows
    sizes = {"TOKENS": tokens, "ROWS": rows, "WIDTH": width, "SPLIT": split, "STAGES": min(stages, MAX_STAGES)}
    return {"ELEMENT": ELEMENTS[dtype], "GATED": int(is_gated), **sizes}


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    is_gated: bool = False,
    out: torch.Tensor | None = None,
    is_ready: bool = False,
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]; added to residual [M, N] in place; gated: silu(gate) * up [M, N / 2]; in the place of
    what out has, where it is given. is_ready: see `linear.write_linear`."""
    return _launch(x, len(x), weight, x.dtype, (0, 0), bias, residual, is_gated, out, is_ready)


def launch_codes(
    x: RoundedRows,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """The same of x [M, K] and weight [N, K] in e4m3, their columns in one order, times x's scales and weight_scales [N, 1] float32; K is a multiple
    of 128, N of 16, gated of 32. dtype: bfloat16 or float16, of the result."""
    codes, num_tokens = x.codes.view(torch.uint8), len(x.scales)
    return _launch(codes, num_tokens, weight.view(torch.uint8), dtype, (weight_scales, x.scales), bias, residual, is_gated)


def _launch(
    x: torch.Tensor,
    num_tokens: int,
    weight: torch.Tensor,
    dtype: torch.dtype,
    scales: tuple[torch.Tensor | int, torch.Tensor | int],
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    is_gated: bool,
    out: torch.Tensor | None = None,
    is_ready: bool = False,
) -> torch.Tensor:
    (out_size, in_size), size = weight.shape, x.element_size()
    out_width = out_size // 2 if is_gated else out_size
    if out is None:
        out = torch.empty(num_tokens, out_width, dtype=dtype, device=x.device) if residual is None else residual
    num_multiprocessors = gpu_of(x.device).num_multiprocessors
    row_bytes, step = in_size * size, LINE // size
    defines = choose_shape(num_tokens, out_size, row_bytes, dtype, is_gated, num_multiprocessors) | {"CODES": int(size == 1)}
    tokens, width, split = (int(defines[key]) for key in ("TOKENS", "WIDTH", "SPLIT"))
    num_rows = -(-num_tokens // 8) * 8
    weights = tensor_map(weight.data_ptr(), x.dtype, (in_size, out_size), (row_bytes,), (step, width // (1 + is_gated)))
    tokens_map = tensor_map(x.data_ptr(), x.dtype, (in_size, len(x)), (x.stride(0) * size,), (step, num_rows))
    kernel = load(x.device, "wide_linear", "wide_linear", defines, shared=SHARED, programmatic=True)
    num_tiles = -(-out_size // width)
    grid = num_tiles * split if split > 1 else min(num_tiles, num_multiprocessors)
    pointers = (*(0 if t is None else t for t in (bias, residual)), *scales)
    sizes = (num_tokens, out_size, in_size, num_tiles, num_rows)
    kernel((grid, 1), (2 * tokens + 128, 1, 1), weights, tokens_map, out, *pointers, *sizes, int(is_ready))
    return out
