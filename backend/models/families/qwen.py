"""Qwen 2 and 2.5: Llama with biases of queries, keys and values. Qwen 3: with norms of heads instead. Both may have windows in later layers.

Qwen 2 MoE has a shared expert with a gate beside its experts; Qwen 3 MoE none. MiMo is Qwen 2 with prediction modules (Xiaomi 2025).
"""

from __future__ import annotations

import dataclasses

from backend.models.moe_spec import GATED_NAMES, MoeSpec, read_router, read_sparse_layers
from backend.models.mtp_spec import MtpLayerSpec, MtpSpec, read_modules
from backend.models.rope_spec import read_rope
from backend.models.spec import (
    ACTIVATIONS,
    LAYER_TYPES,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    Projection,
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

FULL, SLIDING = LAYER_TYPES


def _layer(
    values: Values, prefix: str, window: int | None, *, head_dim: int | None, has_bias: bool, has_output_bias: bool, has_head_norms: bool
) -> LayerSpec:
    sizes = read_sizes(values, head_dim)
    part = attention(
        f"{prefix}.self_attn",
        sizes,
        read_rope(values, sizes.head_dim),
        has_bias=has_bias,
        has_output_bias=has_output_bias,
        has_head_norms=has_head_norms,
        window=window,
    )
    mlp = gated_mlp(f"{prefix}.mlp", sizes, values.choice("hidden_act", ACTIVATIONS, "silu"))
    return pre_norm_layer(prefix, sizes, read_eps(values), part, mlp)


def _read_windows(values: Values) -> list[int | None]:
    """Of each layer."""
    window = read_window(values, 4096) if values.flag("use_sliding_window") else None
    first = values.integer("max_window_layers", 2**16, low=0, default=28)
    types = read_layer_types(values, [SLIDING if i >= first else FULL for i in range(read_num_layers(values))])
    return [window if kind == SLIDING else None for kind in types]


def _qwen2_layer(values: Values, prefix: str, window: int | None) -> LayerSpec:
    return _layer(values, prefix, window, head_dim=None, has_bias=True, has_output_bias=False, has_head_norms=False)


def qwen2(values: Values) -> DecoderSpec:
    windows = _read_windows(values)
    return read_decoder(values, [_qwen2_layer(values, f"model.layers.{i}", window) for i, window in enumerate(windows)])


def qwen3(values: Values) -> DecoderSpec:
    has_bias = values.flag("attention_bias")

    def layer(number: int, window: int | None) -> LayerSpec:
        prefix = f"model.layers.{number}"
        return _layer(values, prefix, window, head_dim=128, has_bias=has_bias, has_output_bias=has_bias, has_head_norms=True)

    return read_decoder(values, [layer(i, window) for i, window in enumerate(_read_windows(values))])


def _mlp(values: Values, prefix: str, sizes: Sizes, activation: str, *, is_sparse: bool, has_shared: bool) -> MlpSpec | MoeSpec:
    if not is_sparse:
        return gated_mlp(prefix, sizes, activation)
    count_key = "num_experts" if values.has("num_experts") else "num_local_experts"  # the one that newer files have
    router = read_router(values, f"{prefix}.gate", sizes.hidden, count_key, default_chosen=8)
    experts = MoeSpec(
        dataclasses.replace(router, is_normalized=values.flag("norm_topk_prob")),
        f"{prefix}.experts",
        GATED_NAMES,
        sizes.hidden,
        values.integer("moe_intermediate_size", 2**20),
        "moe_intermediate_size",
        activation,
    )
    if not has_shared:
        return experts
    shared = gated_mlp(f"{prefix}.shared_expert", sizes, activation, inner=values.integer("shared_expert_intermediate_size", 2**20))
    return dataclasses.replace(experts, shared=shared, shared_gate=Projection(f"{prefix}.shared_expert_gate", 1, sizes.hidden))


def _moe_decoder(
    values: Values, windows: list[int | None], *, has_bias: bool, has_output_bias: bool, has_head_norms: bool, has_shared: bool
) -> DecoderSpec:
    sizes, eps, activation = read_sizes(values), read_eps(values), values.choice("hidden_act", ACTIVATIONS, "silu")
    rope, is_sparse = read_rope(values, sizes.head_dim), read_sparse_layers(values, len(windows))
    layers = []
    for i, window in enumerate(windows):
        prefix = f"model.layers.{i}"
        part = attention(
            f"{prefix}.self_attn",
            sizes,
            rope,
            has_bias=has_bias,
            has_output_bias=has_output_bias,
            has_head_norms=has_head_norms,
            window=window,
        )
        mlp = _mlp(values, f"{prefix}.mlp", sizes, activation, is_sparse=is_sparse(i), has_shared=has_shared)
        layers.append(pre_norm_layer(prefix, sizes, eps, part, mlp))
    return read_decoder(values, layers)


def qwen2_moe(values: Values) -> DecoderSpec:
    count = read_num_layers(values)
    has_windows, first = values.flag("use_sliding_window"), values.integer("max_window_layers", 2**16, low=0, default=28)
    window = read_window(values, 4096) if has_windows else None
    types = read_layer_types(values, [SLIDING if has_windows and i < first and i % 2 == 0 else FULL for i in range(count)])
    windows = [window if kind == SLIDING else None for kind in types]
    has_bias = values.flag("qkv_bias", default=True)
    return _moe_decoder(values, windows, has_bias=has_bias, has_output_bias=False, has_head_norms=False, has_shared=True)


def qwen3_moe(values: Values) -> DecoderSpec:
    window = read_window(values, 4096) if values.flag("use_sliding_window") else None
    has_bias, windows = values.flag("attention_bias"), [window] * read_num_layers(values)
    return _moe_decoder(values, windows, has_bias=has_bias, has_output_bias=has_bias, has_head_norms=True, has_shared=False)


def mimo_mtp(values: Values) -> MtpSpec:
    """Modules that take the state first, and hand it on after their last norm."""
    hidden = read_sizes(values).hidden

    def module(number: int) -> MtpLayerSpec:
        prefix = f"model.mtp_layers.{number}"
        return MtpLayerSpec(
            embedding_norm=f"{prefix}.token_layernorm.weight",
            hidden_norm=f"{prefix}.hidden_layernorm.weight",
            projection=Projection(f"{prefix}.input_proj", hidden, 2 * hidden),
            decoder=_qwen2_layer(values, prefix, None),
            head_norm=f"{prefix}.final_layernorm.weight",
        )

    return read_modules(values, module, is_hidden_first=True, is_norm_recycled=True)
