"""Model families: each reads config.json's values and says what parts its models are made of. Nothing else names a family. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backend.models.families.deepseek import deepseek_v2, deepseek_v3, deepseek_v3_mtp
from backend.models.families.ernie import ernie4_5, ernie4_5_moe, ernie4_5_moe_mtp
from backend.models.families.gemma import GEMMA3_SIZES, gemma2, gemma3_text
from backend.models.families.glm import glm, glm4, glm4_moe, glm4_moe_mtp
from backend.models.families.llama import llama, llama_mtp
from backend.models.families.mistral import ministral, ministral3, mistral, mixtral
from backend.models.families.olmoe import olmoe
from backend.models.families.phi import phi3
from backend.models.families.qwen import mimo_mtp, qwen2, qwen2_moe, qwen2_mtp, qwen3, qwen3_moe, qwen3_moe_mtp, qwen3_mtp
from backend.models.mtp_spec import MtpSpec
from backend.models.spec import DecoderSpec
from backend.models.values import Values

ARCHITECTURES: dict[str, Callable[[Values], DecoderSpec]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "MinistralForCausalLM": ministral,
    "Ministral3ForCausalLM": ministral3,
    "Qwen2ForCausalLM": qwen2,
    "MiMoForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Phi3ForCausalLM": phi3,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3_text,
    "Ernie4_5ForCausalLM": ernie4_5,
    "GlmForCausalLM": glm,
    "Glm4ForCausalLM": glm4,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "MixtralForCausalLM": mixtral,
    "OlmoeForCausalLM": olmoe,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe,
    "Glm4MoeForCausalLM": glm4_moe,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
}
"""By the name that config.json's `architectures` gives."""

OLDER_NAMES = {"Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM"}
"""Under which models of a family were published before transformers had it."""

WITH_IMAGES = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")
"""Models that read images too, whose text model is served."""

TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_text": ("Gemma3ForCausalLM", GEMMA3_SIZES),
    "mistral": ("MistralForCausalLM", {}),
    "ministral3": ("Ministral3ForCausalLM", {}),
}
"""Of their text models, by the `model_type` in `text_config`: the architecture, and what files leave out."""

DRAFTERS: dict[str, Callable[[Values], MtpSpec]] = {
    "LlamaMTP": llama_mtp,
    "DeepseekV3ForCausalLM": deepseek_v3_mtp,
    "Glm4MoeForCausalLM": glm4_moe_mtp,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe_mtp,
    "MiMoForCausalLM": mimo_mtp,
    "Qwen2ForCausalLM": qwen2_mtp,
    "Qwen3ForCausalLM": qwen3_mtp,
    "Qwen3MoeForCausalLM": qwen3_moe_mtp,
}
"""Likewise; those that are models too have a drafter's modules in their own checkpoints, where num_nextn_predict_layers says so."""
