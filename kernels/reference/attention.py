"""Keys and values in pages, and attention over them.

A plane of the paged memory [P, page, ...] is a view of one pool: its pages lie stride(0) apart, and a page's tokens follow one another.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from kernels.cache_scales import CacheScales
from kernels.reference.dense import soft_cap
from kernels.reference.e4m3 import E4M3, read_numbers, round_to_e4m3

MAX_GROUPED_QUERIES = 32
"""Requests with at most this many query tokens are computed together; longer ones (prompts) one by one."""
WIDTHS = (1, 2, 4, 6, 9, 13, 18, 25, MAX_GROUPED_QUERIES)
"""Query tokens up to which requests go together."""


def token_rows(plane: torch.Tensor) -> torch.Tensor:
    """A plane [P, page, *entry] as rows of one token's numbers: row page * (stride(0) / numbers of a token) + place is a token's KV slot.

    Raises ValueError when pages do not lie so many tokens apart. What lies between the plane's pages belongs to other planes.
    """
    return plane.as_strided(*_lay_out(plane.shape, plane.stride()))


@functools.lru_cache(maxsize=1024)
def _lay_out(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shape and strides of a plane's rows. The same few planes come with every layer of every step."""
    num_pages, page_size, *entry = shape
    size = math.prod(entry)
    stride, rest = divmod(strides[0], size)
    inner = tuple(math.prod(entry[place:]) for place in range(len(entry) + 1))
    if rest or strides[1:] != inner:
        raise ValueError(f"a plane {list(shape)} has strides {list(strides)}; pages in one piece, {size} n apart, are needed")
    return ((num_pages - 1) * stride + page_size, size), (size, 1)


def write_rows(plane: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """What tokens have in a plane [T, numbers], of its type, to their KV slots [T]."""
    if plane.dtype == E4M3:  # of which index_copy_ knows nothing
        plane, rows = plane.view(torch.uint8), rows.view(torch.uint8)
    token_rows(plane).index_copy_(0, slots.long(), rows)


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

    qkv [T, H + 2 Hkv, D]; cos and sin [T, 1, D], sin negated in its first half, or with positions [T] the whole tables [L, 1, D];
    slots [T]: KV slots (see `token_rows`), a negative one is not written. scales: of pages in e4m3.
    """
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    num_kv, size = key_pages.shape[-2:]
    num_q = qkv.shape[1] - 2 * num_kv
    turning = qkv[:, : num_q + num_kv]
    swapped = turning.unflatten(-1, (2, size // 2)).flip(-2).flatten(-2)
    turned = torch.addcmul(turning * cos, swapped, sin)
    keys, values = turned[:, num_q:], qkv[:, num_q + num_kv :]
    if scales is not None:
        keys, values = round_to_e4m3(keys, scales.key_factors[:, None]), round_to_e4m3(values, scales.value_factors[:, None])
    if len(slots) and int(slots.min()) < 0:
        is_kept = slots >= 0
        slots, keys, values = slots[is_kept], keys[is_kept], values[is_kept]
    for pages, rows in ((key_pages, keys), (value_pages, values)):
        write_rows(pages, slots, rows.flatten(1))
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
    gathered: list[torch.Tensor] = field(default_factory=list)
    """Keys and values of these pages: the same memory for all layers, which is touched for the first time once."""

    def gather(self, pages: torch.Tensor, number: int, dtype: torch.dtype) -> torch.Tensor:
        """[B' * N, numbers of a page] of keys (number 0) or values (1); of e4m3 in `dtype`, without their scales."""
        flat = pages.view(pages.shape[0], -1)
        is_e4m3 = flat.dtype == E4M3
        if len(self.gathered) <= number:
            self.gathered.append(flat.new_empty(len(self.pages), flat.shape[1], dtype=dtype if is_e4m3 else None))
        own = self.gathered[number]
        is_fit = own.shape[1] == flat.shape[1] and own.dtype == (dtype if is_e4m3 else flat.dtype)
        if is_e4m3:
            return read_numbers(flat.index_select(0, self.pages), dtype, own if is_fit else None)
        return torch.index_select(flat, 0, self.pages, out=own) if is_fit else flat.index_select(0, self.pages)


@dataclass(slots=True)
class AttentionPlan:
    """How one step's queries are grouped; made once, used by every layer."""

    groups: list[_Group]
    max_seq_len: int
    _make: Callable[[int], AttentionPlan] | None = None
    _windowed: dict[int, AttentionPlan] = field(default_factory=dict)

    def within(self, window: int | None) -> AttentionPlan:
        """The plan of layers whose queries see but the last `window` tokens, themselves with them: made for the first such layer of a step."""
        if window is None or window >= self.max_seq_len or self._make is None:
            return self
        if window not in self._windowed:
            self._windowed[window] = self._make(window)
        return self._windowed[window]


def plan_attention(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    page_ids: Sequence[Sequence[int] | np.ndarray],
    page_size: int,
    num_groups: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    window: int | None = None,
    seen: np.ndarray | None = None,
    min_query_len: int = 0,
    is_whole: bool = False,
) -> AttentionPlan:
    """Groups requests of like length, so that one call serves many of them and little of it is padding.

    query_lens and seq_lens [B]: new tokens, and all tokens with them; page_ids [B][>= pages of seq_len]; num_groups =
    H / Hkv. Page ids past those of seq_len are not read. window: tokens that a query sees, itself with them; None: all. seen [sum of query_lens]
    int64: of a request whose new tokens are a tree, which of them each query sees, a bit each from the lowest on; it sees all tokens before
    them too. 0: it sees what comes before it. min_query_len: requests of fewer new tokens are left out. is_whole: queries see
    all of their request's tokens, from where their window begins on; not with seen.
    """
    starts = [0, *itertools.accumulate(query_lens)]
    # The pages that hold what the queries see.
    firsts = [0] * len(seq_lens)
    if window is not None:
        firsts = [max(0, n - q - window + 1) // page_size for q, n in zip(query_lens, seq_lens)]
    needed = [-(-length // page_size) - first for length, first in zip(seq_lens, firsts)]
    # A call costs little beside its products, padding is multiplied like all else: only what is nearly as wide and as long goes together.
    kinds = sorted((bisect.bisect_left(WIDTHS, q), needed[b], b) for b, q in enumerate(query_lens) if min_query_len <= q <= MAX_GROUPED_QUERIES)
    buckets: list[list[int]] = []
    last, limit = -1, 0
    for kind, count, b in kinds:
        if kind == last and count <= limit:
            buckets[-1].append(b)
        else:
            buckets.append([b])
            last, limit = kind, count + count // 4 + 2
    buckets += [[b] for b, q in enumerate(query_lens) if q > MAX_GROUPED_QUERIES]
    groups = []
    for bucket in buckets:
        bucket.sort()
        width, most = max(query_lens[b] for b in bucket), max(needed[b] for b in bucket)
        pages = np.empty((len(bucket), most), np.int64)
        for row, b in zip(pages, bucket):
            first = firsts[b]
            row[: needed[b]], row[needed[b] :] = page_ids[b][first : first + needed[b]], page_ids[b][first]
        queries, lengths = np.array([query_lens[b] for b in bucket])[:, None], np.array([seq_lens[b] for b in bucket])[:, None]
        # Query j of a request sees the tokens up to its own place; padded queries see what the last real one sees.
        offsets = np.minimum(np.arange(width), queries - 1)
        place = lengths - queries + offsets
        newest = np.broadcast_to(lengths - 1, place.shape) if is_whole else place
        if window is None:
            hidden = np.arange(most * page_size) > newest[:, :, None]
        else:
            before = np.array([firsts[b] for b in bucket])[:, None] * page_size
            numbers = np.arange(most * page_size)
            hidden = (numbers > (newest - before)[:, :, None]) | (numbers <= (place - before)[:, :, None] - window)
        if seen is not None:
            for row, b in enumerate(bucket):
                own = seen[starts[b] : starts[b + 1]]
                if own.any():
                    first_new = seq_lens[b] - query_lens[b] - firsts[b] * page_size
                    hidden[row, : len(own)] = _hide(own, first_new, most * page_size, window)
                    hidden[row, len(own) :] = hidden[row, len(own) - 1]
        mask = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0))).to(device, dtype)
        span = slice(starts[bucket[0]], starts[bucket[0]] + len(bucket) * width)
        is_padded = min(query_lens[b] for b in bucket) < width
        rows: torch.Tensor | slice = span
        targets: torch.Tensor | slice = span
        kept: torch.Tensor | None = None
        if is_padded or bucket[-1] - bucket[0] != len(bucket) - 1:
            numbers = (np.array([starts[b] for b in bucket])[:, None] + offsets).ravel()
            is_real = (np.arange(width) < queries).ravel()
            rows, targets = torch.from_numpy(numbers).to(device), torch.from_numpy(numbers[is_real]).to(device)
            kept = torch.from_numpy(is_real).to(device) if is_padded else None
        groups.append(
            _Group(
                rows=rows,
                pages=torch.from_numpy(pages).flatten().to(device),
                mask=mask.repeat(1, num_groups, 1).unsqueeze(1),
                shape=(len(bucket), width),
                kept=kept,
                targets=targets,
            )
        )
    if window is not None:
        return AttentionPlan(groups, max(seq_lens, default=0))

    def make(window: int) -> AttentionPlan:
        return plan_attention(query_lens, seq_lens, page_ids, page_size, num_groups, dtype, device, window, seen, min_query_len, is_whole)

    return AttentionPlan(groups, max(seq_lens, default=0), make)


def _hide(seen: np.ndarray, first_new: int, num_keys: int, window: int | None) -> np.ndarray:
    """[Q, num_keys]: the keys that queries of a tree do not see; first_new: the number of its first token among the keys."""
    numbers, places = np.arange(num_keys), np.arange(len(seen))
    is_seen = seen[:, None] >> places & 1 != 0
    depths = is_seen.sum(axis=1) - 1
    if window is not None:  # of positions: those of a tree's tokens follow their depths
        is_seen &= depths[:, None] - depths < window
    hidden = np.repeat((numbers >= first_new)[None], len(seen), axis=0)
    hidden[:, first_new : first_new + len(seen)] = ~is_seen
    if window is not None:
        hidden[:, :first_new] = numbers[:first_new] <= (first_new + depths)[:, None] - window
    return hidden


def append_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    plan: AttentionPlan,
    window: int | None = None,
    cap: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of packed queries [T, H, D] of mixed lengths over paged keys and values, causal among the new tokens -> [T, H, D], in `out`
    if that is given.

    The new tokens' keys and values are in their pages already; of pages in e4m3 the codes are taken as they are (`CacheScales` has the scales).
    window: tokens that a query sees, itself with them; cap: scores become cap tanh(score / cap).
    """
    plan = plan.within(window)
    num_kv, size = key_pages.shape[-2:]
    num_groups = query.shape[1] // num_kv
    out = torch.empty_like(query) if out is None else out
    for group in plan.groups:
        batch, width = group.shape
        q = query[group.rows].view(batch, width, num_kv, num_groups, size)
        # The heads that share keys become more queries of one head.
        q = q.permute(0, 2, 3, 1, 4).reshape(batch, num_kv, num_groups * width, size)
        k = group.gather(key_pages, 0, q.dtype).view(batch, -1, num_kv, size).transpose(1, 2)
        v = group.gather(value_pages, 1, q.dtype).view(batch, -1, num_kv, size).transpose(1, 2)
        if cap is None:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
        else:
            scores = soft_cap(q @ k.transpose(2, 3) * size**-0.5, cap).add_(group.mask)
            y = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v
        y = y.view(batch, num_kv, num_groups, width, size).permute(0, 3, 1, 2, 4).reshape(batch * width, -1, size)
        out[group.targets] = y if group.kept is None else y[group.kept]
    return out
