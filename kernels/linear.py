"""Projections of few tokens at the speed of the memory, with what comes right before and after them.

A row of the result does not depend on how many rows there are, as long as they are at most MAX_TOKENS. Larger products, float32
and odd shapes go to torch.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from kernels import reference
from kernels._load import ELEMENTS, load
from kernels.activation import silu_mul
from kernels.norm import add_rms_norm, rms_norm

MAX_TOKENS = 16
TILE, STEP, THREADS = 16, 32, 256
SHARED = 112 * 1024
"""So much that two blocks share a multiprocessor: the next kernel's first copies run while the last one's sums are made."""


@functools.cache
def _num_multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _choose_tiles(per_block: int, most: int) -> int:
    """Tiles of a pass: as few passes as can be, all alike."""
    passes = -(-per_block // most)
    return -(-per_block // passes)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    tiles: int | None = None,
    shared: int = SHARED, extra: dict = {},
) -> torch.Tensor:
    (num_tokens, in_size), out_size = x.shape, weight.shape[0]
    num_outputs = out_size // 2 if is_gated else out_size
    out = x.new_empty(num_tokens, num_outputs) if residual is None else residual
    num_tiles, num_blocks = out_size // TILE, _num_multiprocessors(x.device.index)
    tokens = -(-num_tokens // 8) * 8
    tiles = tiles or _choose_tiles(-(-num_tiles // num_blocks), 4)
    defines = {"ELEMENT": ELEMENTS[x.dtype], "TOKENS": tokens, "TILES": tiles, "SHARED": shared, "NORM": 0 if norm_weight is None else in_size, "GATED": int(is_gated), **extra}
    kernel = load(x.device, "linear", "linear", "PPPPPPiiiif", defines, shared=shared, programmatic=True)
    pointers = (0 if t is None else t for t in (bias, residual, norm_weight))
    kernel((min(num_tiles, num_blocks), 1), (THREADS, 1, 1), out, x, weight, *pointers, num_tokens, out_size, in_size, x.stride(0), eps)
    return out
