"""Llama: RMS norm, rotary grouped-query attention, SwiGLU (Touvron et al. 2023); and the drafters that are trained for it here."""

from __future__ import annotations

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


def llama_layer(values: Values, prefix: str) -> LayerSpec:
    sizes = read_sizes(values)
    has_bias = values.flag("attention_bias")
    rope = read_rope(values, sizes.head_dim)
    parts = attention(f"{prefix}.self_attn", sizes, rope, has_bias=has_bias, has_output_bias=has_bias)
    mlp = gated_mlp(f"{prefix}.mlp", sizes, values.choice("hidden_act", ACTIVATIONS, "silu"), has_bias=values.flag("mlp_bias"))
    return pre_norm_layer(prefix, sizes, read_eps(values), parts, mlp)


def llama(values: Values) -> DecoderSpec:
    return read_decoder(values, (llama_layer(values, f"model.layers.{i}") for i in range(read_num_layers(values))))


def llama_mtp(values: Values) -> MtpSpec:
    def module(number: int) -> MtpLayerSpec:
        prefix = f"model.layers.{number}"
        return make_module(prefix, llama_layer(values, prefix))

    return read_modules(values, module, is_first_masked=False)  # trained here
