"""Rotary embedding and the write to the KV cache, fused: append_kv."""

from __future__ import annotations

import torch

from kernels import reference
from kernels._load import load

THREADS = 128
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def append_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotates queries and keys (RoPE, half-split layout), writes keys and values to their slots, returns the queries [T, H, D].

    qkv [T, H + 2 Hkv, D], its tokens at any stride that is a multiple of 16 bytes; cos and sin [T, 1, D], sin negated in its first
    half, or with positions [T] int32 the whole tables [L, 1, D]; slots [T] (int32 or int64) = page * page_size + offset, a negative
    one is not written; pages [P, page, Hkv, D].
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
    if positions is not None and (positions.shape != (num_tokens,) or positions.dtype != torch.int32):
        raise ValueError(f"positions is {positions.dtype} {list(positions.shape)}; must be int32 [{num_tokens}]")
    for name, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        if pages.shape != key_pages.shape or pages.dtype != qkv.dtype or not pages.is_contiguous():
            raise ValueError(f"{name} is {pages.dtype} {list(pages.shape)}; must be {qkv.dtype} {list(key_pages.shape)}, contiguous")
    if not qkv.is_cuda:
        return reference.append_kv(qkv, cos, sin, slots, key_pages, value_pages, positions)
    width = 16 // qkv.element_size()
    if size % (2 * width) or qkv.stride(0) % width or qkv.data_ptr() % 16:
        raise ValueError(f"qkv has heads of {size} and a stride of {qkv.stride(0)}; must be multiples of {2 * width} and {width}")
    queries = torch.empty(num_tokens, num_heads, size, dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return queries
    defines = {"DTYPE": _DTYPES[qkv.dtype], "NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv, "HEAD_DIM": size}
    threads = num_tokens * all_heads * (size // (2 * width))
    load(qkv.device, "append_kv", "append_kv", "PPPPPPPPiii", defines, programmatic=True)(
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
        num_tokens,
        qkv.stride(0),
        slots.element_size() // 4,
    )
    return queries
