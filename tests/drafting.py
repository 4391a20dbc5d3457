"""What is held of every model drafter: its drafts against a statement of its formulas, and that they change no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from backend import LLM, SamplingParams
from tests.families import assert_close, random_tokens

NUM_DRAFTS = 4


def serve(folder: Path, options: dict[str, Any] | None = None, **speculative: Any) -> LLM:
    """options: of the engine."""
    config = {"num_speculative_tokens": NUM_DRAFTS, "adaptive": False, **speculative}
    values = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "4MiB", "page_size": 8, **(options or {})}
    return LLM(str(folder), speculative_config=config, **values)


def watched(llm: LLM) -> list[torch.Tensor]:
    """Logits of drafts, as the step has them of its drafter."""
    seen: list[torch.Tensor] = []
    drafting = llm.engine.worker.program.drafting
    own: Callable[..., torch.Tensor] = drafting._logits

    def logits(*arguments: Any) -> torch.Tensor:
        seen.append(own(*arguments).clone())
        return seen[-1]

    def chain(step: Any, states: list[torch.Tensor], outputs: Any) -> None:
        """Draft by draft: recorded whole, as `test_tapes` has it, nobody sees them."""
        drafting.plan_drafts(step)
        drafting._chain(step, states, None, outputs, is_likeliest=True)

    drafting._logits, drafting._chain_recorded = logits, chain  # type: ignore[method-assign]
    return seen


def check_drafts(llm: LLM, draft: Callable[[list[int], int], list[torch.Tensor]], policy: str) -> list[int]:
    """After a prompt, and after more tokens: where the drafts before them fell (`reject_all`), and where they stand (`accept_all`).

    draft: logits [V] of each of so many drafts after tokens, the last of which the target has not computed. Returns the answer.
    """
    seen, prompt = watched(llm), random_tokens(37)
    params = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
    (result,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    answer, known, num_steps = result.outputs[0].token_ids, 1, 0
    while known < len(answer):
        expected = draft([*prompt, *answer[:known]], min(NUM_DRAFTS, len(answer) - known))
        for own, other in zip(seen[num_steps * NUM_DRAFTS :], expected):
            is_drafted = other > float("-inf")
            assert torch.equal(own[0] > float("-inf"), is_drafted)
            assert_close(own[0][is_drafted], other[is_drafted])
        num_steps += 1
        known += 1 if policy == "reject_all" else 1 + NUM_DRAFTS
    assert num_steps == result.outputs[0].stats.steps - 1
    return answer


Following = Callable[[list[int], list[int]], torch.Tensor]
"""Logits [V] after tokens, the last of which the target has not computed, and after drafts."""
Verified = tuple[list[int], list[int], list[int]]
"""Known tokens, drafts and their parents."""


def watch_verified(llm: LLM) -> list[Verified]:
    """Of the steps of one request of 37 + 26 tokens that verify drafts, all of which fall."""
    seen: list[Verified] = []
    worker = llm.engine.worker
    decide, table = worker.program.decide, worker.table

    def watched_decide(step: Any) -> None:
        index = int(step.indices[0])
        known, count = int(table.num_tokens[index]), int(table.num_drafts[index])
        if count:
            parents = table.parents[index, :count].tolist() if len(table.parents) else []  # of a chain there are none
            seen.append((table.tokens[index, :known].tolist(), table.drafts[index, :count].tolist(), parents))
        decide(step)

    worker.program.decide = watched_decide  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=26, temperature=0.0, ignore_eos=True)
    llm.generate([{"prompt_token_ids": random_tokens(37)}], params, use_tqdm=False)
    assert len(seen) > 3
    return seen


def watch_trees(llm: LLM) -> list[Verified]:
    return watch_verified(llm)[:3]


def check_static(llm: LLM, following: Following, paths: list[list[int]]) -> None:
    """Each draft is the candidate that its path says."""
    paths = sorted(paths, key=lambda path: (len(path), path))
    for tokens, drafts, parents in watch_trees(llm):
        for path, own, parent in zip(paths, drafts, parents, strict=True):
            assert parent == (paths.index(path[:-1]) if len(path) > 1 else -1)
            logits = following(tokens, [drafts[paths.index(path[:i])] for i in range(1, len(path))])
            torch.testing.assert_close(logits[own], logits.sort(descending=True).values[path[-1]], atol=1e-4, rtol=1e-4)


def check_growth(llm: LLM, following: Following, depth: int, top_k: int, num_nodes: int) -> None:
    """Drafts are those of EAGLE-2's rule."""
    for tokens, drafts, parents in watch_trees(llm):
        level, grown = [((), 0.0)], dict[tuple[int, ...], float]()
        for _ in range(depth):
            found: dict[tuple[int, ...], float] = {}
            for path, score in level:
                chances, ids = following(tokens, list(path)).log_softmax(dim=0).topk(top_k)
                found |= {(*path, token): score + chance for token, chance in zip(ids.tolist(), chances.tolist())}
            grown |= found
            level = sorted(found.items(), key=lambda entry: -entry[1])[:top_k]
        expected = sorted(grown, key=lambda path: -grown[path])[:num_nodes]
        made: list[tuple[int, ...]] = []
        for own, parent in zip(drafts, parents):
            made.append((*(made[parent] if parent >= 0 else ()), own))
        assert sorted(made) == sorted(expected)


def check_tokens(folder: Path, method: str, count: int = 3, **speculative: Any) -> LLM:
    """Those without drafts: greedy and sampled, several at once, in chunks, again from the prefix cache; with a lookup that lengthens them."""
    prompts = [{"prompt_token_ids": random_tokens(length, length)} for length in (40, 9)]
    options = {"max_batch_size": 8, "max_num_batched_tokens": 16}
    llm = serve(folder, options, method=method, **{"num_speculative_tokens": count, "request_methods": ["suffix"], **speculative})
    choices = [{"method": "none"}, {"method": method}, {"method": "ngram"}]
    choices += [{"method": method, "mtp_strategy": name, "num_speculative_tokens": count + 2} for name in ("with_ngram", "with_suffix")]
    for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 7}):
        params = SamplingParams(max_tokens=7, ignore_eos=True, **sampling)
        answers = []
        for choice in choices:
            answers.append([r.outputs[0].token_ids for r in llm.generate(prompts, params, speculative=choice, use_tqdm=False)])
        assert all(answer == answers[0] for answer in answers)
    return llm


def check_tree_tokens(folder: Path, num_tokens: int = 12, **speculative: Any) -> LLM:
    """Trees change no token: as `check_tokens` has it, without lookups; drafts are accepted."""
    prompts = [{"prompt_token_ids": random_tokens(length, length)} for length in (40, 9)]
    llm = serve(folder, {"max_batch_size": 8, "max_num_batched_tokens": 16}, **speculative)
    num_accepted = 0
    for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 7}, {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.3}):
        params, answers = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **sampling), []
        for choice in ({"method": "none"}, None, {"method": "ngram"}, {"verify_strategy": "rejection"}):
            results = llm.generate(prompts, params, speculative=choice, use_tqdm=False)
            answers.append([r.outputs[0].token_ids for r in results])
            num_accepted += sum(r.outputs[0].stats.accepted for r in results if choice is None)
        assert all(answer == answers[0] for answer in answers)
    assert num_accepted > 0
    return llm
