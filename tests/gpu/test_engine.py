"""The whole engine on the GPU: in float32 its tokens are the CPU's, by every method, and captured steps leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backend import LLM, SamplingParams
from tests.conftest import code_prompts, greedy, note_shapes
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


STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rejection of what the model drew": ({"method": "mtp", "verify_strategy": "rejection"}, {"top_p": 0.95}),
    "rejection of certain drafts": ({"method": "ngram", "num_speculative_tokens": 5, "verify_strategy": "rejection"}, {}),
    "topp": ({"method": "mtp", "verify_strategy": "topp"}, {"top_p": 0.8}),
    "topp, filtered": ({"method": "ngram", "num_speculative_tokens": 5, "verify_strategy": "topp"}, {"top_p": 0.8, "top_k": 4, "min_p": 0.02}),
    "bad words": ({"method": "mtp"}, {"bad_words": ["self", "return", "import os"]}),
    "log-probabilities": ({"method": "mtp"}, {"logprobs": 5, "repetition_penalty": 1.2}),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_are_the_cpus(engines, prompts, name, monkeypatch):
    """Strategies that look at whole distributions, and log-probabilities: while their shapes run eagerly, and once they are captured. Tokens
    depend on the drafts here."""
    choice, sampling = STRATEGIES[name]
    params = SamplingParams(max_tokens=48, ignore_eos=True, temperature=0.8, seed=5, **sampling)
    one, other = engines["cpu"], engines["cuda"]
    used = note_shapes(other, monkeypatch)
    expected = [r.outputs[0] for r in one.generate(prompts[:32], params, speculative=choice, use_tqdm=False)]
    for way in ("eagerly", "captured"):
        found = [r.outputs[0] for r in other.generate(prompts[:32], params, speculative=choice, use_tqdm=False)]
        for i, (exact, mine) in enumerate(zip(expected, found, strict=True)):
            assert (mine.token_ids, mine.sources) == (exact.token_ids, exact.sources), f"{name}, {way}: prompt {i}"
            for a, b in zip(mine.logprobs or [], exact.logprobs or [], strict=True):
                assert a.token_id == b.token_id and abs(a.logprob - b.logprob) < 1e-3
                assert max(abs(x - y) for (_, x), (_, y) in zip(a.top, b.top, strict=True)) < 1e-3
        while other.engine._capture():
            pass
        assert other.engine.scheduler.pool.num_held == 0
    assert any(shape.options for shape in used)


def test_more_drafts_than_distributions_are_held_of(engines, prompts):
    """A request that chooses more drafts than the server's method makes: the first ones' are held, and no memory is taken for the others'."""
    config = {"device": "cuda", "dtype": "float32", "max_batch_size": 8, "speculative_config": SPECULATION}
    other, params = LLM(**config), SamplingParams(max_tokens=48, ignore_eos=True, temperature=0.8, seed=5)
    lookup, own = ({"method": name, "num_speculative_tokens": 8, "verify_strategy": "rejection"} for name in ("ngram", "mtp"))
    other.generate(prompts[:8], params, speculative=lookup, use_tqdm=False)
    while other.engine._capture():
        pass
    expected = [r.outputs[0] for r in engines["cpu"].generate(prompts[:8], params, speculative=own, use_tqdm=False)]
    for _ in range(2):
        found = [r.outputs[0] for r in other.generate(prompts[:8], params, speculative=own, use_tqdm=False)]
        assert [o.token_ids for o in found] == [o.token_ids for o in expected]
        while other.engine._capture():
            pass
    other.close()


def test_log_probabilities_of_prompts(engines, prompts):
    params = SamplingParams(max_tokens=4, temperature=0.0, echo=True, logprobs=2, ignore_eos=True)
    one, other = ([r.outputs[0] for r in engines[d].generate(prompts[:8], params, use_tqdm=False)] for d in ("cpu", "cuda"))
    for exact, mine in zip(one, other, strict=True):
        assert mine.token_ids == exact.token_ids and len(mine.logprobs) == len(exact.logprobs) == len(mine.token_ids) - 1
        assert max(abs(a.logprob - b.logprob) for a, b in zip(mine.logprobs, exact.logprobs)) < 1e-3


def measure_rounding(llm: LLM, exact_llm: LLM, texts: list[list[int]]) -> float:
    """How far `llm` at most is from `exact_llm` in the distance between the scores of the two likeliest tokens of a place."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, echo=True, logprobs=8)
    found = [engine.generate([{"prompt_token_ids": ids} for ids in texts], params, use_tqdm=False) for engine in (llm, exact_llm)]
    errors = [0.0]
    for one, other in zip(*found, strict=True):
        for rough, exact in zip(*([dict(place.top) for place in r.outputs[0].logprobs] for r in (one, other)), strict=True):
            (first, score), (second, next_score) = list(exact.items())[:2]
            if first in rough and second in rough:
                errors.append(abs(rough[first] - rough[second] - (score - next_score)))
    return max(errors)


def check_only_ties_differ(llm: LLM, exact_llm: LLM, prompts: list[list[int]], plain: list[list[int]], answers: list[list[list[int]]]) -> None:
    """Where an answer of `llm` leaves its plain one, the two tokens are as likely as bfloat16 can tell: float32 puts them no further apart than
    bfloat16 is wrong about such a distance somewhere in these texts."""
    contexts, pairs = [], []
    for own in answers:
        for ids, expected, tokens in zip(prompts, plain, own, strict=True):
            place = next((i for i, (a, b) in enumerate(zip(expected, tokens, strict=True)) if a != b), None)
            if place is not None:
                contexts.append({"prompt_token_ids": ids + tokens[:place]})
                pairs.append((expected[place], tokens[place]))
    if not pairs:
        return
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=20)
    results = exact_llm.generate(contexts, one, speculative={"method": "none"}, use_tqdm=False)
    scores = [dict(r.outputs[0].logprobs[0].top) for r in results]
    rounding = measure_rounding(llm, exact_llm, [ids + tokens for ids, tokens in zip(prompts, plain, strict=True)])
    gaps = [abs(exact[a] - exact[b]) for (a, b), exact in zip(pairs, scores, strict=True)]
    count = len(answers) * len(prompts)
    print(f"bfloat16: {len(gaps)} of {count} answers differ, at gaps of at most {max(gaps):.3f}; rounding is up to {rounding:.3f}")
    assert max(gaps) <= rounding


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_only_ties_differ(prompts, engines, dtype):
    llm = LLM(device="cuda", dtype=dtype, speculative_config=SPECULATION, max_batch_size=64, max_num_batched_tokens=2048)
    encoded = [llm.engine.tokenizer.encode(p) for p in prompts]
    requests = [{"prompt_token_ids": ids} for ids in encoded]
    plain, *answers = (
        [r.outputs[0].token_ids for r in llm.generate(requests, greedy(64), speculative=choice, use_tqdm=False)]
        for choice in (CHOICES["none"], *CHOICES.values())
    )
    check_only_ties_differ(llm, engines["cuda"], encoded, plain, answers)


def test_a_shared_beginning_is_read_once(prompts, engines, monkeypatch):
    """With cascade attention captured steps read the pages that requests share once; tokens differ in ties at most."""
    options: dict[str, Any] = {"speculative_config": SPECULATION, "max_batch_size": 64, "max_num_batched_tokens": 2048, "dtype": "bfloat16"}
    apart, together = (LLM(device="cuda", cascade_attention=is_on, **options) for is_on in (False, True))
    encode = apart.engine.tokenizer.encode
    beginning = encode("\n".join(prompts))[:640]
    encoded = [beginning + encode(p)[:40] for p in prompts[:48]]
    results = []
    for llm in (apart, together):
        used = note_shapes(llm, monkeypatch)
        llm.generate({"prompt_token_ids": beginning}, greedy(1), use_tqdm=False)  # its pages are found by those that follow
        for method in ("none", "mtp"):
            answers = llm.generate([{"prompt_token_ids": ids} for ids in encoded], greedy(48), speculative={"method": method}, use_tqdm=False)
            assert all(r.num_cached_tokens >= 624 for r in answers)
            results.append([r.outputs[0].token_ids for r in answers])
        assert any(shape.has_prefixes for shape in used) == (llm is together)
        llm.engine.scheduler.check()
        assert llm.engine.scheduler.pool.num_held == 0
    check_only_ties_differ(together, engines["cuda"], encoded, results[0], results[1:])


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
        kv_cache_memory=160 * plain.engine.worker.store.page_bytes,
    )
    run_histories(tight, plain, 10_000, num_prompts=48, arrivals=24, cancels=0.5, check_every=50)


def test_the_next_engine_has_the_memory_of_one_that_is_closed():
    """Though the program still refers to it."""
    first = LLM(device="cuda", dtype="float32", max_batch_size=8, kv_cache_memory="4GiB")
    answer = first.generate("def main", greedy(8), use_tqdm=False)[0].outputs[0].token_ids
    before, store = torch.cuda.memory_reserved(), first.engine.worker.store  # of this process: others may use the GPU, too
    first.close()
    assert before - torch.cuda.memory_reserved() >= store.num_pages * store.page_bytes > 2**28
    second = LLM(device="cuda", dtype="float32", max_batch_size=8, kv_cache_memory="4GiB")
    assert second.generate("def main", greedy(8), use_tqdm=False)[0].outputs[0].token_ids == answer
