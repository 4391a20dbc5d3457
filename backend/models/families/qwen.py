"""Qwen 2 and 2.5: Llama with biases of queries, keys and values. Qwen 3: with norms of heads instead. Both may have windows in later layers."""

from __future__ import annotations

from backend.models.rope_spec import read_rope
from backend.models.spec import (
    ACTIVATIONS,
    LAYER_TYPES,
    DecoderSpec,
    attention,
    gated_mlp,
    pre_norm_layer,
    read_decoder,
    read_eps,
    read_layer_types,
    read_num_layers,
    read_sizes,
    read_window,
)
from backend.models.values import Values

FULL, SLIDING = LAYER_TYPES


def _decoder(values: Values, *, head_dim: int | None, has_bias: bool, has_output_bias: bool, has_head_norms: bool) -> DecoderSpec:
    sizes, count, eps = read_sizes(values, head_dim), read_num_layers(values), read_eps(values)
    rope, activation = read_rope(values, sizes.head_dim), values.choice("hidden_act", ACTIVATIONS, "silu")
    window = read_window(values, 4096) if values.flag("use_sliding_window") else None
    first = values.integer("max_window_layers", 2**16, low=0, default=28)
    types = read_layer_types(values, [SLIDING if i >= first else FULL for i in range(count)])
    layers = []
    for i, kind in enumerate(types):
        prefix = f"model.layers.{i}"
        part = attention(
            f"{prefix}.self_attn",
            sizes,
            rope,
            has_bias=has_bias,
            has_output_bias=has_output_bias,
            has_head_norms=has_head_norms,
            window=window if kind == SLIDING else None,
        )
        layers.append(pre_norm_layer(prefix, sizes, eps, part, gated_mlp(f"{prefix}.mlp", sizes, activation)))
    return read_decoder(values, layers)


def qwen2(values: Values) -> DecoderSpec:
    return _decoder(values, head_dim=None, has_bias=True, has_output_bias=False, has_head_norms=False)


def qwen3(values: Values) -> DecoderSpec:
    has_bias = values.flag("attention_bias")
    return _decoder(values, head_dim=128, has_bias=has_bias, has_output_bias=has_bias, has_head_norms=True)
