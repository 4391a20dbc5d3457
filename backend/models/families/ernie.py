"""ERNIE 4.5: Llama with interleaved rotary pairs; with experts, whose choice a correction turns, in some layers (Baidu 2025)."""

from __future__ import annotations

import dataclasses

from backend.models.moe_spec import GATED_NAMES, MoeSpec, read_router
from backend.models.mtp_spec import MtpLayerSpec, MtpSpec, read_modules
from backend.models.rope_spec import read_rope
from backend.models.spec import (
    ACTIVATIONS,
    DecoderSpec,
    LayerSpec,
    Projection,
    Sizes,
    attention,
    gated_mlp,
    pre_norm_layer,
    read_decoder,
    read_eps,
    read_num_layers,
    read_sizes,
)
from backend.models.values import Values

THETA = 5e5
"""Where the file has none."""


def _layer(values: Values, sizes: Sizes, prefix: str, experts: MoeSpec | None = None) -> LayerSpec:
    """experts: in the MLP's place."""
    has_bias = values.flag("use_bias")
    rope = read_rope(values, sizes.head_dim, is_interleaved=True, theta=THETA)
    part = attention(f"{prefix}.self_attn", sizes, rope, has_bias=has_bias, has_output_bias=has_bias)
    mlp = experts or gated_mlp(f"{prefix}.mlp", sizes, _read_activation(values), has_bias=has_bias)
    return pre_norm_layer(prefix, sizes, read_eps(values), part, mlp)


def _read_activation(values: Values) -> str:
    return values.choice("hidden_act", ACTIVATIONS, "silu")


def ernie4_5(values: Values) -> DecoderSpec:
    sizes = read_sizes(values, head_dim=128)
    return read_decoder(values, [_layer(values, sizes, f"model.layers.{i}") for i in range(read_num_layers(values))], is_tied=True)


def ernie4_5_moe(values: Values) -> DecoderSpec:
    sizes, count = read_sizes(values), read_num_layers(values)
    values.choice("moe_gate", ("topk", "top2", "topk_fused", "top2_fused"), "topk")
    values.choice("moe_gate_act", ("softmax",), "softmax")
    first, step = values.integer("moe_layer_start_index", 2**16, low=0, default=1), values.integer("moe_layer_interval", 2**16, default=1)
    last = values.integer("moe_layer_end_index", 2**16, low=-1, default=-1)
    sparse = range(first, count if last == -1 else last + 1)
    layers = []
    for i in range(count):
        prefix = f"model.layers.{i}"
        experts = _experts(values, sizes, f"{prefix}.mlp") if i in sparse and (i + 1) % step == 0 else None
        layers.append(_layer(values, sizes, prefix, experts))
    return read_decoder(values, layers, is_tied=True)


def _experts(values: Values, sizes: Sizes, prefix: str) -> MoeSpec:
    size_key, activation = "moe_intermediate_size", _read_activation(values)
    inner, num_shared = values.integer(size_key, 2**20), values.integer("moe_num_shared_experts", 1024, low=0, default=2)
    router = read_router(values, f"{prefix}.gate", sizes.hidden, "moe_num_experts", "moe_k", default_chosen=6)
    router = dataclasses.replace(
        router,
        is_normalized=True,
        min_sum=values.number("moe_norm_min", 1.0, default=1e-12),
        correction=f"{prefix}.moe_statics.e_score_correction_bias",
        correction_shape=(1, router.num_experts),
    )
    shared = None
    if num_shared:
        shared = gated_mlp(f"{prefix}.shared_experts", sizes, activation, has_bias=values.flag("use_bias"), inner=num_shared * inner)
    is_assumed = not values.has("moe_num_shared_experts")  # of which the 300B's file does not speak, and has none
    return MoeSpec(router, f"{prefix}.experts", GATED_NAMES, sizes.hidden, inner, size_key, activation, shared, is_shared_assumed=is_assumed)


def ernie4_5_moe_mtp(values: Values) -> MtpSpec:
    """Dense layers, whose states go on as they are, and to the head through the model's own last norm (FastDeploy)."""
    sizes, has_bias = read_sizes(values), values.flag("use_bias")

    def module(number: int) -> MtpLayerSpec:
        return MtpLayerSpec(
            embedding_norm=f"model.mtp_emb_norm.{number}.weight",
            hidden_norm=f"model.mtp_hidden_norm.{number}.weight",
            projection=Projection(f"model.mtp_linear_proj.{number}", sizes.hidden, 2 * sizes.hidden, has_bias),
            decoder=_layer(values, sizes, f"model.mtp_block.{number}"),
            head_norm="model.norm.weight",
        )

    return read_modules(values, module)
