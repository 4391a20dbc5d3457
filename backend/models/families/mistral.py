"""Mistral: Llama with a sliding window in every layer (Jiang et al. 2023). Ministral: in some, or with queries that grow with the position.

Mixtral: experts in every layer (Jiang et al. 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from backend.models.moe_spec import MoeSpec, read_router
from backend.models.rope_spec import RopeSpec, find_scaling, read_rope
from backend.models.spec import (
    ACTIVATIONS,
    LAYER_TYPES,
    DecoderSpec,
    Sizes,
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

WINDOW = 4096
FULL, SLIDING = LAYER_TYPES


def _decoder(values: Values, sizes: Sizes, rope: RopeSpec, windows: Sequence[int | None]) -> DecoderSpec:
    eps, activation = read_eps(values), values.choice("hidden_act", ACTIVATIONS, "silu")
    layers = []
    for i, window in enumerate(windows):
        prefix = f"model.layers.{i}"
        part = attention(f"{prefix}.self_attn", sizes, rope, window=window)
        layers.append(pre_norm_layer(prefix, sizes, eps, part, gated_mlp(f"{prefix}.mlp", sizes, activation)))
    return read_decoder(values, layers)


def mistral(values: Values) -> DecoderSpec:
    if values.get("model_type") == "ministral":  # by which transformers goes
        return ministral(values)
    sizes = read_sizes(values)
    return _decoder(values, sizes, read_rope(values, sizes.head_dim), [read_window(values, WINDOW)] * read_num_layers(values))


def ministral(values: Values) -> DecoderSpec:
    sizes, window = read_sizes(values), read_window(values, WINDOW)
    types = read_layer_types(values, [SLIDING] * read_num_layers(values))
    return _decoder(values, sizes, read_rope(values, sizes.head_dim), [window if kind == SLIDING else None for kind in types])


def ministral3(values: Values) -> DecoderSpec:
    """Ministral 3, the text model: its rope parameters also say how queries grow past the context that it was trained with."""
    sizes = read_sizes(values, head_dim=128)
    rope = read_rope(values, sizes.head_dim)
    parameters = find_scaling(values)
    if parameters.is_empty:
        raise values.refuse("rope_parameters", "an object: what this family turns by where there is none, other files do not say")
    if parameters.has("llama_4_scaling_beta"):
        original = rope.original_len or parameters.integer("original_max_position_embeddings", 2**24)
        rope = dataclasses.replace(rope, query_scale_beta=parameters.number("llama_4_scaling_beta", 1e3), original_len=original)
    return _decoder(values, sizes, rope, [read_window(values)] * read_num_layers(values))


def mixtral(values: Values) -> DecoderSpec:
    sizes = read_sizes(values)
    spec = _decoder(values, sizes, read_rope(values, sizes.head_dim, theta=1e6), [read_window(values)] * read_num_layers(values))
    activation = values.choice("hidden_act", ACTIVATIONS, "silu")
    layers = []
    for i, layer in enumerate(spec.layers):
        prefix = f"model.layers.{i}.block_sparse_moe"
        router = read_router(values, f"{prefix}.gate", sizes.hidden, "num_local_experts", default_chosen=2)
        mlp = MoeSpec(
            dataclasses.replace(router, is_normalized=True),
            f"{prefix}.experts",
            ("w1", "w3", "w2"),
            sizes.hidden,
            sizes.inner,
            "intermediate_size",
            activation,
        )
        layers.append(dataclasses.replace(layer, mlp=mlp))
    return dataclasses.replace(spec, layers=tuple(layers))
