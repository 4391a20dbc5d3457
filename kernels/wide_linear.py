"""Projections of 17 to 64 tokens on Hopper GPUs, where cuBLAS leaves some of the memory's speed: see wide_linear.cu.

A row of a result does not depend on how many rows there are.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from kernels._load import ELEMENTS, KernelError, gpu_of, load

MIN_TOKENS, MAX_TOKENS = 17, 64
SIZES = (32, 48, 64)
"""Tokens that a kernel has room for."""
STEP, TILE, THREADS = 64, 128, 384
SHARED = 112 * 1024
"""Bytes of dynamic shared memory: what two blocks of a multiprocessor may have each."""

Defines = dict[str, "int | str"]


def is_wide(x: torch.Tensor, weight: torch.Tensor, is_gated: bool = False) -> bool:
    """Whether x weight^T is computed by `wide_linear.cu`."""
    return (
        x.is_cuda
        and MIN_TOKENS <= x.shape[0] <= MAX_TOKENS
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] % STEP == 0
        and weight.shape[0] % (32 if is_gated else 16) == 0
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and gpu_of(x.device).generation == 9
    )


@functools.cache
def choose_shape(num_tokens: int, out_size: int, in_size: int, dtype: torch.dtype, is_gated: bool, num_multiprocessors: int) -> Defines:
    """How `wide_linear.cu` is compiled for a product."""
    tokens = next(size for size in SIZES if num_tokens <= size)
    tiles = -(-out_size // TILE)
    split = next((s for s in (4, 2) if 2 * tiles * s <= 3 * num_multiprocessors and in_size // STEP >= 4 * s), 1)
    stages = (SHARED - 1024) // ((TILE + tokens) * 128)
    return {
        "ELEMENT": ELEMENTS[dtype],
        "TOKENS": tokens,
        "SPLIT": split,
        "GATED": int(is_gated),
        "STAGES": stages,
    }


@functools.cache
def _encoder() -> ctypes._NamedFuncPointer:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled


@functools.lru_cache(maxsize=8192)
def _tensor_map(address: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> bytes:
    """A CUtensorMap of a tensor, innermost dimension first. strides: bytes, without the innermost. What is read past its end is zero."""
    types = {torch.float16: 6, torch.bfloat16: 9}
    swizzle_128, promotion_256, none = 3, 3, 0
    rank = len(sizes)
    buffer = ctypes.create_string_buffer(128 + 64)
    start = -ctypes.addressof(buffer) % 64
    code = _encoder()(
        ctypes.c_void_p(ctypes.addressof(buffer) + start),
        types[dtype],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        none,
        swizzle_128,
        promotion_256,
        none,
    )
    if code:
        raise KernelError(f"CUDA error {code}: no tensor map of {sizes} values with strides {strides} and boxes {box}")
    return buffer.raw[start : start + 128]


def launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None, is_gated: bool = False
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]; added to residual [M, N] in place; gated: silu(gate) * up [M, N / 2]."""
    (num_tokens, in_size), out_size, size = x.shape, weight.shape[0], x.element_size()
    out = x.new_empty(num_tokens, out_size // 2 if is_gated else out_size) if residual is None else residual
    num_multiprocessors = gpu_of(x.device).num_multiprocessors
    defines = choose_shape(num_tokens, out_size, in_size, x.dtype, is_gated, num_multiprocessors)
    tokens_box, split, row_bytes = (STEP, int(defines["TOKENS"])), int(defines["SPLIT"]), in_size * size
    sizes: tuple[int, ...] = (in_size, out_size)
    strides: tuple[int, ...] = (row_bytes,)
    box: tuple[int, ...] = (STEP, TILE)
    if is_gated:
        half = out_size // 2
        sizes, strides, box = (in_size, 8, 2, half // 8), (row_bytes, half * row_bytes, 8 * row_bytes), (STEP, 8, 2, TILE // 16)
    weights = _tensor_map(weight.data_ptr(), x.dtype, sizes, strides, box)
    tokens = _tensor_map(x.data_ptr(), x.dtype, (in_size, num_tokens), (x.stride(0) * size,), tokens_box)
    kernel = load(x.device, "wide_linear", "wide_linear", "128s128sPPPiiii", defines, shared=SHARED, programmatic=True)
    num_tiles = -(-out_size // TILE)
    grid = num_tiles * split if split > 1 else min(num_tiles, 2 * num_multiprocessors)
    pointers = (0 if t is None else t for t in (bias, residual))
    kernel((grid, 1), (THREADS, 1, 1), weights, tokens, out, *pointers, num_tokens, out_size, in_size, num_tiles)
    return out
