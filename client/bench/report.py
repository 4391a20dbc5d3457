"""From outcomes to figures: the summary that `--save-result` writes (keys as in `vllm bench serve`) and the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from client.bench.requests import Outcome
from client.bench.speculation import Acceptance

METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token, after the first",
    "itl": "Time between responses",
    "e2el": "End-to-end latency",
}
MAX_ERRORS_SHOWN = 5


def collect(name: str, outcomes: Sequence[Outcome]) -> list[float]:
    """A metric's values, in milliseconds, of the requests that have one."""
    if name == "itl":
        return [1e3 * gap for o in outcomes for gap in o.itl]
    if name == "tpot":
        return [1e3 * o.tpot for o in outcomes if o.output_tokens > 1]
    return [1e3 * getattr(o, name) for o in outcomes if name == "e2el" or o.arrivals]


def is_good(outcome: Outcome, goals: Mapping[str, float]) -> bool:
    """Whether a request kept within every goal, in milliseconds; one of a single token has no time per token to miss."""
    return all(value <= goal for name, goal in goals.items() for value in collect(name, [outcome]))


def summarize(
    outcomes: Sequence[Outcome], duration: float, metrics: Sequence[str], percentiles: Sequence[float], goals: Mapping[str, float]
) -> dict[str, Any]:
    """Counts, throughput and latencies (milliseconds); failed requests count in `failed` and in nothing else."""
    done = [o for o in outcomes if o.error is None]
    failures = Counter(o.error for o in outcomes if o.error is not None)
    output_tokens = sum(o.output_tokens for o in done)
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "errors": dict(failures.most_common()),
        "total_input_tokens": sum(o.prompt_tokens for o in done),
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (output_tokens + sum(o.prompt_tokens for o in done)) / duration,
        "tokens_per_response": output_tokens / max(1, sum(len(o.arrivals) for o in done)),
    }
    if goals:
        summary["goodput_goals_ms"] = dict(goals)
        summary["request_goodput"] = sum(is_good(o, goals) for o in done) / duration
    for name in metrics:
        values = np.array(collect(name, done) or [np.nan])
        summary |= {f"mean_{name}_ms": values.mean(), f"median_{name}_ms": np.median(values), f"std_{name}_ms": values.std()}
        summary |= {f"p{p:g}_{name}_ms": np.percentile(values, p) for p in percentiles}
    return {k: (float(v) if v == v else None) if isinstance(v, np.floating) else v for k, v in summary.items()}


def format_table(summary: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float], speculation: Sequence[Acceptance]) -> str:
    """The summary for a terminal."""
    lines: list[str] = []

    def head(text: str) -> None:
        lines.append(f"{f' {text} ':-^64}")

    def row(text: str, value: Any, form: str = ".2f") -> None:
        lines.append(f"{text:<46}{'-' if value is None else format(value, form):>18}")

    head("Requests")
    row("Completed", summary["completed"], "d")
    row("Failed", summary["failed"], "d")
    row("Duration (s)", summary["duration"])
    row("Input tokens", summary["total_input_tokens"], "d")
    row("Output tokens", summary["total_output_tokens"], "d")
    row("Requests/s", summary["request_throughput"])
    if "request_goodput" in summary:
        goals = ", ".join(f"{k} <= {v:g} ms" for k, v in summary["goodput_goals_ms"].items())
        row(f"Requests/s within {goals}", summary["request_goodput"])
    row("Output tokens/s", summary["output_throughput"])
    row("Tokens/s, input and output", summary["total_token_throughput"])
    row("Tokens per response", summary["tokens_per_response"])
    for name in metrics:
        head(f"{METRICS[name]} (ms)")
        row(f"Mean {name.upper()}", summary[f"mean_{name}_ms"])
        row(f"Median {name.upper()}", summary[f"median_{name}_ms"])
        for p in percentiles:
            row(f"P{p:g} {name.upper()}", summary[f"p{p:g}_{name}_ms"])
    for method in speculation:
        head(f"Speculation, method {method.method}")
        row("Steps with drafts", method.num_drafts, "d")
        row("Drafted tokens", method.draft_tokens, "d")
        row("Accepted tokens", method.accepted_tokens, "d")
        row("Acceptance rate (%)", 100 * method.rate)
        row("Accepted length (tokens a step with drafts)", method.length)
        for position, share in enumerate(method.per_position):
            row(f"Accepted at position {position} (%)", 100 * share)
    lines.append("-" * 64)
    for error, count in list(summary["errors"].items())[:MAX_ERRORS_SHOWN]:
        lines.append(f"{count} failed: {error}")
    return "\n".join(lines)
