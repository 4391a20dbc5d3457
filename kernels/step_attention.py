"""Attention of a step: rows that decode by kernels, or in torch's operations where none computes it, prompts by `PromptAttention`.

Which rows are prompts, and how long, the host knows; all else is on the device, and nothing of it comes to the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from kernels import attention, reference
from kernels import latent_attention as latents
from kernels._load import gpu_of
from kernels.attention import Heads
from kernels.cache_scales import CacheScales, attend_scaled, check_scales
from kernels.cpu_step_attention import CpuStepAttention
from kernels.latent import head_linear
from kernels.plain_attention import PlainAttention
from kernels.prompt_attention import PromptAttention
from kernels.structs import MAX_DEPTH

if TYPE_CHECKING:
    from kernels.cpu_attention import CpuRows
    from kernels.split_attention import SplitAttention

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
    num_prompts: int = 0
    """Leading rows that are prompts; the others decode."""
    num_prompt_rows: int = 0
    """Packed rows of the prompts."""
    max_prompt_query_len: int = 0
    max_prompt_seq_len: int = 0
    num_prompt_keys: int = 0
    """Sum of the prompts' seq_lens."""
    max_query_len: int
    """Of rows that decode. Kernels are compiled for it: `warm_up.load_attention` before requests come."""
    max_seq_len: int
    page_size: int
    heads: Heads
    dtype: torch.dtype
    prefix_group: torch.Tensor | None = None
    """[B] int32, with prefix_len: rows that decode and have the same group share their first prefix_len tokens' pages, which are read once
    for all of them. A group is numbered by its first such row; -1: none. Prompts take no part."""
    prefix_len: torch.Tensor | None = None
    """[B] int32: a multiple of page_size, and no more than the tokens before the new ones."""
    seen: torch.Tensor | None = None
    """[T] int64: what rows that decode see of their request's, where some are trees: see `step_rows.StepRows`."""
    is_e4m3: bool = False
    """Whether pages hold codes of e4m3."""
    is_whole: bool = False
    """Queries see all of their request's tokens, from where their own window begins on. Not with prompts, prefixes, trees or latents."""
    max_first_row: int = 0
    """Where rows that decode begin at most, if others lie before them and num_prompts does not say so."""
    _decoding: attention.AttentionPlan | latents.LatentPlan | None = field(default=None, init=False)
    """Where a kernel computes rows that decode."""
    _kinds: dict[tuple[int | None, float | None], attention.AttentionPlan] = field(default_factory=dict, init=False)
    """The same for layers with a window or a cap of scores, by those: made when the first such layer asks."""
    _plain: PlainAttention | None = field(default=None, init=False)
    """Of rows that decode, for what the kernel does not compute."""
    _prompts: PromptAttention | None = field(default=None, init=False)
    _on_cpu: CpuStepAttention | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        batch, prompts = len(self.seq_lens), self.num_prompts
        bounds = (self.num_prompt_rows, self.max_prompt_query_len, self.max_prompt_seq_len, self.num_prompt_keys)
        if not 0 <= prompts <= batch or (prompts and min(bounds) < 1):
            raise ValueError(f"{prompts} prompts of {batch} rows have {bounds} rows, most queries, most keys, and keys; each must be at least 1")
        if (self.prefix_group is None) != (self.prefix_len is None):
            raise ValueError("prefix_group and prefix_len go together; one of them is missing")
        if self.is_whole and (prompts or self.prefix_len is not None or self.seen is not None or self.heads.latent_rank):
            raise ValueError("is_whole goes with no prompts, prefixes, trees or latents")
        named = {"cu_query_lens": self.cu_query_lens, "seq_lens": self.seq_lens, "request_indices": self.request_indices}
        for name, tensor in named.items():
            length = batch + (name == "cu_query_lens")
            if tensor.shape != (length,) or tensor.dtype != torch.int32:
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; must be int32 [{length}]")
        if self.seq_lens.device.type != "cuda":
            tensors = (self.cu_query_lens, self.seq_lens, self.request_indices, self.page_table)
            self._on_cpu = CpuStepAttention(*tensors, self.page_size, self.heads, self.dtype, self.seen, is_e4m3=self.is_e4m3, is_whole=self.is_whole)
            return
        if batch == prompts:
            return
        lists = (self.cu_query_lens[prompts:], self.seq_lens[prompts:], self.request_indices[prompts:])
        self._plain = PlainAttention(*lists, self.page_table, self.page_size, self.max_seq_len, self.seen, self.max_query_len * self.is_whole)
        self._decoding = self._plan_latents(*lists) if self.heads.latent_rank else self._plan_keys()

    @property
    def _first(self) -> int:
        """Packed rows before those that decode."""
        return self.num_prompt_rows if self.num_prompts else 0

    def _plan_latents(self, cu_query_lens: torch.Tensor, seq_lens: torch.Tensor, table_rows: torch.Tensor) -> latents.LatentPlan | None:
        if self.seen is not None:
            return None
        defines = latents.choose_shape(self.max_query_len, self.page_size, self.heads, self.dtype, gpu_of(seq_lens.device), self.is_e4m3)
        if defines is None:
            return None
        return latents.LatentPlan(
            cu_query_lens=cu_query_lens,
            seq_lens=seq_lens,
            page_table=self.page_table,
            table_rows=table_rows,
            max_query_len=self.max_query_len,
            page_size=self.page_size,
            heads=self.heads,
            defines=dict(defines),
            first_token=self._first,
        )

    def _plan_keys(self, window: int | None = None, cap: float | None = None) -> attention.AttentionPlan | None:
        if not attention.is_known(self.page_size, self.heads) or (self.seen is not None and window is not None and window <= MAX_DEPTH):
            return None
        groups, lens, prompts = self.prefix_group, self.prefix_len, self.num_prompts
        if window is not None or cap is not None:
            groups = lens = None
        if prompts and groups is not None and lens is not None:
            groups, lens = torch.empty_like(groups[prompts:]), lens[prompts:]
        return attention.AttentionPlan(
            cu_query_lens=self.cu_query_lens[prompts:],
            seq_lens=self.seq_lens[prompts:],
            page_table=self.page_table,
            table_rows=self.request_indices[prompts:],
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            page_size=self.page_size,
            heads=self.heads[:3],
            dtype=self.dtype,
            prefixes=None if groups is None or lens is None else (groups, lens),
            first_token=self._first or self.max_first_row,
            window=window,
            cap=cap,
            seen=self.seen,
            is_e4m3=self.is_e4m3,
            is_whole=self.is_whole,
        )

    def _kind(self, window: int | None, cap: float | None) -> attention.AttentionPlan | None:
        """The plan of layers with such a window and cap, where a kernel computes them."""
        if window is None and cap is None:
            return self._decoding if isinstance(self._decoding, attention.AttentionPlan) else None
        plan = self._kinds.get((window, cap)) or self._plan_keys(window, cap)
        if plan is not None and (window, cap) not in self._kinds:
            plan.refresh()
            self._kinds[window, cap] = plan
        return plan

    @property
    def compiled_rows(self) -> CpuRows | None:
        """On CPU, where a compiled kernel computes all rows, as of the last refresh()."""
        return None if self._on_cpu is None else self._on_cpu.compiled_rows

    def refresh(self) -> None:
        """Plans anew, from the lengths that the tensors hold now."""
        prompts = self.num_prompts
        if self._on_cpu is not None:
            self._on_cpu.refresh()
            return
        if self._plain is not None:
            self._plain.refresh()
        if self._decoding is not None:
            prefixes = self._decoding.prefixes if isinstance(self._decoding, attention.AttentionPlan) else None
            if prompts and prefixes is not None and self.prefix_group is not None:
                torch.sub(self.prefix_group[prompts:], prompts, out=prefixes[0]).clamp_(min=-1)
            self._decoding.refresh()
        for plan in self._kinds.values():
            plan.refresh()
        if prompts:
            self._prompts = PromptAttention(
                self.cu_query_lens[: prompts + 1],
                self.seq_lens[:prompts],
                self.request_indices[:prompts],
                self.page_table,
                self.page_size,
                self.max_prompt_query_len,
                self.max_prompt_seq_len,
                self.num_prompt_keys,
            )

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
        """See `append_attention`."""
        if self._on_cpu is not None:
            return self._on_cpu.attend(query, key_pages, value_pages, window, cap, scales, out)
        first, prompts = self._first, self._prompts
        if not first:
            return self._decode(query, key_pages, value_pages, window, cap, scales, out)
        assert prompts is not None, "refresh() comes first"

        def attend_prompts(target: torch.Tensor | None) -> torch.Tensor:
            if scales is None:
                return prompts.attend(query[:first], key_pages, value_pages, window, cap, target)
            made = attend_scaled(lambda q: prompts.attend(q, key_pages, value_pages, window, cap), query[:first], scales)
            return made if target is None else target.copy_(made)

        if out is None:
            if len(query) == first:
                return attend_prompts(None)
            out = torch.empty_like(query)
        if self._plain is not None:  # first: a kernel may begin while the keys are written
            self._decode(query, key_pages, value_pages, window, cap, scales, out)
        attend_prompts(out[:first])
        return out

    def _decode(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        window: int | None,
        cap: float | None,
        scales: CacheScales | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Of the rows that decode; out: of all rows, of which others are left as they are."""
        plan, plain, first = self._kind(window, cap), self._plain, self._first
        if plan is not None:
            return attention.append_attention(query, key_pages, value_pages, plan, out, scales)
        assert plain is not None
        made = attend_scaled(lambda q: plain.attend(q, key_pages, value_pages, first, window, cap), query[first:], scales)
        return made if out is None else out[first:].copy_(made)

    def attend_latents(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        key_up: torch.Tensor,
        value_up: torch.Tensor,
        scale: float,
        absorb: torch.Tensor | None = None,
        scales: CacheScales | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `latent_attention`."""
        still, prompts = key_up.shape[1], self._prompts
        if self._on_cpu is not None:
            return self._on_cpu.attend_latents(query, pages, key_up, value_up, scale, scales, out)
        if not self.heads.latent_rank:
            raise ValueError("attention over latents needs heads with latent_rank; this step is planned for keys and values")
        first = self._first
        parts = []
        if self._plain is not None and len(query) > first:
            parts.append(self._decode_latents(query[first:], pages, key_up, value_up, scale, absorb, scales))
        if first:
            assert prompts is not None, "refresh() comes first"
            made = attend_scaled(lambda q: prompts.attend_latents(q, pages, key_up, value_up, scale), query[:first], scales, still)
            parts.insert(0, made)
        if out is None:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        begin = 0
        for part in parts:
            out[begin : begin + len(part)].copy_(part)
            begin += len(part)
        return out

    def _decode_latents(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        key_up: torch.Tensor,
        value_up: torch.Tensor,
        scale: float,
        absorb: torch.Tensor | None,
        scales: CacheScales | None,
    ) -> torch.Tensor:
        """What the rows that decode find [T, H, V]."""
        still, rank = key_up.shape[1:]
        weight, plain = key_up.transpose(1, 2).contiguous() if absorb is None else absorb, self._plain
        if isinstance(self._decoding, latents.LatentPlan):
            return self._decoding.attend(head_linear(query[..., :still], weight), query[..., still:], pages, scale, value_up, scales)
        assert plain is not None

        def attend(q: torch.Tensor) -> torch.Tensor:
            absorbed = torch.cat([head_linear(q[..., :still], weight), q[..., still:]], dim=-1)
            return plain.attend_latents(absorbed, pages, rank, self._first, scale)

        return head_linear(attend_scaled(attend, query, scales, still), value_up)


def plan_attention(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    page_ids: Sequence[Sequence[int]],
    page_size: int,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
) -> StepAttention | reference.AttentionPlan:
    """A plan for lengths that the host knows. See `reference.plan_attention`."""
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
        heads=heads,
        dtype=dtype,
    )
    plan.refresh()
    return plan


Plan: TypeAlias = "StepAttention | SplitAttention | reference.AttentionPlan"
"""How attention is computed: of a step, of one that is captured whatever its prompts, and by the twin for lists of lengths."""


def append_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    plan: Plan,
    window: int | None = None,
    cap: float | None = None,
    scales: CacheScales | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of packed queries [T, H, D] over paged keys and values [P, page, Hkv, D], causal among the new tokens -> [T, H, D].

    The new tokens' keys and values are in their pages already. Rows past the last request's may hold anything. window: tokens that a query
    sees, itself with them; cap: scores become cap tanh(score / cap). scales: of pages in e4m3. out [T, H, D]: where a step's results go.
    """
    check_scales(key_pages, scales)
    if not isinstance(plan, reference.AttentionPlan):
        return plan.attend(query, key_pages, value_pages, window, cap, scales, out)
    assert out is None, "of a step alone"
    return attend_scaled(lambda q: reference.append_attention(q, key_pages, value_pages, plan, window, cap), query, scales)


def latent_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    plan: Plan,
    key_up: torch.Tensor,
    value_up: torch.Tensor,
    scale: float,
    absorb: torch.Tensor | None = None,
    scales: CacheScales | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of packed queries [T, H, N + D] over paged latents [P, page, 1, R + D] -> [T, H, V]: see `reference.latent_attention`.

    absorb: key_up as [H, R, N], which a GPU wants where few queries meet latents; made for the call when it is not given. scales: of pages in
    e4m3. out [T, H, V]: where a step's results go.
    """
    check_scales(pages, scales)
    if isinstance(plan, StepAttention):
        return plan.attend_latents(query, pages, key_up, value_up, scale, absorb, scales, out)
    assert out is None and isinstance(plan, reference.AttentionPlan), "of a step alone, and of keys and values where prompts are found by kernels"
    return attend_scaled(lambda q: reference.latent_attention(q, pages, plan, key_up, value_up, scale), query, scales, key_up.shape[1])
