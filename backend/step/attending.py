"""Attention of a step's rows over the pages of one worker: what a plan of it is made of."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from backend.step.tensors import StepTensors
from kernels import ops
from kernels._load import gpu_of
from kernels.structs import PREFIX_GROUP, PREFIX_LEN

Kind = tuple[int | None, float | None]


@dataclass(frozen=True, slots=True)
class Attending:
    """What all such plans of a worker share."""

    page_table: torch.Tensor
    page_size: int
    max_model_len: int
    dtype: torch.dtype
    target_heads: ops.Heads

    def plan(
        self,
        step: StepTensors,
        cu_rows: torch.Tensor,
        seq_lens: torch.Tensor,
        prompt_lens: tuple[int, ...],
        prompt_seq_lens: tuple[int, ...],
        heads: ops.Heads,
        num_queries: int | None = None,
        seen: torch.Tensor | None = None,
        *,
        is_e4m3: bool = False,
    ) -> ops.StepAttention:
        """Of rows that lie by request: cu_rows [B + 1], seq_lens [B] int32. prompt_lens, prompt_seq_lens: of the leading requests that are
        prompts; num_queries: of the others at most, the step's own if not given; seen: see `step_rows.StepRows`; is_e4m3: pages hold codes."""
        has_prefixes = step.shape.has_prefixes and heads == self.target_heads and num_queries is None
        if not any(prompt_lens):  # of prompts that are not the drafter's business: rows without queries
            prompt_lens = prompt_seq_lens = ()
        return ops.StepAttention(
            cu_query_lens=cu_rows,
            seq_lens=seq_lens,
            request_indices=step.indices,
            page_table=self.page_table,
            num_prompts=len(prompt_lens),
            num_prompt_rows=sum(prompt_lens),
            max_prompt_query_len=max(prompt_lens, default=0),
            max_prompt_seq_len=max(prompt_seq_lens, default=0),
            num_prompt_keys=sum(prompt_seq_lens),
            max_query_len=num_queries or step.shape.num_queries,
            max_seq_len=self.max_model_len,
            page_size=self.page_size,
            heads=heads,
            dtype=self.dtype,
            prefix_group=step.fields[PREFIX_GROUP] if has_prefixes else None,
            prefix_len=step.fields[PREFIX_LEN] if has_prefixes else None,
            seen=seen,
            is_e4m3=is_e4m3,
        )

    def split(
        self, split: ops.SplitRows, heads: ops.Heads, max_rows: int, max_queries: int, kinds: Collection[Kind] = (), *, is_e4m3: bool = False
    ) -> ops.SplitAttention | None:
        """Of any step of so many rows, whose decoding requests have so many queries, at most; None: no kernel finds prompts by itself.
        kinds: windows and caps of scores of layers that have any."""
        if not ops.can_split(heads, self.page_size, self.dtype, gpu_of(self.page_table.device), kinds, is_e4m3=is_e4m3):
            return None
        sizes = {"max_rows": max_rows, "max_query_len": max_queries, "max_seq_len": self.max_model_len, "page_size": self.page_size}
        return ops.SplitAttention(split, self.page_table, heads=heads, dtype=self.dtype, **sizes)
