"""Which experts a token takes, on a GPU by one kernel: see `reference.route`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels import reference
from kernels._load import ELEMENTS, gpu_of, load
from kernels.norm import rms_norm
from kernels.structs import RouteSizes

THREADS, TOKENS, WARPS = 256, 8, 8
AHEAD = 8 * 32 * 4
"""Of an expert's weights, how many a warp has on their way at once."""
MAX_SPLIT_BLOCKS = 2
"""To a multiprocessor, up to which the parts of an expert's weights have warps of their own."""
MAX_CHOSEN, MAX_GROUPS, MAX_GROUP_SCORES = 32, 32, 2
"""A lane of a warp has one."""
MAX_SCORED = 256
"""Tokens up to which the kernel makes the scores too; beyond them cuBLAS."""
MAX_TOKENS = 2**19
STATIC_SHARED = 2048
"""Bytes of a block that the kernel itself has, at most."""
FEW = (1, 2, 4)
"""Tokens that have code of their own."""


class ExpertGroups(NamedTuple):
    """How the pairs of tokens and experts are to be sorted by expert, for `kernels.experts.mix_experts`."""

    first: int
    """The rank's own experts: the first, and their number."""
    num_own: int
    least_rows: int
    """A chunk has up to so many rows, or twice, four times as many up to rows_per_chunk where an expert takes more than fit."""
    rows_per_chunk: int
    max_chunks: int


class Routing(NamedTuple):
    """What a router says of tokens [T, hidden]."""

    x: torch.Tensor
    """The tokens, normalised where that was asked for."""
    experts: torch.Tensor
    """[T, k] int64"""
    weights: torch.Tensor
    """[T, k] float32: of what the experts add."""
    lists: torch.Tensor | None = None
    """int32: the pairs sorted by expert, as `experts.cu` has them, where that was asked for and the kernel did it."""


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros whenever no kernel runs; one for each block of tokens that the kernel scores, and one more."""
    return torch.zeros(-(-MAX_SCORED // TOKENS) + 1, dtype=torch.int32, device=device)


def split_gate(gate: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """gate [E, hidden] float32 as a sum of parts in bfloat16 [n, E, hidden], n up to 3, with which products of many tokens of `dtype` run on tensor
    cores and lose nothing; None: where they do not."""
    if not gate.is_cuda or dtype != torch.bfloat16 or not hasattr(torch.ops.aten.mm, "dtype") or gpu_of(gate.device).generation < 9:
        return None
    parts, rest = [], gate
    for _ in range(3):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1]
    return torch.stack([part for i, part in enumerate(parts) if i == 0 or part.any()])


def _score(x: torch.Tensor, gate_parts: torch.Tensor) -> torch.Tensor:
    """x [T, hidden] times the sum of gate_parts [n, E, hidden] transposed -> [T, E] float32."""
    made = torch.mm(x, gate_parts.flatten(0, 1).t(), out_dtype=torch.float32).unflatten(1, gate_parts.shape[:2])
    return made[:, 0] if len(gate_parts) == 1 else made.sum(dim=1)


def route_tokens(
    x: torch.Tensor,
    gate: torch.Tensor,
    num_chosen: int,
    *,
    is_sigmoid: bool = False,
    correction: torch.Tensor | None = None,
    num_groups: int = 1,
    num_chosen_groups: int = 1,
    num_group_scores: int = 1,
    min_sum: float | None = None,
    scale: float = 1.0,
    norm: tuple[torch.Tensor, float] | None = None,
    groups: ExpertGroups | None = None,
    gate_parts: torch.Tensor | None = None,
) -> Routing:
    """Experts of tokens x [T, hidden], and the weights of what they add.

    Scores are x gate^T, gate [E, hidden], in float32, and their sigmoid or softmax; the rest is as `reference.route` says. norm: weights [hidden]
    and eps of a norm of x before that. gate_parts: what `split_gate` makes of gate.
    """
    if x.dim() != 2 or gate.dim() != 2 or x.shape[1] != gate.shape[1] or gate.dtype != torch.float32:
        raise ValueError(f"route_tokens: x {tuple(x.shape)} must be [T, hidden] and gate {tuple(gate.shape)} {gate.dtype} float32 [E, hidden]")
    (num_tokens, hidden), num_experts = x.shape, len(gate)
    if not 0 < num_chosen <= num_experts:
        raise ValueError(f"route_tokens: num_chosen is {num_chosen}; must be from 1 to the number of experts ({num_experts})")
    if correction is not None and (correction.shape != (num_experts,) or correction.dtype != torch.float32):
        raise ValueError(f"route_tokens: correction {tuple(correction.shape)} {correction.dtype} must be float32 [{num_experts}]")
    shared_for_choice = 2 * WARPS * num_experts * 4  # more than it takes to sort the pairs
    is_known = (
        x.is_cuda
        and num_chosen <= MAX_CHOSEN
        and num_groups <= MAX_GROUPS
        and num_group_scores <= MAX_GROUP_SCORES
        and 0 < num_tokens <= MAX_TOKENS
        and shared_for_choice <= gpu_of(x.device).block_memory - STATIC_SHARED
    )
    if not is_known:
        x = x if norm is None else rms_norm(x, *norm)
        scores = F.linear(x.float(), gate)
        rule = {"num_groups": num_groups, "num_chosen_groups": num_chosen_groups, "num_group_scores": num_group_scores}
        shares = scores.sigmoid() if is_sigmoid else scores.softmax(dim=-1)
        return Routing(x, *reference.route(shares, num_chosen, correction=correction, **rule, min_sum=min_sum, scale=scale))
    device = x.device
    few = next((few for few in FEW if num_tokens <= few), TOKENS)
    shared = max((few + (norm is not None)) * hidden * x.element_size(), shared_for_choice)
    is_scored = (
        num_tokens <= MAX_SCORED
        and hidden % 8 == 0
        and x.stride(1) == 1
        and x.stride(0) % (16 // x.element_size()) == 0
        and x.data_ptr() % 16 == 0
        and gate.is_contiguous()
        and shared <= gpu_of(device).block_memory - STATIC_SHARED
    )
    if norm is not None and (norm[0].shape != (hidden,) or norm[0].dtype != x.dtype):
        raise ValueError(f"route_tokens: the norm's weights {tuple(norm[0].shape)} {norm[0].dtype} must be {x.dtype} [{hidden}]")
    lists = None
    if is_scored:
        scores, normed = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=device), None
        if norm is not None:
            normed = torch.empty(num_tokens, hidden, dtype=x.dtype, device=device)
        if groups is not None:
            lists = torch.empty(4 * groups.max_chunks + num_tokens * num_chosen + 1, dtype=torch.int32, device=device)
    else:
        normed = x = x if norm is None else rms_norm(x, *norm)
        scores = F.linear(x.float(), gate) if gate_parts is None else _score(x, gate_parts)
    experts = torch.empty(num_tokens, num_chosen, dtype=torch.int64, device=device)
    weights = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=device)
    shared = shared if is_scored else shared_for_choice
    tokens = few if is_scored else TOKENS
    defines: dict[str, int | str] = {"ELEMENT": ELEMENTS[x.dtype], "TOKENS": tokens, "MANY": int(num_tokens > tokens)}
    kernel = load(device, "route", "route", defines, gpu_of(device).block_memory - STATIC_SHARED, programmatic=True)
    num_parts = next((n for n in (1, 2, 4) if hidden <= n * AHEAD), WARPS)
    num_blocks = -(-num_experts * num_parts // WARPS) * -(-num_tokens // TOKENS)
    split = num_parts if num_blocks <= MAX_SPLIT_BLOCKS * gpu_of(device).num_multiprocessors else 1
    sizes = RouteSizes(
        num_tokens,
        hidden,
        x.stride(0),
        num_experts,
        num_chosen,
        num_groups,
        num_chosen_groups,
        num_group_scores,
        int(is_sigmoid),
        int(min_sum is not None),
        *(groups or (0,) * 5),
        num_parts,
        split,
        min_sum or 0.0,
        scale,
        0.0 if norm is None else norm[1],
    )
    grid = (-(-num_experts * split // WARPS) if is_scored else 1, -(-num_tokens // tokens))
    tensors = (normed, lists, x if is_scored else None, None if norm is None else norm[0], gate, correction)
    pointers = (0 if t is None else t for t in tensors)
    kernel(grid, (THREADS, 1, 1), experts, weights, scores, *pointers, _counters(device), sizes, shared=shared)
    return Routing(x if normed is None else normed, experts, weights, lists)
