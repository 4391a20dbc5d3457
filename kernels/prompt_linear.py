"""Projections of prompts' tokens on Hopper GPUs, by tiles that fit what is to be computed: see prompt_linear.cu."""

from __future__ import annotations

import functools

import torch

from kernels._load import ELEMENTS, Kernel, gpu_of, is_compiling, load
from kernels.round_rows import RoundedRows
from kernels.tensor_map import tensor_map
from kernels.wide_linear import LINE, MAX_TOKENS, takes_operands

MIN_TOKENS = MAX_TOKENS + 1
"""Fewer are `wide_linear.cu`'s."""
TOKENS, THREADS = 128, 384
"""Of a tile; of a block."""
MAX_PLAIN, MAX_PLAIN_CODES, MAX_CODES = 384, 512, 2048
"""Tokens up to which products are faster here than in cuBLAS and what comes behind it there: of elements, if they are not gated; of codes, if they
are neither gated nor added to anything; of codes, if they are."""
WIDTHS = (64, 96, 128, 160, 192, 224, 256)
"""Rows of weights that a tile may have."""
SHARED, GROUPED_SHARED = 226 * 1024, 224 * 1024
"""Bytes of dynamic shared memory; where rows are of several experts."""
MAX_GROUPS = 512
MANY_HEIGHTS = 16
"""Times 128 tokens."""
CACHED = 24 << 20
"""Bytes of tokens that stay in the L2 cache while weights pass."""


_loaded: set[tuple[object, ...]] = set()
"""Devices and kinds of products that are loaded with tiles of all widths."""


def is_long(x: torch.Tensor, weight: torch.Tensor, is_gated: bool = False) -> bool:
    """Whether x weight^T is computed by `prompt_linear.cu`."""
    return x.shape[0] >= MIN_TOKENS and (is_gated or x.shape[0] <= MAX_PLAIN) and takes_operands(x, weight, is_gated)


@functools.lru_cache(maxsize=4096)
def choose_width(num_heights: int, out_size: int, row_bytes: int, num_multiprocessors: int, is_plain: bool = True) -> int:
    """Of the tiles of a product of so many times 128 tokens that takes the least time; row_bytes: of a row of weights; is_plain: of
    elements, and of one expert's rows or none's. The figures were fitted to an H200's (in clock cycles), those of many plain rows to an H100's."""

    def estimate(width: int) -> float:
        num_tiles = num_heights * -(-out_size // width)
        # Of many tokens, tiles are bound by what all of them read of the L2 cache, and narrow ones read a token more often.
        line = 3.6 * width + 143 if is_plain and num_heights >= MANY_HEIGHTS else max(4.2 * width, 300)
        return -(-num_tiles // num_multiprocessors) * (row_bytes // LINE * line + 1500 + 8 * width)

    return min(WIDTHS, key=lambda width: (estimate(width), -width))


def count_stages(width: int, is_grouped: bool = False) -> int:
    """Blocks of 128 bytes of K that are under way."""
    return min(8, ((GROUPED_SHARED if is_grouped else SHARED) - 1024) // ((TOKENS + width) * LINE))


def _load(device: torch.device, width: int, dtype: torch.dtype, has_codes: bool, is_gated: bool, is_grouped: bool) -> Kernel:
    defines: dict[str, int | str] = {"ELEMENT": ELEMENTS[dtype], "CODES": int(has_codes), "WIDTH": width, "GATED": int(is_gated)}
    defines |= {"GROUPED": int(is_grouped), "STAGES": count_stages(width, is_grouped)}
    return load(device, "prompt_linear", "prompt_linear", defines, GROUPED_SHARED if is_grouped else SHARED, programmatic=True)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    is_gated: bool = False,
    out: torch.Tensor | None = None,
    is_fresh: bool = False,
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N], in `out` [M, N] if that is given; added to residual [M, N] in place; gated: silu(gate)
    * up [M, N / 2]. is_fresh: the weights are made for this product; else they are read before the kernel ahead in the stream has ended."""
    return _launch(x, len(x), weight, x.dtype, (0, 0), bias, residual, is_gated, out, is_fresh)


def launch_codes(
    x: RoundedRows,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """The same of x [M, K] and weight [N, K] in e4m3: see `wide_linear.launch_codes`."""
    codes, scales = x.codes.view(torch.uint8), (weight_scales, x.scales)
    return _launch(codes, len(x.scales), weight.view(torch.uint8), dtype, scales, bias, residual, is_gated)


def can_launch_groups(x: torch.Tensor, num_groups: int, out_size: int, in_size: int) -> bool:
    """Whether `launch_groups` takes rows of x's type and as many matrices [out_size, in_size], gated or not."""
    is_known = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and gpu_of(x.device).generation == 9
    return is_known and num_groups <= MAX_GROUPS and in_size * x.element_size() % LINE == 0 and out_size % 32 == 0


def launch_groups(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, is_gated: bool = False) -> torch.Tensor:
    """x [M, K], rows of one expert after those of another that end at ends [E] int32, times each expert's weight [E, N, K] transposed -> [M, N] or,
    gated, [M, N / 2]; what is behind the last end is not computed. For what `can_launch_groups` takes; all contiguous."""
    return _launch(x, len(x), weight.flatten(0, 1), x.dtype, (0, 0), None, None, is_gated, ends=ends)


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
    is_fresh: bool = False,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    (num_rows, in_size), item, is_grouped = weight.shape, x.element_size(), ends is not None
    num_groups = 1 if ends is None else len(ends)
    out_size = num_rows // num_groups
    if out is None:
        out = torch.empty(num_tokens, out_size // (1 + is_gated), dtype=dtype, device=x.device) if residual is None else residual
    num_multiprocessors = gpu_of(x.device).num_multiprocessors
    row_bytes, step, has_codes = in_size * item, LINE // item, item == 1
    # An expert's last rows are half a tile as often as a whole one, and half of the time that takes half as long.
    num_heights = -(-num_tokens // TOKENS) + (num_groups // 4 if is_grouped else 0)
    width = choose_width(num_heights, out_size, row_bytes, num_multiprocessors, not (is_grouped or has_codes))
    kind = (x.device.index, dtype, has_codes, is_gated, is_grouped)
    if kind not in _loaded:  # what other numbers of tokens need, too: the first product comes before requests do
        for other in WIDTHS:
            _load(x.device, other, *kind[1:])
        if not is_compiling():
            _loaded.add(kind)
    kernel = _load(x.device, width, *kind[1:])
    weights = tensor_map(weight.data_ptr(), x.dtype, (in_size, num_rows), (row_bytes,), (step, width // (1 + is_gated)))
    tokens = tensor_map(x.data_ptr(), x.dtype, (in_size, num_tokens), (x.stride(0) * item,), (step, TOKENS // 2))
    num_widths = -(-out_size // width)
    group = max(1, min(num_heights, CACHED // (TOKENS * row_bytes)))
    group = -(-num_heights // -(-num_heights // group))
    pointers = (0 if t is None else t for t in (bias, residual, *scales, ends))
    sizes = (num_groups, num_tokens, out_size, in_size, num_widths, group, int(is_fresh))
    grid = num_multiprocessors if is_grouped else min(num_heights * num_widths, num_multiprocessors)
    kernel((grid, 1), (THREADS, 1, 1), weights, tokens, out, *pointers, *sizes)
    return out
