"""The operations of a step, by name: each runs a CUDA kernel on GPU tensors and its twin in pure torch on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import attention, prefill, reference
from kernels.activation import silu_mul
from kernels.append_kv import append_kv
from kernels.distribution import draw_tokens, probabilities
from kernels.linear import add_linear, linear, norm_gated_linear, norm_linear
from kernels.ngram import draft_ngram
from kernels.norm import rms_norm
from kernels.reference import DRAFT_STREAM, SAMPLE_STREAM, apply_penalties
from kernels.sampling import choose, process_and_choose, sample
from kernels.state import commit
from kernels.step import append_draft, pack_results, prepare_drafter, prepare_step, simulate_acceptance, write_values
from kernels.verify import sample_candidates, top_p_candidates, verify, verify_drafts, verify_rejection, verify_top_p

__all__ = [
    "DRAFT_STREAM",
    "SAMPLE_STREAM",
    "Plan",
    "add_linear",
    "append_attention",
    "append_draft",
    "append_kv",
    "apply_penalties",
    "choose",
    "commit",
    "draft_ngram",
    "draw_tokens",
    "linear",
    "norm_gated_linear",
    "norm_linear",
    "pack_results",
    "plan_attention",
    "prepare_drafter",
    "prepare_step",
    "probabilities",
    "process_and_choose",
    "rms_norm",
    "sample",
    "sample_candidates",
    "silu_mul",
    "simulate_acceptance",
    "top_p_candidates",
    "verify",
    "verify_drafts",
    "verify_rejection",
    "verify_top_p",
    "write_values",
]

Plan = attention.AttentionPlan | prefill.PackedPlan | reference.AttentionPlan
"""How a step's attention is computed: from lengths on the device, from lengths on the host, and the latter on CPU."""


def plan_attention(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    page_ids: Sequence[Sequence[int]],
    page_size: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Plan:
    """A plan for lengths that the host knows. heads: of queries, of keys and values, and their size. See `reference.plan_attention`."""
    if device.type == "cuda":
        return prefill.PackedPlan(query_lens, seq_lens, page_ids, page_size, *heads, dtype, device)
    return reference.plan_attention(list(query_lens), list(seq_lens), [list(p) for p in page_ids], page_size, heads[0] // heads[1], dtype, device)


def append_attention(query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Attention of packed queries [T, H, D] over paged keys and values, causal among the new tokens -> [T, H, D]."""
    if isinstance(plan, attention.AttentionPlan):
        return attention.append_attention(query, key_pages, value_pages, plan)
    if isinstance(plan, prefill.PackedPlan):
        return prefill.append_packed_attention(query, key_pages, value_pages, plan)
    return reference.append_attention(query, key_pages, value_pages, plan)
