"""Phi-3 and Phi-4: Llama with fused weights, heads that may turn in part, and LongRoPE (Abdin et al. 2024)."""

from __future__ import annotations

from backend.models.rope_spec import ORIGINAL_LEN, find_scaling, read_rope
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
    read_window,
)
from backend.models.values import Values

ALIASES = {"su": "longrope", "yarn": "longrope"}
"""What LongRoPE is called in its older files."""
LEN = 4096
"""Of contexts before they were extended, where the file has none beside the scaling."""


def phi3(values: Values) -> DecoderSpec:
    sizes, eps, window = read_sizes(values), read_eps(values), read_window(values)
    scaling = find_scaling(values)
    if not values.has(ORIGINAL_LEN) and scaling.has(ORIGINAL_LEN) and scaling.get(ORIGINAL_LEN) != LEN:
        raise scaling.refuse(ORIGINAL_LEN, f"beside this object, where others read it, or {LEN}, which they take where it is not")
    rope = read_rope(values, sizes.head_dim, partial=1.0, aliases=ALIASES, original_len=LEN)
    activation = values.choice("hidden_act", ACTIVATIONS, "silu")
    layers = []
    for i in range(read_num_layers(values)):
        prefix = f"model.layers.{i}"
        part = attention(f"{prefix}.self_attn", sizes, rope, is_fused=True, window=window)
        layers.append(pre_norm_layer(prefix, sizes, eps, part, gated_mlp(f"{prefix}.mlp", sizes, activation, is_fused=True)))
    return read_decoder(values, layers)
