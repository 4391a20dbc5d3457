"""Qwen 2 and 2.5: Llama with biases of queries, keys and values. Qwen 3: with norms of heads instead. Both may have windows in later layers.

Qwen 2 MoE has a shared expert with a gate beside its experts; Qwen 3 MoE none. MiMo is Qwen 2 with prediction modules (Xiaomi 2025).
Others may have such modules under Qwen3-Next's names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from backend.models.moe_spec import GATED_NAMES, MoeSpec, read_router, read_sparse_layers
from backend.models.mtp_spec import MtpLayerSpec, MtpSpec, read_modules
from backend.models.rope_spec import read_rope
from backend.models.spec import (
    ACTIVATIONS,
    LAYER_TYPES,
    DecoderSpec,
    LayerSpec,
    Projection,
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


def _qwen2_layer(values: Values, prefix: str, window: int | None, *, has_bias: bool = True) -> LayerSpec:
    return _layer(values, prefix, window, head_dim=None, has_bias=has_bias, has_output_bias=False, has_head_norms=False)


def _qwen3_layer(values: Values, prefix: str, window: int | None, *, head_dim: int | None) -> LayerSpec:
    has_bias = values.flag("attention_bias")
    return _layer(values, prefix, window, head_dim=head_dim, has_bias=has_bias, has_output_bias=has_bias, has_head_norms=True)


def qwen2(values: Values) -> DecoderSpec:
    return read_decoder(values, [_qwen2_layer(values, f"model.layers.{i}", window) for i, window in enumerate(_read_windows(values))])


def qwen3_layer(values: Values, prefix: str) -> LayerSpec:
    """A layer as drafters have it, which sees the whole context."""
    return _qwen3_layer(values, prefix, None, head_dim=None)


def qwen3(values: Values) -> DecoderSpec:
    windows = _read_windows(values)
    return read_decoder(values, [_qwen3_layer(values, f"model.layers.{i}", window, head_dim=128) for i, window in enumerate(windows)])


def _experts(values: Values, prefix: str, layer: LayerSpec, *, has_shared: bool) -> MoeSpec:
    sizes, activation = read_sizes(values), values.choice("hidden_act", ACTIVATIONS, "silu")
    count_key = "num_local_experts" if values.has("num_local_experts") else "num_experts"  # newer files have the first
    router = read_router(values, f"{prefix}.gate", layer.hidden_size, count_key, default_chosen=4 if has_shared else 8)
    experts = MoeSpec(
        dataclasses.replace(router, is_normalized=values.flag("norm_topk_prob")),
        f"{prefix}.experts",
        GATED_NAMES,
        layer.hidden_size,
        values.integer("moe_intermediate_size", 2**20),
        "moe_intermediate_size",
        activation,
    )
    if not has_shared:
        return experts
    shared = gated_mlp(f"{prefix}.shared_expert", sizes, activation, inner=values.integer("shared_expert_intermediate_size", 2**20))
    return dataclasses.replace(experts, shared=shared, shared_gate=Projection(f"{prefix}.shared_expert_gate", 1, layer.hidden_size))


def _with_experts(values: Values, layers: Sequence[LayerSpec], *, has_shared: bool) -> DecoderSpec:
    is_sparse, mixed = read_sparse_layers(values, len(layers)), []
    for i, layer in enumerate(layers):
        experts = _experts(values, f"model.layers.{i}.mlp", layer, has_shared=has_shared) if is_sparse(i) else None
        mixed.append(dataclasses.replace(layer, mlp=experts) if experts else layer)
    return read_decoder(values, mixed)


def qwen2_moe(values: Values) -> DecoderSpec:
    has_windows, first = values.flag("use_sliding_window"), values.integer("max_window_layers", 2**16, low=0, default=28)
    window = read_window(values, 4096) if has_windows else None
    default = [SLIDING if has_windows and i < first and i % 2 == 0 else FULL for i in range(read_num_layers(values))]
    has_bias, windows = values.flag("qkv_bias", default=True), [window if kind == SLIDING else None for kind in read_layer_types(values, default)]
    layers = [_qwen2_layer(values, f"model.layers.{i}", window, has_bias=has_bias) for i, window in enumerate(windows)]
    return _with_experts(values, layers, has_shared=True)


def qwen3_moe(values: Values) -> DecoderSpec:
    window = read_window(values, 4096) if values.flag("use_sliding_window") else None
    layers = [_qwen3_layer(values, f"model.layers.{i}", window, head_dim=None) for i in range(read_num_layers(values))]
    return _with_experts(values, layers, has_shared=False)


def mimo_mtp(values: Values) -> MtpSpec:
    """Modules that take the state first, and hand it on after their last norm (vLLM and SGLang, mimo_mtp.py: `final_layernorm` is in `forward`)."""
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


def _read_next_modules(values: Values, make: Callable[[str], LayerSpec]) -> MtpSpec:
    """As Qwen3-Next has them: layers of their own, all else is shared (vLLM, qwen3_next_mtp.py). make: a layer with this prefix."""
    hidden = read_sizes(values).hidden

    def module(number: int) -> MtpLayerSpec:
        return MtpLayerSpec(
            embedding_norm="mtp.pre_fc_norm_embedding.weight",
            hidden_norm="mtp.pre_fc_norm_hidden.weight",
            projection=Projection("mtp.fc", hidden, 2 * hidden),
            decoder=make(f"mtp.layers.{number}"),
            head_norm="mtp.norm.weight",
        )

    return read_modules(values, module, is_norm_recycled=True, is_first_masked=False)


def qwen2_mtp(values: Values) -> MtpSpec:
    return _read_next_modules(values, lambda prefix: _qwen2_layer(values, prefix, None))


def qwen3_mtp(values: Values) -> MtpSpec:
    return _read_next_modules(values, lambda prefix: _qwen3_layer(values, prefix, None, head_dim=128))


def qwen3_moe_mtp(values: Values) -> MtpSpec:
    def make(prefix: str) -> LayerSpec:
        layer = _qwen3_layer(values, prefix, None, head_dim=None)
        return dataclasses.replace(layer, mlp=_experts(values, f"{prefix}.mlp", layer, has_shared=False))

    return _read_next_modules(values, make)
