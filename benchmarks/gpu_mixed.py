"""The load that users have: prompts come in while others decode. Tokens a second, time to first token, time per token.

    python -m benchmarks.gpu_mixed [--methods none ngram mtp] [--tensor-parallel 2] [--requests 384] [--running 128] [--max-step-ms 0 50]

All requests are there at once, with inputs of 128 to 1,536 tokens of real code and outputs of 32 to 384 (seeded), at most --running of
them at a time. Weights are random and acceptance is simulated, as in gpu_step. --prompts times prompts alone.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from backend import LLM, SamplingParams
from backend.core import Delta
from benchmarks.gpu_step import METHODS, SHAPES, make_prompts, watch_steps, write_drafter, write_target
from benchmarks.models import check_gpus

INPUTS, OUTPUTS = (128, 1536), (32, 384)


def make_load(llm: LLM, count: int) -> list[tuple[list[int], int]]:
    """(prompt, tokens to emit) of each request; the same in every run."""
    rng = random.Random(1)
    lengths = [rng.randint(*INPUTS) for _ in range(count)]
    texts = make_prompts(llm, count, INPUTS[1])
    return [(text[:length], rng.randint(*OUTPUTS)) for text, length in zip(texts, lengths)]


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def run(llm: LLM, load: list[tuple[list[int], int]], tag: str) -> dict[str, float]:
    """All requests at once, until the last has ended."""
    engine = llm.engine
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    gaps: list[float] = []
    num_open = len(load)

    def sink(delta: Delta) -> None:
        nonlocal num_open
        now = time.perf_counter()
        if delta.error is not None:
            raise delta.error
        if delta.token_ids:
            if delta.request_id in last:
                # A step's tokens come together: what a client sees is the wait for them, shared by the tokens.
                gaps.extend([(now - last[delta.request_id]) / len(delta.token_ids)] * len(delta.token_ids))
            first.setdefault(delta.request_id, now)
            last[delta.request_id] = now
        num_open -= delta.is_final

    started = time.perf_counter()
    for i, (ids, count) in enumerate(load):
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        engine.submit(ids, params, sink, request_id=f"{tag}-{i}")
    with watch_steps(llm) as steps:
        while num_open:
            engine.step()
    wall = time.perf_counter() - started
    waits = [at - started for at in first.values()]
    busy = sum(s.times.total for s in steps)
    return {
        "tokens_per_s": sum(n for _, n in load) / wall,
        "wall": wall,
        "ttft_p50": quantile(waits, 0.5),
        "ttft_p99": quantile(waits, 0.99),
        "tpot_p50": 1000 * quantile(gaps, 0.5),
        "tpot_p99": 1000 * quantile(gaps, 0.99),
        "idle": 1 - busy / wall,
        "drafting": sum(s.times.draft for s in steps) / busy,
        "mixed_steps": sum(bool(s.prompt_rows) for s in steps),
        "steps": len(steps),
        "longest_ms": 1000 * max(s.times.total for s in steps),
    }


def show(row: dict[str, float]) -> str:
    waits = f"{row['ttft_p50']:.2f}, {row['ttft_p99']:.2f} | {row['tpot_p50']:.1f}, {row['tpot_p99']:.1f}"
    steps = f"{row['steps']:.0f} ({row['mixed_steps']:.0f}) | {row['longest_ms']:.1f}"
    return f"{row['tokens_per_s']:.0f} | {row['wall']:.2f} | {waits} | {row['idle']:.1%} | {row['drafting']:.1%} | {steps}"


def time_prompts(llm: LLM, repeats: int = 3) -> None:
    """Seconds of prompts alone, from submission to every first token."""
    print("| prompts | tokens of each | seconds | tokens/s |")
    print("|---|---|---|---|")
    for count, length in ((1, 128), (1, 512), (1, 2048), (1, 8192), (128, 512)):
        if length + 2 > llm.engine.worker.max_model_len:
            continue
        prompts = make_prompts(llm, count, length)
        times = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
            times.append(time.perf_counter() - started)
        seconds = statistics.median(times[1:])
        print(f"| {count} | {length} | {seconds:.4f} | {count * length / seconds:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=["none", "ngram", "mtp"])
    parser.add_argument("--requests", type=int, default=384)
    parser.add_argument("--running", type=int, default=128)
    parser.add_argument("--budgets", type=int, nargs="+", default=[0], help="known tokens of a step; 0: the default")
    parser.add_argument("--max-step-ms", type=float, nargs="+", default=[-1.0], help="0: no limit; -1: the default")
    parser.add_argument("--adaptive", action="store_true")
    parser.add_argument("--quantization", help="of the target's weights")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="RANKS")
    parser.add_argument("--prompts", action="store_true", help="times prompts alone, and nothing else")
    parser.add_argument("--uncaptured", action="store_true", help="times forwards with prompts that are launched kernel by kernel, too")
    arguments = parser.parse_args()
    if arguments.uncaptured and arguments.tensor_parallel > 1:
        parser.error("--uncaptured is of this process: other ranks would go on replaying")
    check_gpus(parser, arguments.tensor_parallel)
    print(torch.cuda.get_device_name())
    with tempfile.TemporaryDirectory() as folder:
        target = write_target(arguments.shape, Path(folder))
        if arguments.prompts:
            common: dict[str, Any] = {
                "load_format": "dummy",
                "device": "cuda",
                "enable_prefix_caching": False,
                "tensor_parallel_size": arguments.tensor_parallel,
            }
            for budget in arguments.budgets:
                options: dict[str, Any] = {"max_num_batched_tokens": budget} if budget else {}
                llm = LLM(model=str(target), quantization=arguments.quantization, **common, **options)
                print(f"budget {llm.engine.worker.max_num_batched_tokens}:")
                time_prompts(llm)
                if arguments.uncaptured:
                    print("kernel by kernel:")
                    llm.engine.worker.graphs.pieces = None
                    time_prompts(llm)
                llm.close()
                del llm
                gc.collect()
                torch.cuda.empty_cache()
            return
        columns = ["method", "budget", "limit ms", "tokens/s", "wall s", "first token s p50, p99", "per token ms p50, p99", "idle", "drafting"]
        columns += ["steps (with prompts)", "longest ms"]
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for method in arguments.methods:
            for budget in arguments.budgets:
                for limit in arguments.max_step_ms:
                    options = {"max_num_batched_tokens": budget} if budget else {}
                    speculation = {**METHODS[method], "adaptive": arguments.adaptive, "accept_policy": "simulated"}
                    if (drafter := write_drafter(method, target)) is not None:
                        speculation["model"] = str(drafter)
                    llm = LLM(
                        model=str(target),
                        load_format="dummy",
                        device="cuda",
                        max_batch_size=arguments.running,
                        max_model_len=INPUTS[1] + OUTPUTS[1],
                        max_step_ms=limit if limit >= 0 else None,
                        enable_prefix_caching=False,
                        quantization=arguments.quantization,
                        tensor_parallel_size=arguments.tensor_parallel,
                        speculative_config=speculation,
                        **options,
                    )
                    load = make_load(llm, arguments.requests)
                    run(llm, load[: len(load) // 4], "warm")
                    what = f"{budget or 'default'} | {limit if limit >= 0 else 'default'}"
                    print(f"| {method} | {what} | {show(run(llm, load, 'run'))} |", flush=True)
                    if arguments.uncaptured:
                        llm.engine.worker.graphs.pieces = None
                        print(f"| {method}, kernel by kernel | {what} | {show(run(llm, load, 'again'))} |", flush=True)
                    llm.close()
                    del llm
                    gc.collect()
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
