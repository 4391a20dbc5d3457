"""Whole answers on CPU in turns: by torch's operations, by the compiled kernels (`kernels/cpu`), and by those as they were recorded (`kernels.tape`);
on a processor with a matrix unit (AMX) recorded without it, too.

    python -m benchmarks.cpu_kernels [--model DIR] [--threads 1] [--rounds 5] [--tokens 128] [--busy 1]

Processes hold the same engine, with other `cpu_kernels`, or without tapes; while one answers the others wait.
Tokens a second (of prompts: of the prompt), the best of all rounds, and the median of the rounds' ratios. Held-out code, float32, greedy, without a
prefix cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from backend import LLM, SamplingParams
from backend.config import BUNDLED_MODEL, DEFAULT_DRAFTER
from backend.step import program
from benchmarks.models import model_folder
from benchmarks.workloads import completion_requests
from kernels._load_cpu import own_level

EAGLE3: dict[str, Any] = {"method": "eagle3", "model": str(DEFAULT_DRAFTER), "num_model_steps": 4, "num_speculative_tokens": 4, "adaptive": False}
RECORDED = "recorded"
KINDS = {"torch": "none", "compiled": "auto", **({"without AMX": "avx512"} if own_level() == "amx" else {}), RECORDED: "auto"}
"""Their `cpu_kernels`."""


def answer(options: argparse.Namespace) -> None:
    """One of them: a line on stdin names a case, a line on stdout has its tokens a second."""
    if options.answer == "compiled":
        program.find_tapes = lambda *arguments: None
    common: dict[str, Any] = {
        "cpu_kernels": KINDS[options.answer],
        "device": "cpu",
        "num_threads": options.threads,
        "enable_prefix_caching": False,
        "kv_cache_memory": "512MiB",
    }
    prompts = [prompt for prompt, _ in completion_requests(16)]
    params = SamplingParams(max_tokens=options.tokens, temperature=0.0, ignore_eos=True)

    def run(llm: LLM, count: int, own: SamplingParams) -> float:
        begun = time.perf_counter()
        answers = llm.generate(prompts[:count], own, use_tqdm=False)
        seconds = time.perf_counter() - begun
        return sum(len(done.outputs[0].token_ids) for done in answers) / seconds

    def read_prompts(llm: LLM) -> float:
        length = sum(len(llm.engine.tokenizer.encode(prompt)) for prompt in prompts)
        begun = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
        return length / (time.perf_counter() - begun)

    plain = LLM(str(options.model), speculative_config={"method": "none"}, max_batch_size=16, **common)
    cases: dict[str, Callable[[], float]] = {f"plain, {count} at a time": lambda count=count: run(plain, count, params) for count in (1, 4, 16)}  # type: ignore[misc]
    cases["prompts, 16 at a time"] = lambda: read_prompts(plain)
    if options.model == BUNDLED_MODEL:
        drafting = LLM(str(options.model), speculative_config=EAGLE3, max_batch_size=4, **common)
        cases["eagle3, 4 drafts, 1 at a time"] = lambda: run(drafting, 1, params)
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        print(cases[line.strip()](), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=model_folder, default=BUNDLED_MODEL, help="default: the bundled one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--busy", type=int, default=0, help="processes beside it that compute all the time")
    parser.add_argument("--answer", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer(options)
        return
    sides = {}
    for name in KINDS:
        command = [sys.executable, "-m", "benchmarks.cpu_kernels", "--answer", name, *sys.argv[1:]]
        sides[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(name: str, case: str | None = None) -> Any:
        side = sides[name]
        assert side.stdin is not None and side.stdout is not None
        if case is not None:
            side.stdin.write(case + "\n")
            side.stdin.flush()
        return json.loads(side.stdout.readline())

    cases, *_ = [ask(name) for name in KINDS]
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
    print(f"{options.threads} threads, {options.busy} busy processes, tokens/s")
    others_than = [name for name in KINDS if name != RECORDED]
    print(
        "\n".join(["| | " + " | ".join([*KINDS, *(f"x {name}" for name in others_than)]) + " |", "|---" * (len(KINDS) + len(others_than) + 1) + "|"])
    )
    for case in cases:
        speeds = [{name: ask(name, case) for name in KINDS} for _ in range(options.rounds + 1)][1:]
        best = [f"{max(speed[name] for speed in speeds):.0f}" for name in KINDS]
        ratios = [f"{statistics.median(speed[RECORDED] / speed[name] for speed in speeds):.2f}" for name in others_than]
        print(f"| {' | '.join([case, *best, *ratios])} |", flush=True)
    for other in others:
        other.kill()
    for side in sides.values():
        assert side.stdin is not None
        side.stdin.close()
        side.wait()


if __name__ == "__main__":
    main()
