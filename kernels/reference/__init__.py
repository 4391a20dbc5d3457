"""The operations of a step in pure torch: what runs on CPU, and what every CUDA kernel is tested against.

Shape letters: T packed tokens, B requests, R logits rows, V vocabulary, H query heads, Hkv key/value heads, D head size, P pages.
Keys and values of one layer are two planes [P, page, Hkv, D]. `request_table` and `step` have the operations on the request table.
"""

from kernels.reference.attention import MAX_GROUPED_QUERIES, AttentionPlan, append_attention, append_kv, plan_attention, token_rows
from kernels.reference.dense import (
    add_linear,
    add_rms_norm,
    gelu_mul,
    linear,
    norm_gated_linear,
    norm_heads,
    norm_linear,
    rms_norm,
    silu_mul,
    soft_cap,
)
from kernels.reference.e4m3 import E4M3, E4M3_MAX, read_numbers, round_activations, round_to_e4m3
from kernels.reference.experts import mix_experts, route
from kernels.reference.latent import append_latent, latent_attention
from kernels.reference.quantized import expand_rows, quantized_linear
from kernels.reference.sampling import (
    apply_penalties,
    argmax,
    draw_tokens,
    filter_logits,
    gumbel_noise,
    philox,
    probabilities,
    sample,
    token_numbers,
)
from kernels.reference.verification import top_p_candidates, verify, verify_rejection, verify_top_p
from kernels.structs import ACCEPT_STREAM, DRAFT_STREAM, RECOVER_STREAM, SAMPLE_STREAM

__all__ = [
    "ACCEPT_STREAM",
    "DRAFT_STREAM",
    "E4M3",
    "E4M3_MAX",
    "MAX_GROUPED_QUERIES",
    "RECOVER_STREAM",
    "SAMPLE_STREAM",
    "AttentionPlan",
    "add_linear",
    "add_rms_norm",
    "append_attention",
    "append_kv",
    "append_latent",
    "apply_penalties",
    "argmax",
    "draw_tokens",
    "expand_rows",
    "filter_logits",
    "gelu_mul",
    "gumbel_noise",
    "latent_attention",
    "linear",
    "mix_experts",
    "norm_gated_linear",
    "norm_heads",
    "norm_linear",
    "philox",
    "plan_attention",
    "probabilities",
    "quantized_linear",
    "read_numbers",
    "rms_norm",
    "round_activations",
    "round_to_e4m3",
    "route",
    "sample",
    "silu_mul",
    "soft_cap",
    "token_numbers",
    "token_rows",
    "top_p_candidates",
    "verify",
    "verify_rejection",
    "verify_top_p",
]
