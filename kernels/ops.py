"""The operations of a step, by name: each runs a CUDA kernel on GPU tensors and its twin in pure torch on CPU tensors."""

from __future__ import annotations

from kernels.activation import silu_mul
from kernels.append_kv import append_kv
from kernels.attention import Heads
from kernels.cache_scales import CacheScales
from kernels.candidates import choose_candidates
from kernels.compact import compact_rows
from kernels.distribution import draw_tokens, probabilities
from kernels.drafter import NEVER_MASKED, Spread, pair_rows
from kernels.experts import add_mixed, choose_groups
from kernels.experts import mix_experts as mix_experts_on_gpu
from kernels.latent import append_latent
from kernels.linear import add_linear, linear, norm_gated_linear, norm_linear, write_linear
from kernels.ngram import draft_ngram
from kernels.norm import norm_heads, rms_norm
from kernels.quantized import (
    quantized_add_linear,
    quantized_gated_linear,
    quantized_linear,
    quantized_norm_gated_linear,
    quantized_norm_linear,
    write_quantized_linear,
)
from kernels.quantized_experts import choose_quantized_groups, count_expanded, mix_quantized_experts
from kernels.quantized_weight import STEP as STORED_STEP
from kernels.quantized_weight import QuantizedWeight
from kernels.reference import E4M3, E4M3_MAX, apply_penalties, argmax, gelu_mul, mix_experts, route, soft_cap, token_rows
from kernels.request_state import Admission
from kernels.request_table import RequestTable, commit
from kernels.rounded import is_rounded, rounding_activations
from kernels.route import ExpertGroups, Routing, route_tokens, split_gate
from kernels.sampling import choose, likeliest, process_and_choose, sample
from kernels.split_attention import SplitAttention, can_split
from kernels.step import append_draft, append_tree, pack_results, prepare_drafter, prepare_step, simulate_acceptance, split_rows, write_values
from kernels.step_attention import Plan, StepAttention, append_attention, latent_attention, plan_attention
from kernels.step_rows import DrafterRows, SplitRows, StepRows
from kernels.structs import DRAFT_STREAM, SAMPLE_STREAM, Policy, StepSizes
from kernels.token_mask import mask_logits
from kernels.verify import sample_candidates, top_p_candidates, verify, verify_drafts, verify_rejection, verify_top_p, verify_tree

__all__ = [
    "DRAFT_STREAM",
    "E4M3",
    "E4M3_MAX",
    "NEVER_MASKED",
    "SAMPLE_STREAM",
    "STORED_STEP",
    "Admission",
    "CacheScales",
    "DrafterRows",
    "ExpertGroups",
    "Heads",
    "Plan",
    "Policy",
    "QuantizedWeight",
    "RequestTable",
    "Routing",
    "SplitAttention",
    "SplitRows",
    "Spread",
    "StepAttention",
    "StepRows",
    "StepSizes",
    "add_linear",
    "add_mixed",
    "append_attention",
    "append_draft",
    "append_kv",
    "append_latent",
    "append_tree",
    "apply_penalties",
    "argmax",
    "can_split",
    "choose",
    "choose_candidates",
    "choose_groups",
    "choose_quantized_groups",
    "commit",
    "compact_rows",
    "count_expanded",
    "draft_ngram",
    "draw_tokens",
    "gelu_mul",
    "is_rounded",
    "latent_attention",
    "likeliest",
    "linear",
    "mask_logits",
    "mix_experts",
    "mix_experts_on_gpu",
    "mix_quantized_experts",
    "norm_gated_linear",
    "norm_heads",
    "norm_linear",
    "pack_results",
    "pair_rows",
    "plan_attention",
    "prepare_drafter",
    "prepare_step",
    "probabilities",
    "process_and_choose",
    "quantized_add_linear",
    "quantized_gated_linear",
    "quantized_linear",
    "quantized_norm_gated_linear",
    "quantized_norm_linear",
    "rms_norm",
    "rounding_activations",
    "route",
    "route_tokens",
    "sample",
    "sample_candidates",
    "silu_mul",
    "simulate_acceptance",
    "soft_cap",
    "split_gate",
    "split_rows",
    "token_rows",
    "top_p_candidates",
    "verify",
    "verify_drafts",
    "verify_rejection",
    "verify_top_p",
    "verify_tree",
    "write_linear",
    "write_quantized_linear",
    "write_values",
]
