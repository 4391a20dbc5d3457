"""What a drafter is worth: its drafts in the engine itself, on text that it was not trained on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def measure(model: Path, drafter: Path, method: str, drafts: int, prompts: Sequence[np.ndarray], max_tokens: int, **engine: Any) -> dict[str, Any]:
    """Greedy answers of the engine to prompts, without and with the drafter: accepted by position, length, share of drafting, speed.

    acceptance: by position, of the drafts made there; accepted_length: tokens that a step of a request brings. The prefix cache is off, so
    that the second run does not profit from the first. engine: options of `backend.LLM`. Raises ConfigError, ModelError.
    """
    from backend import LLM, SamplingParams

    speculative = {"method": method, "model": str(drafter), "num_speculative_tokens": drafts, "num_model_steps": drafts, "adaptive": False}
    # None of the prompts has a token that the model has no embedding of.
    llm = LLM(str(model), speculative_config=speculative, enable_prefix_caching=False, unknown_tokens="refuse", **engine)
    try:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        contents = [{"prompt_token_ids": ids.tolist()} for ids in prompts]
        metrics = llm.engine.metrics
        seconds, shares, answers = {}, {}, {}
        for name, choice in (("none", {"method": "none"}), (method, {"method": method})):
            drafting, stepping, started = metrics.propose_seconds, metrics.step_seconds, time.perf_counter()
            answers[name] = llm.generate(contents, params, speculative=choice, use_tqdm=False)
            seconds[name] = time.perf_counter() - started
            shares[name] = (metrics.propose_seconds - drafting) / max(metrics.step_seconds - stepping, 1e-9)
    finally:
        llm.close()
    stats = [result.outputs[0].stats for result in answers[method]]
    emitted, steps = sum(s.emitted for s in stats), sum(s.steps for s in stats)
    made = [metrics.drafted_per_position[method, i] for i in range(drafts)]
    accepted = [metrics.accepted_per_position[method, i] for i in range(drafts)]
    return {
        "prompts": len(prompts),
        "tokens": emitted,
        "acceptance": [round(a / m, 4) if m else None for a, m in zip(accepted, made)],
        "accepted_length": round(emitted / max(1, steps), 3),
        "drafting_share": round(shares[method], 4),
        "tokens_per_second": {name: round(emitted / spent, 1) for name, spent in seconds.items()},
        "speed_up": round(seconds["none"] / seconds[method], 3),
    }


def describe(report: dict[str, Any]) -> str:
    """A few lines for people."""
    rates = " ".join("-" if rate is None else f"{100 * rate:.0f}%" for rate in report["acceptance"])
    return (
        f"acceptance by position: {rates}; {report['accepted_length']:.2f} tokens a step\n"
        f"{report['speed_up']:.2f} x plain decoding here, {100 * report['drafting_share']:.0f}% of the time is drafting "
        f"({report['prompts']} prompts, {report['tokens']} tokens)"
    )
