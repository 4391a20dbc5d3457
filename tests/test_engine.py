"""The engine: what ends a request, log-probabilities, refusals, cancelling, failures, and its loop. That tokens are right: test_methods."""

from __future__ import annotations

import re
import threading
from collections import Counter

import pytest
import tokenizers
import torch

from backend import SamplingParams, open_requests, planner
from backend import waiting as waiting_module
from backend.core import Delta, Request
from backend.errors import CapacityError, ConfigError, EngineError, InternalError, ModelError, RequestError
from backend.models.inspection import Load, inspect
from backend.scheduler import Scheduler
from backend.step.worker import Launched
from deploy.served_model import check_model as check_launch
from tests.conftest import code_prompts, greedy
from tests.models import make_tiny
from tests.small import LLM, SMALL_MODEL, memory_of

NEW_TOKENS = 16
UNPACED = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
"""Drafts that do not depend on the clock."""


@pytest.fixture(scope="module")
def prompts(llm_ngram) -> list[list[int]]:
    return [llm_ngram.engine.tokenizer.encode(p) for p in code_prompts(12)]


@pytest.fixture(scope="module")
def expected(llm_plain, prompts) -> list[list[int]]:
    results = llm_plain.generate([{"prompt_token_ids": ids} for ids in prompts], greedy(NEW_TOKENS), use_tqdm=False)
    return [r.outputs[0].token_ids for r in results]


@pytest.fixture(params=["waiting", "ahead"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return request.getfixturevalue({"waiting": "llm_all", "ahead": "llm_ahead"}[request.param])


def test_prefix_cache_is_used_and_exact(llm_plain, llm, prompts):
    """A prompt that leaves a known one in the middle of a page shares that page too, by copy."""
    long = max(prompts, key=len)
    other = [*long[: len(long) - 7], 500, 501, 502]
    exact = llm_plain.generate([{"prompt_token_ids": ids} for ids in (long, other)], greedy(NEW_TOKENS), use_tqdm=False)
    for _ in range(2):
        result = llm.generate({"prompt_token_ids": long}, greedy(NEW_TOKENS), use_tqdm=False)[0]
        assert result.outputs[0].token_ids == exact[0].outputs[0].token_ids
    assert result.num_cached_tokens == len(long) - 1
    cached = llm.generate({"prompt_token_ids": other}, greedy(NEW_TOKENS), use_tqdm=False)[0]
    assert cached.num_cached_tokens >= len(other) - 3 - llm.engine.config.page_size // 4
    assert cached.outputs[0].token_ids == exact[1].outputs[0].token_ids


def test_drafts_follow_cold_prompts(llm, monkeypatch):
    """Of prompts that are computed in chunks while others decode: every step of a request has drafts but its first one, and a last one that has
    room for none."""
    prompts = [[7 + number, *llm.engine.tokenizer.encode(p)] for number, p in enumerate(code_prompts(6, (900, 1200), seed=15))]
    assert sum(map(len, prompts)) > 3 * llm.engine.worker.max_num_batched_tokens, "they do not fit one step"
    batches, plan = [], llm.engine.planner.plan
    monkeypatch.setattr(llm.engine.planner, "plan", lambda batch: batches.append(batch) or plan(batch))
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy(16), use_tqdm=False)
    for result in results:
        stats = result.outputs[0].stats
        assert result.num_cached_tokens == 0 and stats.steps - 2 <= stats.drafts < stats.steps and stats.accepted
    assert sum({e.is_decoding for e in b.entries} == {True, False} for b in batches) >= 3


def test_drafts_are_not_held_against_rows_of_prompts(llm_all, monkeypatch):
    """Beside the chunks of a long prompt as many drafts are worth their rows as without it: one row of each request that goes on counts."""
    engine, seen, batches = llm_all.engine, [], []
    allot, plan = engine.budget.allot, engine.planner.plan
    monkeypatch.setattr(engine.budget, "allot", lambda requests, *rest: seen.append((len(requests), rest[2])) or allot(requests, *rest))
    monkeypatch.setattr(engine.planner, "plan", lambda batch: batches.append(batch) or plan(batch))
    short, long = [engine.tokenizer.encode(code_prompts(1, size, seed=21)[0]) for size in ((200, 300), (1500, 1600))]
    for name, prompt in (("short", short), ("long", [9, *long])):
        engine.submit(prompt, greedy(12), lambda delta: None, request_id=name, speculative={"method": "ngram"})
        engine.step()
        engine.step()
    while engine.step():
        pass
    assert any(e.num_tokens > 100 for batch in batches[2:] for e in batch.entries), "a prompt comes beside drafts"
    assert seen and all(num_requests <= num_rows <= 2 for num_requests, num_rows in seen)


@pytest.mark.parametrize("is_ahead", [False, True], ids=["waiting", "ahead"])
def test_a_drafter_that_was_not_worth_its_time_at_the_prompt_catches_up(llm_plain, monkeypatch, is_ahead):
    """It drafts as one that has seen the prompt at once. Short prompts are spared it; of long ones it computes what would be too much to catch up."""
    prompts = [
        [7 + i, *llm_plain.engine.tokenizer.encode(p)][:n] for i, (n, p) in enumerate(zip((90, 500, 900), code_prompts(3, (3000, 3500), seed=16)))
    ]
    inputs, found = [{"prompt_token_ids": ids} for ids in prompts], {}
    for max_lag in (0, 512):
        monkeypatch.setattr(planner, "MAX_LAG", max_lag)
        llm = LLM(
            speculative_config={"method": "mtp", "num_speculative_tokens": 3}, async_scheduling=is_ahead, max_num_batched_tokens=200, max_batch_size=8
        )
        engine, rows = llm.engine, Counter()
        monkeypatch.setattr(engine.budget, "num_model", lambda request: 3 * (len(request.token_ids) > len(request.prompt_token_ids) + 4))
        for name, fixed in {"allot": lambda _, chains, *rest: [*map(len, chains)], "limit": lambda request: 3, "least_standing": lambda: 0.0}.items():
            monkeypatch.setattr(engine.budget, name, fixed)
        plan = engine.planner.plan

        def note(batch, plan=plan, rows=rows):
            step = plan(batch)
            for entry, count in zip(step.entries, step.plan.drafter_counts):
                rows[len(entry.request.prompt_token_ids)] += count * (entry.request.num_output_tokens == 0)
            return step

        monkeypatch.setattr(engine.planner, "plan", note)
        for turn in ("cold", "cached"):
            outputs = [r.outputs[0] for r in llm.generate(inputs, greedy(12), use_tqdm=False)]
            found[max_lag, turn] = [(o.token_ids, o.stats.as_dict()) for o in outputs]
            assert all(o.stats.drafts for o in outputs)
        assert [rows[count] > 0 for count in (90, 500)] == [max_lag == 0, max_lag == 0] and rows[900] > 300
        engine.scheduler.check()
    assert found[512, "cold"] == found[0, "cold"] and found[512, "cached"] == found[0, "cached"]
    assert [ids for ids, _ in found[0, "cold"]] == [r.outputs[0].token_ids for r in llm_plain.generate(inputs, greedy(12), use_tqdm=False)]


def test_more_completions_than_may_be_open(tmp_path):
    """Offline, too, they are refused: nothing that is open will ever make room for them."""
    llm = LLM(str(make_tiny(tmp_path, 8)), device="cpu", kv_cache_memory="1MiB", max_batch_size=1, max_waiting=1)
    prompts, params = [{"prompt_token_ids": [3]}] * 2, [SamplingParams(max_tokens=2, n=n) for n in (2, 3)]
    with pytest.raises(RequestError, match="n is 3; the limit is 1 running and 1 waiting"):
        llm.generate(prompts, params, use_tqdm=False)
    llm.engine.scheduler.check()


def test_ngram_accepts_drafts_and_counts_them(llm_ngram):
    code = "".join(f"    def get_{n}(self):\n        return self._{n}\n\n" for n in ("width", "height", "depth", "colour"))
    before = llm_ngram.engine.metrics.inter_token.count
    result = llm_ngram.generate(f"class Box:\n{code}    def get_weight(self):", greedy(40), use_tqdm=False)[0].outputs[0]
    stats = result.stats
    assert llm_ngram.engine.metrics.inter_token.count - before == stats.steps - 1, "from step to step, as vLLM's latency between tokens"
    assert stats.accepted > 0 and stats.emitted == 40 == len(result.token_ids)
    assert stats.emitted == stats.steps + stats.accepted
    assert sum(stats.accepted_per_position) == stats.accepted == result.sources.count("ngram")
    assert stats.as_dict()["mean_accepted_length"] == 1 + stats.accepted / stats.drafts


def test_bfloat16_runs_and_stays_near_float32(llm_plain, prompts):
    rounded = LLM(dtype="bfloat16")
    wanted = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
    inputs = [{"prompt_token_ids": ids} for ids in prompts[:8]]
    for pair in zip(*(m.generate(inputs, wanted, use_tqdm=False) for m in (llm_plain, rounded))):
        a, b = (r.outputs[0].logprobs[0] for r in pair)
        assert dict(a.top)[a.token_id] == pytest.approx(dict(b.top).get(a.token_id, -99), abs=0.15)


def test_n_completions_are_those_of_seeds_in_a_row(llm):
    together = llm.generate("def parse(text):", SamplingParams(max_tokens=12, seed=5, n=3), use_tqdm=False)[0]
    alone = [llm.generate("def parse(text):", SamplingParams(max_tokens=12, seed=5 + i), use_tqdm=False)[0].outputs[0].token_ids for i in range(3)]
    assert [c.token_ids for c in together.outputs] == alone
    assert len({tuple(ids) for ids in alone}) > 1
    assert all(c.stats.emitted == len(c.token_ids) for c in together.outputs)


def test_each_prompt_may_have_its_own_speculation(llm_all, prompts):
    choices = [{"method": "none"}, None, {"method": "ngram", "num_speculative_tokens": 2}]
    results = llm_all.generate([{"prompt_token_ids": ids} for ids in prompts[:3]], greedy(NEW_TOKENS), speculative=choices, use_tqdm=False)
    plain, own, ngram = (r.outputs[0] for r in results)
    assert plain.stats.drafted == 0 < own.stats.drafted and "mtp" in own.sources and "mtp" not in ngram.sources
    with pytest.raises(RequestError, match="1 prompts came with 2 choices of speculation"):
        llm_all.generate("x", speculative=[None, None], use_tqdm=False)
    with pytest.raises(ConfigError, match="unknown key 'methud'"):
        llm_all.generate(["x", "y"], speculative=[None, {"methud": "ngram"}], use_tqdm=False)


class TestEnds:
    """What ends a completion, with and without drafts across the end, and steps under way. Lengths and stop ids: test_methods."""

    @pytest.fixture
    def llm(self, llm_ahead):
        return llm_ahead

    PROMPT = (
        "import os\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser(description='Run')\n    parser.add_argument('-v', '--verbose'"
    )

    CHOICE = {"method": "ngram", "num_speculative_tokens": 8}

    def outputs(self, llm, params, prompt=PROMPT):
        plain = llm.generate(prompt, params, speculative={"method": "none"}, use_tqdm=False)[0].outputs[0]
        drafted = llm.generate(prompt, params, speculative=self.CHOICE, use_tqdm=False)[0].outputs[0]
        assert (plain.token_ids, plain.text, plain.finish_reason) == (drafted.token_ids, drafted.text, drafted.finish_reason)
        return plain

    @pytest.fixture(scope="class")
    def free(self, llm_all):
        return llm_all.generate(self.PROMPT, greedy(60), use_tqdm=False)[0].outputs[0]

    def test_stop_string_across_tokens(self, llm, free):
        for stop in ("action=", "parser.add", "\n    parser", "help"):
            at = free.text.find(stop)
            if at < 0:
                continue
            out = self.outputs(llm, greedy(60, stop=(stop,)))
            assert out.text == free.text[:at] and out.finish_reason == "stop"
            kept = self.outputs(llm, greedy(60, stop=(stop, "never seen"), include_stop=True))
            assert kept.text == free.text[:at] + stop

    def test_min_tokens_holds_stops_off(self, llm, free):
        token_id = free.token_ids[3]
        out = self.outputs(llm, greedy(60, stop_token_ids=(token_id,), min_tokens=25))
        assert len(out.token_ids) >= 25 and token_id not in out.token_ids[:24]
        out = self.outputs(llm, greedy(60, stop=("e",), min_tokens=25))
        assert len(out.token_ids) >= 25

    def test_end_of_text_ends_unless_ignored(self, llm):
        end = next(iter(llm.engine.worker.model.eos_token_ids))
        params = {"max_tokens": 30, "temperature": 0.0, "logit_bias": {end: 100.0}}
        out = self.outputs(llm, SamplingParams(**params))
        assert out.token_ids == [end] and out.text == "" and out.finish_reason == "stop"
        out = self.outputs(llm, SamplingParams(**params, ignore_eos=True))
        assert out.token_ids == [end] * 30 and out.finish_reason == "length"
        out = self.outputs(llm, SamplingParams(**params, min_tokens=5))
        assert len(out.token_ids) == 6 and out.token_ids.index(end) == 5

    @pytest.mark.parametrize("is_ahead", [False, True], ids=["waiting", "ahead"])
    def test_the_context_ends(self, is_ahead):
        llm = LLM(max_model_len=64, speculative_config=UNPACED, async_scheduling=is_ahead)
        ids = llm.engine.tokenizer.encode("x = 1\n" * 12)[:50]
        out = self.outputs(llm, greedy(60), {"prompt_token_ids": ids})
        assert len(out.token_ids) == 14 and out.finish_reason == "length"

    def test_special_tokens_in_the_text(self, llm):
        """As vLLM has it: one that ends the completion is left out, but with include_stop."""
        tokenizer = llm.engine.tokenizer
        (end,) = llm.engine.worker.model.eos_token_ids
        special = tokenizer.decode([end], skip_special_tokens=False)
        for options, expected in (
            ({"ignore_eos": True}, special * 3),
            ({"ignore_eos": True, "skip_special_tokens": True}, ""),
            ({"ignore_eos": True, "stop": ("|><|",)}, special[: -len("|>")]),
            ({}, ""),
            ({"include_stop": True}, special),
            ({"include_stop": True, "skip_special_tokens": True}, ""),
            ({"ignore_eos": True, "echo": True}, f"{special}x{special * 4}"),  # the prompt ends with one
        ):
            params = SamplingParams(**{"max_tokens": 3, "temperature": 0.0, "logit_bias": {end: 100.0}, "skip_special_tokens": False, **options})
            prompt = tokenizer.encode("x") + [end] * params.echo
            assert self.outputs(llm, params, {"prompt_token_ids": prompt}).text == expected, options

    def test_the_text_ends_before_the_token_that_ended_it(self, llm):
        """As vLLM has it, be it special or not: the token is in token_ids, its text there with include_stop alone."""
        whole = self.outputs(llm, greedy(9))
        end = whole.token_ids[5]
        for options, written in (({}, 5), ({"include_stop": True}, 6), ({"stop": ("never",)}, 5)):
            out = self.outputs(llm, greedy(9, stop_token_ids=(end,), **options))
            assert out.token_ids == whole.token_ids[:6] and out.finish_reason == "stop"
            assert out.text == llm.engine.tokenizer.decode(whole.token_ids[:written])

    def test_echo(self, llm):
        out = llm.generate("x = 1", greedy(4, echo=True), use_tqdm=False)[0].outputs[0]
        plain = llm.generate("x = 1", greedy(4), use_tqdm=False)[0].outputs[0]
        assert out.text == "x = 1" + plain.text


def assert_scored(hf_model, ids: list[int], result, max_tokens: int) -> None:
    """Every token of the prompt but the first, and every one after it, has the model's log-probabilities."""
    (out,) = result.outputs
    assert out.token_ids[: len(ids)] == ids and len(out.token_ids) == len(ids) + max_tokens and out.finish_reason == "length"
    assert [p.token_id for p in out.logprobs] == out.token_ids[1:] and result.num_cached_tokens == 0
    if out.logprobs:
        with torch.inference_mode():
            scores = hf_model(torch.tensor([out.token_ids])).logits[0, :-1].log_softmax(-1)
        assert [p.logprob for p in out.logprobs] == pytest.approx([s[i].item() for s, i in zip(scores, out.token_ids[1:])], abs=1e-3)
        assert [v for p in out.logprobs for _, v in p.top] == pytest.approx(scores.topk(2).values.flatten().tolist(), abs=1e-3)


@pytest.mark.parametrize("max_tokens", [0, 12])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 24, "max_batch_size": 16}], ids=["whole", "chunks"])
def test_logprobs_of_the_prompt_are_the_models(hf_model, prompts, options, max_tokens):
    """Also of what the prefix cache knows."""
    llm = LLM(speculative_config=UNPACED, **options)
    asked = [*prompts[:5], prompts[0][: 24 * 2 + 1], prompts[0][:1]]  # the last token of a prompt alone in its chunk, and alone
    inputs = [{"prompt_token_ids": ids} for ids in asked]
    llm.generate(inputs, greedy(4), use_tqdm=False)
    for ids, result in zip(asked, llm.generate(inputs, greedy(max_tokens, echo=True, logprobs=2), use_tqdm=False)):
        assert_scored(hf_model, ids, result, max_tokens)
    assert llm.generate(inputs[1], greedy(4), use_tqdm=False)[0].num_cached_tokens > 0, "what it computed is there for others"


def test_logprobs_of_a_prompt_that_is_begun_twice(hf_model, prompts):
    """The first request's growth takes the pages of the second, which has computed half of its prompt."""
    llm = LLM(speculative_config=UNPACED, kv_cache_memory=memory_of(15), max_num_batched_tokens=4, max_batch_size=2)
    asked = [prompts[0][:17], [i for p in prompts[1:] for i in p][:190]]
    results = llm.generate([{"prompt_token_ids": ids} for ids in asked], greedy(40, echo=True, logprobs=2), use_tqdm=False)
    assert llm.engine.metrics.preemptions == 1
    for ids, result in zip(asked, results):
        assert_scored(hf_model, ids, result, 40)


def test_what_is_cancelled_is_gone_before_the_next_step(llm_ngram, prompts):
    """Its pages are free, and not one token more is made of it."""
    engine, metrics = llm_ngram.engine, llm_ngram.engine.metrics
    deltas: dict[str, list] = {"stays": [], "goes": []}
    for name, received in deltas.items():
        engine.submit(prompts[0], greedy(50), received.append, request_id=name, speculative={"method": "none"})
    while not all(len(received) > 3 for received in deltas.values()):
        engine.step()
    counts = {name: len(received) for name, received in deltas.items()}
    engine.cancel("goes")
    emitted = metrics.emitted_tokens["none"]
    engine.step()
    assert metrics.emitted_tokens["none"] == emitted + 1 and len(deltas["stays"]) == counts["stays"] + 1
    (end,) = deltas["goes"][counts["goes"] :]
    assert end.finish_reason == "cancelled" and not end.token_ids
    (stays,) = engine.scheduler.running
    assert engine.scheduler.pool.num_held == len(stays.page_ids)
    engine.cancel("stays")
    steps = metrics.steps
    engine.step()
    assert metrics.steps == steps and engine.scheduler.pool.num_held == 0


def test_requests_that_end_while_they_wait_are_not_kept(monkeypatch) -> None:
    """Those before them may wait for as long as the server is full; each one's prompt would stay. Nobody loses the place."""
    monkeypatch.setattr(waiting_module, "MAX_ENDED", 4)
    sizes = {"num_pages": 16, "page_size": 4, "max_batch_size": 1, "max_num_batched_tokens": 64, "max_model_len": 64, "max_waiting": 4}
    own = Scheduler(**sizes)

    def add(name: str, priority: int = 0) -> Request:
        own.add(request := Request(name, [1, 2, 3], greedy(50), priority=priority))
        return request

    running, *waiting = add("running"), add("last", 2), add("third", 1), add("second")
    for number in range(100):
        own.launch(own.schedule().entries)
        ended = add(str(number), number % 4)
        own.finish(ended)
        assert len(list(own._waiting)) <= 2 * own.num_open + 4 + 1
    own.finish(running)
    for request in reversed(waiting):
        assert [entry.request for entry in own.schedule().entries] == [request]
        own.finish(request)
    assert not own.num_open and own.pool.num_held == 0
    own.check()


def test_who_waits_for_pages_is_looked_at_when_there_may_be_some(monkeypatch) -> None:
    """Not in each step, page by page of its prompt. It starts once pages are free, or enough of its own are another's, too."""
    own = Scheduler(num_pages=10, page_size=4, max_batch_size=4, max_num_batched_tokens=16, max_model_len=64, max_waiting=4)
    looks, match = [], own.prefix_cache.match
    monkeypatch.setattr(own.prefix_cache, "match", lambda token_ids, *rest: looks.append(token_ids[-1]) or match(token_ids, *rest))

    def step() -> list[str]:
        batch = own.schedule()
        own.launch(batch.entries)
        for entry in batch.entries:
            if entry.emits:
                own.commit(entry, [5])
        own.check()
        return [entry.request.request_id for entry in batch.entries]

    shared = list(range(10, 40))
    requests = {name: Request(name, prompt, greedy(20)) for name, prompt in (("first", shared), ("second", [*shared, 1, 1, 1]), ("other", [2] * 33))}
    for request in requests.values():
        own.add(request)
    assert [step() for _ in range(2)] == [["first"]] * 2 and looks == [39, 1], "four of nine pages are there, and two more are free"
    assert step() == ["first", "second"] and looks == [39, 1, 1, 2], "seven of them are there"
    assert step() == ["first", "second"] and len(looks) == 4
    own.finish(requests["first"])
    assert step() == ["second"] and len(looks) == 5, "one page is free"
    assert step() == ["second"] and len(looks) == 5
    own.finish(requests["second"])
    assert step() == ["other"]
    own.finish(requests["other"])
    assert own.pool.num_held == 0


def test_the_end_before_a_prompts_end_has_no_logprobs(llm_ngram, prompts):
    engine, deltas = llm_ngram.engine, []
    ids = [i for p in prompts[:8] for i in p][:1200]
    engine.submit(ids, greedy(4, echo=True, logprobs=1), deltas.append, request_id="late")
    engine.step()
    engine.cancel("late")
    engine.step()
    assert deltas[-1].finish_reason == "cancelled" and deltas[-1].prompt_token_ids == ids and deltas[-1].logprobs is None


def test_logprobs_are_the_models_and_the_same_with_drafts(llm, hf_model, prompts):
    ids = prompts[0]
    params = greedy(24, logprobs=3)
    plain = llm.generate({"prompt_token_ids": ids}, params, speculative={"method": "none"}, use_tqdm=False)[0].outputs[0]
    drafted = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0]
    with torch.inference_mode():
        scores = hf_model(torch.tensor([ids + plain.token_ids])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    for out in (plain, drafted):
        assert [p.token_id for p in out.logprobs] == out.token_ids == plain.token_ids
        for row, entry in zip(scores, out.logprobs, strict=True):
            assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
            values, _ = row.topk(3)
            assert [v for _, v in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


class TestRefusals:
    """Bad requests are refused before they enter, by name, value and limit; others go on."""

    @pytest.mark.parametrize(
        ("prompt", "params", "message"),
        [
            ("", {}, "empty"),
            ([], {}, "empty"),
            ([5, 4096], {}, r"input_ids\[1\] is 4096; the vocabulary has ids 0 to 4095"),
            ([-1], {}, r"input_ids\[0\] is -1"),
            ([5] * 2048, {}, "2048 tokens; the context holds 2048"),
            ("x" * 200_000, {}, "200000 characters"),
            ("x", {"max_tokens": 2049}, "max_tokens is 2049; the context holds 2048 tokens, the prompt's among them"),
            ("x", {"logit_bias": {5000: 1.0}}, "logit_bias names token 5000"),
            ("x", {"stop_token_ids": (9999,)}, "stop_token_ids names token 9999"),
            ("x", {"bad_words": ("a", "9" * 300)}, "bad_words: '9+ has 30[01] tokens; the limit is 128"),
        ],
    )
    def test_request(self, llm_ngram, prompt, params, message):
        with pytest.raises(RequestError, match=message):
            llm_ngram.engine.submit(prompt, SamplingParams(**params), lambda d: None, request_id="bad")
        assert llm_ngram.engine.scheduler.num_open == 0

    def test_speculative(self, llm_ngram):
        for choice, message in (
            ({"methods": "ngram"}, 'did you mean "method"'),
            ({"method": "mtpp"}, "not one of"),
            ({"method": "mtp"}, "method mtp is not loaded; loaded: naive, ngram, none"),
            ({"mtp_strategy": "with_suffix"}, "mtp_strategy has no effect with method ngram: it is a key of mtp"),
            ({"num_speculative_tokens": 99}, "from 0 .off. to 16"),
            ({"num_speculative_tokens": True}, "from 0"),
            ({"verify_strategy": "lucky"}, "verify_strategy"),
        ):
            with pytest.raises(ConfigError, match=message):
                llm_ngram.engine.submit("x", SamplingParams(), lambda d: None, request_id="bad", speculative=choice)
        with pytest.raises(ConfigError, match="not loaded; loaded: naive, none"):
            LLM().engine.submit("x", SamplingParams(), lambda d: None, request_id="bad", speculative={"method": "ngram"})

    def test_too_many(self):
        llm = LLM(max_batch_size=2, max_waiting=3)
        seen: list[Delta] = []
        for i in range(5):
            llm.engine.submit("x = 1", greedy(3), seen.append, request_id=str(i))
        with pytest.raises(CapacityError, match="5 requests are open; the limit is 2 running and 3 waiting"):
            llm.engine.submit("x = 1", greedy(3), seen.append, request_id="6")
        while llm.engine.step():
            pass
        assert sorted(d.request_id for d in seen if d.is_final) == list("01234")

    def test_id_in_use(self, llm_ngram):
        llm_ngram.engine.submit("x = 1", greedy(3), lambda d: None, request_id="twice")
        with pytest.raises(RequestError, match="'twice' is in use"):
            llm_ngram.engine.submit("x = 1", greedy(3), lambda d: None, request_id="twice")
        while llm_ngram.engine.step():
            pass

    def test_larger_than_memory(self):
        llm = LLM(kv_cache_memory=memory_of(4))
        with pytest.raises(RequestError, match="need 7 KV pages of 16 tokens; the server has 4"):
            llm.engine.submit([5] * 60, greedy(40), lambda d: None, request_id="big")


def test_tokens_that_the_model_does_not_know(tmp_path, caplog):
    """A tokenizer that tokens were added to is an error; where it may have them, text that becomes one is refused by name, whatever it is for."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(SMALL_MODEL / name)
    tokenizer = tokenizers.Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))
    assert tokenizer.add_special_tokens(["<extra>", "<more>"]) == 2
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    said = r"2 tokens beyond the model's embedding \(vocab_size 4096\), 4096 \('<extra>'\) the first"
    with pytest.raises(ModelError, match=rf"{tmp_path}/config.json: the tokenizer has {said}; with unknown_tokens refuse"):
        LLM(str(tmp_path))
    with pytest.raises(ModelError, match=said):
        check_launch(str(tmp_path))  # before anything is started
    served = inspect(tmp_path, Load())["served"]
    assert re.search(rf"--unknown-tokens refuse \(the tokenizer has {said}", served), served
    llm = LLM(str(tmp_path), unknown_tokens="refuse")
    assert re.search(said, caplog.text)
    message = r"becomes token 4096 \('<extra>'\), which the model does not know: its vocabulary has ids 0 to 4095"
    for prompt, params in (
        ("x = <extra>", {}),
        ([{"role": "user", "content": "<extra>"}], {}),
        ("x = ", {"bad_words": ("a", "<extra>")}),
    ):
        with pytest.raises(RequestError, match=message):
            llm.engine.submit(prompt, SamplingParams(**params), lambda d: None, request_id="bad")
    with pytest.raises(RequestError, match=r"the prompt is not valid Unicode: '.ud800' at 1"):
        llm.engine.submit("x\ud800", SamplingParams(), lambda d: None, request_id="bad")
    with pytest.raises(RequestError, match=r"the prompt is not valid Unicode"):
        llm.generate("x\ud800", use_tqdm=False)
    assert len(llm.generate("x = 1", greedy(3), use_tqdm=False)[0].outputs[0].token_ids) == 3


class TestFences:
    """What fails in the work for one request ends that request with an error, and the others are answered as ever: with steps under way."""

    VICTIM = 5

    @pytest.fixture
    def engine(self, llm_ahead):
        yield llm_ahead.engine
        assert llm_ahead.engine.scheduler.num_open == 0 == llm_ahead.engine._open.count
        assert llm_ahead.engine.scheduler.pool.num_held == 0
        llm_ahead.engine.scheduler.check()

    def run(self, engine, prompts, sink=None, **options) -> list[list[Delta]]:
        """The deltas of ten requests; `sink` is called before the victim's delta is noted."""
        seen: list[list[Delta]] = [[] for _ in range(10)]
        for i, received in enumerate(seen):

            def note(delta: Delta, i: int = i, received: list[Delta] = received) -> None:
                if sink is not None and i == self.VICTIM:
                    sink(delta)
                received.append(delta)

            engine.submit(prompts[i], greedy(NEW_TOKENS, **options), note, request_id=f"fenced {i}")
        while engine.step():
            pass
        return seen

    def assert_others_are_answered(self, seen, expected) -> None:
        for i, deltas in enumerate(seen):
            if i != self.VICTIM:
                assert [t for d in deltas for t in d.token_ids] == expected[i] and deltas[-1].finish_reason == "length"

    @pytest.mark.parametrize("place", ["append", "flush", "__init__"])
    def test_text(self, engine, prompts, expected, monkeypatch, place):
        made = []

        class Stream(open_requests.TextStream):
            def __init__(self, *args) -> None:
                made.append(self)
                self.count = 0
                self.fail("__init__")
                super().__init__(*args)

            def fail(self, where: str) -> None:
                if where == place and self in made[TestFences.VICTIM : TestFences.VICTIM + 1]:
                    raise ValueError(f"invalid prefix in {where}")

            def append(self, *args):
                self.count += 1
                if self.count == 8:
                    self.fail("append")
                return super().append(*args)

            def extend(self, token_ids):
                return "".join(self.append(token_id)[0] for token_id in token_ids)

            def flush(self):
                self.fail("flush")
                return super().flush()

        monkeypatch.setattr(open_requests, "TextStream", Stream)
        seen = self.run(engine, prompts)
        self.assert_others_are_answered(seen, expected)
        error = seen[self.VICTIM][-1].error
        assert isinstance(error, InternalError) and f"ValueError: invalid prefix in {place}" in str(error)
        assert sum(d.is_final for d in seen[self.VICTIM]) == 1

    @pytest.mark.parametrize("is_told", [True, False])
    def test_sink(self, engine, prompts, expected, is_told):
        calls = []

        def sink(delta: Delta) -> None:
            calls.append(delta)
            if len(calls) == 3 or (len(calls) > 3 and not is_told):
                raise KeyError("the sink")

        seen = self.run(engine, prompts, sink)
        self.assert_others_are_answered(seen, expected)
        assert len(calls) == 4 and isinstance(calls[-1].error, InternalError)
        assert (seen[self.VICTIM][-1] is calls[-1]) is is_told

    def test_prompt_text(self, engine, prompts, expected, monkeypatch):
        decode = engine.tokenizer.decode

        def fail(token_ids, **options):
            if token_ids == prompts[self.VICTIM]:
                raise ValueError("no text")
            return decode(token_ids, **options)

        monkeypatch.setattr(engine.tokenizer, "decode", fail)
        seen = self.run(engine, prompts, echo=True)
        self.assert_others_are_answered(seen, expected)
        assert "no text" in str(seen[self.VICTIM][-1].error)

    @pytest.mark.parametrize("owner", ["scheduler.add", "scheduler.commit", "drafters.start"])
    def test_bookkeeping(self, engine, prompts, expected, monkeypatch, owner):
        part, name = owner.split(".")
        act = getattr(getattr(engine, part), name)

        def fail(subject, *rest):
            request = getattr(subject, "request", subject)
            if request.request_id == f"fenced {self.VICTIM}":
                raise ValueError(f"cannot {name}")
            return act(subject, *rest)

        monkeypatch.setattr(getattr(engine, part), name, fail)
        seen = self.run(engine, prompts)
        self.assert_others_are_answered(seen, expected)
        (delta,) = seen[self.VICTIM]
        assert f"cannot {name}" in str(delta.error)

    @pytest.mark.parametrize("part", ["drafters", "planner", "scheduler"])
    def test_release(self, engine, prompts, expected, monkeypatch, part):
        """The answer is whole by then, and what else the request held is freed."""
        name = "finish" if part == "scheduler" else "stop"
        stop = getattr(getattr(engine, part), name)

        def fail(request):
            stop(request)
            raise ValueError("cannot stop")

        monkeypatch.setattr(getattr(engine, part), name, fail)
        seen = self.run(engine, prompts)
        assert [[t for d in deltas for t in d.token_ids] for deltas in seen] == expected[:10]

    def test_offline(self, engine, llm_ahead, prompts, expected, monkeypatch):
        """`generate` raises the error of a request that fails, once the others are ended: none of them is left open."""
        append, counts = open_requests.TextStream.append, Counter()
        inputs = [{"prompt_token_ids": ids} for ids in prompts[:10]]

        def fail(stream, token_id, *rest):
            counts[stream] += 1
            if token_id == expected[self.VICTIM][9] and counts[stream] == 10:
                raise ValueError("invalid prefix")
            return append(stream, token_id, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(open_requests.TextStream, "append", fail)
            patch.setattr(open_requests.TextStream, "extend", lambda stream, ids: "".join(fail(stream, token_id)[0] for token_id in ids))
            with pytest.raises(InternalError, match="invalid prefix"):
                llm_ahead.generate(inputs, greedy(NEW_TOKENS), use_tqdm=False)
            assert engine._open.count == 0 == engine.scheduler.num_open
        results = llm_ahead.generate(inputs, greedy(NEW_TOKENS), use_tqdm=False)
        assert [r.outputs[0].token_ids for r in results] == expected[:10]

    def test_offline_verdicts_of_the_step_are_booked(self, llm_ahead, prompts, monkeypatch):
        """A request that fails in a step does not lose what that step computed for those after it."""
        metrics, broken = llm_ahead.engine.metrics, llm_ahead.engine._booking.book

        def fail(own, *rest):
            if own.request.prompt_token_ids == prompts[0]:
                own.request.params = None  # whatever reads it fails
            broken(own, *rest)

        monkeypatch.setattr(llm_ahead.engine._booking, "book", fail)
        before = metrics.emitted_tokens["none"]
        with pytest.raises(InternalError):
            llm_ahead.generate(
                [{"prompt_token_ids": ids[:20]} if i else {"prompt_token_ids": ids} for i, ids in enumerate(prompts[:6])],
                greedy(NEW_TOKENS),
                speculative={"method": "none"},
                use_tqdm=False,
            )
        assert metrics.emitted_tokens["none"] - before >= 5
        assert llm_ahead.engine._open.count == 0 == llm_ahead.engine.scheduler.num_open


class TestLoop:
    """The engine's own thread: cancel, deadlines, failure, shutdown."""

    def start(self, **options):
        llm = LLM(**options)
        llm.engine.start()
        return llm.engine

    @staticmethod
    def collect(engine, name, prompt="def f(x):", **options):
        import queue

        received: queue.Queue[Delta] = queue.Queue()
        engine.submit(prompt, greedy(options.pop("max_tokens", 2000)), received.put, request_id=name, **options)
        return received

    @staticmethod
    def last(received) -> Delta:
        while not (delta := received.get(timeout=30)).is_final:
            pass
        return delta

    def test_cancel_frees_the_pages(self):
        engine = self.start()
        received = self.collect(engine, "a")
        received.get(timeout=30)
        assert engine.cancel("a")
        assert self.last(received).finish_reason == "cancelled"
        assert engine.scheduler.pool.num_held == 0
        assert not engine.cancel("a") and not engine.cancel("never")
        engine.shutdown()

    def test_deadline(self):
        engine = self.start()
        for timeout in (0.15, 1.0, 4.0):  # its thread may stand still for as long as the shorter ones
            delta = self.last(self.collect(engine, "a", timeout=timeout))
            if delta.num_output_tokens:
                break
        assert delta.finish_reason == "timeout" and 0 < delta.num_output_tokens < 2000
        engine.shutdown()

    def test_shutdown_tells_open_requests(self):
        engine = self.start()
        received = self.collect(engine, "a")
        received.get(timeout=30)
        engine.shutdown()
        assert isinstance(self.last(received).error, EngineError)
        with pytest.raises(EngineError, match="down"):
            engine.submit("x", greedy(1), lambda d: None, request_id="b")

    def test_failure_tells_open_requests(self, monkeypatch):
        engine = self.start()
        received = self.collect(engine, "a")
        received.get(timeout=30)

        def broken(*_):
            raise MemoryError("no memory for logits")

        monkeypatch.setattr(engine.worker.model, "logits", broken)
        delta = self.last(received)
        assert isinstance(delta.error, EngineError) and "no memory for logits" in str(delta.error)
        assert not engine.is_healthy

    def test_priority_goes_first(self):
        llm = LLM(max_batch_size=1, max_num_batched_tokens=64)
        order: list[str] = []
        for name, priority in (("low", 5), ("high", -1), ("middle", 0)):
            llm.engine.submit("x", greedy(2), lambda d: order.append(d.request_id) if d.is_final else None, request_id=name, priority=priority)
        while llm.engine.step():
            pass
        assert order == ["high", "middle", "low"]


def test_a_request_that_breaks_the_model_does_not_break_others(tmp_path, prompts, expected):
    """A token whose embedding is not finite: that request gets an error, and its pages give nothing of it to the next owner."""
    import shutil

    from safetensors.torch import load_file, save_file

    poison = 4000
    assert all(poison not in ids for ids in prompts[:12])
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        shutil.copy(SMALL_MODEL / name, tmp_path)
    weights = load_file(SMALL_MODEL / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][poison] = float("nan")
    save_file({**weights, "lm_head.weight": head}, tmp_path / "model.safetensors")
    config = (tmp_path / "config.json").read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (tmp_path / "config.json").write_text(config)
    llm = LLM(str(tmp_path), kv_cache_memory=memory_of(130), max_num_batched_tokens=256)
    seen: dict[str, list[Delta]] = {}
    for round_number in range(3):
        for i in range(12):
            key = f"{round_number}-{i}"
            seen[key] = []
            is_bad = i % 3 == 0
            ids = [*prompts[i][:40], poison, *prompts[i][40:]] if is_bad else prompts[i]
            llm.engine.submit(ids, greedy(NEW_TOKENS), seen[key].append, request_id=key)
        while llm.engine.step():
            pass
    llm.engine.scheduler.check()
    for key, deltas in seen.items():
        i = int(key.split("-")[1])
        if i % 3 == 0:
            assert "scores after token" in str(deltas[-1].error) and "not finite" in str(deltas[-1].error)
        else:
            assert [t for d in deltas for t in d.token_ids] == expected[i], key


def test_what_comes_while_the_last_step_is_under_way_is_seen_to(llm_ahead, monkeypatch):
    """A prompt alone under way leaves nothing to launch: the engine waits for it, and for whatever else comes."""
    engine, under_way, asked, deltas = llm_ahead.engine, threading.Event(), threading.Event(), []
    go_on, launched = engine.worker.go_on, []

    def launch(*args):
        read = go_on(*args)
        launched.append(len(launched))
        return Launched(read.read, lambda: asked.set() or under_way.is_set())

    monkeypatch.setattr(engine.worker, "go_on", launch)
    engine.submit("a", greedy(1), deltas.append, request_id="first")
    assert engine.step() and launched == [0] and engine.has_steps_under_way
    waiting = threading.Thread(target=engine.step)  # which has nothing to launch
    waiting.start()
    assert asked.wait(30), "it does not wait"
    engine.submit("b", greedy(1), deltas.append, request_id="second")
    waiting.join(30)
    assert not waiting.is_alive() and not deltas, "the first step has not ended"
    assert engine.step() and launched == [0, 1] and [d.request_id for d in deltas] == ["first"], "the second is under way as the first is read"
    under_way.set()
    while engine.step():
        pass
    assert [d.request_id for d in deltas] == ["first", "second"] and all(d.is_final for d in deltas) and not engine.has_steps_under_way
    under_way.clear()
    told = threading.Event()
    monkeypatch.setattr(engine, "after_deltas", lambda: len(deltas) == 3 and told.set())
    engine.submit("c", greedy(1), deltas.append, request_id="late", timeout=0.05)
    waiting = threading.Thread(target=lambda: [engine.step() for _ in range(3)])  # launches, waits until it is late, ends it
    waiting.start()
    assert told.wait(30) and (deltas[2].request_id, deltas[2].finish_reason) == ("late", "timeout"), "its step has not ended"
    under_way.set()
    waiting.join(30)
    assert not waiting.is_alive() and not engine.step()
    engine.scheduler.check()
