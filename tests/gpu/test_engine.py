"""The whole engine on the GPU: in float32 its tokens are the CPU's, by every method, and captured steps leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backend import LLM, SamplingParams
from tests.conftest import code_prompts
from tests.histories import run_histories

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


def test_in_bfloat16_only_ties_differ(prompts, engines):
    """Where speculation changes a token, the two are as likely as bfloat16 can tell: float32 puts them no further apart than bfloat16's scores are
    from float32's."""
    llm = LLM(device="cuda", dtype="bfloat16", speculative_config=SPECULATION, max_batch_size=64, max_num_batched_tokens=2048)
    encoded = [llm.engine.tokenizer.encode(p) for p in prompts]
    requests = [{"prompt_token_ids": ids} for ids in encoded]
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    plain = [r.outputs[0].token_ids for r in llm.generate(requests, params, speculative={"method": "none"}, use_tqdm=False)]
    contexts, pairs = [], []
    for choice in CHOICES.values():
        for ids, expected, result in zip(encoded, plain, llm.generate(requests, params, speculative=choice, use_tqdm=False)):
            tokens = result.outputs[0].token_ids
            place = next((i for i, (a, b) in enumerate(zip(expected, tokens)) if a != b), None)
            if place is not None:
                contexts.append({"prompt_token_ids": ids + tokens[:place]})
                pairs.append((expected[place], tokens[place]))
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=20)
    scores = [
        [dict(r.outputs[0].logprobs[0].top) for r in engine.generate(contexts, one, speculative={"method": "none"}, use_tqdm=False)]
        for engine in (llm, engines["cuda"])
    ]
    rounding = max(abs(rough[t] - exact[t]) for rough, exact in zip(*scores) for t in list(exact)[:2] if t in rough)
    gaps = [abs(exact[a] - exact[b]) for (a, b), exact in zip(pairs, scores[1])]
    print(
        f"bfloat16: {len(gaps)} of {len(CHOICES) * len(prompts)} answers differ, at gaps of at most {max(gaps):.3f}; rounding is up to {rounding:.3f}"
    )
    assert max(gaps) <= 2 * rounding


def test_many_random_histories():
    """10,000 requests that are cancelled and preempted leave no page behind, and each has the right tokens."""
    plain = LLM(device="cuda", dtype="float32", speculative_config={"method": "none"}, max_batch_size=64)
    tight = LLM(
        device="cuda",
        dtype="float32",
        speculative_config={"method": "mtp", "num_speculative_tokens": 3, "num_model_steps": 3},
        max_batch_size=48,
        max_num_batched_tokens=512,
        max_model_len=192,
        kv_cache_memory=160 * plain.engine.runner.page_bytes,
    )
    run_histories(tight, plain, 10_000, num_prompts=48, arrivals=24, cancels=0.5, check_every=50)
