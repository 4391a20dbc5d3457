"""GLM-4, the dense models: half of a head turns, in interleaved pairs; fused gate and up. The files of 0414 have norms after each part too.

GLM-4.5 and 4.6: experts routed as DeepSeek-V3's, half of a head turns, not in interleaved pairs (Zeng et al. 2025).
"""

from __future__ import annotations

import dataclasses

from backend.models.families.deepseek import corrected_experts
from backend.models.mtp_spec import MtpLayerSpec, MtpSpec, make_module, read_modules
from backend.models.rope_spec import read_rope
from backend.models.spec import (
    ACTIVATIONS,
    DecoderSpec,
    LayerSpec,
    attention,
    gated_mlp,
    pre_norm_layer,
    read_decoder,
    read_eps,
    read_num_layers,
    read_sizes,
)
from backend.models.values import Values


def glm(values: Values) -> DecoderSpec:
    sizes, eps, has_bias = read_sizes(values, head_dim=128), read_eps(values), values.flag("attention_bias", default=True)
    rope = read_rope(values, sizes.head_dim, partial=0.5, is_interleaved=True)
    activation = values.choice("hidden_act", ACTIVATIONS, "silu")
    layers = []
    for i in range(read_num_layers(values)):
        prefix = f"model.layers.{i}"
        part = attention(f"{prefix}.self_attn", sizes, rope, has_bias=has_bias)
        layers.append(pre_norm_layer(prefix, sizes, eps, part, gated_mlp(f"{prefix}.mlp", sizes, activation, is_fused=True)))
    return read_decoder(values, layers)


def glm4(values: Values) -> DecoderSpec:
    spec = glm(values)
    layers = []
    for i, layer in enumerate(spec.layers):
        attention_norm, mlp_norm = (f"model.layers.{i}.{name}.weight" for name in ("post_self_attn_layernorm", "post_mlp_layernorm"))
        layers.append(dataclasses.replace(layer, attention_post_norm=attention_norm, mlp_post_norm=mlp_norm))
    return dataclasses.replace(spec, layers=tuple(layers))


def _moe_layer(values: Values, prefix: str, *, is_sparse: bool) -> LayerSpec:
    sizes, activation = read_sizes(values), values.choice("hidden_act", ACTIVATIONS, "silu")
    part = attention(
        f"{prefix}.self_attn",
        sizes,
        read_rope(values, sizes.head_dim, partial=0.5),
        has_bias=values.flag("attention_bias"),
        has_head_norms=values.flag("use_qk_norm"),
    )
    mlp = corrected_experts(values, f"{prefix}.mlp", sizes, activation) if is_sparse else gated_mlp(f"{prefix}.mlp", sizes, activation)
    return pre_norm_layer(prefix, sizes, read_eps(values), part, mlp)


def glm4_moe(values: Values) -> DecoderSpec:
    num_dense = values.integer("first_k_dense_replace", 2**16, low=0, default=1)
    return read_decoder(values, [_moe_layer(values, f"model.layers.{i}", is_sparse=i >= num_dense) for i in range(read_num_layers(values))])


def glm4_moe_mtp(values: Values) -> MtpSpec:
    """Beside the model's layers, with experts; the state before the norm goes on."""
    first = read_num_layers(values)

    def module(number: int) -> MtpLayerSpec:
        prefix = f"model.layers.{first + number}"
        return make_module(prefix, _moe_layer(values, prefix, is_sparse=True))

    return read_modules(values, module)
