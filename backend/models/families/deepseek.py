"""DeepSeek-V2 and V3: latent attention, and many small experts beside shared ones (DeepSeek-AI 2024).

V2 chooses experts by softmax, V3 by corrected sigmoid scores; both may do so within the best groups. V3 has prediction modules.
"""

from __future__ import annotations

import dataclasses
import math

from backend.models.latent_spec import read_latent
from backend.models.moe_spec import GATED_NAMES, MoeSpec, RouterSpec, read_groups, read_router
from backend.models.mtp_spec import MtpLayerSpec, MtpSpec, make_module, read_modules
from backend.models.rope_spec import RopeSpec, find_scaling, read_rope
from backend.models.spec import (
    ACTIVATIONS,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    Sizes,
    gated_mlp,
    pre_norm_layer,
    read_decoder,
    read_eps,
    read_num_layers,
)
from backend.models.values import Values

COUNT_KEY, SIZE_KEY = "n_routed_experts", "moe_intermediate_size"
GREEDY, GROUPED = "greedy", "group_limited_greedy"


def corrected_experts(values: Values, prefix: str, sizes: Sizes, activation: str, default_scale: float = 1.0) -> MoeSpec:
    """DeepSeek-V3's, which other families have too. default_scale: of what they give, where the file does not say."""
    values.choice("scoring_func", ("sigmoid",), "sigmoid")
    values.choice("topk_method", ("noaux_tc",), "noaux_tc")
    router = read_groups(values, read_router(values, f"{prefix}.gate", sizes.hidden, COUNT_KEY, default_chosen=8), num_group_scores=2)
    router = dataclasses.replace(
        router,
        scoring="sigmoid",
        is_normalized=values.flag("norm_topk_prob", default=True),
        min_sum=1e-20,
        correction=f"{prefix}.gate.e_score_correction_bias",
        correction_shape=(router.num_experts,),
    )
    return _experts(values, prefix, sizes, activation, router, default_scale=default_scale)


def _softmax_experts(values: Values, prefix: str, sizes: Sizes, activation: str) -> MoeSpec:
    """DeepSeek-V2's."""
    values.choice("scoring_func", ("softmax",), "softmax")
    method = values.choice("topk_method", (GREEDY, GROUPED), GREEDY)
    if values.flag("norm_topk_prob"):
        raise values.refuse("norm_topk_prob", "false: what else it means here, implementations do not agree on")
    router = read_router(values, f"{prefix}.gate", sizes.hidden, COUNT_KEY)
    router = read_groups(values, router, num_group_scores=1) if method == GROUPED else router
    return _experts(values, prefix, sizes, activation, router, has_bias=values.flag("mlp_bias"))


def _experts(
    values: Values,
    prefix: str,
    sizes: Sizes,
    activation: str,
    router: RouterSpec,
    *,
    default_scale: float = 1.0,
    has_bias: bool = False,
) -> MoeSpec:
    """has_bias: of shared experts."""
    router = dataclasses.replace(router, scale=values.number("routed_scaling_factor", 1e6, default=default_scale))
    inner, num_shared = values.integer(SIZE_KEY, 2**20), values.integer("n_shared_experts", 1024, low=0, default=0)
    shared = gated_mlp(f"{prefix}.shared_experts", sizes, activation, has_bias=has_bias, inner=num_shared * inner) if num_shared else None
    return MoeSpec(router, f"{prefix}.experts", GATED_NAMES, sizes.hidden, inner, SIZE_KEY, activation, shared)


def _score_scale(values: Values, rope: RopeSpec) -> float:
    """Where yarn has stretched the context, all numbers of queries and keys grow too."""
    scaling = find_scaling(values)
    if rope.kind == "default" or not scaling.get("mscale_all_dim") or rope.factor <= 1:
        return 1.0
    return (0.1 * scaling.number("mscale_all_dim", 1e6) * math.log(rope.factor) + 1.0) ** 2


def _layer(values: Values, prefix: str, *, is_sparse: bool, is_corrected: bool) -> LayerSpec:
    hidden, heads = values.integer("hidden_size", 2**17), values.integer("num_attention_heads", 1024)
    turning = values.integer("qk_rope_head_dim", 2**16)
    if turning % 2:
        raise values.refuse("qk_rope_head_dim", "even, since RoPE turns pairs")
    rope = read_rope(values, turning, is_interleaved=not is_corrected or values.flag("rope_interleave", default=True))
    part = read_latent(values, f"{prefix}.self_attn", hidden, rope, _score_scale(values, rope))
    sizes = Sizes(hidden, values.integer("intermediate_size", 2**20), heads, heads, turning)
    activation = values.choice("hidden_act", ACTIVATIONS, "silu")
    mlp: MlpSpec | MoeSpec
    if is_sparse and is_corrected and not values.has("n_group"):
        raise values.refuse("n_group", "an integer: implementations do not agree on how many groups there are where a file has none")
    if is_sparse:
        of = f"{prefix}.mlp", sizes, activation
        mlp = corrected_experts(values, *of, default_scale=2.5) if is_corrected else _softmax_experts(values, *of)
    else:
        mlp = gated_mlp(f"{prefix}.mlp", sizes, activation, has_bias=not is_corrected and values.flag("mlp_bias"))
    return pre_norm_layer(prefix, sizes, read_eps(values), part, mlp)


def _decoder(values: Values, *, num_dense: int, is_corrected: bool) -> DecoderSpec:
    """num_dense: leading layers without experts, where the file does not say."""
    first, step = values.integer("first_k_dense_replace", 2**16, low=0, default=num_dense), values.integer("moe_layer_freq", 2**16, default=1)
    return read_decoder(
        values,
        [
            _layer(values, f"model.layers.{i}", is_sparse=i >= first and i % step == 0, is_corrected=is_corrected)
            for i in range(read_num_layers(values))
        ],
    )


def deepseek_v2(values: Values) -> DecoderSpec:
    return _decoder(values, num_dense=0, is_corrected=False)


def deepseek_v3(values: Values) -> DecoderSpec:
    return _decoder(values, num_dense=3, is_corrected=True)


def deepseek_v3_mtp(values: Values) -> MtpSpec:
    """Beside the model's layers, with experts; the state after the norm goes on."""
    first = read_num_layers(values)

    def module(number: int) -> MtpLayerSpec:
        prefix = f"model.layers.{first + number}"
        return make_module(prefix, _layer(values, prefix, is_sparse=True, is_corrected=True))

    return read_modules(values, module, is_norm_recycled=True)
