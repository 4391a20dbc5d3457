"""Keys and values in pages, and attention over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

MAX_GROUPED_QUERIES = 32
"""Requests with at most this many query tokens are computed together; longer ones (prompts) one by one."""


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

    qkv [T, H + 2 Hkv, D]; cos and sin [T, 1, D], sin negated in its first half, or with positions [T] the whole tables [L, 1, D];
    slots [T] = page * page_size + offset, a negative one is not written.
    """
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    num_kv, size = key_pages.shape[-2:]
    num_q = qkv.shape[1] - 2 * num_kv
    turning = qkv[:, : num_q + num_kv]
    swapped = turning.unflatten(-1, (2, size // 2)).flip(-2).flatten(-2)
    turned = torch.addcmul(turning * cos, swapped, sin)
    is_kept = slots >= 0
    for pages, rows in ((key_pages, turned[:, num_q:]), (value_pages, qkv[:, num_q + num_kv :])):
        pages.view(-1, num_kv, size).index_copy_(0, slots[is_kept].long(), rows[is_kept])
    return turned[:, :num_q]


@dataclass(slots=True)
class _Group:
    """Requests that one attention call computes together."""

    rows: torch.Tensor | slice
    """Packed positions of the queries [B' * Q]; padding points at a real row."""
    pages: torch.Tensor
    """[B' * N] page ids; padding repeats the request's first page."""
    mask: torch.Tensor
    """[B', 1, G * Q, N * page] 0 or -inf"""
    shape: tuple[int, int]
    """(B', Q)"""
    kept: torch.Tensor | None
    """Which of the B' * Q rows are real, when some are padding."""
    targets: torch.Tensor | slice
    """Where the real rows go."""


@dataclass(slots=True)
class AttentionPlan:
    """How one step's queries are grouped; made once, used by every layer."""

    groups: list[_Group]


def plan_attention(
    query_lens: list[int],
    seq_lens: list[int],
    page_ids: list[list[int]],
    page_size: int,
    num_groups: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> AttentionPlan:
    """Groups requests of like length, so that one call serves many of them and little of it is padding.

    query_lens and seq_lens [B]: new tokens, and all tokens with them; page_ids [B][>= pages of seq_len]; num_groups =
    H / Hkv. Page ids past those of seq_len are not read.
    """
    starts, total = [], 0
    for count in query_lens:
        starts.append(total)
        total += count
    needed = [-(-length // page_size) for length in seq_lens]
    small = sorted((b for b, q in enumerate(query_lens) if q <= MAX_GROUPED_QUERIES), key=lambda b: needed[b])
    buckets: list[list[int]] = []
    for b in small:
        if buckets and needed[b] <= 2 * needed[buckets[-1][0]] + 4:
            buckets[-1].append(b)
        else:
            buckets.append([b])
    buckets += [[b] for b, q in enumerate(query_lens) if q > MAX_GROUPED_QUERIES]
    groups = []
    for bucket in buckets:
        bucket.sort()
        width, most = max(query_lens[b] for b in bucket), max(needed[b] for b in bucket)
        pages = [page_ids[b][: needed[b]] + [page_ids[b][0]] * (most - needed[b]) for b in bucket]
        queries = torch.tensor([query_lens[b] for b in bucket], device=device)
        lengths = torch.tensor([seq_lens[b] for b in bucket], device=device)
        offsets = torch.arange(width, device=device)
        first = torch.tensor([starts[b] for b in bucket], device=device)
        is_real = offsets < queries[:, None]
        # Query j of a request sees the tokens up to its own place; padded queries see what the last real one sees.
        place = (lengths - queries)[:, None] + torch.minimum(offsets, queries[:, None] - 1)
        hidden = torch.arange(most * page_size, device=device) > place[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        rows = (first[:, None] + torch.minimum(offsets, queries[:, None] - 1)).flatten()
        is_padded = min(query_lens[b] for b in bucket) < width
        is_packed = not is_padded and bucket[-1] - bucket[0] == len(bucket) - 1
        span = slice(starts[bucket[0]], starts[bucket[0]] + len(bucket) * width)
        groups.append(
            _Group(
                rows=span if is_packed else rows,
                pages=torch.tensor(pages, device=device).flatten(),
                mask=mask.repeat(1, num_groups, 1).unsqueeze(1),
                shape=(len(bucket), width),
                kept=is_real.flatten() if is_padded else None,
                targets=span if is_packed else rows[is_real.flatten()],
            )
        )
    return AttentionPlan(groups)


def append_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    plan: AttentionPlan,
) -> torch.Tensor:
    """Attention of packed queries [T, H, D] of mixed lengths over paged keys and values, causal among the new tokens -> [T, H, D].

    The new tokens' keys and values are in their pages already.
    """
    num_kv, size = key_pages.shape[-2:]
    num_groups = query.shape[1] // num_kv
    num_pages = key_pages.shape[0]
    flat_keys, flat_values = key_pages.view(num_pages, -1), value_pages.view(num_pages, -1)
    out = torch.empty_like(query)
    for group in plan.groups:
        batch, width = group.shape
        q = query[group.rows].view(batch, width, num_kv, num_groups, size)
        # The heads that share keys become more queries of one head.
        q = q.permute(0, 2, 3, 1, 4).reshape(batch, num_kv, num_groups * width, size)
        k = flat_keys.index_select(0, group.pages).view(batch, -1, num_kv, size).transpose(1, 2)
        v = flat_values.index_select(0, group.pages).view(batch, -1, num_kv, size).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
        y = y.view(batch, num_kv, num_groups, width, size).permute(0, 3, 1, 2, 4).reshape(batch * width, -1, size)
        out[group.targets] = y if group.kept is None else y[group.kept]
    return out
