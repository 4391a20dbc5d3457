"""Rotary embedding and the write to the KV cache, fused: append_kv."""

from __future__ import annotations

import functools

import torch

from kernels import cpu_attention, reference
from kernels._load import load
from kernels.cache_scales import CacheScales

THREADS = 128
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


Plane = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@functools.lru_cache(maxsize=1024)
def _fault_of(keys: Plane, values: Plane, page_shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Of planes given by shape, strides and type. The same few come with every layer of every step."""
    page_size, num_kv, size = page_shape
    token = num_kv * size
    for name, (shape, strides, own_type) in (("key_pages", keys), ("value_pages", values)):
        is_plane = strides[1:] == (token, size, 1) and strides[0] % token == 0 and strides[0] >= page_size * token
        if tuple(shape) != (keys[0][0], *page_shape) or own_type != dtype or not is_plane:
            want = f"{dtype} {[keys[0][0], *page_shape]}, each page in one piece and {token} n apart"
            return f"{name} is {own_type} {list(shape)} with strides {list(strides)}; must be {want}"
    if keys[1][0] != values[1][0]:
        return f"pages of keys lie {keys[1][0]} apart, those of values {values[1][0]}; must be the same"
    return None


def check_planes(key_pages: torch.Tensor, value_pages: torch.Tensor, page_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises ValueError for what are no planes [P, page, Hkv, D] of paged memory: pages in one piece, as many tokens apart in both."""
    keys, values = ((pages.shape, pages.stride(), pages.dtype) for pages in (key_pages, value_pages))
    fault = _fault_of(keys, values, page_shape, dtype)
    if fault:
        raise ValueError(fault)


def append_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    positions: torch.Tensor | None = None,
    scales: CacheScales | None = None,
) -> torch.Tensor:
    """Rotates queries and keys (RoPE, half-split layout), writes keys and values to their slots, returns the queries [T, H, D].

    qkv [T, H + 2 Hkv, D], its tokens at any stride that is a multiple of 16 bytes; cos and sin [T, 1, D], sin negated in its first
    half, or with positions [T] (int32 or int64) the whole tables [L, 1, D]; slots [T] (int32 or int64): KV slots (see
    `reference.token_rows`), a negative one is not written; pages [P, page, Hkv, D], keys and values the same number of bytes apart.
    scales: the pages are in e4m3; None: in the type of qkv.
    """
    num_kv, size = key_pages.shape[-2:]
    num_tokens, all_heads = qkv.shape[:2]
    num_heads = all_heads - 2 * num_kv
    if qkv.shape[2] != size or num_heads < 1 or qkv.stride()[1:] != (size, 1) or qkv.dtype not in _DTYPES:
        raise ValueError(f"qkv is {qkv.dtype} {list(qkv.shape)}; must be a float [T, H + {2 * num_kv}, {size}] with rows in one piece")
    num_angles = num_tokens if positions is None else len(cos)
    for name, tensor in (("cos", cos), ("sin", sin)):
        if tensor.shape != (num_angles, 1, size) or tensor.dtype != qkv.dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; must be {qkv.dtype} [{num_angles}, 1, {size}], contiguous")
    if slots.shape != (num_tokens,) or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots is {slots.dtype} {list(slots.shape)}; must be int32 or int64 [{num_tokens}]")
    if positions is not None and (positions.shape != (num_tokens,) or positions.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"positions is {positions.dtype} {list(positions.shape)}; must be int32 or int64 [{num_tokens}]")
    check_planes(key_pages, value_pages, key_pages.shape[1:], qkv.dtype if scales is None else reference.E4M3)
    if scales is not None:
        scales.check(num_kv, "append_kv")
    if not qkv.is_cuda:
        if scales is None and cpu_attention.is_usable(size, qkv.dtype):
            return cpu_attention.append_kv(qkv, cos, sin, slots, key_pages, value_pages, None if positions is None else positions.int())
        return reference.append_kv(qkv, cos, sin, slots, key_pages, value_pages, positions, scales)
    width = 16 // qkv.element_size()
    if size % (2 * width) or qkv.stride(0) % width or qkv.data_ptr() % 16:
        raise ValueError(f"qkv has heads of {size} and a stride of {qkv.stride(0)}; must be multiples of {2 * width} and {width}")
    queries = torch.empty(num_tokens, num_heads, size, dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return queries
    defines = {"DTYPE": _DTYPES[qkv.dtype], "NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv, "HEAD_DIM": size}
    if scales is not None:
        defines["E4M3"] = 1
    threads = num_tokens * all_heads * (size // (2 * width))
    load(qkv.device, "append_kv", "append_kv", defines, programmatic=True)(
        (-(-threads // THREADS), 1),
        (THREADS, 1, 1),
        queries,
        key_pages,
        value_pages,
        qkv,
        cos,
        sin,
        slots,
        0 if positions is None else positions,
        *((0, 0) if scales is None else (scales.key_factors, scales.value_factors)),
        num_tokens,
        qkv.stride(0),
        slots.element_size() // 4,
        1 if positions is None else positions.element_size() // 4,
    )
    return queries
