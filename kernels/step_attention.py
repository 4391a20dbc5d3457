"""Attention of a step: rows that decode by `append_attention`, prompts of any length by torch's flash attention over their gathered keys.

Which rows are prompts, and how long, the host knows; all else is on the device, and nothing of it comes to the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from kernels import attention, reference

MAX_SHORT_QUERIES = 17
"""Lists of requests with at most this many query tokens each are what `append_attention` is for."""


@dataclass(kw_only=True, eq=False)
class StepAttention:
    """How one step's attention is computed. Made for the bounds of a step; `refresh` once a step, whose lengths the tensors hold then.

    Without prompts it can be captured: the tensors' contents may change between steps, their addresses may not.
    """

    cu_query_lens: torch.Tensor
    """[B + 1] int32: the queries of row b are the packed rows cu[b] to cu[b + 1]; none: an inactive request."""
    seq_lens: torch.Tensor
    """[B] int32: tokens in the cache, the new ones with them."""
    request_indices: torch.Tensor
    """[B] int32: the row's place in the page table."""
    page_table: torch.Tensor
    """[S, N] int32: page ids."""
    num_prompts: int
    """Leading rows that are prompts; the others decode."""
    num_prompt_rows: int
    """Packed rows of the prompts."""
    max_prompt_query_len: int
    max_prompt_seq_len: int
    num_prompt_keys: int
    """Sum of the prompts' seq_lens."""
    max_query_len: int
    """Of rows that decode. Kernels are compiled for it: `warm_up.load_attention` before requests come."""
    max_seq_len: int
    page_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    prefix_group: torch.Tensor | None = None
    """[B] int32, with prefix_len: rows that decode and have the same group share their first prefix_len tokens' pages, which are read once
    for all of them. A group is numbered by its first such row; -1: none. Prompts take no part."""
    prefix_len: torch.Tensor | None = None
    """[B] int32: a multiple of page_size, and no more than the tokens before the new ones."""
    _decoding: attention.AttentionPlan | None = field(default=None, init=False)
    _prompts: _Prompts | None = field(default=None, init=False)
    _rows: reference.AttentionPlan | None = field(default=None, init=False)
    """On CPU, of all rows."""

    def __post_init__(self) -> None:
        batch, prompts = len(self.seq_lens), self.num_prompts
        bounds = (self.num_prompt_rows, self.max_prompt_query_len, self.max_prompt_seq_len, self.num_prompt_keys)
        if not 0 <= prompts <= batch or (prompts and min(bounds) < 1):
            raise ValueError(f"{prompts} prompts of {batch} rows have {bounds} rows, most queries, most keys, and keys; each must be at least 1")
        if (self.prefix_group is None) != (self.prefix_len is None):
            raise ValueError("prefix_group and prefix_len go together; one of them is missing")
        for name, tensor, length in (
            ("cu_query_lens", self.cu_query_lens, batch + 1),
            ("seq_lens", self.seq_lens, batch),
            ("request_indices", self.request_indices, batch),
        ):
            if tensor.shape != (length,) or tensor.dtype != torch.int32:
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; must be int32 [{length}]")
        if self.seq_lens.device.type != "cuda" or batch == prompts:
            return
        groups, lens = self.prefix_group, self.prefix_len
        if prompts and groups is not None and lens is not None:
            groups, lens = torch.empty_like(groups[prompts:]), lens[prompts:]
        self._decoding = attention.AttentionPlan(
            cu_query_lens=self.cu_query_lens[prompts:],
            seq_lens=self.seq_lens[prompts:],
            page_table=self.page_table,
            table_rows=self.request_indices[prompts:],
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            page_size=self.page_size,
            heads=(self.num_query_heads, self.num_kv_heads, self.head_dim),
            dtype=self.dtype,
            prefixes=None if groups is None or lens is None else (groups, lens),
            first_token=self.num_prompt_rows if prompts else 0,
        )

    def refresh(self) -> None:
        """Plans anew, from the lengths that the tensors hold now."""
        prompts = self.num_prompts
        if self.seq_lens.device.type != "cuda":
            self._rows = self._plan_rows()
            return
        if self._decoding is not None:
            if prompts and self._decoding.prefixes is not None and self.prefix_group is not None:
                torch.sub(self.prefix_group[prompts:], prompts, out=self._decoding.prefixes[0]).clamp_(min=-1)
            self._decoding.refresh()
        if prompts:
            self._prompts = _Prompts(self)

    def attend(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        window: int | None = None,
        cap: float | None = None,
    ) -> torch.Tensor:
        """See `append_attention`."""
        if self._rows is not None:
            return reference.append_attention(query, key_pages, value_pages, self._rows, window, cap)
        if window is not None or cap is not None:
            raise ValueError(f"window is {window}, cap {cap}: attention on a GPU has neither yet; must be None")
        if not self.num_prompts:
            assert self._decoding is not None
            return attention.append_attention(query, key_pages, value_pages, self._decoding)
        assert self._prompts is not None, "refresh() comes first"
        if self._decoding is None and len(query) == self.num_prompt_rows:
            return self._prompts.attend(query, key_pages, value_pages)
        out, count = torch.empty_like(query), self.num_prompt_rows
        if self._decoding is not None:  # first: it may begin while the keys are written
            attention.append_attention(query, key_pages, value_pages, self._decoding, out)
        out[:count].copy_(self._prompts.attend(query[:count], key_pages, value_pages))
        return out

    def attend_latents(self, query: torch.Tensor, pages: torch.Tensor, key_up: torch.Tensor, value_up: torch.Tensor, scale: float) -> torch.Tensor:
        """See `latent_attention`."""
        if self._rows is None:
            raise ValueError("attention over latents is computed on CPU alone, after refresh()")
        return reference.latent_attention(query, pages, self._rows, key_up, value_up, scale)

    def _plan_rows(self) -> reference.AttentionPlan:
        """The twin's plan of all rows."""
        starts, lens, indices = (t.tolist() for t in (self.cu_query_lens, self.seq_lens, self.request_indices))
        table = self.page_table.numpy()
        active = [b for b in range(len(lens)) if starts[b + 1] > starts[b]]
        pages = [table[indices[b], : -(-lens[b] // self.page_size)] for b in active]
        query_lens = [starts[b + 1] - starts[b] for b in active]
        num_groups = self.num_query_heads // self.num_kv_heads
        return reference.plan_attention(query_lens, [lens[b] for b in active], pages, self.page_size, num_groups, self.dtype)


class _Prompts:
    """One step's prompts for flash attention with packed queries and keys (Dao 2023)."""

    def __init__(self, step: StepAttention) -> None:
        count, device = step.num_prompts, step.seq_lens.device
        self._max_queries, self._max_keys = step.max_prompt_query_len, step.max_prompt_seq_len
        self._cu_queries = step.cu_query_lens[: count + 1]
        self._cu_keys = torch.zeros(count + 1, dtype=torch.int32, device=device)
        torch.cumsum(step.seq_lens[:count], 0, out=self._cu_keys[1:])
        keys = torch.arange(step.num_prompt_keys, dtype=torch.int32, device=device)
        # Should a prompt compute nothing after all, then some keys are nobody's: they are read from anywhere.
        owners = torch.searchsorted(self._cu_keys[1:], keys, right=True).clamp_(max=count - 1)
        places = keys - self._cu_keys[owners]
        numbers = (places // step.page_size).clamp_(max=step.page_table.shape[1] - 1)
        self._pages = step.page_table[step.request_indices[owners].long(), numbers.long()].long()
        self._offsets = places % step.page_size
        self._slots: dict[int, torch.Tensor] = {}
        """KV slots of the keys, by the stride of the plane's pages."""

    def attend(self, query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor) -> torch.Tensor:
        num_pages, page_size, num_kv, size = key_pages.shape
        stride = key_pages.stride(0) // (num_kv * size)
        num_rows = (num_pages - 1) * stride + page_size  # as in `reference.token_rows`
        if stride not in self._slots:
            self._slots[stride] = (self._pages * stride + self._offsets).clamp_(0, num_rows - 1)
        slots, row = self._slots[stride], num_kv * size
        keys, values = (
            pages.as_strided((num_rows, row), (row, 1)).index_select(0, slots).view(-1, num_kv, size) for pages in (key_pages, value_pages)
        )
        if query.dtype == torch.float32:
            return self._attend_exactly(query, keys, values)
        return torch.ops.aten._flash_attention_forward(
            query, keys, values, self._cu_queries, self._cu_keys, self._max_queries, self._max_keys, 0.0, True, False
        )[0]

    def _attend_exactly(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """In float32, which flash attention has not, and which is for tests: it may wait for the lengths."""
        out = torch.empty_like(query)
        queries, places = self._cu_queries.tolist(), self._cu_keys.tolist()
        for begin, end, first, last in zip(queries, queries[1:], places, places[1:]):
            if end > begin:
                is_seen = torch.ones(end - begin, last - first, dtype=torch.bool, device=query.device).tril(last - first - (end - begin))
                q, k, v = (x.transpose(0, 1)[None] for x in (query[begin:end], keys[first:last], values[first:last]))
                out[begin:end] = F.scaled_dot_product_attention(q, k, v, attn_mask=is_seen, enable_gqa=True)[0].transpose(0, 1)
        return out


def plan_attention(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    page_ids: Sequence[Sequence[int]],
    page_size: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> StepAttention | reference.AttentionPlan:
    """A plan for lengths that the host knows. heads: of queries, of keys and values, and their size. See `reference.plan_attention`."""
    if device.type != "cuda":
        return reference.plan_attention(query_lens, seq_lens, page_ids, page_size, heads[0] // heads[1], dtype, device)
    batch, most = len(query_lens), max(seq_lens)
    width = -(-most // page_size)
    table = np.zeros((batch, width), np.int32)
    for row, ids, length in zip(table, page_ids, seq_lens, strict=True):
        count = -(-length // page_size)
        row[:count] = ids[:count]

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    is_short = max(query_lens) <= MAX_SHORT_QUERIES
    plan = StepAttention(
        cu_query_lens=ints([0, *itertools.accumulate(query_lens)]),
        seq_lens=ints(seq_lens),
        request_indices=torch.arange(batch, dtype=torch.int32, device=device),
        page_table=torch.from_numpy(table).to(device),
        num_prompts=0 if is_short else batch,
        num_prompt_rows=sum(query_lens),
        max_prompt_query_len=max(query_lens),
        max_prompt_seq_len=most,
        num_prompt_keys=sum(seq_lens),
        max_query_len=MAX_SHORT_QUERIES,
        max_seq_len=width * page_size,
        page_size=page_size,
        num_query_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        dtype=dtype,
    )
    plan.refresh()
    return plan


Plan = StepAttention | reference.AttentionPlan
"""How attention is computed: of a step, and by the twin for lists of lengths."""


def append_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    plan: Plan,
    window: int | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """Attention of packed queries [T, H, D] over paged keys and values [P, page, Hkv, D], causal among the new tokens -> [T, H, D].

    The new tokens' keys and values are in their pages already. Rows past the last request's may hold anything. On CPU also with a window
    (tokens that a query sees, itself with them) and a cap of scores (cap tanh(score / cap)).
    """
    if isinstance(plan, StepAttention):
        return plan.attend(query, key_pages, value_pages, window, cap)
    return reference.append_attention(query, key_pages, value_pages, plan, window, cap)


def latent_attention(
    query: torch.Tensor, pages: torch.Tensor, plan: Plan, key_up: torch.Tensor, value_up: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of packed queries [T, H, N + D] over paged latents [P, page, 1, R + D] -> [T, H, V]: see `reference.latent_attention`. On CPU."""
    if isinstance(plan, StepAttention):
        return plan.attend_latents(query, pages, key_up, value_up, scale)
    return reference.latent_attention(query, pages, plan, key_up, value_up, scale)
