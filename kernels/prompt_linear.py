"""Projections of prompts' tokens on Hopper GPUs, by tiles that fit what is to be computed: see prompt_linear.cu."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from kernels._load import ELEMENTS, Kernel, gpu_of, is_compiling, load
from kernels.round_rows import RoundedRows
from kernels.tensor_map import tensor_map
from kernels.wide_linear import LINE, MAX_TOKENS

MIN_TOKENS = MAX_TOKENS + 1
"""Fewer are `wide_linear.cu`'s."""
TOKENS, THREADS = 128, 384
"""Of a tile; of a block."""
WIDTHS = (64, 96, 128, 160, 192, 224, 256)
"""Rows of weights that a tile may have."""
CLUSTERS = ((1, 1), (2, 1), (1, 2))
"""PAIR and SPLIT."""
SHARED = 226 * 1024
"""Bytes of dynamic shared memory."""
CACHED = 24 << 20
"""Bytes of tokens that stay in the L2 cache while weights pass."""


_loaded: set[tuple[object, ...]] = set()
"""Devices and kinds of products whose forms are all loaded."""


class Form(NamedTuple):
    """How `prompt_linear.cu` is compiled for a product."""

    width: int
    pair: int
    split: int = 1

    @property
    def stages(self) -> int:
        return min(8, (SHARED - 1024) // ((TOKENS + self.width) * LINE))


def forms(is_gated: bool) -> list[Form]:
    """All that there are."""
    return [Form(width, *cluster) for width in WIDTHS for cluster in CLUSTERS if not (is_gated and cluster[1] > 1)]


def is_long(x: torch.Tensor, weight: torch.Tensor, is_gated: bool = False) -> bool:
    """Whether x weight^T is computed by `prompt_linear.cu`."""
    return (
        x.is_cuda
        and x.shape[0] >= MIN_TOKENS
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


def _estimate(form: Form, num_tokens: int, out_size: int, row_bytes: int, num_multiprocessors: int) -> float:
    """Clock cycles of a product."""
    width, pair, split = form
    # Of a tile and a line of K: what the tensor cores take, what passes through shared memory, what comes from the L2 cache.
    products, operands = width * 4, 8 * (2048 + 32 * width)
    copies, fetched = (TOKENS + width) * LINE, (TOKENS + width / pair) * LINE
    step = max(products, (operands + copies) / 128, fetched / 56)
    num_tiles = -(-num_tokens // (TOKENS * pair)) * -(-out_size // width)
    turns = -(-num_tiles // (num_multiprocessors // (pair * split)))
    if split > 1 and (turns > 1 or row_bytes < 4 * LINE):
        return math.inf  # parts lie where the next tile would, and nobody has none of K
    return turns * (row_bytes // LINE // split * step + 1500 + 8 * width + (2000 if split > 1 else 0))


@functools.lru_cache(maxsize=4096)
def choose_form(num_tokens: int, out_size: int, row_bytes: int, is_gated: bool, num_multiprocessors: int) -> Form:
    """row_bytes: of a row of weights."""
    sizes = (num_tokens, out_size, row_bytes, num_multiprocessors)
    return min(forms(is_gated), key=lambda form: (_estimate(form, *sizes), -form.width, -form.pair))


def _load(device: torch.device, form: Form, dtype: torch.dtype, has_codes: bool, is_gated: bool) -> Kernel:
    defines: dict[str, int | str] = {"ELEMENT": ELEMENTS[dtype], "CODES": int(has_codes), "WIDTH": form.width, "PAIR": form.pair}
    defines |= {"SPLIT": form.split, "GATED": int(is_gated), "STAGES": form.stages}
    return load(device, "prompt_linear", "prompt_linear", defines, shared=SHARED, programmatic=True)


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
) -> torch.Tensor:
    (out_size, in_size), item = weight.shape, x.element_size()
    if out is None:
        out = torch.empty(num_tokens, out_size // (1 + is_gated), dtype=dtype, device=x.device) if residual is None else residual
    num_multiprocessors = gpu_of(x.device).num_multiprocessors
    row_bytes, step, has_codes = in_size * item, LINE // item, item == 1
    form = choose_form(num_tokens, out_size, row_bytes, is_gated, num_multiprocessors)
    kind = (x.device.index, dtype, has_codes, is_gated)
    if kind not in _loaded:  # what other numbers of tokens need, too: the first product comes before requests do
        for other in forms(is_gated):
            _load(x.device, other, dtype, has_codes, is_gated)
        if not is_compiling():
            _loaded.add(kind)
    kernel = _load(x.device, form, dtype, has_codes, is_gated)
    rows_at_once = form.width // (2 if is_gated or form.pair == 2 else 1)
    weights = tensor_map(weight.data_ptr(), x.dtype, (in_size, out_size), (row_bytes,), (step, rows_at_once))
    tokens = tensor_map(x.data_ptr(), x.dtype, (in_size, num_tokens), (x.stride(0) * item,), (step, TOKENS))
    num_pairs, num_widths = -(-num_tokens // (TOKENS * form.pair)), -(-out_size // form.width)
    group = max(1, min(num_pairs, CACHED // (TOKENS * form.pair * row_bytes)))
    group = -(-num_pairs // -(-num_pairs // group))
    size, num_tiles = form.pair * form.split, num_pairs * num_widths
    clusters = num_tiles if form.split > 1 else min(num_tiles, kernel.count_clusters(size, THREADS) or num_multiprocessors // size)
    pointers = (*(0 if t is None else t for t in (bias, residual)), *scales)
    sizes = (num_tokens, out_size, in_size, num_pairs, num_widths, group, int(is_fresh))
    kernel((clusters * size, 1), (THREADS, 1, 1), weights, tokens, out, *pointers, *sizes)
    return out
