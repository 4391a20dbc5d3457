"""Gemma 2 and the text models of Gemma 3: norms before and after each part, their weights counted from 1; scaled embeddings; windows in most layers.

Gemma 2 caps scores of attention and logits; Gemma 3 has norms of heads, and another rotary base in layers with windows.
"""

from __future__ import annotations

import dataclasses

from backend.models.rope_spec import RopeSpec, read_rope
from backend.models.spec import (
    ACTIVATIONS,
    LAYER_TYPES,
    DecoderSpec,
    LayerSpec,
    attention,
    gated_mlp,
    read_decoder,
    read_eps,
    read_layer_types,
    read_num_layers,
    read_sizes,
    read_soft_cap,
    read_window,
)
from backend.models.values import Values

FULL, SLIDING = LAYER_TYPES
PLACEHOLDERS = frozenset({"<image_soft_token>"})
"""Gemma 3's, for images: tokenizers of the models that read none have it, too."""
GEMMA3_SIZES = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}
"""Of the models that read images too, whose files say only what differs from these."""


def _decoder(
    values: Values, ropes: dict[str, RopeSpec], types: list[str], *, has_head_norms: bool, soft_cap: float | None, logit_soft_cap: float | None
) -> DecoderSpec:
    """soft_cap: of attention's scores; logit_soft_cap: of logits, where the file does not name it."""
    if values.flag("use_bidirectional_attention"):
        raise values.refuse("use_bidirectional_attention", "false: tokens are written one after the other")
    sizes, eps = read_sizes(values, head_dim=256), read_eps(values)
    window = read_window(values, 4096)
    activation = values.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")  # no implementation of these reads hidden_act
    scale = values.number("query_pre_attn_scalar", 1e6, default=256) ** -0.5
    has_bias = values.flag("attention_bias")
    layers = []
    for i, kind in enumerate(types):
        prefix = f"model.layers.{i}"
        part = attention(
            f"{prefix}.self_attn",
            sizes,
            ropes[kind],
            has_bias=has_bias,
            has_output_bias=has_bias,
            has_head_norms=has_head_norms,
            scale=scale,
            window=window if kind == SLIDING else None,
            soft_cap=soft_cap,
        )
        layers.append(
            LayerSpec(
                sizes.hidden,
                eps,
                input_norm=f"{prefix}.input_layernorm.weight",
                attention=part,
                attention_post_norm=f"{prefix}.post_attention_layernorm.weight",
                mlp_norm=f"{prefix}.pre_feedforward_layernorm.weight",
                mlp=gated_mlp(f"{prefix}.mlp", sizes, activation),
                mlp_post_norm=f"{prefix}.post_feedforward_layernorm.weight",
                norm_offset=1.0,
            )
        )
    cap = read_soft_cap(values, "final_logit_softcapping", logit_soft_cap)
    return read_decoder(values, layers, is_tied=True, norm_offset=1.0, embedding_scale=sizes.hidden**0.5, logit_soft_cap=cap)


def gemma2(values: Values) -> DecoderSpec:
    types = read_layer_types(values, [FULL if i % 2 else SLIDING for i in range(read_num_layers(values))])
    rope = read_rope(values, read_sizes(values, head_dim=256).head_dim)
    soft_cap = read_soft_cap(values, "attn_logit_softcapping", 50.0)
    return _decoder(values, dict.fromkeys(LAYER_TYPES, rope), types, has_head_norms=False, soft_cap=soft_cap, logit_soft_cap=30.0)


def _check_ropes(values: Values) -> None:
    """Raises ModelError for what implementations pass over in silence, though whoever wrote it wanted a scaling."""
    parameters, scaling = values.section("rope_parameters"), values.section("rope_scaling")
    if not parameters.without(*LAYER_TYPES).is_empty:
        raise values.refuse("rope_parameters", f"an object for each type of layer ({', '.join(LAYER_TYPES)}): others pass over what is beside them")
    if scaling.has("type") and not scaling.has("rope_type"):
        raise scaling.refuse("type", "named rope_type: by the older name not all implementations of this family read it")


def gemma3_text(values: Values) -> DecoderSpec:
    pattern = values.integer("sliding_window_pattern", 1024, default=6)
    types = read_layer_types(values, [SLIDING if (i + 1) % pattern else FULL for i in range(read_num_layers(values))])
    head_dim = read_sizes(values, head_dim=256).head_dim
    _check_ropes(values)
    if values.section("rope_parameters").get(SLIDING) is None:
        # Older files: scaling is of the layers without windows alone.
        sliding = RopeSpec(head_dim, theta=values.number("rope_local_base_freq", 1e15, default=10000.0))
    else:
        sliding = read_rope(values, head_dim, layer_type=SLIDING)
    ropes = {FULL: read_rope(values, head_dim, layer_type=FULL, theta=1e6), SLIDING: sliding}
    # Files may name a cap of attention's scores; no implementation of the family reads it.
    spec = _decoder(values, ropes, types, has_head_norms=True, soft_cap=None, logit_soft_cap=None)
    return dataclasses.replace(spec, placeholders=PLACEHOLDERS)
