"""Predicted answers of requests: drafted from, never more than that."""

from __future__ import annotations

from typing import Any

import pytest

from backend import LLM
from backend.errors import ConfigError, RequestError
from tests.conftest import code_prompts, greedy

PROMPT = code_prompts(1, (60, 200), seed=12)[0]


@pytest.fixture(scope="module")
def answer(llm_plain: LLM) -> Any:
    return llm_plain.generate([PROMPT], greedy(48), use_tqdm=False)[0].outputs[0]


def ask(llm: LLM, **speculative: Any) -> Any:
    return llm.generate([PROMPT], greedy(48), speculative=speculative, use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("method", ["ngram", "suffix", "mtp"])
@pytest.mark.parametrize("engine", ["llm_all", "llm_ahead"])
def test_an_answer_that_was_predicted(engine: str, method: str, answer: Any, request: pytest.FixtureRequest) -> None:
    """As text and as token ids; one that is wrong at a place is followed again after it; one that is wrong everywhere changes nothing."""
    llm = request.getfixturevalue(engine)
    ids = list(answer.token_ids)
    as_ids = ask(llm, method=method, prediction=ids)
    assert as_ids.token_ids == answer.token_ids and as_ids.stats.steps <= 6, as_ids.stats
    # A model drafts first where the planner, which knows the prediction of earlier requests only, believes more in it.
    assert as_ids.sources.count("prediction") >= (16 if method == "mtp" else 40)
    as_text = ask(llm, method=method, prediction=answer.text)
    assert as_text.token_ids == answer.token_ids and as_text.stats.steps <= 24
    edited = ask(llm, method=method, prediction=[*ids[:20], 7, 8, *ids[21:]])
    assert edited.token_ids == answer.token_ids and edited.stats.steps <= 12
    foreign = ask(llm, method=method, prediction="predictions of something else")
    assert foreign.token_ids == answer.token_ids
    assert ask(llm, method=method, prediction=ids, num_speculative_tokens=2).stats.steps >= 16, "a request's own limit holds"
    llm.engine.scheduler.check()


@pytest.mark.parametrize(
    ("speculative", "error", "message"),
    [
        ({"prediction": 5}, RequestError, "prediction must be a text or a list of token ids, got 5"),
        ({"prediction": [1, 10**6]}, RequestError, r"prediction\[1\] is 1000000; the vocabulary has ids 0 to"),
        ({"prediction": [True]}, RequestError, r"prediction\[0\] is True"),
        ({"prediction": [1] * 5000}, RequestError, "prediction has 5000 tokens; the context holds"),
        ({"prediction": "x", "method": "none"}, ConfigError, "prediction has no effect with method none: choose a method"),
        ({"prediction": "x", "num_speculative_tokens": 0}, ConfigError, "prediction has no effect with num_speculative_tokens 0"),
    ],
)
def test_what_is_refused(speculative: dict[str, Any], error: type[Exception], message: str, llm_all: LLM) -> None:
    with pytest.raises(error, match=message):
        ask(llm_all, **speculative)
