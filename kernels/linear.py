"""Projections of few tokens at the speed of the memory, with what comes right before and after them.

A row of a result does not depend on how many rows there are, as long as `linear.cu` computes it: a drafted token is verified with
the sums that plain decoding would have made. Longer products, float32 and odd shapes go to torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.nn.functional as F

from kernels._load import ELEMENTS, load
from kernels.activation import silu_mul
from kernels.norm import rms_norm

MAX_TOKENS = 16
TILE, STEP, THREADS = 16, 32, 256
TILES = {8: 2, 16: 3}
"""Tiles of weights that a block takes at a time, by the tokens that the kernel has room for; measured (benchmarks/gpu_linear.py)."""
SHARED = 136 * 1024
"""So much that a multiprocessor holds one block: the next kernel's first weights then come in while this one's last sums are made and
whatever small kernel is between them runs, and not long before."""


def _defines(dtype: torch.dtype, tokens: int, norm_size: int, is_gated: bool) -> dict[str, int | str]:
    return {"ELEMENT": ELEMENTS[dtype], "TOKENS": tokens, "TILES": TILES[tokens], "SHARED": SHARED, "NORM": norm_size, "GATED": int(is_gated)}


def variants(dtype: torch.dtype, hidden_sizes: Iterable[int]) -> list[tuple[str, dict[str, int | str]]]:
    """What `_load.compile_all` is to compile beforehand for models that normalise rows of these sizes."""
    modes = [(0, False), *((size, is_gated) for size in hidden_sizes for is_gated in (False, True))]
    return [("linear", _defines(dtype, tokens, *mode)) for tokens in TILES for mode in modes]


@functools.cache
def _num_multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _check(name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(f"{name}: x {tuple(x.shape)} {x.dtype} must be [M, K] and weight {tuple(weight.shape)} {weight.dtype} [N, K] of one type")


def is_skinny(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x weight^T is computed by `linear.cu`."""
    return (
        x.is_cuda
        and 0 < x.shape[0] <= MAX_TOKENS
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] % STEP == 0
        and weight.shape[0] % (2 * TILE) == 0
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.is_contiguous()
    )


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
) -> torch.Tensor:
    (num_tokens, in_size), out_size = x.shape, weight.shape[0]
    out = x.new_empty(num_tokens, out_size // 2 if is_gated else out_size) if residual is None else residual
    defines = _defines(x.dtype, -(-num_tokens // 8) * 8, 0 if norm_weight is None else in_size, is_gated)
    kernel = load(x.device, "linear", "linear", "PPPPPPiiiif", defines, shared=SHARED, programmatic=True)
    num_blocks = min(out_size // TILE, _num_multiprocessors(x.device.index))
    pointers = (0 if t is None else t for t in (bias, residual, norm_weight))
    kernel((num_blocks, 1), (THREADS, 1, 1), out, x, weight, *pointers, num_tokens, out_size, in_size, x.stride(0), eps)
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N] -> [M, N]."""
    _check("linear", x, weight)
    return _launch(x, weight, bias) if is_skinny(x, weight) else F.linear(x, weight, bias)


def add_linear(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Adds linear(x, weight, bias), rounded, to residual [M, N] in place; returns residual."""
    _check("add_linear", x, weight)
    if residual.shape != (len(x), len(weight)) or residual.dtype != x.dtype or not residual.is_contiguous():
        raise ValueError(f"add_linear: residual {tuple(residual.shape)} {residual.dtype} must be [{len(x)}, {len(weight)}] {x.dtype}, contiguous")
    return _launch(x, weight, bias, residual) if is_skinny(x, weight) else residual.add_(F.linear(x, weight, bias))


def norm_linear(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """linear(rms_norm(x, norm_weight, eps), weight, bias), to the bit."""
    _check("norm_linear", x, weight)
    if is_skinny(x, weight) and x.dtype == torch.bfloat16:
        return _launch(x, weight, bias, None, norm_weight, eps)
    return linear(rms_norm(x, norm_weight, eps), weight, bias)


def norm_gated_linear(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor) -> torch.Tensor:
    """silu_mul(linear(rms_norm(x, norm_weight, eps), weight)), to the bit: weight [2N, K] = gate | up -> [M, N]."""
    _check("norm_gated_linear", x, weight)
    if not is_skinny(x, weight):
        return silu_mul(F.linear(rms_norm(x, norm_weight, eps), weight))
    if x.dtype != torch.bfloat16:
        return _launch(rms_norm(x, norm_weight, eps), weight, is_gated=True)
    return _launch(x, weight, None, None, norm_weight, eps, is_gated=True)
