"""Steps launched before the one ahead is read: the tokens, drafts and pages of the engine that waits for each step. On CPU, by the twins
of the kernels."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from backend import LLM, SamplingParams
from backend.core import Request, Scheduled
from backend.device.extras import Extras
from backend.device.slots import MANY_SHARED_TOKENS, MIN_SHARED_TOKENS, Updates
from kernels.step import PREFIX_GROUP, PREFIX_LEN
from tests.conftest import code_prompts, greedy, note_shapes
from tests.histories import run_histories

PROMPTS = code_prompts(5, seed=21)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"method": "none"}, {"temperature": 0.0}),
    "ngram": ({"method": "ngram", "num_speculative_tokens": 5}, {"temperature": 0.0}),
    "mtp": ({"method": "mtp"}, {"temperature": 0.0}),
    "mtp, one draft": ({"method": "mtp", "num_speculative_tokens": 1}, {"temperature": 0.0}),
    "mtp, sampled": ({"method": "mtp"}, {"temperature": 0.9, "seed": 4, "top_p": 0.9, "top_k": 40, "min_p": 0.02}),
    "suffix: drafted on the host": ({"method": "suffix"}, {"temperature": 0.0}),
    "every rule": (
        {"method": "ngram", "num_speculative_tokens": 4},
        {"temperature": 0.8, "seed": 2, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1, "min_tokens": 9}
        | {"logit_bias": {7: 2.0}},
    ),
    "bad words": ({"method": "mtp"}, {"temperature": 0.0, "bad_words": ["self", "\n   ", "import os"], "logprobs": 1}),
    "bad words: too long for the captured step": ({"method": "mtp"}, {"temperature": 0.0, "bad_words": ["self", "x = 1; " * 9]}),
    "log-probabilities": ({"method": "mtp"}, {"temperature": 0.9, "seed": 6, "logprobs": 3, "repetition_penalty": 1.3}),
    "rejection of what the model drew": ({"method": "mtp", "verify_strategy": "rejection"}, {"temperature": 0.8, "seed": 5, "logprobs": 0}),
    "rejection, filtered": (
        {"method": "mtp", "verify_strategy": "rejection"},
        {"temperature": 1.1, "seed": 5, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "presence_penalty": 0.4},
    ),
    "rejection of certain drafts": (
        {"method": "ngram", "num_speculative_tokens": 5, "verify_strategy": "rejection"},
        {"temperature": 0.7, "seed": 1},
    ),
    "rejection, drafted on the host": ({"method": "suffix", "verify_strategy": "rejection"}, {"temperature": 0.7, "seed": 1}),
    "rejection, greedy": ({"method": "mtp", "verify_strategy": "rejection"}, {"temperature": 0.0}),
    "topp": ({"method": "mtp", "verify_strategy": "topp"}, {"temperature": 0.8, "seed": 9, "top_p": 0.8}),
    "topp, filtered": (
        {"method": "ngram", "num_speculative_tokens": 5, "verify_strategy": "topp"},
        {"temperature": 1.2, "seed": 9, "top_p": 0.7, "top_k": 4, "min_p": 0.05, "logprobs": 20},
    ),
}  # fmt: skip


SPECULATION = {"method": "mtp", "num_speculative_tokens": 3, "request_methods": ["suffix"], "adaptive": False}


@pytest.fixture(scope="module")
def llm_ahead() -> LLM:
    return LLM(speculative_config=SPECULATION, async_scheduling=True)


@pytest.mark.parametrize("case", CASES)
def test_same_as_waiting_for_each_step(llm_all, llm_ahead, case):
    choice, sampling = CASES[case]
    params = SamplingParams(max_tokens=24, ignore_eos="min_tokens" not in sampling, **sampling)
    expected, results = (llm.generate(PROMPTS, params, speculative=choice, use_tqdm=False) for llm in (llm_all, llm_ahead))
    for one, other in zip(expected, results):
        one, other = one.outputs[0], other.outputs[0]
        assert (other.token_ids, other.text, other.finish_reason) == (one.token_ids, one.text, one.finish_reason)
        assert (other.stats.drafted, other.stats.accepted) == (one.stats.drafted, one.stats.accepted)
        assert other.logprobs == one.logprobs
    llm_ahead.engine.scheduler.check()
    assert llm_ahead.engine.scheduler.pool.num_held == 0


def test_all_kinds_in_one_batch(monkeypatch):
    """Each request's drafts and tokens are those of the engine that waits, though others are drafted for by the host, which has all steps read
    before the next one."""
    # Room for all prompts and drafts at once: nobody goes without drafts.
    waiting, ahead = (
        LLM(speculative_config=SPECULATION, max_num_batched_tokens=16384, max_batch_size=32, async_scheduling=is_ahead) for is_ahead in (False, True)
    )
    used, outside = note_shapes(ahead, monkeypatch), set()
    monkeypatch.setattr(ahead.engine.sampler, "choose", watch(ahead.engine.sampler.choose, outside))
    answers = []
    for llm in (waiting, ahead):
        results: dict[str, list[Any]] = {}
        for i, (name, (choice, sampling)) in enumerate(CASES.items()):
            params = SamplingParams(max_tokens=24, ignore_eos=True, **sampling)
            llm.engine.submit(PROMPTS[i % len(PROMPTS)], params, results.setdefault(name, []).append, request_id=name, speculative=choice)
        while llm.engine.step():
            pass
        answers.append({name: [(d.error, d.token_ids, d.sources, d.logprobs) for d in deltas] for name, deltas in results.items()})
    for name, deltas in answers[0].items():
        assert answers[1][name] == deltas, name
    assert functools.reduce(operator.or_, (shape.extras for shape in used)) == ~Extras.NONE
    assert outside == {name for name in CASES if "too long" in name}


def watch(choose: Callable[..., Any], seen: set[str]) -> Callable[..., Any]:
    """`choose` that notes requests which decode."""

    def watched(entries: Sequence[Scheduled], *arguments: Any) -> Any:
        seen.update(e.request.request_id for e in entries if e.request.num_output_tokens)
        return choose(entries, *arguments)

    return watched


def test_a_model_and_a_lookup_draft_together(llm_all, llm_ahead):
    """Which of them the waiting engine asks is measured; the tokens are the same."""
    choice = {"method": "mtp", "mtp_strategy": "with_ngram", "num_speculative_tokens": 6}
    expected, results = (llm.generate(PROMPTS, greedy(32), speculative=choice, use_tqdm=False) for llm in (llm_all, llm_ahead))
    assert [r.outputs[0].token_ids for r in results] == [r.outputs[0].token_ids for r in expected]
    assert sum(r.outputs[0].stats.accepted for r in results) > 0


def test_stop_strings_and_ends_discard_what_was_launched(llm_all, llm_ahead):
    prompts = ["import os\nimport sys\n\n\ndef main(", "class Reader:\n    def __init__("]
    to_end = [SamplingParams(temperature=0.0, max_tokens=40, stop=("\n\n",)), SamplingParams(temperature=0.0, max_tokens=7)]
    for params in (*to_end, greedy(1), greedy(2)):
        expected, results = (llm.generate(prompts, params, speculative={"method": "mtp"}, use_tqdm=False) for llm in (llm_all, llm_ahead))
        ends = [[(r.outputs[0].token_ids, r.outputs[0].finish_reason) for r in part] for part in (expected, results)]
        assert ends[0] == ends[1]
    llm_ahead.engine.scheduler.check()


def test_requests_that_share_a_prefix_are_grouped():
    """By their first pages, as far as all of a group agree and have computed; groups that read little are left alone."""
    page = 16
    requests = [Request(str(b), [0] * 3000, SamplingParams(), num_computed_tokens=2999 - b, page_ids=[*range(180), 900 + b]) for b in range(4)]
    requests += [Request("5", [0] * 3000, SamplingParams(), num_computed_tokens=2999, page_ids=[500, *range(1, 188)])]
    requests[2].page_ids[170] = 700
    updates = Updates(8, 8)
    assert updates.put_prefixes(requests, page, MIN_SHARED_TOKENS)
    assert updates.fields[PREFIX_GROUP].tolist() == [0, 0, 0, 0, -1, -1, -1, -1]
    assert updates.fields[PREFIX_LEN].tolist() == [170 * page] * 4 + [0] * 4
    assert not Updates(8, 8).put_prefixes(requests[:3], page, MIN_SHARED_TOKENS), "too few"
    assert not Updates(8, 8).put_prefixes(requests, page, MANY_SHARED_TOKENS), "too little for wide steps"
    short = [Request(str(b), [0] * 60, SamplingParams(), num_computed_tokens=50, page_ids=[1, 2, 3, 4 + b]) for b in range(8)]
    assert not Updates(8, 8).put_prefixes(short, page, MIN_SHARED_TOKENS)


def test_random_histories_leave_no_page_behind():
    """Cancels, preemptions and mixed methods in few pages: every request ends, with the tokens of an engine that has room."""
    roomy = LLM(speculative_config={"method": "none"}, max_batch_size=12)
    tight = LLM(
        speculative_config={"method": "mtp", "num_speculative_tokens": 3, "num_model_steps": 3, "adaptive": False},
        async_scheduling=True,
        max_batch_size=6,
        max_num_batched_tokens=64,
        max_model_len=192,
        kv_cache_memory=19 * roomy.engine.runner.page_bytes,
    )
    run_histories(tight, roomy, 40, arrivals=2, cancels=0.2)
