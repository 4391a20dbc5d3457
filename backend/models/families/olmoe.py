"""OLMoE: experts in every layer, and norms over all queries and all keys of a token (Muennighoff et al. 2024)."""

from __future__ import annotations

import dataclasses

from backend.models.moe_spec import GATED_NAMES, MoeSpec, read_router
from backend.models.rope_spec import read_rope
from backend.models.spec import (
    ACTIVATIONS,
    DecoderSpec,
    attention,
    pre_norm_layer,
    read_decoder,
    read_eps,
    read_num_layers,
    read_sizes,
)
from backend.models.values import Values


def olmoe(values: Values) -> DecoderSpec:
    sizes, eps, has_bias = read_sizes(values), read_eps(values), values.flag("attention_bias")
    rope, activation = read_rope(values, sizes.head_dim), values.choice("hidden_act", ACTIVATIONS, "silu")
    clip = values.number("clip_qkv", 1e9) if values.has("clip_qkv") else None
    is_normalized = values.flag("norm_topk_prob")
    layers = []
    for i in range(read_num_layers(values)):
        prefix = f"model.layers.{i}"
        part = attention(f"{prefix}.self_attn", sizes, rope, has_bias=has_bias, has_output_bias=has_bias, are_norms_whole=True, clip=clip)
        router = read_router(values, f"{prefix}.mlp.gate", sizes.hidden, "num_experts", default_chosen=8)
        mlp = MoeSpec(
            dataclasses.replace(router, is_normalized=is_normalized),
            f"{prefix}.mlp.experts",
            GATED_NAMES,
            sizes.hidden,
            sizes.inner,
            "intermediate_size",
            activation,
        )
        layers.append(pre_norm_layer(prefix, sizes, eps, part, mlp))
    return read_decoder(values, layers)
