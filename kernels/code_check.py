"""Whether attention over keys and values in e4m3 computes what it should on this device: asked once, before anyone's answer depends on it.

Kernels are compiled where they run, by whatever compiler and for whatever GPU is there, and what reads codes is made of instructions that differ by
generation. A wrong layout would be wrong answers without a word.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from kernels._load import KernelError
from kernels.attention import Heads
from kernels.cache_scales import CacheScales
from kernels.reference.e4m3 import E4M3
from kernels.step_attention import StepAttention, append_attention, latent_attention, plan_attention

LENGTHS = (70, 900)
"""Tokens of requests beside the queries: within a tile, and some tiles."""
LIMIT = 0.05
"""Of the error's norm over the result's: rounding in 16 bits makes a tenth of it, anything misplaced makes about 1."""


def check_codes(device: torch.device, heads: Heads, page_size: int, dtype: torch.dtype, widths: Collection[int]) -> None:
    """Attention of so many queries a request over random codes against the twin's on CPU. Raises KernelError with what is off."""
    for width in sorted(widths):
        error = _measure(device, heads, page_size, dtype, width)
        if not error <= LIMIT:
            raise KernelError(
                f"attention over keys and values in e4m3 is off by {error:.3g} of its size on {device} (limit {LIMIT}; {width} queries a request, "
                f"heads {tuple(heads)}, pages of {page_size} tokens, {dtype}): use kv_cache_dtype model there, and report this"
            )


@torch.inference_mode()
def _measure(device: torch.device, heads: Heads, page_size: int, dtype: torch.dtype, width: int) -> float:
    cpu, generator = torch.device("cpu"), torch.Generator().manual_seed(width)
    lens = [length + width for length in LENGTHS]
    needed = [-(-length // page_size) for length in lens]
    pages = [list(ids) for ids in torch.randperm(sum(needed), generator=generator).split(needed)]
    num_rows, num_kv = len(lens) * width, 1 if heads.latent_rank else heads.num_kv

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def codes(*shape: int) -> torch.Tensor:
        return draw(sum(needed), page_size, *shape).mul_(64).clamp_(-448, 448).to(E4M3)

    scales = [0.5 / 64 * (1 + torch.rand(num_kv, generator=generator)) for _ in range(2)]
    plan = plan_attention([width] * len(lens), lens, pages, page_size, heads, dtype, cpu)
    own_plan = _plan(device, heads, page_size, dtype, width, lens, pages)
    if rank := heads.latent_rank:
        still = size = 64
        tensors = [draw(num_rows, heads.num_query, still + heads.latent_dim), draw(heads.num_query, still, rank), draw(heads.num_query, size, rank)]
        query, key_up, value_up = (t.to(dtype) / (1 if i == 0 else rank**0.5) for i, t in enumerate(tensors))
        held, scale = codes(1, rank + heads.latent_dim), (still + heads.latent_dim) ** -0.5
        right = latent_attention(query, held, plan, key_up, value_up, scale, scales=CacheScales(*scales))
        own = CacheScales(*(s.to(device) for s in scales))
        made = latent_attention(query.to(device), held.to(device), own_plan, key_up.to(device), value_up.to(device), scale, scales=own)
    else:
        query, keys, values = draw(num_rows, heads.num_query, heads.size).to(dtype), *(codes(num_kv, heads.size) for _ in range(2))
        right = append_attention(query, keys, values, plan, scales=CacheScales(*scales))
        own = CacheScales(*(s.to(device) for s in scales))
        made = append_attention(query.to(device), keys.to(device), values.to(device), own_plan, scales=own)
    return float((made.cpu().double() - right.double()).norm() / right.double().norm())


def _plan(
    device: torch.device, heads: Heads, page_size: int, dtype: torch.dtype, width: int, lens: list[int], pages: list[list[int]]
) -> StepAttention:
    """As a step has it whose requests all decode."""
    table = torch.zeros(len(lens), max(map(len, pages)), dtype=torch.int32)
    for row, ids in zip(table, pages, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    plan = StepAttention(
        cu_query_lens=torch.arange(len(lens) + 1, dtype=torch.int32, device=device) * width,
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        request_indices=torch.arange(len(lens), dtype=torch.int32, device=device),
        page_table=table.to(device),
        num_prompts=0,
        num_prompt_rows=0,
        max_prompt_query_len=0,
        max_prompt_seq_len=0,
        num_prompt_keys=0,
        max_query_len=width,
        max_seq_len=table.shape[1] * page_size,
        page_size=page_size,
        heads=heads,
        dtype=dtype,
        is_e4m3=True,
    )
    plan.refresh()
    return plan
