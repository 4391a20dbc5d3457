"""Attention of steps with prompts in them: long runs of queries go to torch's flash attention, short ones to `append_attention`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from kernels import attention, reference

MAX_SHORT_QUERIES = 17
"""Requests with at most this many query tokens are what `append_attention` is for."""


class PackedPlan:
    """How one step's queries of mixed lengths are computed, from lengths and pages that the host knows; on a GPU.

    query_lens and seq_lens [B]: new tokens, and all tokens with them; page_ids [B][>= pages of seq_len].
    """

    def __init__(
        self,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        page_ids: Sequence[Sequence[int]],
        page_size: int,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        starts = [0, *itertools.accumulate(query_lens)]
        short = [b for b, count in enumerate(query_lens) if count <= MAX_SHORT_QUERIES]
        long = [b for b, count in enumerate(query_lens) if count > MAX_SHORT_QUERIES]
        self.short: attention.AttentionPlan | None = None
        self.long: _Long | reference.AttentionPlan | None = None
        self.short_rows = _rows(short, starts, device)
        self.long_rows = _rows(long, starts, device)

        def ints(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        if short:
            width = max(-(-seq_lens[b] // page_size) for b in short)
            table = [[*page_ids[b][:width], *[0] * (width - len(page_ids[b]))] for b in short]
            self.short = attention.AttentionPlan(
                cu_query_lens=ints([0, *itertools.accumulate(query_lens[b] for b in short)]),
                seq_lens=ints([seq_lens[b] for b in short]),
                page_table=torch.tensor(table, dtype=torch.int32, device=device),
                table_rows=ints(range(len(short))),
                max_query_len=MAX_SHORT_QUERIES,
                max_seq_len=width * page_size,
                page_size=page_size,
                num_query_heads=num_query_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                dtype=dtype,
            )
            self.short.refresh()
        if long:
            queries, lengths, pages = [query_lens[b] for b in long], [seq_lens[b] for b in long], [list(page_ids[b]) for b in long]
            if dtype == torch.float32:
                self.long = reference.plan_attention(queries, lengths, pages, page_size, num_query_heads // num_kv_heads, dtype, device)
            else:
                self.long = _Long(queries, lengths, pages, page_size, device)


def _rows(requests: Sequence[int], starts: Sequence[int], device: torch.device) -> torch.Tensor | slice:
    """Packed rows of some requests: a slice where they follow one another."""
    if not requests or requests[-1] - requests[0] == len(requests) - 1:
        return slice(starts[requests[0]], starts[requests[-1] + 1]) if requests else slice(0, 0)
    return torch.tensor([row for b in requests for row in range(starts[b], starts[b + 1])], device=device)


class _Long:
    """Requests for flash attention with packed queries and keys (Dao 2023)."""

    def __init__(
        self, query_lens: Sequence[int], seq_lens: Sequence[int], page_ids: Sequence[Sequence[int]], page_size: int, device: torch.device
    ) -> None:
        self.max_queries, self.max_keys = max(query_lens), max(seq_lens)
        sums = [[0, *itertools.accumulate(lens)] for lens in (query_lens, seq_lens)]
        self.cu_queries, self.cu_keys = (torch.tensor(values, dtype=torch.int32, device=device) for values in sums)
        places = [torch.tensor(pages[: -(-length // page_size)]) for pages, length in zip(page_ids, seq_lens)]
        offsets = torch.arange(page_size)
        slots = [(own[:, None] * page_size + offsets).flatten()[:length] for own, length in zip(places, seq_lens)]
        self.key_slots = torch.cat(slots).to(device, non_blocking=True)

    def attend(self, query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor) -> torch.Tensor:
        keys, values = (pages.flatten(0, 1)[self.key_slots] for pages in (key_pages, value_pages))
        return torch.ops.aten._flash_attention_forward(
            query, keys, values, self.cu_queries, self.cu_keys, self.max_queries, self.max_keys, 0.0, True, False
        )[0]


def append_packed_attention(query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, plan: PackedPlan) -> torch.Tensor:
    """As `append_attention`, for a PackedPlan."""
    out = torch.empty_like(query)
    if plan.short is not None:
        out[plan.short_rows] = attention.append_attention(query[plan.short_rows], key_pages, value_pages, plan.short)
    if isinstance(plan.long, _Long):
        out[plan.long_rows] = plan.long.attend(query[plan.long_rows], key_pages, value_pages)
    elif plan.long is not None:
        out[plan.long_rows] = reference.append_attention(query[plan.long_rows], key_pages, value_pages, plan.long)
    return out
