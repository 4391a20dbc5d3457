"""Sampling: the same seed gives the same tokens with and without drafts, and the tokens follow the model's own distribution."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from backend import SamplingParams
from tests.conftest import code_prompts

PARAMETERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 40},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.9},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.2},
    {"frequency_penalty": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {278: 3.0, 361: -100.0, 267: 2.5}},
    {"bad_words": ("return", "self.", " def")},
    {"min_tokens": 20, "logit_bias": {0: 8.0}},
    {"temperature": 0.0, "min_tokens": 20, "logit_bias": {0: 12.0}},
    {"temperature": 0.6, "top_p": 0.95, "stop": ("\n\n", "return ")},
]
REPEATING = "".join(f"    def get_{n}(self):\n        return self._{n}\n\n" for n in ("width", "height", "depth", "width", "height"))


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [f"class Box:\n{REPEATING}    def get_depth(self):", "x = [\n" + "    ('a', 1),\n" * 12 + "    ('a'", *code_prompts(6, seed=3)]


def outputs(llm, prompts, params, choice):
    results = llm.generate(prompts, params, speculative=choice, use_tqdm=False)
    return [r.outputs[0] for r in results]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: ",".join(p) or "temperature 1")
def test_same_seed_same_tokens_with_and_without_drafts(llm_ngram, prompts, parameters):
    params = [SamplingParams(**{"max_tokens": 32, "seed": 100 + i, **parameters}) for i in range(len(prompts))]
    plain = outputs(llm_ngram, prompts, params, {"method": "none"})
    for choice in ({"method": "naive"}, {"num_speculative_tokens": 1}, {"num_speculative_tokens": 4}, {"num_speculative_tokens": 8}):
        drafted = outputs(llm_ngram, prompts, params, choice)
        assert [o.token_ids for o in drafted] == [o.token_ids for o in plain], choice
        assert [o.text for o in drafted] == [o.text for o in plain]
        assert [o.finish_reason for o in drafted] == [o.finish_reason for o in plain]
    alone = [outputs(llm_ngram, [p], [s], None)[0].token_ids for p, s in zip(prompts[:3], params)]
    assert alone == [o.token_ids for o in plain[:3]]


def test_the_parameters_above_are_tried_with_drafts(llm_ngram, prompts):
    """The test above would pass with no drafts at all: the prompts must make some, and some must be accepted."""
    params = [SamplingParams(max_tokens=32, seed=i, temperature=0.7) for i in range(len(prompts))]
    drafted = outputs(llm_ngram, prompts, params, {"num_speculative_tokens": 4})
    assert sum(o.stats.accepted for o in drafted) > 20
    assert sum(o.stats.drafted - o.stats.accepted for o in drafted) > 20


def test_each_parameter_changes_something(llm_ngram, prompts):
    """All of them in one batch, where none may have another's."""
    count = len(prompts)
    params = [SamplingParams(**{"max_tokens": 32, "seed": 100 + i, **p}) for p in PARAMETERS for i in range(count)]
    tokens = [o.token_ids for o in outputs(llm_ngram, prompts * len(PARAMETERS), params, None)]
    base, *others = (tokens[i : i + count] for i in range(0, len(tokens), count))
    for parameters, found in zip(PARAMETERS[1:], others, strict=True):
        if "stop" not in parameters:
            assert found != base, parameters


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


def test_bad_words_never_appear(llm_ngram, prompts):
    words = ("return", "self", "=", "(")
    params = [SamplingParams(max_tokens=40, seed=i, bad_words=words) for i in range(len(prompts))]
    for out in outputs(llm_ngram, prompts, params, None):
        banned = {ids for w in words for ids in llm_ngram.engine.tokenizer.encode_bad_word(w) if len(ids) == 1}
        assert not banned & {(t,) for t in out.token_ids}


# -- distributions --------------------------------------------------------------------------------------------------------

SAMPLES = 3072


def draw(llm, ids: list[int], params: dict, choice, count: int = SAMPLES) -> Counter:
    requests = [SamplingParams(**params, seed=7919 * i + 13) for i in range(count)]
    results = llm.generate([{"prompt_token_ids": ids}] * count, requests, speculative=choice, use_tqdm=False)
    return Counter(tuple(r.outputs[0].token_ids) for r in results)


def exact(hf_model, ids: list[int], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """The next token's probabilities from transformers' logits, filtered in plain Python."""
    with torch.inference_mode():
        logits = hf_model(torch.tensor([ids])).logits[0, -1].double() / temperature
    ranked = sorted(enumerate(logits.tolist()), key=lambda x: -x[1])[: top_k or None]
    weights = torch.tensor([v for _, v in ranked], dtype=torch.float64).softmax(0).tolist()
    kept, mass = {}, 0.0
    for (token, _), weight in zip(ranked, weights):
        if mass >= top_p:
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
    assert chisquare(seen, [w * sum(seen) / sum(wanted) for w in wanted]).pvalue > 1e-4


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 8, 1.0), (1.3, 0, 0.8)])
def test_first_token_follows_the_model(llm_ngram, hf_model, temperature, top_k, top_p):
    ids = llm_ngram.engine.tokenizer.encode("import os\n\n\ndef")
    params = {"max_tokens": 1, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    counts = draw(llm_ngram, ids, params, None)
    assert_follows(Counter({k[0]: v for k, v in counts.items()}), exact(hf_model, ids, temperature, top_k, top_p), SAMPLES)


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_two_tokens_follow_the_model_jointly(llm_ngram, hf_model, method):
    """Three tokens; with ngram the second and third come from drafts that some draws accept and others do not."""
    ids = llm_ngram.engine.tokenizer.encode("a = b\na = c\na = b\na = d\na = b\na")
    params = {"max_tokens": 3, "temperature": 1.2, "top_k": 5, "ignore_eos": True}
    before = llm_ngram.engine.metrics.accepted_tokens["ngram"]
    counts = draw(llm_ngram, ids, params, {"method": method})
    accepted = llm_ngram.engine.metrics.accepted_tokens["ngram"] - before
    assert (SAMPLES / 20 < accepted < SAMPLES) == (method == "ngram")
    probabilities: dict[tuple[int, int, int], float] = {}
    for a, pa in exact(hf_model, ids, 1.2, 5, 1.0).items():
        for b, pb in exact(hf_model, [*ids, a], 1.2, 5, 1.0).items():
            for c, pc in exact(hf_model, [*ids, a, b], 1.2, 5, 1.0).items():
                probabilities[a, b, c] = pa * pb * pc
    assert_follows(counts, probabilities, SAMPLES)
