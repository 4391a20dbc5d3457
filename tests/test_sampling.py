"""Sampling: tokens follow the model's own distribution. That the same seed gives the same tokens, whatever the drafts: test_methods."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import scipy
import torch
import transformers

from backend import LLM, SamplingParams
from tests.conftest import code_prompts
from tests.models import make_tiny


def outputs(llm, prompts, params, choice):
    results = llm.generate(prompts, params, speculative=choice, use_tqdm=False)
    return [r.outputs[0] for r in results]


def test_seeds_and_positions_differ(llm_ngram):
    params = [SamplingParams(max_tokens=12, seed=seed) for seed in range(12)]
    seen = {tuple(o.token_ids) for o in outputs(llm_ngram, ["import os\n"] * 12, params, None)}
    assert len(seen) >= 11
    unseeded = {tuple(o.token_ids) for o in outputs(llm_ngram, ["import os\n"] * 6, [SamplingParams(max_tokens=12)] * 6, None)}
    assert len(unseeded) >= 5
    extremes = [SamplingParams(max_tokens=4, seed=s) for s in (0, -1, 2**63, 2**64 - 1, -(2**63))]
    assert len(outputs(llm_ngram, ["x = "] * 5, extremes, None)) == 5


def test_penalties_see_the_steps_own_drafts(llm_ngram):
    """A frequency penalty must stop a loop inside one span of drafts, as it does token by token."""
    params = SamplingParams(max_tokens=40, temperature=0.0, frequency_penalty=0.4, ignore_eos=True)
    prompt = "ha ha ha ha ha ha ha ha ha ha ha ha ha"
    plain = outputs(llm_ngram, [prompt], [params], {"method": "none"})[0]
    drafted = outputs(llm_ngram, [prompt], [params], {"num_speculative_tokens": 8})[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.accepted > 0


def test_bad_words_never_appear(llm_ngram):
    words = ("return", "self", "=", "(")
    prompts = code_prompts(8, seed=3)
    params = [SamplingParams(max_tokens=40, seed=i, bad_words=words) for i in range(len(prompts))]
    for out in outputs(llm_ngram, prompts, params, None):
        banned = {ids for w in words for ids in llm_ngram.engine.tokenizer.encode_bad_word(w) if len(ids) == 1}
        assert not banned & {(t,) for t in out.token_ids}


# -- distributions --------------------------------------------------------------------------------------------------------

SAMPLES, VOCABULARY = 3072, 14


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[transformers.LlamaForCausalLM, Path]:
    path = make_tiny(tmp_path_factory.mktemp("tiny"), VOCABULARY, sharpness=0.4)
    return transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), path


@pytest.fixture(scope="module", params=["waiting", "ahead"])
def llm_tiny(request, tiny) -> LLM:
    speculative = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    return LLM(
        str(tiny[1]),
        speculative_config=speculative,
        dtype="float32",
        kv_cache_memory="8MiB",
        max_waiting=4096,
        async_scheduling=request.param == "ahead",
    )


PROMPT = [1, *random.Random(5).sample(range(VOCABULARY), VOCABULARY), *random.Random(6).sample(range(VOCABULARY), VOCABULARY)]
"""Every word is in it, so a lookup always finds something."""


def draw(llm, ids: list[int], params: dict, choice, count: int = SAMPLES) -> Counter:
    requests = [SamplingParams(**params, seed=7919 * i + 13) for i in range(count)]
    results = llm.generate([{"prompt_token_ids": ids}] * count, requests, speculative=choice, use_tqdm=False)
    return Counter(tuple(r.outputs[0].token_ids) for r in results)


def exact(model, ids: list[int], temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> dict[int, float]:
    """The next token's probabilities from transformers' logits, filtered in plain Python."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -1].double() / temperature
    ranked = sorted(enumerate(logits.tolist()), key=lambda x: -x[1])[: top_k or None]
    weights = torch.tensor([v for _, v in ranked], dtype=torch.float64).softmax(0).tolist()
    kept, mass = {}, 0.0
    for (token, _), weight in zip(ranked, weights):
        if mass >= top_p or weight < min_p * weights[0]:
            break
        kept[token] = weight
        mass += weight
    total = sum(kept.values())
    return {token: weight / total for token, weight in kept.items()}


def assert_follows(counts: Counter, probabilities: dict, total: int) -> None:
    """Chi-square at p > 1e-4; outcomes expected fewer than 8 times count as one."""
    assert sum(counts.values()) == total
    assert set(counts) <= set(probabilities), "an outcome of probability zero was drawn"
    common = [k for k, p in probabilities.items() if p * total >= 8]
    seen, wanted = [counts[k] for k in common], [probabilities[k] * total for k in common]
    rest = total - sum(wanted)
    if rest > 1e-6 * total:
        seen.append(total - sum(seen))
        wanted.append(rest)
    assert scipy.stats.chisquare(seen, [w * sum(seen) / sum(wanted) for w in wanted]).pvalue > 1e-4


FILTERS = [(1.0, 0, 1.0, 0.0), (0.7, 8, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.2), (0.9, 12, 0.9, 0.05)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERS)
def test_first_token_follows_the_model(llm_tiny, tiny, temperature, top_k, top_p, min_p):
    params = {"max_tokens": 1, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    counts = draw(llm_tiny, PROMPT, params, None)
    wanted = exact(tiny[0], PROMPT, temperature, top_k, top_p, min_p)
    assert 2 < len(wanted) < VOCABULARY or (top_k, top_p, min_p) == (0, 1.0, 0.0), "a filter that cuts nothing"
    assert_follows(Counter({k[0]: v for k, v in counts.items()}), wanted, SAMPLES)


@pytest.mark.parametrize("choice", [{"method": "none"}, {}, {"verify_strategy": "rejection"}], ids=["plain", "target_match", "rejection"])
def test_three_tokens_follow_the_model_jointly(llm_tiny, tiny, choice):
    """The second and third may come from drafts, which some draws accept and others do not."""
    params = {"max_tokens": 3, "temperature": 1.2, "top_k": 5, "ignore_eos": True}
    before = llm_tiny.engine.metrics.accepted_tokens["ngram"]
    counts = draw(llm_tiny, PROMPT, params, choice)
    accepted = llm_tiny.engine.metrics.accepted_tokens["ngram"] - before
    assert (SAMPLES / 20 < accepted < 1.5 * SAMPLES) == (choice != {"method": "none"})
    probabilities: dict[tuple[int, int, int], float] = {}
    for a, pa in exact(tiny[0], PROMPT, 1.2, 5, 1.0).items():
        for b, pb in exact(tiny[0], [*PROMPT, a], 1.2, 5, 1.0).items():
            for c, pc in exact(tiny[0], [*PROMPT, a, b], 1.2, 5, 1.0).items():
                probabilities[a, b, c] = pa * pb * pc
    assert_follows(counts, probabilities, SAMPLES)
