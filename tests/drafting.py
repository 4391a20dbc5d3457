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
    """Logits of drafts, as the drafter makes them."""
    seen: list[torch.Tensor] = []
    drafter = llm.engine.worker.drafter
    assert drafter is not None
    own: Callable[..., torch.Tensor] = drafter.logits

    def logits(*arguments: Any) -> torch.Tensor:
        seen.append(own(*arguments).clone())
        return seen[-1]

    drafter.logits = logits  # type: ignore[method-assign]
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
