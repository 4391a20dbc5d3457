"""Every drafter, every count, every batch, either way of scheduling: the tokens are those of plain decoding, which are transformers' own."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from backend import SamplingParams
from backend.core import Delta
from tests.conftest import EVERY_METHOD, code_prompts, greedy
from tests.histories import run_histories
from tests.small import LLM, memory_of
from tests.test_suffix import settle

METHODS: dict[str, dict[str, Any]] = {
    "naive": {"method": "naive"},
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "mtp": {"method": "mtp"},
    "mtp with ngram": {"method": "mtp", "mtp_strategy": "with_ngram"},
    "mtp with suffix": {"method": "mtp", "mtp_strategy": "with_suffix"},
}
PLAIN = {"method": "none"}
WAYS = {"waiting": "llm_all", "ahead": "llm_ahead"}
"""When the next step is planned: the engines' fixtures."""
TOKENS = 14


def mixed(index: int, **options) -> SamplingParams:
    """Greedy for every other request, seeded at several temperatures for the rest."""
    temperature = [0.0, 1.0, 0.0, 0.7][index % 4]
    return SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=1000 + index, ignore_eos=True, **options)


@dataclasses.dataclass
class Asked:
    """One request of a batch in which each makes its own choice."""

    prompt: Sequence[int]
    params: SamplingParams
    choice: dict[str, Any] | None = None


def run(llm: LLM, asked: Sequence[Asked], batch: int = 1000) -> list:
    """Outputs of all requests, `batch` of them put in at a time."""
    outputs: list = []
    for begin in range(0, len(asked), batch):
        results = {}
        for number, one in enumerate(asked[begin : begin + batch]):
            results[number] = submit(llm, str(number), one)
        while llm.engine.step():
            wait_for_texts(llm)
        outputs += [results[number] for number in sorted(results)]
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.num_open == 0 == llm.engine.scheduler.pool.num_held
    return outputs


def wait_for_texts(llm: LLM) -> None:
    """Until suffix has all texts in its trees: on a busy machine a prompt may come after a step that would have drafts of it, and `rejection` draws
    other tokens without them."""
    suffix = llm.engine.drafters._suffix
    deadline = time.monotonic() + 10
    while suffix is not None and not suffix.is_idle:
        assert time.monotonic() < deadline
        time.sleep(1e-4)


def submit(llm: LLM, request_id: str, asked: Asked):
    """The completion that the deltas will fill."""
    from backend.llm import Completion, Generation, collect

    result = Generation(request_id, None, list(asked.prompt), [Completion(0)])
    llm.engine.submit(list(asked.prompt), asked.params, lambda d: collect(result, d), request_id=request_id, speculative=asked.choice)
    return result.outputs[0]


def ids_of(outputs: Sequence) -> list[list[int]]:
    return [o.token_ids for o in outputs]


def drafted(output) -> tuple[int, int, list[int]]:
    return output.stats.drafted, output.stats.accepted, output.stats.accepted_per_position


@pytest.fixture(params=WAYS)
def llm(request: pytest.FixtureRequest) -> LLM:
    return request.getfixturevalue(WAYS[request.param])


@pytest.fixture(scope="module")
def prompts(llm_all) -> list[list[int]]:
    return [llm_all.engine.tokenizer.encode(p) for p in code_prompts(32, (60, 500), seed=3)]


@pytest.fixture(scope="module")
def plain(llm_plain, prompts) -> list[list[int]]:
    """From an engine that knows nothing of drafters."""
    return ids_of(run(llm_plain, [Asked(p, mixed(i)) for i, p in enumerate(prompts)]))


def test_greedy_tokens_are_those_of_transformers(llm_plain, llm_all, llm_ahead, hf_model, prompts):
    expected: dict[int, list[int]] = {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), 8):
        group = order[start : start + 8]
        width = max(len(prompts[i]) for i in group)
        ids = torch.tensor([[0] * (width - len(prompts[i])) + prompts[i] for i in group])
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in group])
        with torch.inference_mode():
            out = hf_model.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=1)
        expected.update(zip(group, out[:, width:].tolist()))
    for engine in (llm_plain, llm_all, llm_ahead):
        outputs = run(engine, [Asked(p, greedy(TOKENS), PLAIN) for p in prompts])
        assert ids_of(outputs) == [expected[i] for i in range(len(prompts))]


# -- drafts change nothing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "llm"), [(count, list(WAYS)[count % 2]) for count in range(1, 9)], indirect=["llm"])
def test_any_count_gives_plain_tokens(llm, prompts, plain, count):
    """All methods in one batch, with requests that have none and some that want 9 - count: either way of scheduling meets every count."""
    choices = [{**own, "num_speculative_tokens": count} for own in METHODS.values()]
    choices += [PLAIN, {"num_speculative_tokens": 0}, {"num_speculative_tokens": 9 - count}, {"verify_strategy": "target_match"}, None]
    outputs = run(llm, [Asked(p, mixed(i), choices[i % len(choices)]) for i, p in enumerate(prompts)])
    assert ids_of(outputs) == plain
    own = [o for i, o in enumerate(outputs) if choices[i % len(choices)] == {"method": "mtp", "num_speculative_tokens": count}]
    assert max(len(o.stats.accepted_per_position) for o in own) == count
    assert sum(o.stats.accepted for o in own) > 0
    assert {s for o in outputs for s in o.sources} == {"target", "ngram", "suffix", "mtp"}


BATCHES = {1: 3, 7: 7, 32: 32}
"""Requests of each, some at a time."""


@pytest.mark.parametrize(
    ("method", "batch", "llm"), [(m, b, list(WAYS)[(i + j) % 2]) for i, m in enumerate(METHODS) for j, b in enumerate(BATCHES)], indirect=["llm"]
)
def test_any_batch_gives_plain_tokens(llm, prompts, plain, method, batch):
    """Every method alone in every batch, and both with either way of scheduling."""
    count = BATCHES[batch]
    outputs = run(llm, [Asked(p, mixed(i), METHODS[method]) for i, p in enumerate(prompts[:count])], batch)
    assert ids_of(outputs) == plain[:count]


AT_ONCE = {"max_num_batched_tokens": 4096, "max_batch_size": 32}
"""As many prompts begin together as pages hold, so all grow into the last ones."""
OPTIONS: dict[str, dict[str, Any]] = {
    "whole prompts, no cache": {"max_num_batched_tokens": 4096, "enable_prefix_caching": False},
    "small chunks, no cache": {"max_num_batched_tokens": 24, "max_batch_size": 16, "enable_prefix_caching": False},
    "odd chunks": {"max_num_batched_tokens": 33, "max_batch_size": 32},
    "page 64": {"page_size": 64},
    "page 1": {"page_size": 1},
    "few pages": {"num_pages": 60, **AT_ONCE},
    "few pages, no cache": {"num_pages": 60, "enable_prefix_caching": False, **AT_ONCE},
}


IN_PARTS = ("small chunks, no cache", "few pages", "few pages, no cache")
"""Where either way of scheduling goes its own: prompts in several steps, and preemption, of what may be under way."""


@pytest.mark.parametrize(
    ("name", "is_ahead"),
    [*((name, True) for name in OPTIONS), *((name, False) for name in IN_PARTS)],
    ids=lambda p: p if isinstance(p, str) else "ahead" if p else "waiting",
)
def test_chunks_cache_and_preemption_change_nothing(llm_all, prompts, plain, name, is_ahead):
    options = dict(OPTIONS[name])
    if "num_pages" in options:
        options["kv_cache_memory"] = options.pop("num_pages") * llm_all.engine.worker.store.page_bytes
    own = LLM(speculative_config={**EVERY_METHOD, "num_model_steps": 2}, async_scheduling=is_ahead, **options)
    choices = [*METHODS.values(), {"method": "mtp", "mtp_strategy": "with_suffix", "num_speculative_tokens": 5}, PLAIN]
    outputs = run(own, [Asked(p, mixed(i), choices[i % len(choices)]) for i, p in enumerate(prompts)])
    assert ids_of(outputs) == plain
    assert (own.engine.metrics.preemptions > 0) == ("kv_cache_memory" in options)
    stats = [o.stats for i, o in enumerate(outputs) if choices[i % len(choices)]["method"] == "mtp"]
    drafts, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    assert drafts > 200 and accepted / drafts > 0.35, "drafts were made from the wrong states"


@pytest.mark.parametrize("is_ahead", [False, True], ids=["waiting", "ahead"])
def test_adaptive_drafting_changes_nothing(prompts, plain, is_ahead):
    """Of any method, and of auto, which takes from all of them."""
    config = {**EVERY_METHOD, "adaptive": True, "num_speculative_tokens": 5, "num_model_steps": 3, "request_methods": ["suffix", "auto"]}
    own = LLM(speculative_config=config, async_scheduling=is_ahead)
    choices = [{"method": "auto", "num_speculative_tokens": 12}, *METHODS.values()]
    for turn in range(2):
        outputs = run(own, [Asked(p, mixed(i), choices[(i + turn) % len(choices)]) for i, p in enumerate(prompts)])
        assert ids_of(outputs) == plain
    outputs = run(own, [Asked(p, mixed(i), choices[0]) for i, p in enumerate(prompts)])
    assert ids_of(outputs) == plain
    assert {source for o in outputs for source in o.sources} <= {"target", "mtp", "ngram", "suffix"}


@pytest.mark.parametrize("is_ahead", [False, True], ids=["waiting", "ahead"])
def test_random_histories_leave_no_page_behind(llm_plain, is_ahead):
    """Cancels, preemptions and mixed methods in few pages: every request ends, with the tokens of an engine that has room."""
    tight = LLM(
        speculative_config={"method": "mtp", "num_speculative_tokens": 3, "num_model_steps": 3, "adaptive": False},
        async_scheduling=is_ahead,
        max_batch_size=6,
        max_num_batched_tokens=64,
        max_model_len=192,
        kv_cache_memory=memory_of(11, with_drafter=True),
    )
    run_histories(tight, llm_plain, 40, arrivals=2, cancels=0.2)


# -- what a drafter remembers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_ahead", [False, True], ids=["waiting", "ahead"])
def test_a_cached_prefix_drafts_as_well_as_a_fresh_one(llm_all, is_ahead):
    """Whoever computed the prefix, and also where the hit ends within a page: the drafter's memory is made or caught up."""
    config = {"method": "mtp", "num_speculative_tokens": 4, "adaptive": False}
    texts = [llm_all.engine.tokenizer.encode(p)[:97] for p in code_prompts(3, (400, 500), seed=17)]
    fresh = run(LLM(speculative_config=config, enable_prefix_caching=False), [Asked(ids, greedy(TOKENS)) for ids in texts])
    own = LLM(speculative_config=config, async_scheduling=is_ahead)
    for ids, first, expected in zip(texts, ({"method": "mtp"}, PLAIN, {"method": "ngram"}), fresh):
        run(own, [Asked(ids[:77], greedy(TOKENS), first)])
        again = own.generate({"prompt_token_ids": ids}, greedy(TOKENS), use_tqdm=False)[0]
        assert again.num_cached_tokens >= 76
        assert drafted(again.outputs[0]) == drafted(expected), first


def test_a_prompt_that_the_model_was_spared_is_not_taken_for_one_that_it_knows():
    """A lookup drafts alone from the prompt's end on, and the client leaves: where the prompt comes again, the model makes up for it."""
    config = {"method": "mtp", "mtp_strategy": "with_ngram", "num_speculative_tokens": 4, "num_model_steps": 4, "adaptive": False}
    own, fresh = LLM(speculative_config=config), LLM(speculative_config=config, enable_prefix_caching=False)
    text = "".join(f"    def get_{n}(self):\n        return self._{n}\n\n" for n in ("width", "height", "depth", "colour", "age"))
    ids = own.engine.tokenizer.encode(f"class Box:\n{text}    def get_weight(self):\n        return")
    deltas: list[Delta] = []
    own.engine.submit(ids, greedy(TOKENS), deltas.append, request_id="leaves")
    while not deltas:
        own.engine.step()
    own.engine.cancel("leaves")
    own.engine.step()
    mtp = {"method": "mtp", "mtp_strategy": "default"}
    again = own.generate({"prompt_token_ids": ids}, greedy(TOKENS), speculative=mtp, use_tqdm=False)[0]
    assert again.num_cached_tokens >= 80
    assert drafted(again.outputs[0]) == drafted(run(fresh, [Asked(ids, greedy(TOKENS), mtp)])[0])


def test_a_prompt_that_comes_again_promises_its_answer(monkeypatch):
    """Before its first token: the model may be spared it."""
    own = LLM(speculative_config={"method": "mtp", "mtp_strategy": "with_suffix", "num_speculative_tokens": 8, "adaptive": False})
    promised: list[int] = []
    monkeypatch.setattr(own.engine.budget, "foresee", lambda request, chains: promised.append(sum(map(len, chains))))
    (prompt,) = code_prompts(1, (200, 300), seed=31)
    answers = []
    for _ in range(2):
        answers += run(own, [Asked(own.engine.tokenizer.encode(prompt), greedy(TOKENS))])
        settle(own.engine.drafters._suffix)
    assert promised == [0, 8] and answers[0].token_ids == answers[1].token_ids


def test_requests_of_one_batch_draft_as_they_would_alone(llm, prompts):
    """Nothing of one request reaches another's drafts."""
    asked = [Asked(p, greedy(TOKENS)) for p in prompts[:8]]
    together, alone = run(llm, asked), run(llm, asked, batch=1)
    assert [drafted(o) for o in together] == [drafted(o) for o in alone]


def test_sources_say_who_drafted_each_token(llm):
    text = "".join(f"    def get_{n}(self):\n        return self._{n}\n\n" for n in ("width", "height", "depth", "colour", "age"))
    prompt = llm.engine.tokenizer.encode(f"class Box:\n{text}    def get_weight(self):")
    for method in ("ngram", "mtp", "mtp with ngram", "mtp with suffix"):
        (output,) = run(llm, [Asked(prompt, greedy(48), {**METHODS[method], "num_speculative_tokens": 8})])
        assert len(output.sources) == len(output.token_ids) == 48
        counts = {name: output.sources.count(name) for name in ("mtp", "ngram", "suffix", "target")}
        assert counts["target"] == output.stats.steps and sum(counts.values()) == 48
        assert counts["mtp"] + counts["ngram"] + counts["suffix"] == output.stats.accepted > 0
        assert sum(output.stats.accepted_per_position) == output.stats.accepted
        assert {name for name, count in counts.items() if count} <= {"target", *(s.removeprefix("with_") for s in METHODS[method].values())}


# -- with every sampling parameter -------------------------------------------------------------------------------------

PARAMETERS: list[dict[str, Any]] = [
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
    {"temperature": 0.0, "bad_words": ("self", " return", "\n    ", "x = 1; " * 9)},
    {"min_tokens": 12, "logit_bias": {0: 11.0}},
    {"temperature": 0.0, "min_tokens": 20, "logit_bias": {0: 12.0}},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": tuple(range(200, 420))},
    {"temperature": 0.6, "top_p": 0.95, "stop": ("\n\n", "return ", "):\n")},
    {"logprobs": 4},
    {"temperature": 0.9, "logprobs": 0, "repetition_penalty": 1.3, "bad_words": ("self",)},
]
REPEATING = "".join(f"    def get_{n}(self):\n        return self._{n}\n\n" for n in ("width", "height", "depth", "width", "height"))


@pytest.fixture(scope="module")
def texts(llm_all) -> list[list[int]]:
    """Some that repeat themselves, so that lookups find something, and some that do not."""
    texts = [f"class Box:\n{REPEATING}    def get_depth(self):", "x = [\n" + "    ('a', 1),\n" * 12 + "    ('a'", *code_prompts(4, seed=3)]
    return [llm_all.engine.tokenizer.encode(text) for text in texts]


def params_of(number: int, text: int) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 28, "seed": 100 + text, **PARAMETERS[number]})


@pytest.fixture(scope="module")
def expected(llm_all, texts) -> dict[tuple[int, int], Any]:
    """By parameters and text: of plain decoding, all in one batch."""
    keys = [(number, text) for number in range(len(PARAMETERS)) for text in range(len(texts))]
    return dict(zip(keys, run(llm_all, [Asked(texts[text], params_of(number, text), PLAIN) for number, text in keys])))


def test_sampling_parameters_act_as_in_plain_decoding(llm, llm_ahead, texts, expected):
    """Every set with every method, half of them by either way of scheduling, in one batch, where none may have another's; 1, 4 and 8 drafts."""
    keys = []
    for number in range(len(PARAMETERS)):
        for place, name in enumerate(METHODS):
            if (number + place // 2 + (llm is llm_ahead)) % 2:
                continue
            text = number % 2 if place % 2 else 2 + (number + place) % 4
            keys.append((number, text, name, (4, 1, 8)[(number + place) % 3]))
    asked = [Asked(texts[text], params_of(number, text), {**METHODS[name], "num_speculative_tokens": count}) for number, text, name, count in keys]
    outputs = run(llm, asked)
    for key, ours in zip(keys, outputs):
        theirs = expected[key[:2]]
        where = f"{PARAMETERS[key[0]]}, {key[2]}"
        assert (ours.token_ids, ours.text, ours.finish_reason) == (theirs.token_ids, theirs.text, theirs.finish_reason), where
        assert (ours.logprobs is None) == (theirs.logprobs is None) == ("logprobs" not in PARAMETERS[key[0]]), where
        for a, b in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert a.token_id == b.token_id and a.logprob == pytest.approx(b.logprob, abs=1e-4), where
            assert dict(a.top) == pytest.approx(dict(b.top), abs=1e-4), where
    for name in METHODS:
        own = [o.stats for key, o in zip(keys, outputs) if key[2] == name]
        drafts, accepted = sum(s.drafted for s in own), sum(s.accepted for s in own)
        assert (accepted > 20 and drafts - accepted > 10) == (name != "naive"), f"{name}: {accepted} of {drafts}"


def test_each_parameter_changes_something(expected, texts):
    base = [expected[0, text].token_ids for text in range(len(texts))]
    for number, parameters in enumerate(PARAMETERS[1:], 1):
        found = [expected[number, text] for text in range(len(texts))]
        if set(parameters) <= {"logprobs"}:
            assert ids_of(found) == base
        else:
            assert ids_of(found) != base, parameters
        if "stop" in parameters or "stop_token_ids" in parameters:
            assert any(o.finish_reason == "stop" for o in found), parameters


def test_an_end_inside_a_draft(llm, prompts):
    """Any token of the answer as the stop id, and any length: the end falls on every place of a draft."""
    (full,) = ids_of(run(llm, [Asked(prompts[0], greedy(24), PLAIN)]))
    lengths = run(llm, [Asked(prompts[0], greedy(count)) for count in range(1, 24)])
    for count, cut in enumerate(lengths, 1):
        assert cut.token_ids == full[:count] and cut.finish_reason == "length"
        assert cut.stats.emitted == count == cut.stats.steps + cut.stats.accepted
    stopped = run(llm, [Asked(prompts[0], greedy(24, stop_token_ids=(end,))) for end in full])
    for end, cut in zip(full, stopped):
        assert cut.token_ids == full[: full.index(end) + 1] and cut.finish_reason == "stop"
    texts = run(llm, [Asked(prompts[0], greedy(24, stop=(stop,))) for stop in ("\n", "self", "(")])
    unstopped = llm.engine.tokenizer.decode(full)
    for stop, cut in zip(("\n", "self", "("), texts):
        assert cut.text == unstopped.partition(stop)[0]


# -- strategies that look at whole distributions -----------------------------------------------------------------------

STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"method": "mtp", "verify_strategy": "greedy"}, {"temperature": 0.8}),
    "rejection of what the model drew": ({"method": "mtp", "verify_strategy": "rejection"}, {"temperature": 0.8, "logprobs": 0}),
    "rejection, filtered": (
        {"method": "mtp", "verify_strategy": "rejection"},
        {"temperature": 1.1, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "presence_penalty": 0.4, "bad_words": ["self"]},
    ),
    "rejection of certain drafts": ({"method": "ngram", "num_speculative_tokens": 5, "verify_strategy": "rejection"}, {"temperature": 0.7}),
    "rejection, drafted on the host": ({"method": "suffix", "verify_strategy": "rejection"}, {"temperature": 0.7}),
    "rejection, drafted by both": (
        {"method": "mtp", "mtp_strategy": "with_suffix", "num_speculative_tokens": 5, "verify_strategy": "rejection"},
        {"temperature": 0.7},
    ),
    "rejection, greedy": ({"method": "mtp", "verify_strategy": "rejection"}, {"temperature": 0.0}),
    "topp": ({"method": "mtp", "verify_strategy": "topp"}, {"temperature": 0.8, "top_p": 0.8}),
    "topp, filtered": (
        {"method": "ngram", "num_speculative_tokens": 5, "verify_strategy": "topp"},
        {"temperature": 1.2, "top_p": 0.7, "top_k": 4, "min_p": 0.05, "logprobs": 20},
    ),
}  # fmt: skip


def asked_with(name: str, prompts: Sequence[list[int]]) -> list[Asked]:
    choice, sampling = STRATEGIES[name]
    return [Asked(p, SamplingParams(max_tokens=TOKENS, seed=50 + i, ignore_eos=True, **sampling), choice) for i, p in enumerate(prompts)]


def all_of(outputs: Sequence) -> list[tuple]:
    return [(o.token_ids, o.text, o.sources, o.finish_reason, o.stats.drafted, o.stats.accepted, o.logprobs) for o in outputs]


@pytest.fixture(scope="module")
def answered_alone(llm_all, prompts) -> dict[str, list]:
    return {name: run(llm_all, asked_with(name, prompts[:4])) for name in STRATEGIES}


@pytest.fixture(scope="module")
def answered_ahead(llm_ahead, prompts) -> dict[str, list]:
    """In the same order: a log-probability's last bits depend on how much of a prompt was in the cache."""
    return {name: run(llm_ahead, asked_with(name, prompts[:4])) for name in STRATEGIES}


@pytest.mark.parametrize("name", [name for name in STRATEGIES if "both" not in name])  # which of the two drafts is a matter of measured times
def test_answers_do_not_depend_on_the_scheduling(answered_alone, answered_ahead, name):
    assert all_of(answered_ahead[name]) == all_of(answered_alone[name])


def test_strategies_run_mixed_with_exact_requests(llm, prompts, plain, answered_alone):
    """Each answers as it would alone, and what shares their batch keeps its tokens."""
    exact = [Asked(prompts[i], mixed(i), choice) for i, choice in enumerate((None, *METHODS.values()))]
    outputs = run(llm, [*exact, *(one for name in STRATEGIES for one in asked_with(name, prompts[:4]))])
    assert ids_of(outputs[: len(exact)]) == plain[: len(exact)]
    for number, name in enumerate(STRATEGIES):
        own = outputs[len(exact) + 4 * number :][:4]
        if "both" not in name:
            for mine, alone in zip(own, answered_alone[name]):
                assert (mine.token_ids, mine.sources, drafted(mine)) == (alone.token_ids, alone.sources, drafted(alone)), name
        assert all(len(o.token_ids) == TOKENS for o in own)


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_topp_draws_from_its_candidates_with_and_without_drafts(llm, prompts, method):
    """Steps with none drew from the whole nucleus, so that what could come depended on how many drafts a step had room for."""
    sampling = {"max_tokens": TOKENS, "temperature": 1.8, "ignore_eos": True, "logprobs": 20}
    choice = {"method": method, "verify_strategy": "topp"}
    outputs = run(llm, [Asked(p, SamplingParams(seed=i, **sampling), choice) for i, p in enumerate(prompts[:16])])
    ranks = [sum(logprob > own.logprob for _, logprob in own.top) for o in outputs for own in o.logprobs]
    assert max(ranks) == llm.engine.config.speculative_config.max_candidate_len - 1, "the tail beyond is likely at this temperature"


def test_topp_without_drafts_draws_as_the_target_does(llm):
    """With the noise of the request's seed: from no more candidates than there are, the tokens of plain decoding."""
    rng = random.Random(4)
    asked = [(rng.sample(range(100, 4000), 12), SamplingParams(max_tokens=8, top_k=5, seed=i, ignore_eos=True)) for i in range(32)]
    plain = run(llm, [Asked(p, s, PLAIN) for p, s in asked])
    found = run(llm, [Asked(p, s, {"method": "ngram", "verify_strategy": "topp"}) for p, s in asked])
    undrafted = [(mine.token_ids, other.token_ids) for mine, other in zip(found, plain) if not mine.stats.drafted]
    assert len(undrafted) > 8 and all(mine == other for mine, other in undrafted)


def test_greedy_requests_do_not_depend_on_the_strategy(llm, texts):
    """Nor does `greedy` depend on the temperature."""
    asked = [Asked(texts[0], greedy(48), {"method": "ngram", "verify_strategy": s}) for s in ("greedy", "target_match", "rejection", "topp")]
    hot = SamplingParams(max_tokens=48, temperature=1.5, seed=3, ignore_eos=True)
    first, *others = run(llm, [Asked(texts[0], greedy(48), PLAIN), *asked, Asked(texts[0], hot, {"method": "ngram", "verify_strategy": "greedy"})])
    assert all(o.token_ids == first.token_ids and o.stats.accepted > 0 for o in others)


@pytest.mark.parametrize("policy", ["accept_all", "reject_all"])
def test_accept_policies(prompts, plain, policy):
    own = LLM(speculative_config={"method": "mtp", "num_speculative_tokens": 3, "accept_policy": policy, "adaptive": False})
    for method in ("mtp", "ngram"):
        for output, wanted in zip(run(own, [Asked(p, mixed(i), {"method": method}) for i, p in enumerate(prompts[:4])]), plain):
            assert output.stats.drafted > 0
            if policy == "reject_all":
                assert output.token_ids == wanted and output.stats.accepted == 0 and output.stats.steps == TOKENS
            else:
                assert output.stats.accepted == output.stats.drafted and output.sources.count(method) == output.stats.accepted


def test_shared_noise_accepts_more_than_greedy_drafts(llm_all, prompts):
    """Daliri et al. 2024. The tokens are the same, for the drafts do not matter to them."""
    params = [SamplingParams(max_tokens=24, temperature=1.0, seed=i, ignore_eos=True) for i in range(32)]
    other = LLM(speculative_config={"method": "mtp", "num_speculative_tokens": 1, "draft_sampling": "greedy", "adaptive": False})
    rates, answers = [], []
    for own in (llm_all, other):
        outputs = run(own, [Asked(p, s, {"method": "mtp", "num_speculative_tokens": 1}) for p, s in zip(prompts, params)])
        answers.append(ids_of(outputs))
        rates.append(sum(o.stats.accepted for o in outputs) / sum(o.stats.drafted for o in outputs))
    assert answers[0] == answers[1]
    assert rates[0] > rates[1] + 0.02


@pytest.mark.parametrize("scheme", ["wint8", "block_wise_fp8", {"dense_quant_type": "wint4", "head_quant_type": "wint8"}], ids=["8", "fp8", "4"])
def test_drafts_change_no_token_of_quantized_targets(prompts, scheme):
    """Plain decoding and verification of the same rounded weights; drafters in few bits beside them."""
    config = EVERY_METHOD | {"quantization": "wint4"}
    own = LLM(quantization=scheme, speculative_config=config)
    few = prompts[:4]
    expected = ids_of(run(own, [Asked(p, mixed(i), PLAIN) for i, p in enumerate(few)]))
    for choice, batch in (({"method": "mtp"}, 4), ({"method": "ngram", "num_speculative_tokens": 5}, 1)):
        outputs = run(own, [Asked(p, mixed(i), choice) for i, p in enumerate(few)], batch)
        assert ids_of(outputs) == expected
        assert sum(o.stats.accepted for o in outputs) > 0


@pytest.mark.parametrize("scheme", ["wint8", "wint4", "fp8"])
def test_quantized_drafters_change_no_token(prompts, plain, scheme):
    own = LLM(speculative_config={"method": "mtp", "num_speculative_tokens": 3, "quantization": scheme, "adaptive": False})
    outputs = run(own, [Asked(p, mixed(i)) for i, p in enumerate(prompts[:8])])
    assert ids_of(outputs) == plain[:8]
    assert sum(o.stats.accepted for o in outputs) > 0.3 * sum(o.stats.drafted for o in outputs)
