"""On CPU: how soon idle OpenMP threads sleep (`backend.SPINS`) against libgomp's own default, alone on the machine and beside busy processes.

    python -m benchmarks.idle_threads [--repeats 3] [--busy N] [--spins N]

Bundled model, float32, 8 completions at once with 3 drafts of its mtp, 48 tokens each. Two processes that differ in GOMP_SPINCOUNT alone take turns;
the table shows the median of the repeats, ratios with the least and the greatest in brackets.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import backend
from benchmarks.workloads import completion_prompts
from kernels._cpus import count_cpus

DEFAULT = "300000"
"""libgomp's GOMP_SPINCOUNT where OMP_WAIT_POLICY is not set."""


def work() -> None:
    """For each line read: seconds and processor seconds of one run."""
    from backend import LLM, SamplingParams

    llm = LLM(speculative_config={"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}, kv_cache_memory="256MiB")
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    for turn, _ in enumerate(sys.stdin):
        started, used = time.perf_counter(), time.process_time()
        llm.generate([f"# {turn}\n{prompt}" for prompt in completion_prompts(8)], params, use_tqdm=False)
        print(time.perf_counter() - started, time.process_time() - used, flush=True)


@contextlib.contextmanager
def worker(spins: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "GOMP_SPINCOUNT": spins}
    command = [sys.executable, "-m", "benchmarks.idle_threads", "--work"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def run(process: subprocess.Popen[str]) -> tuple[float, float]:
    assert process.stdin is not None and process.stdout is not None
    print("go", file=process.stdin, flush=True)
    seconds, used = map(float, process.stdout.readline().split())
    return seconds, used


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--busy", type=int, default=count_cpus(), help="processes beside, in the second row (default: one for each CPU)")
    parser.add_argument("--spins", default=backend.SPINS, help="in the place of the engine's own choice")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"commit {commit}, {count_cpus()} CPUs, GOMP_SPINCOUNT {args.spins} against {DEFAULT}")
    with worker(args.spins) as ours, worker(DEFAULT) as theirs:
        run(ours), run(theirs)
        for count in (0, args.busy):
            with busy(count):
                pairs = [(run(ours), run(theirs)) for _ in range(args.repeats)]
            ratios = sorted(their[0] / our[0] for our, their in pairs)
            own, other = ([statistics.median(pair[n][i] for pair in pairs) for i in (0, 1)] for n in (0, 1))
            print(
                f"{count} busy processes beside: {own[0]:.2f} s ({own[1]:.2f} of processor time), {other[0]:.2f} s ({other[1]:.2f}): "
                f"{statistics.median(ratios):.2f} times as fast [{ratios[0]:.2f}, {ratios[-1]:.2f}]",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
