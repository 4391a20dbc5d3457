"""Published models by their config.json, without weights: numbers of parameters, which round to those that their makers give."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from backend.model_checks import check_drafter, check_model
from backend.models.spec import WeightList

EQUAL = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
MODELS: dict[str, tuple[float, float | None, dict[str, Any]]] = {
    "DeepSeek-V2-Lite": (15.71, None, {
        "architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn"}, "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy",
        "v_head_dim": 128, "vocab_size": 102400
    }),
    "DeepSeek-V3": (671.03, 11.61, {
        "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size":
        129280
    }),
    "ERNIE-4.5-21B-A3B": (21.83, 0.12, {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072,
        "num_attention_heads": 20, "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 103424, "tie_word_embeddings": True,
        "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_intermediate_size": 1536, "moe_gate": "topk",
        "moe_k": 6, "moe_layer_interval": 1, "num_nextn_predict_layers": 1
    }),
    "ERNIE-4.5-0.3B": (0.36, None, {
        "architectures": ["Ernie4_5_ForCausalLM"], "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072,
        "max_position_embeddings": 131072, "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2, "vocab_size": 103424,
        "tie_word_embeddings": True
    }),
    "GLM-4.5-Air": (106.85, 2.38, {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "head_dim": 128, "hidden_size": 4096, "partial_rotary_factor":
        0.5, "intermediate_size": 10944, "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "num_attention_heads": 96,
        "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace":
        1, "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "vocab_size": 151552
    }),
    "Qwen3-30B-A3B": (30.53, None, {
        "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048, "intermediate_size":
        6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "vocab_size": 151936
    }),
    "Qwen1.5-MoE-A2.7B": (14.32, None, {
        "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5632,
        "max_position_embeddings": 8192, "max_window_layers": 21, "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_experts":
        60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "shared_expert_intermediate_size": 5632,
        "vocab_size": 151936
    }),
    "Mixtral-8x7B": (46.7, None, {
        "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "vocab_size": 32000
    }),
    "OLMoE-1B-7B": (6.92, None, {
        "architectures": ["OlmoeForCausalLM"], "clip_qkv": None, "hidden_size": 2048, "intermediate_size": 1024,
        "max_position_embeddings": 4096, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "vocab_size": 50304
    }),
    "MiMo-7B": (7.62, 0.21, {
        "architectures": ["MiMoForCausalLM"], "attention_bias": True, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 32768, "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "vocab_size": 151680
    }),
}  # fmt: skip
"""Billions of parameters, those of the prediction modules, and what config.json says."""


def count(spec: Any) -> float:
    weights = WeightList()
    spec.list_weights(weights)
    return sum(math.prod(shape) for shape in weights.required.values()) / 1e9


@pytest.mark.parametrize("name", MODELS)
def test_numbers_of_parameters(name: str, tmp_path: Path) -> None:
    expected, modules, config = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(EQUAL | config))
    assert count(check_model(tmp_path, has_weights=False)) == pytest.approx(expected, abs=0.01)
    if modules is not None:
        assert count(check_drafter(tmp_path, has_weights=False)) == pytest.approx(modules, abs=0.01)


def test_a_stretched_context_scales_scores(tmp_path: Path) -> None:
    """DeepSeek-V2-Lite's: 192 ** -0.5, and twice what yarn makes of 0.707 at a factor of 40."""
    (tmp_path / "config.json").write_text(json.dumps(EQUAL | MODELS["DeepSeek-V2-Lite"][2]))
    scale = check_model(tmp_path, has_weights=False).layers[0].attention.scale
    assert scale == pytest.approx(192**-0.5 * (1 + 0.1 * 0.707 * math.log(40)) ** 2)
