"""Random histories of an engine: requests of mixed methods and lengths come, are cancelled, are preempted in too few pages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from backend import LLM
from backend.core import Delta
from tests.conftest import code_prompts, greedy

CHOICES = (
    {"method": "none"},
    {"method": "ngram", "num_speculative_tokens": 4},
    {"method": "mtp"},
    {"method": "mtp", "mtp_strategy": "with_ngram", "num_speculative_tokens": 5},
)
MAX_OUTPUT, MAX_WAITING = 48, 64


def run_histories(
    llm: LLM,
    plain: LLM,
    count: int,
    *,
    num_prompts: int = 12,
    arrivals: int = 1,
    cancels: float = 0.05,
    check_every: int = 1,
    choices: Sequence[dict[str, Any] | None] = CHOICES,
) -> None:
    """Puts `count` requests through the engine of `llm`. Every one ends with the tokens that `plain` gives, as many as it got, and no page is left.

    arrivals: most requests a step; cancels: share of steps that cancel one; choices: of `speculative`.
    """
    engine, rng = llm.engine, random.Random(count)
    prompts = [engine.tokenizer.encode(p)[: rng.randint(4, 60)] for p in code_prompts(num_prompts, seed=8)]
    expected = [r.outputs[0].token_ids for r in plain.generate([{"prompt_token_ids": p} for p in prompts], greedy(MAX_OUTPUT), use_tqdm=False)]
    answers: dict[int, list[int]] = {}
    ends: dict[int, str | None] = {}

    def sink(delta: Delta) -> None:
        assert delta.error is None, delta.error
        answers.setdefault(int(delta.request_id), []).extend(delta.token_ids)
        if delta.is_final:
            ends[int(delta.request_id)] = delta.finish_reason

    submitted = steps = 0
    while submitted < count or len(ends) < submitted:
        for _ in range(rng.randint(0, arrivals) if submitted < count and engine.scheduler.num_waiting < MAX_WAITING else 0):
            params = greedy(rng.randint(1, MAX_OUTPUT))
            engine.submit(prompts[submitted % num_prompts], params, sink, request_id=str(submitted), speculative=rng.choice(choices))
            submitted += 1
        if submitted and rng.random() < cancels:
            engine.cancel(str(rng.randrange(max(0, submitted - 64), submitted)))
        engine.step()
        steps += 1
        if steps % check_every == 0:
            engine.scheduler.check()
    engine.scheduler.check()
    assert engine.scheduler.pool.num_held == 0
    assert engine.metrics.preemptions > 0
    assert set(ends.values()) == {"length", "cancelled"}
    for number in range(submitted):
        tokens = answers.get(number, [])
        assert tokens == expected[number % num_prompts][: len(tokens)], f"request {number}"
