"""The whole engine on the GPU: in float32 its tokens are the CPU's, by every method, and captured steps leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backend import LLM, SamplingParams
from tests.conftest import code_prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CHOICES: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5},
    "mtp 1": {"method": "mtp", "num_speculative_tokens": 1},
    "mtp 3": {"method": "mtp", "num_speculative_tokens": 3},
    "mtp 5": {"method": "mtp", "num_speculative_tokens": 5},
    "mtp and ngram": {"method": "mtp", "mtp_strategy": "with_ngram", "num_speculative_tokens": 6},
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 7, "top_p": 0.9, "top_k": 50},
    "penalised": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.2, "logit_bias": {9: 1.5}, "min_tokens": 20},
}
SPECULATION = {"method": "mtp", "num_speculative_tokens": 3, "num_model_steps": 3, "adaptive": False}


@pytest.fixture(scope="module")
def engines() -> dict[str, LLM]:
    return {
        device: LLM(device=device, dtype="float32", speculative_config=SPECULATION, max_batch_size=64, max_num_batched_tokens=2048)
        for device in ("cpu", "cuda")
    }


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return code_prompts(64, seed=11)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_tokens_are_the_cpus(engines, prompts, sampling):
    params = SamplingParams(max_tokens=64, ignore_eos="min_tokens" not in SAMPLINGS[sampling], **SAMPLINGS[sampling])
    expected = [r.outputs[0].token_ids for r in engines["cpu"].generate(prompts, params, speculative={"method": "none"}, use_tqdm=False)]
    for name, choice in CHOICES.items():
        results = engines["cuda"].generate(prompts, params, speculative=choice, use_tqdm=False)
        different = [i for i, r in enumerate(results) if r.outputs[0].token_ids != expected[i]]
        print(sampling, name, "accepted", sum(r.outputs[0].stats.accepted for r in results), "different", different)
        assert not different, f"{name}: prompts {different} differ from the CPU's plain decoding"
        engines["cuda"].engine.scheduler.check()
        assert engines["cuda"].engine.scheduler.pool.num_held == 0
