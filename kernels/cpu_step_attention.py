"""Attention of a step on CPU: rows of few by a compiled kernel where it computes them, all others by the twin."""

from __future__ import annotations

import torch

from kernels import cpu_attention, reference
from kernels.attention import Heads
from kernels.cache_scales import CacheScales, attend_scaled

MOST = reference.MAX_GROUPED_QUERIES
"""Rows of a request that the kernel computes: of more, the twin's products are the quicker ones."""


class CpuStepAttention:
    """What `kernels.step_attention.StepAttention` has on CPU."""

    def __init__(
        self,
        cu_query_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        indices: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
        heads: Heads,
        dtype: torch.dtype,
        seen: torch.Tensor | None,
        *,
        is_e4m3: bool,
        is_whole: bool,
    ) -> None:
        """As the fields of `StepAttention`."""
        self._cu, self._seq_lens, self._indices, self._table = cu_query_lens, seq_lens, indices, page_table
        self._page_size, self._heads, self._dtype, self._seen, self._is_whole = page_size, heads, dtype, seen, is_whole
        self._has_kernel = not is_e4m3 and not is_whole and not heads.latent_rank and cpu_attention.is_usable(heads.size, dtype)
        self._all: reference.AttentionPlan | None = None
        """The twin's plan of all rows, once a layer needs it."""
        self._few: cpu_attention.CpuRows | None = None
        """What the kernel computes."""
        self._many: reference.AttentionPlan | None = None
        """The twin's plan of the others, if there are any."""

    def refresh(self) -> None:
        """Plans anew, from the lengths that the tensors hold now."""
        self._all = self._many = None
        if not self._has_kernel:
            return
        if self._few is None or not self._few.is_live:
            self._few = cpu_attention.CpuRows(self._cu, self._seq_lens, self._indices, self._table, self._seen, MOST)
        starts = self._cu.numpy()
        if starts[-1] > MOST and (starts[1:] - starts[:-1]).max() > MOST:
            self._many = self._plan(MOST + 1)

    @property
    def compiled_rows(self) -> cpu_attention.CpuRows | None:
        """What the kernel computes, where that is all: see `refresh`."""
        return self._few if self._many is None else None

    def attend(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        window: int | None,
        cap: float | None,
        scales: CacheScales | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `kernels.step_attention.append_attention`."""
        if self._few is None or cap is not None or (window is not None and self._seen is not None):
            rows = self._rows
            made = attend_scaled(lambda q: reference.append_attention(q, key_pages, value_pages, rows, window, cap), query, scales)
            return made if out is None else out.copy_(made)
        made = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None or not out.is_contiguous() else out
        self._few.attend(query, key_pages, value_pages, window, made)
        if self._many is not None:
            reference.append_attention(query, key_pages, value_pages, self._many, window, out=made)
        return made if out is None or made is out else out.copy_(made)

    def attend_latents(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        key_up: torch.Tensor,
        value_up: torch.Tensor,
        scale: float,
        scales: CacheScales | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `kernels.step_attention.latent_attention`."""
        rows = self._rows
        made = attend_scaled(lambda q: reference.latent_attention(q, pages, rows, key_up, value_up, scale), query, scales, key_up.shape[1])
        return made if out is None else out.copy_(made)

    @property
    def _rows(self) -> reference.AttentionPlan:
        if self._all is None:
            self._all = self._plan()
        return self._all

    def _plan(self, min_query_len: int = 0) -> reference.AttentionPlan:
        """The twin's, of requests that have so many rows."""
        starts, lens, indices = (t.tolist() for t in (self._cu, self._seq_lens, self._indices))
        table = self._table.numpy()
        active = [b for b in range(len(lens)) if starts[b + 1] > starts[b]]
        pages = [table[indices[b], : -(-lens[b] // self._page_size)] for b in active]
        query_lens = [starts[b + 1] - starts[b] for b in active]
        num_groups = self._heads.num_query // self._heads.num_kv
        seen = None if self._seen is None else self._seen.numpy()  # of active requests, as the others have no rows
        lens = [lens[b] for b in active]
        sizes = (self._page_size, num_groups, self._dtype)
        return reference.plan_attention(query_lens, lens, pages, *sizes, seen=seen, min_query_len=min_query_len, is_whole=self._is_whole)
