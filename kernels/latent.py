"""What multi-head latent attention does beside the attention itself: latents written to their slots, and products for each head."""

from __future__ import annotations

import torch

from kernels import reference
from kernels._load import ELEMENTS, load
from kernels.cache_scales import CacheScales
from kernels.structs import LatentSizes

THREADS, TILE, STEP, TOKENS, WARPS = 128, 16, 32, 32, 4
MAX_STEPS = 4
"""Of 32 terms each, that a warp holds weights for."""


def append_latent(
    query: torch.Tensor,
    latents: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    scales: CacheScales | None = None,
) -> None:
    """Turns the last D numbers of queries [T, H, N + D] in place; normalises the first R of latents [T, R + D] with the weights norm_weight [R],
    turns the others and writes all to their slots of pages [P, page, 1, R + D].

    cos and sin [T, 1, D] as `append_kv` has them; slots [T] (int32 or int64): KV slots, a negative one is not written.
    scales: the pages are in e4m3; None: in the type of the others.
    """
    (num_tokens, num_heads, head_size), rank, dim = query.shape, len(norm_weight), cos.shape[-1]
    if latents.shape != (num_tokens, rank + dim) or pages.shape[2:] != (1, rank + dim) or dim > head_size:
        raise ValueError(
            f"append_latent: latents {tuple(latents.shape)} must be [{num_tokens}, {rank + dim}], pages {tuple(pages.shape)} "
            f"[P, page, 1, {rank + dim}], and queries {tuple(query.shape)} turn {dim} numbers"
        )
    if scales is not None:
        scales.check(1, "append_latent")
    if pages.dtype != (query.dtype if scales is None else reference.E4M3):
        raise ValueError(f"append_latent: pages are {pages.dtype}; must be {query.dtype if scales is None else reference.E4M3}")
    if not query.dtype == latents.dtype == cos.dtype == sin.dtype == norm_weight.dtype:
        raise ValueError(f"append_latent: query is {query.dtype}, latents {latents.dtype}, cos {cos.dtype}; must be one type")
    if not query.is_cuda:
        own = reference.rms_norm(latents[:, :rank], norm_weight, eps)
        reference.append_latent(query, torch.cat([own, latents[:, rank:]], dim=-1), cos, sin, slots, pages, scales)
        return
    if query.stride()[1:] != (head_size, 1) or latents.stride(1) != 1 or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("append_latent: rows of queries and latents must be in one piece, cos and sin contiguous")
    if pages.stride()[1:] != (rank + dim, rank + dim, 1) or pages.stride(0) % (rank + dim):
        raise ValueError(f"append_latent: pages have strides {pages.stride()}; each must be in one piece and {rank + dim} n apart")
    if slots.shape != (num_tokens,) or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"append_latent: slots is {slots.dtype} {list(slots.shape)}; must be int32 or int64 [{num_tokens}]")
    if not num_tokens:
        return
    defines: dict[str, int | str] = {"ELEMENT": ELEMENTS[query.dtype], "SPLIT": 1, "STEPS": 1}
    if scales is not None:
        defines["E4M3"] = 1
    factors = (0, 0) if scales is None else (scales.key_factors, scales.value_factors)
    sizes = LatentSizes(rank, dim, num_heads, head_size, query.stride(0), latents.stride(0), slots.element_size() // 4, eps)
    grid = (num_tokens, 1 + -(-num_heads * (dim // 2) // THREADS))
    load(query.device, "latent", "append_latent", defines, programmatic=True)(
        grid, (THREADS, 1, 1), pages, query, latents, norm_weight, cos, sin, slots, *factors, sizes
    )


def is_head_weight(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels read weight [H, N, K] as it lies."""
    (_, out_size, in_size), is_aligned = weight.shape, weight.stride(0) % 8 == 0 and weight.data_ptr() % 16 == 0
    return weight.dtype == dtype and out_size % TILE == 0 and weight.stride()[1:] == (in_size, 1) and is_aligned


def head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of each head x [T, H, K] times weight [H, N, K] transposed -> [T, H, N]. Heads of x, and tokens, may lie any multiple of 16 bytes apart.

    A row of a result does not depend on how many rows there are where the kernel computes it: in float16 and bfloat16, K up to 512.
    """
    (num_tokens, num_heads, in_size), out_size = x.shape, weight.shape[1]
    if weight.shape != (num_heads, out_size, in_size) or x.dtype != weight.dtype:
        raise ValueError(f"head_linear: x {tuple(x.shape)} {x.dtype} must be [T, H, K] and weight {tuple(weight.shape)} {weight.dtype} [H, N, K]")
    split = 1 if in_size <= MAX_STEPS * STEP else WARPS
    steps = -(-in_size // (STEP * split))
    is_known = (
        x.is_cuda
        and num_tokens > 0
        and x.dtype in (torch.bfloat16, torch.float16)
        and in_size % STEP == 0
        and steps <= MAX_STEPS
        and x.stride(2) == 1
        and x.stride(0) % 8 == 0
        and x.stride(1) % 8 == 0
        and x.data_ptr() % 16 == 0
        and is_head_weight(weight, x.dtype)
    )
    if not is_known:
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).contiguous()
    out = x.new_empty(num_tokens, num_heads, out_size)
    tiles = out_size // TILE
    grid = (tiles if split > 1 else -(-tiles // WARPS), num_heads, -(-num_tokens // TOKENS))
    defines: dict[str, int | str] = {"ELEMENT": ELEMENTS[x.dtype], "SPLIT": split, "STEPS": steps}
    kernel = load(x.device, "latent", "head_linear", defines, programmatic=True)
    kernel(grid, (THREADS, 1, 1), out, x, weight, num_tokens, out_size, in_size, x.stride(0), x.stride(1), weight.stride(0))
    return out
