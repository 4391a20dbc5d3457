"""ERNIE 4.5, the dense models: Llama with interleaved rotary pairs."""

from __future__ import annotations

from backend.models.rope_spec import read_rope
from backend.models.spec import (
    ACTIVATIONS,
    DecoderSpec,
    attention,
    gated_mlp,
    pre_norm_layer,
    read_decoder,
    read_eps,
    read_num_layers,
    read_sizes,
)
from backend.models.values import Values


def ernie4_5(values: Values) -> DecoderSpec:
    sizes, eps, has_bias = read_sizes(values, head_dim=128), read_eps(values), values.flag("use_bias")
    rope, activation = read_rope(values, sizes.head_dim, is_interleaved=True), values.choice("hidden_act", ACTIVATIONS, "silu")
    layers = []
    for i in range(read_num_layers(values)):
        prefix = f"model.layers.{i}"
        part = attention(f"{prefix}.self_attn", sizes, rope, has_bias=has_bias, has_output_bias=has_bias)
        layers.append(pre_norm_layer(prefix, sizes, eps, part, gated_mlp(f"{prefix}.mlp", sizes, activation, has_bias=has_bias)))
    return read_decoder(values, layers, is_tied=True)
