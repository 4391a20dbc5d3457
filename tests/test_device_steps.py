"""Steps launched before the one ahead is read: the tokens, drafts and pages of the engine that waits for each step. On CPU, by the twins
of the kernels."""

from __future__ import annotations

from typing import Any

import pytest

from backend import LLM, SamplingParams
from backend.core import Request
from backend.device.slots import MANY_SHARED_TOKENS, MIN_SHARED_TOKENS, Updates
from kernels.step import PREFIX_GROUP, PREFIX_LEN
from tests.conftest import code_prompts, greedy
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
    "bad words: outside the captured step": ({"method": "mtp"}, {"temperature": 0.0, "bad_words": ["self"]}),
    "log-probabilities: outside the captured step": ({"method": "mtp"}, {"temperature": 0.0, "logprobs": 2}),
    "rejection: outside the captured step": ({"method": "mtp", "verify_strategy": "rejection"}, {"temperature": 0.8, "seed": 5}),
}  # fmt: skip


@pytest.fixture(scope="module")
def llm_ahead() -> LLM:
    return LLM(
        speculative_config={"method": "mtp", "num_speculative_tokens": 3, "request_methods": ["suffix"], "adaptive": False}, async_scheduling=True
    )


@pytest.mark.parametrize("case", CASES)
def test_same_as_waiting_for_each_step(llm_all, llm_ahead, case):
    choice, sampling = CASES[case]
    params = SamplingParams(max_tokens=24, ignore_eos="min_tokens" not in sampling, **sampling)
    expected, results = (llm.generate(PROMPTS, params, speculative=choice, use_tqdm=False) for llm in (llm_all, llm_ahead))
    for one, other in zip(expected, results):
        one, other = one.outputs[0], other.outputs[0]
        assert (other.token_ids, other.text, other.finish_reason) == (one.token_ids, one.text, one.finish_reason)
        assert (other.stats.drafted, other.stats.accepted) == (one.stats.drafted, one.stats.accepted)
        assert [t.token_id for t in other.logprobs or []] == [t.token_id for t in one.logprobs or []]
    llm_ahead.engine.scheduler.check()
    assert llm_ahead.engine.scheduler.pool.num_held == 0


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
