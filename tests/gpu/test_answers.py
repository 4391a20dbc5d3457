"""Families with experts, latents, windows and caps through the whole engine on the GPU: in float32 its tokens are the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backend import LLM, SamplingParams
from tests.families import Case, make_model, random_tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LATENTS = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 12, "num_key_value_heads": 4}
EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1}
CASES = [
    Case("qwen2_moe", config={"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}),
    Case("qwen3_moe", config={"head_dim": 64, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True}),
    Case("ernie4_5_moe", config={"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2}),
    Case("glm4_moe", config=EXPERTS | {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7}),
    Case("deepseek_v2", config=LATENTS | EXPERTS | {"q_lora_rank": None}),
    Case("deepseek_v3", config=LATENTS | EXPERTS | {"n_group": 2, "topk_group": 1}),
    Case("mistral", "a window", {"sliding_window": 11, "head_dim": 64}),
    Case("gemma2", "a window in every other layer, caps", {"sliding_window": 9, "head_dim": 64}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_the_cpus(case: Case, tmp_path: Path) -> None:
    make_model(case, tmp_path)
    prompts = [{"prompt_token_ids": ids} for ids in (random_tokens(40, 3), (random_tokens(9, 4) * 5)[:41], random_tokens(3, 5))]
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    answers = {}
    for device in ("cpu", "cuda"):
        config = {"method": "ngram", "num_speculative_tokens": 4, "min_ngram_size": 1}
        llm = LLM(str(tmp_path), dtype="float32", device=device, kv_cache_memory="4MiB", page_size=16, max_batch_size=4, speculative_config=config)
        for method in ("none", "ngram"):
            outputs = llm.generate(prompts, params, speculative={"method": method}, use_tqdm=False)
            answers[device, method] = [output.outputs[0].token_ids for output in outputs]
        llm.close()
    assert all(answer == answers["cpu", "none"] for answer in answers.values())
