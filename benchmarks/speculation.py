"""Speculative decoding: every method, number of drafts and concurrency, against plain decoding in the same run.

    python -m benchmarks.speculation [--part planner grid rounds hybrid noise default placement] [--json FILE] [--svg FILE]
    python -m benchmarks.speculation --part planner [--device cuda:1] [--workloads completion mix ...] [--concurrency 1 128 ...] [--repeats 3]

Bundled model and drafter, on held-out code; on CPU in float32, and but for the part planner there alone. Each speed-up is over a run of `none` on
the same requests, shortly before it.
The prefix cache is off (but for `rounds`), so that no run profits from the one before. Times per output token are a request's
own, from its first token to its last, by tokens.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from backend import LLM, SamplingParams
from benchmarks import draft_planner
from benchmarks.workloads import Requests, agent_rounds, completion_requests, editing_requests
from deploy.bundled import DEFAULT_SPECULATION

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "mtp": {"method": "mtp", "mtp_strategy": "default"},
    "mtp+ngram": {"method": "mtp", "mtp_strategy": "with_ngram"},
    "mtp+suffix": {"method": "mtp", "mtp_strategy": "with_suffix"},
}
NONE = {"method": "none"}
MODEL_STEPS = 3
"""Of the hybrids: drafts that the model makes, before lookups go on."""


def make_llm(**changes: Any) -> LLM:
    speculative = {"method": "mtp", "mtp_strategy": "with_suffix", "num_model_steps": MODEL_STEPS, "num_speculative_tokens": 5}
    # Requests come again in every run: answers to the run before would be remembered (the part `rounds` is about that).
    speculative["suffix_decoding_max_cached_requests"] = 0
    return LLM(speculative_config={**speculative, "adaptive": False, **changes}, enable_prefix_caching=False)


@dataclass
class Run:
    """What one pass over a set of requests showed."""

    tokens_per_second: float
    ms_per_token_p50: float
    ms_per_token_p99: float
    accepted_length: float
    """Tokens a step of a request"""
    drafts_per_step: float
    acceptance: list[float] = field(default_factory=list)
    """By position in the draft: accepted / drafted there"""
    drafting_share: float = 0.0
    """Of the step time"""
    verification_share: float = 0.0
    """Sampling and verification; the target's forward pass is most of the rest"""
    speed_up: float = 1.0


class Bench:
    """Runs requests at a fixed concurrency through one engine."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._turn = 0

    def run(self, requests: Requests, concurrency: int, choice: dict[str, Any] | None, **sampling: Any) -> Run:
        self._turn += 1
        engine = self.llm.engine
        metrics = engine.metrics
        before = (metrics.propose_seconds, metrics.verify_seconds, metrics.step_seconds, dict(metrics.drafted_per_position))
        accepted_before = dict(metrics.accepted_per_position)
        waiting = list(enumerate(requests))[::-1]
        first: dict[str, float] = {}
        times: list[float] = []
        stats = []
        num_open = 0

        def sink(delta) -> None:
            nonlocal num_open
            now = time.perf_counter()
            if delta.error is not None:
                raise delta.error
            first.setdefault(delta.request_id, now)
            if delta.finish_reason:
                num_open -= 1
                stats.append(delta.stats)
                times.append(1e3 * (now - first[delta.request_id]) / max(1, delta.num_output_tokens - 1))

        params = {"temperature": 0.0, "ignore_eos": True, **sampling}
        started = time.perf_counter()
        while waiting or num_open:
            while waiting and num_open < concurrency:
                number, (prompt, count) = waiting.pop()
                own = SamplingParams(max_tokens=count, seed=number, **params)
                engine.submit(prompt, own, sink, request_id=f"{self._turn}-{number}", speculative=choice)
                num_open += 1
            engine.step()
        seconds = time.perf_counter() - started
        tokens = sum(s.emitted for s in stats)
        steps = sum(s.steps for s in stats)
        step_seconds = metrics.step_seconds - before[2]
        method = (choice or {}).get("method") or engine.config.speculative_config.method
        drafted = {p: n - before[3].get((m, p), 0) for (m, p), n in metrics.drafted_per_position.items() if m == method}
        accepted = {p: n - accepted_before.get((m, p), 0) for (m, p), n in metrics.accepted_per_position.items() if m == method}
        ordered = sorted(times)
        return Run(
            tokens_per_second=tokens / seconds,
            ms_per_token_p50=statistics.median(ordered),
            ms_per_token_p99=ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))],
            accepted_length=tokens / steps,
            drafts_per_step=sum(s.drafted for s in stats) / steps,
            acceptance=[accepted.get(p, 0) / drafted[p] for p in sorted(drafted) if drafted[p]],
            drafting_share=(metrics.propose_seconds - before[0]) / step_seconds,
            verification_share=(metrics.verify_seconds - before[1]) / step_seconds,
        )

    def compare(self, requests: Requests, concurrency: int, choices: list[dict[str, Any]], repeats: int, **sampling: Any) -> list[Run]:
        """Medians by speed-up over `none`, which runs right before them."""
        columns: list[list[Run]] = [[] for _ in choices]
        for _ in range(repeats):
            base = self.run(requests, concurrency, NONE, **sampling)
            for column, choice in zip(columns, choices):
                one = self.run(requests, concurrency, choice, **sampling)
                one.speed_up = one.tokens_per_second / base.tokens_per_second
                column.append(one)
        return [sorted(column, key=lambda r: r.speed_up)[len(column) // 2] for column in columns]


COLUMNS = f"{'tokens/s':>8s} {'x none':>7s} {'ms/token p50':>12s} {'p99':>6s} {'tokens/step':>11s} {'drafts':>6s}"
HEADER = f"{'':34s} {COLUMNS}  draft/verify  acceptance by position"


def line(name: str, run: Run) -> str:
    shares = f"{100 * run.drafting_share:3.0f}% / {100 * run.verification_share:2.0f}%"
    positions = " ".join(f"{100 * a:.0f}" for a in run.acceptance)
    return (
        f"{name:34s} {run.tokens_per_second:8.1f} {run.speed_up:7.2f} {run.ms_per_token_p50:12.2f} {run.ms_per_token_p99:6.2f} "
        f"{run.accepted_length:11.2f} {run.drafts_per_step:6.2f}  {shares:>12s}  {positions}"
    )


def say(title: str, rows: dict[str, Run]) -> dict[str, Any]:
    print(f"\n{title}\n{HEADER}", flush=True)
    for name, run in rows.items():
        print(line(name, run), flush=True)
    return {name: asdict(run) for name, run in rows.items()}


def sized(requests: Callable[[int], Requests], concurrency: int) -> Requests:
    return requests({1: 5, 8: 16, 32: 32}[concurrency])


SETS: dict[str, Callable[[int], Requests]] = {"completion": completion_requests, "editing": editing_requests}


def grid(repeats: int) -> dict[str, Any]:
    """Every method with 1 to 5 drafts, at concurrency 1, 8 and 32."""
    bench, results = Bench(make_llm()), {}
    bench.run(completion_requests(4), 4, NONE)
    for set_name, requests in SETS.items():
        for concurrency in (1, 8, 32):
            rows: dict[str, Run] = {}
            own = sized(requests, concurrency)
            for name, choice in METHODS.items():
                counts = (4, 5) if "+" in name else (1, 2, 3, 4, 5)  # a hybrid's first MODEL_STEPS drafts are mtp's
                choices = [{**choice, "num_speculative_tokens": k} for k in counts]
                for k, run in zip(counts, bench.compare(own, concurrency, choices, repeats)):
                    rows[f"{name} k={k}"] = run
            results[f"{set_name}, {concurrency}"] = say(f"{set_name}, concurrency {concurrency}: fixed numbers of drafts", rows)
    return results


def default(repeats: int) -> dict[str, Any]:
    """What a server does unless told otherwise: at most 5 drafts, fewer when measured times say so."""
    results = {}
    for set_name, requests in SETS.items():
        for concurrency in (1, 8, 32):
            rows = {}
            for name, choice in METHODS.items():
                bench = Bench(make_llm(adaptive=True))
                own = sized(requests, concurrency)
                bench.run(own, concurrency, choice)  # learns, as a server has after its first requests
                rows[name] = bench.compare(own, concurrency, [choice], repeats)[0]
            results[f"{set_name}, {concurrency}"] = say(f"{set_name}, concurrency {concurrency}: adaptive, 5 drafts at most", rows)
    return results


def rounds(repeats: int) -> dict[str, Any]:
    """An agent that comes with the same prompts ten times: what suffix remembers of earlier answers."""
    bench = Bench(LLM(speculative_config={"method": "suffix", "num_speculative_tokens": 8, "adaptive": False}, enable_prefix_caching=True))
    rows = {}
    for number in range(1, 11):
        rows[f"suffix k=8, round {number}"] = bench.run(agent_rounds(4), 1, {"method": "suffix"})
    base = bench.run(agent_rounds(4), 1, NONE)
    for run in rows.values():
        run.speed_up = run.tokens_per_second / base.tokens_per_second
    return {"rounds": say("agent loop, concurrency 1: ten identical rounds", rows)}


def hybrid(repeats: int) -> dict[str, Any]:
    """Each hybrid beside its parts: of mtp, and of the drafter that is `foretoken serve`'s default."""
    default = Bench(LLM(speculative_config={**DEFAULT_SPECULATION, "adaptive": False}, enable_prefix_caching=False))
    bench, results = Bench(make_llm()), {}
    for own in (bench, default):
        own.run(completion_requests(4), 4, NONE)
    eagle3 = {"method": "eagle3", "mtp_strategy": "with_ngram", "num_speculative_tokens": 6}
    defaults = {
        "eagle3 k=4": {"method": "eagle3", "mtp_strategy": "default", "num_speculative_tokens": 4},
        "eagle3 k=4 + ngram, k=6": eagle3,
        "the same, planned": {**eagle3, "adaptive": True},
    }
    choices = {
        "mtp k=3": {**METHODS["mtp"], "num_speculative_tokens": 3},
        "ngram k=5": {"method": "ngram", "num_speculative_tokens": 5},
        "mtp k=3 + ngram, k=5": {**METHODS["mtp+ngram"], "num_speculative_tokens": 5},
        "suffix k=5": {"method": "suffix", "num_speculative_tokens": 5},
        "mtp k=3 + suffix, k=5": {**METHODS["mtp+suffix"], "num_speculative_tokens": 5},
    }
    for set_name, requests in SETS.items():
        for name in ("mtp+ngram", "mtp+suffix"):  # what pays is learned from requests
            bench.run(requests(6), 1, METHODS[name])
        for choice in defaults.values():
            default.run(requests(6), 1, choice)
        rows = dict(zip(choices, bench.compare(requests(12), 1, list(choices.values()), repeats)))
        rows |= zip(defaults, default.compare(requests(12), 1, list(defaults.values()), repeats))
        results[set_name] = say(f"{set_name}, concurrency 1: hybrids and their parts", rows)
    return results


def noise(repeats: int) -> dict[str, Any]:
    """target_match at temperature 1: drafts drawn with the target's noise against the likeliest ones; and rejection sampling."""
    rows = {}
    for sampling in ("shared_noise", "greedy"):
        bench = Bench(make_llm(draft_sampling=sampling))
        choice = {**METHODS["mtp"], "num_speculative_tokens": 3}
        rows[f"target_match, {sampling}"] = bench.compare(completion_requests(12), 4, [choice], repeats, temperature=1.0)[0]
        if sampling == "shared_noise":
            choice = {**choice, "verify_strategy": "rejection"}
            rows["rejection"] = bench.compare(completion_requests(12), 4, [choice], repeats, temperature=1.0)[0]
    return {"temperature 1": say("completion, concurrency 4, temperature 1, mtp k=3", rows)}


def placement(repeats: int) -> dict[str, Any]:
    """The drafter in the decode model's process and in its own, on a real server, one request after the other."""
    from client import Client
    from deploy.demo import free_ports, running_server

    results: dict[str, Any] = {}
    print("\ncompletion through gRPC, concurrency 1, mtp k=3: x none", flush=True)
    for name in ("in_process", "bls"):
        ports = free_ports(3)
        speculative = json.dumps({"method": "mtp", "num_speculative_tokens": 3, "placement": name, "adaptive": False})
        with (
            tempfile.TemporaryDirectory() as folder,
            running_server(*ports, Path(folder) / "log", f"--repository={folder}/repository", "--speculative-config", speculative),
            Client(f"127.0.0.1:{ports[1]}") as client,
        ):
            turn = iter(range(10**6))

            def measure(choice: dict[str, Any] | None) -> float:
                started, tokens, mark = time.perf_counter(), 0, next(turn)  # noqa: B023
                for prompt, count in completion_requests(6):
                    answer = client.generate(f"# {mark}\n{prompt}", max_tokens=count, temperature=0.0, ignore_eos=True, speculative=choice)
                    tokens += len(answer[0].token_ids)
                return tokens / (time.perf_counter() - started)

            measure(None), measure(NONE)
            ratios = []
            for _ in range(max(1, repeats)):
                base = measure(NONE)
                ratios.append(measure(None) / base)
        results[name] = {"speed_up": statistics.median(ratios), "range": [min(ratios), max(ratios)]}
        print(f"{name:34s} {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]", flush=True)
    return {"placement": results}


PARTS = {
    "planner": draft_planner.measure,
    "hybrid": hybrid,
    "rounds": rounds,
    "noise": noise,
    "placement": placement,
    "default": default,
    "grid": grid,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=1)
    own = parser.add_argument_group("of the part planner")
    own.add_argument("--concurrency", type=int, nargs="*", default=draft_planner.CONCURRENCIES)
    own.add_argument("--workloads", nargs="*", choices=draft_planner.WORKLOADS, default=draft_planner.WORKLOADS)
    own.add_argument("--device", default="cpu", help="cpu (by processor time), cuda or cuda:N (in bfloat16, by the wall's clock)")
    own.add_argument("--requests", type=int, help="that are measured of each choice")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path, help="draws acceptance by position and speed-up by concurrency; needs the parts grid and default")
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    cpu = next((row.split(":")[1].strip() for row in Path("/proc/cpuinfo").read_text().splitlines() if row.startswith("model name")), "")
    gpu = f"{torch.cuda.get_device_name(args.device)}, " if args.device != "cpu" and torch.cuda.is_available() else ""
    print(f"{gpu}{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}, commit {commit}")
    if args.device != "cpu" and args.part != ["planner"]:
        parser.error(f"--device {args.device}: parts other than planner are measured on CPU; say --part planner")
    parts = PARTS | {"planner": lambda repeats: draft_planner.measure(repeats, args.concurrency, args.workloads, args.device, args.requests)}
    results = {name: parts[name](args.repeats) for name in args.part}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.svg:
        from benchmarks.plot_speculation import draw

        args.svg.write_text(draw(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
