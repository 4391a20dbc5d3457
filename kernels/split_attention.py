"""Attention of a step whose prompts the device alone knows: of graphs that hold a whole forward, whatever requests are in it."""

from __future__ import annotations

from collections.abc import Collection

import torch

from kernels import attention
from kernels._load import Gpu
from kernels.attention import Heads
from kernels.cache_scales import CacheScales
from kernels.prompt_attention import PAGES, SIZES, PromptAttention, can_attend
from kernels.step_attention import StepAttention
from kernels.step_rows import SplitRows


def can_split(
    heads: Heads, page_size: int, dtype: torch.dtype, gpu: Gpu, kinds: Collection[tuple[int | None, float | None]] = (), *, is_e4m3: bool = False
) -> bool:
    """Whether kernels attend that find prompts, and rows that decode, by themselves. kinds: windows and caps of scores that layers have;
    is_e4m3: pages hold codes."""
    is_half = dtype in (torch.bfloat16, torch.float16) and not is_e4m3 and not heads.latent_rank
    has_prompts = gpu.generation == 9 and (heads.size, heads.size) in SIZES and page_size in PAGES
    return is_half and has_prompts and attention.is_known(page_size, heads) and all(cap is None for _, cap in kinds)


class SplitAttention:
    """The work is found anew in every launch: it is captured with the forward whose layers it is for."""

    def __init__(
        self,
        split: SplitRows,
        page_table: torch.Tensor,
        *,
        max_rows: int,
        max_query_len: int,
        max_seq_len: int,
        page_size: int,
        heads: Heads,
        dtype: torch.dtype,
    ) -> None:
        """page_table [R, N] int32: page ids by request index; max_rows: packed rows of a step; max_query_len: of a request that decodes. Only for
        what `can_split` says yes to."""
        lists = split.seq_lens, split.indices, page_table
        self._decoding = StepAttention(
            cu_query_lens=split.cu_decoding_rows,
            seq_lens=split.seq_lens,
            request_indices=split.indices,
            page_table=page_table,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            page_size=page_size,
            heads=heads,
            dtype=dtype,
            max_first_row=max_rows,
        )
        self._prompts = PromptAttention(split.cu_prompt_rows, *lists, page_size, max_rows, max_seq_len, 0)
        self._num_requests = len(split.seq_lens)

    def refresh(self) -> None:
        """See `StepAttention.refresh`."""
        self._decoding.refresh()

    def attend(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        window: int | None = None,
        cap: float | None = None,
        scales: CacheScales | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `kernels.step_attention.append_attention`; rows of nobody are left as they are."""
        if cap is not None or scales is not None or not can_attend(query, key_pages, value_pages, self._num_requests):
            raise ValueError(f"query {list(query.shape)} {query.dtype} over pages {list(key_pages.shape)} {key_pages.dtype} is not for split lists")
        if out is None:
            out = torch.empty_like(query)
        self._decoding.attend(query, key_pages, value_pages, window, out=out)  # first: a kernel may begin while the keys are written
        return self._prompts.attend(query, key_pages, value_pages, window, out=out)
