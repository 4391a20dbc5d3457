"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) over paged latents [P, page, 1, R + D].

A token's entry is its latent [R], which keys and values of all heads are made of, and a key [D] that has turned, which all heads share.
N numbers of a query's head meet the keys that are made, D the shared one; V numbers of values come back.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.cache_scales import CacheScales
from kernels.reference.attention import MAX_GROUPED_QUERIES, AttentionPlan, write_rows
from kernels.reference.e4m3 import round_to_e4m3


def append_latent(
    query: torch.Tensor,
    latents: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    scales: CacheScales | None = None,
) -> None:
    """Turns the last D numbers of queries [T, H, N + D] and of latents [T, R + D] in place, and writes these to their slots.

    cos and sin [T, 1, D] as `append_kv` has them; slots [T]: KV slots, a negative one is not written. scales: of pages in e4m3.
    """
    size = cos.shape[-1]
    for turning in (query[..., -size:], latents[:, None, -size:]):
        swapped = turning.unflatten(-1, (2, size // 2)).flip(-2).flatten(-2)
        turning.copy_(torch.addcmul(turning * cos, swapped, sin))
    if scales is not None:
        rank = latents.shape[1] - size
        latents = round_to_e4m3(latents, torch.cat([scales.value_factors.expand(rank), scales.key_factors.expand(size)]))
    is_kept = slots >= 0
    write_rows(pages, slots[is_kept], latents[is_kept])


def latent_attention(
    query: torch.Tensor, pages: torch.Tensor, plan: AttentionPlan, key_up: torch.Tensor, value_up: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of packed queries [T, H, N + D] of mixed lengths, causal among the new tokens -> [T, H, V].

    key_up [H, N, R] and value_up [H, V, R] make a head's keys and values of a latent; scale: of scores. With few queries they go to the
    queries and to the result (absorption: one key of R + D for all heads); with many, as in prompts, keys and values are made.
    """
    num_heads, still, rank = key_up.shape
    out = query.new_empty(len(query), num_heads, value_up.shape[1])
    for group in plan.groups:
        batch, width = group.shape
        q = query[group.rows].view(batch, width, num_heads, -1).transpose(1, 2)
        latents = group.gather(pages, 0, q.dtype).view(batch, -1, pages.shape[-1])
        # Multiplications for each key and head: of queries that meet latents, and of those that meet keys, which are made first.
        made = rank * (still + value_up.shape[1])
        is_plain = width > MAX_GROUPED_QUERIES and width * (2 * rank - still - value_up.shape[1]) > made
        y = (_attend_plainly if is_plain else _attend_absorbed)(q, latents, group.mask, key_up, value_up, scale)
        y = y.transpose(1, 2).reshape(batch * width, num_heads, -1)
        out[group.targets] = y if group.kept is None else y[group.kept]
    return out


def _attend_plainly(
    query: torch.Tensor, latents: torch.Tensor, mask: torch.Tensor, key_up: torch.Tensor, value_up: torch.Tensor, scale: float
) -> torch.Tensor:
    """Queries [B, H, Q, N + D], latents [B, S, R + D], mask [B, 1, Q, S] -> [B, H, Q, V]."""
    rank = key_up.shape[2]
    own, shared = latents[:, None, :, :rank], latents[:, None, :, rank:]
    keys = torch.cat([own @ key_up.transpose(1, 2), shared.expand(-1, len(key_up), -1, -1)], dim=-1)
    return F.scaled_dot_product_attention(query, keys, own @ value_up.transpose(1, 2), attn_mask=mask, scale=scale)


def _attend_absorbed(
    query: torch.Tensor, latents: torch.Tensor, mask: torch.Tensor, key_up: torch.Tensor, value_up: torch.Tensor, scale: float
) -> torch.Tensor:
    """The same, by the latents alone: all heads' queries meet one key."""
    (batch, num_heads, width, _), (_, still, rank) = query.shape, key_up.shape
    absorbed = torch.cat([query[..., :still] @ key_up, query[..., still:]], dim=-1).flatten(1, 2)
    scores = (absorbed @ latents.transpose(1, 2)).view(batch, num_heads, width, -1).mul_(scale).add_(mask)
    shares = scores.softmax(dim=-1, dtype=torch.float32).to(latents.dtype).flatten(1, 2)
    mixed = (shares @ latents[..., :rank]).view(batch, num_heads, width, rank)
    return mixed @ value_up.transpose(1, 2)
