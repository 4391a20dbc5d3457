"""DeepSeek-V3: experts chosen by corrected sigmoid scores, within the best groups (DeepSeek-AI 2024)."""

from __future__ import annotations

from backend.models.moe_spec import GATED_NAMES, MoeSpec, read_router
from backend.models.spec import Sizes, gated_mlp
from backend.models.values import Values

COUNT_KEY, SIZE_KEY = "n_routed_experts", "moe_intermediate_size"


def corrected_experts(values: Values, prefix: str, sizes: Sizes, activation: str) -> MoeSpec:
    """DeepSeek-V3's, which other families have too."""
    values.choice("scoring_func", ("sigmoid",), "sigmoid")
    values.choice("topk_method", ("noaux_tc",), "noaux_tc")
    router = read_router(
        values,
        f"{prefix}.gate",
        sizes.hidden,
        count_key=COUNT_KEY,
        default_chosen=8,
        scoring="sigmoid",
        is_normalized=values.flag("norm_topk_prob", default=True),
        min_sum=1e-20,
        scale=values.number("routed_scaling_factor", 1e6, default=1.0),
        correction=f"{prefix}.gate.e_score_correction_bias",
        has_groups=True,
        num_group_scores=2,
    )
    inner, num_shared = values.integer(SIZE_KEY, 2**20), values.integer("n_shared_experts", 1024, low=0, default=0)
    shared = gated_mlp(f"{prefix}.shared_experts", sizes, activation, inner=num_shared * inner) if num_shared else None
    return MoeSpec(router, f"{prefix}.experts", GATED_NAMES, sizes.hidden, inner, COUNT_KEY, SIZE_KEY, activation, shared)
