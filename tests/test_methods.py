"""Every drafter, every count, every batch: the tokens are those of plain decoding, greedy and seeded."""

from __future__ import annotations

import dataclasses

import pytest

from backend import LLM, SamplingParams
from backend.core import Delta
from tests.conftest import code_prompts

METHODS = {
    "naive": {"method": "naive"},
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "mtp": {"method": "mtp"},
    "mtp with ngram": {"method": "mtp", "mtp_strategy": "with_ngram"},
    "mtp with suffix": {"method": "mtp", "mtp_strategy": "with_suffix"},
}
TOKENS = 20


def mixed(index: int, **options) -> SamplingParams:
    """Greedy for every other request, seeded at several temperatures for the rest."""
    temperature = [0.0, 1.0, 0.0, 0.7][index % 4]
    return SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=1000 + index, ignore_eos=True, **options)


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], choice: dict | None, batch: int = 256) -> list:
    """Outputs of all prompts, `batch` at a time."""
    outputs = []
    for i in range(0, len(prompts), batch):
        contents = [{"prompt_token_ids": ids} for ids in prompts[i : i + batch]]
        outputs += [r.outputs[0] for r in llm.generate(contents, params[i : i + batch], speculative=choice, use_tqdm=False)]
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.num_held == 0
    return outputs


def ids_of(outputs: list) -> list[list[int]]:
    return [o.token_ids for o in outputs]


@pytest.fixture(scope="module")
def prompts(llm_all) -> list[list[int]]:
    return [llm_all.engine.tokenizer.encode(p) for p in code_prompts(32, (60, 500), seed=3)]


@pytest.fixture(scope="module")
def plain(prompts) -> list[list[int]]:
    """From an engine that knows nothing of drafters."""
    return ids_of(run(LLM(enable_prefix_caching=False), prompts, [mixed(i) for i in range(len(prompts))], None))


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("method", METHODS)
def test_any_count_gives_plain_tokens(llm_all, prompts, plain, method, count):
    outputs = run(llm_all, prompts[:7], [mixed(i) for i in range(7)], {**METHODS[method], "num_speculative_tokens": count})
    assert ids_of(outputs) == plain[:7]
    if method == "mtp":
        assert max(len(o.stats.accepted_per_position) for o in outputs) == count
        assert sum(o.stats.accepted for o in outputs) > 0


@pytest.mark.parametrize("batch", [1, 7, 32])
@pytest.mark.parametrize("method", METHODS)
def test_any_batch_gives_plain_tokens(llm_all, prompts, plain, method, batch):
    count = 12 if batch == 1 else 32
    assert ids_of(run(llm_all, prompts[:count], [mixed(i) for i in range(count)], METHODS[method], batch)) == plain[:count]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 24, "max_batch_size": 16, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 33, "max_batch_size": 32},
        {"page_size": 64},
        {"page_size": 1},
        {"kv_cache_memory": 20 * 1024 * 16 * 60},
        {"kv_cache_memory": 20 * 1024 * 16 * 60, "enable_prefix_caching": False},
    ],
    ids=["small chunks", "odd chunks", "page 64", "page 1", "few pages", "few pages, no cache"],
)
@pytest.mark.parametrize("method", ["mtp", "mtp with suffix"])
def test_chunks_cache_and_preemption_change_nothing(prompts, plain, options, method):
    speculative = {"num_speculative_tokens": 3, "num_model_steps": 2, "mtp_strategy": "with_suffix", "adaptive": False}
    llm = LLM(speculative_config={"method": "mtp", **speculative}, **options)
    batch = 4 if "max_num_batched_tokens" in options else 32  # a small budget leaves nothing for the drafts of many
    outputs = run(llm, prompts, [mixed(i) for i in range(32)], METHODS[method], batch)
    assert ids_of(outputs) == plain
    assert (llm.engine.metrics.preemptions > 0) == ("kv_cache_memory" in options)
    drafts, accepted = sum(o.stats.drafted for o in outputs), sum(o.stats.accepted for o in outputs)
    assert drafts > 200 and accepted / drafts > 0.35, "drafts were made from the wrong states"


def test_adaptive_drafting_changes_nothing(prompts, plain):
    llm = LLM(speculative_config={"method": "mtp", "num_speculative_tokens": 5, "request_methods": ["suffix"]})
    for method in METHODS.values():
        assert ids_of(run(llm, prompts, [mixed(i) for i in range(32)], method)) == plain


# -- what a drafter remembers ------------------------------------------------------------------------------------------


def drafted(output) -> tuple[int, int, list[int]]:
    return output.stats.drafted, output.stats.accepted, output.stats.accepted_per_position


@pytest.mark.parametrize("first", [{"method": "mtp"}, {"method": "none"}, {"method": "ngram"}], ids=["mtp", "none", "ngram"])
def test_a_cached_prefix_drafts_as_well_as_a_fresh_one(prompts, first):
    """Whoever computed the prefix, and also where the hit ends within a page: the drafter's memory is made or caught up."""
    config = {"method": "mtp", "num_speculative_tokens": 4, "adaptive": False}
    for ids in (p[:-3] for p in prompts if len(p) > 100):
        fresh = run(LLM(speculative_config=config), [ids], [mixed(0)], None)[0]
        llm = LLM(speculative_config=config)
        run(llm, [ids[:77]], [mixed(0)], first)
        again = llm.generate({"prompt_token_ids": ids}, mixed(0), use_tqdm=False)[0]
        assert again.num_cached_tokens >= 76
        assert drafted(again.outputs[0]) == drafted(fresh)
        break
    else:
        pytest.fail("no prompt is long enough")


def test_requests_of_one_batch_draft_as_they_would_alone(llm_all, prompts):
    """Nothing of one request reaches another's drafts."""
    params = [mixed(0)] * 8
    together = run(llm_all, prompts[:8], params, None)
    alone = run(llm_all, prompts[:8], params, None, batch=1)
    assert [drafted(o) for o in together] == [drafted(o) for o in alone]


def test_every_method_in_one_batch(llm_all, prompts, plain):
    outputs: dict[str, list[Delta]] = {}
    choices = [
        *METHODS.values(),
        {"method": "none"},
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 8},
        {"verify_strategy": "target_match"},
    ]
    for i in range(30):
        outputs[str(i)] = []
        sink = lambda d: outputs[d.request_id].append(d)  # noqa: E731
        llm_all.engine.submit(prompts[i], mixed(i), sink, request_id=str(i), speculative=choices[i % len(choices)])
    while llm_all.engine.step():
        pass
    assert [[t for d in outputs[str(i)] for t in d.token_ids] for i in range(30)] == plain[:30]
    sources = {s for deltas in outputs.values() for d in deltas for s in d.sources}
    assert sources == {"target", "ngram", "suffix", "mtp"}


def test_sources_say_who_drafted_each_token(llm_all):
    text = "".join(f"    def get_{n}(self):\n        return self._{n}\n\n" for n in ("width", "height", "depth", "colour", "age"))
    prompt = llm_all.engine.tokenizer.encode(f"class Box:\n{text}    def get_weight(self):")
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    choice = {"method": "mtp", "mtp_strategy": "with_ngram", "num_speculative_tokens": 8}
    llm = LLM(speculative_config={"num_model_steps": 2, **choice, "adaptive": False})
    for engine, own in ((llm, None), (llm_all, choice)):
        output = run(engine, [prompt], [params], own)[0]
        assert len(output.sources) == len(output.token_ids) == 48
        counts = {name: output.sources.count(name) for name in ("mtp", "ngram", "target")}
        assert counts["mtp"] + counts["ngram"] == output.stats.accepted and counts["target"] == output.stats.steps
        assert output.stats.accepted > 0  # by whom is a matter of measured times


# -- with every sampling parameter -------------------------------------------------------------------------------------

PARAMETERS = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {300: 4.0, 301: -100.0, 12: 2.5}},
    "filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "bad words": {"bad_words": ("self", " return", "\n    ")},
    "stop": {"stop": ("self.", "):\n", "= ")},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(200, 420))},
    "logprobs": {"logprobs": 4},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_sampling_parameters_act_as_in_plain_decoding(llm_all, prompts, name):
    params = [dataclasses.replace(mixed(i), max_tokens=24, ignore_eos=False, **PARAMETERS[name]) for i in range(8)]
    expected = run(llm_all, prompts[:8], params, {"method": "none"})
    for method in ("ngram", "suffix", "mtp", "mtp with ngram", "mtp with suffix"):
        outputs = run(llm_all, prompts[:8], params, {**METHODS[method], "num_speculative_tokens": 4})
        assert ids_of(outputs) == ids_of(expected)
        assert [(o.text, o.finish_reason) for o in outputs] == [(o.text, o.finish_reason) for o in expected]
        for ours, theirs in zip(outputs, expected):
            assert (ours.logprobs is None) == (theirs.logprobs is None) == (name != "logprobs")
            for a, b in zip(ours.logprobs or (), theirs.logprobs or ()):
                assert a.token_id == b.token_id and a.logprob == pytest.approx(b.logprob, abs=1e-4)
                assert dict(a.top) == pytest.approx(dict(b.top), abs=1e-4)
    if name in ("stop", "min_tokens"):
        assert any(o.finish_reason == "stop" for o in expected)


def test_an_end_inside_a_draft(llm_all, prompts):
    """Any token of the answer as the stop id, and any length: the end falls on every place of a draft."""
    full = run(llm_all, prompts[:1], [SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)], {"method": "none"})[0].token_ids
    for count in range(1, 24):
        cut = run(llm_all, prompts[:1], [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)], None)[0]
        assert cut.token_ids == full[:count] and cut.finish_reason == "length"
        assert cut.stats.emitted == count == cut.stats.steps + cut.stats.accepted
        end = SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(full[count],), ignore_eos=True)
        stopped = run(llm_all, prompts[:1], [end], None)[0]
        assert stopped.token_ids == full[: full.index(full[count]) + 1] and stopped.finish_reason == "stop"
    llm_all.engine.scheduler.check()


@pytest.mark.parametrize("policy", ["accept_all", "reject_all"])
def test_accept_policies(prompts, plain, policy):
    llm = LLM(speculative_config={"method": "mtp", "num_speculative_tokens": 3, "accept_policy": policy, "adaptive": False})
    outputs = run(llm, prompts[:4], [mixed(i) for i in range(4)], None)
    for output, expected in zip(outputs, plain):
        assert output.stats.drafted > 0
        if policy == "reject_all":
            assert output.token_ids == expected and output.stats.accepted == 0 and output.stats.steps == TOKENS
        else:
            assert output.stats.accepted == output.stats.drafted and output.sources.count("mtp") == output.stats.accepted


def test_shared_noise_accepts_more_than_greedy_drafts(prompts):
    """Daliri et al. 2024. The tokens are the same, for the drafts do not matter to them."""
    params = [SamplingParams(max_tokens=24, temperature=1.0, seed=i, ignore_eos=True) for i in range(32)]
    rates, answers = [], []
    for sampling in ("shared_noise", "greedy"):
        llm = LLM(speculative_config={"method": "mtp", "num_speculative_tokens": 1, "draft_sampling": sampling, "adaptive": False})
        outputs = run(llm, prompts, params, None)
        answers.append(ids_of(outputs))
        rates.append(sum(o.stats.accepted for o in outputs) / sum(o.stats.drafted for o in outputs))
    assert answers[0] == answers[1]
    assert rates[0] > rates[1] + 0.02


@pytest.mark.parametrize("strategy", ["greedy", "rejection", "topp"])
def test_other_strategies_run_mixed_with_exact_ones(llm_all, prompts, plain, strategy):
    """They answer for themselves; what shares their batch keeps its tokens."""
    outputs: dict[str, list[int]] = {str(i): [] for i in range(16)}
    for i in range(16):
        choice = {"verify_strategy": strategy, "num_speculative_tokens": 4} if i % 2 else None
        llm_all.engine.submit(prompts[i], mixed(i), lambda d: outputs[d.request_id].extend(d.token_ids), request_id=str(i), speculative=choice)
    while llm_all.engine.step():
        pass
    assert [outputs[str(i)] for i in range(0, 16, 2)] == plain[:16:2]
    assert all(len(ids) == TOKENS for ids in outputs.values())


def test_quantized_drafters_change_no_token(prompts, plain):
    for scheme in ("wint8", "wint4", "fp8"):
        llm = LLM(speculative_config={"method": "mtp", "num_speculative_tokens": 3, "quantization": scheme, "adaptive": False})
        outputs = run(llm, prompts[:8], [mixed(i) for i in range(8)], None)
        assert ids_of(outputs) == plain[:8]
        assert sum(o.stats.accepted for o in outputs) > 0.3 * sum(o.stats.drafted for o in outputs)
