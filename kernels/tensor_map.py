"""Descriptions of tensors for Hopper's bulk copies (CUtensorMap)."""

from __future__ import annotations

import ctypes
import functools

import torch

from kernels._load import KernelError


@functools.cache
def _encoder() -> ctypes._NamedFuncPointer:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled


@functools.lru_cache(maxsize=8192)
def tensor_map(address: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> bytes:
    """A CUtensorMap of a tensor in float16, bfloat16 or uint8, innermost dimension first, for boxes whose rows are 128 or 64 bytes, swizzled.

    strides: bytes, without the innermost. What is read past the tensor's end is zero. Raises KernelError with what the driver refuses.
    """
    types = {torch.uint8: 0, torch.float16: 6, torch.bfloat16: 9}
    swizzle, promotion_256, none = {64: 2, 128: 3}[box[0] * dtype.itemsize], 3, 0
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
        swizzle,
        promotion_256,
        none,
    )
    if code:
        raise KernelError(f"CUDA error {code}: no tensor map of {sizes} values with strides {strides} and boxes {box}")
    return buffer.raw[start : start + 128]
