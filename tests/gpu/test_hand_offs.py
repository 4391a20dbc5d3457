"""Prompts that another engine computes, on a GPU: pages, the drafter's with them, first tokens, and what drafts were drawn from come over whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backend import LLM, SamplingParams
from tests.conftest import code_prompts
from tests.test_hand_offs import Direct, check_idle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda"
CHOICES: list[dict[str, Any]] = [
    {"method": "none"},
    {"method": "mtp"},
    {"method": "mtp", "mtp_strategy": "with_ngram", "num_speculative_tokens": 5},
    {"method": "mtp", "verify_strategy": "rejection"},
]


def test_answers_are_those_of_one_engine() -> None:
    """Eagerly, and once steps are captured; several steps with prompts and answers beside one another."""
    speculative = {"method": "mtp", "num_speculative_tokens": 3, "num_model_steps": 3, "adaptive": False, "request_methods": ["ngram"]}
    options: dict[str, Any] = {"device": DEVICE, "dtype": "float32", "max_batch_size": 8, "kv_cache_memory": "256MiB"}
    alone, here, there = (LLM(speculative_config=speculative, **options) for _ in range(3))
    link, prompts = Direct(here.engine, there.engine), code_prompts(6, (40, 500), seed=31)
    has_drawn: list[bool] = []
    link.change = lambda hand_off: has_drawn.append(hand_off.draft_probs is not None)
    for way in ("eagerly", "captured"):
        for choice in CHOICES:
            for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "seed": 11, "logprobs": 2}):
                params = SamplingParams(max_tokens=24, ignore_eos=True, **sampling)
                found = []
                for llm in (alone, here):
                    outputs = [r.outputs[0] for r in llm.generate([f"# {way}\n{p}" for p in prompts], params, speculative=choice, use_tqdm=False)]
                    found.append([own.token_ids for own in outputs])
                assert found[0] == found[1], (way, choice, sampling)
                assert choice["method"] == "none" or sum(own.stats.accepted for own in outputs) > 20, (way, choice, sampling)
        for llm in (alone, here, there):
            while llm.engine._capture():
                pass
    assert any(has_drawn) and here.engine.hand_offs.num_fetched == len(has_drawn) >= 6 and not here.engine.hand_offs.fallbacks
    check_idle(link)
    for llm in (alone, here, there):
        llm.close()
