"""The engine on CPU: against transformers, with and without ngram, served against offline, two ranks against one, and what it costs beside the model.

    python -m benchmarks.serve_cpu [--repeats 3] [--only NAME ...]

Bundled model, float32, greedy. Each ratio is of two runs that take turns in one process (served: one server beside it);
the table shows the median of the repeats and, in brackets, the least and the greatest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from backend import LLM, SamplingParams
from backend.config import BUNDLED_MODEL
from benchmarks.workloads import completion_prompts, editing_prompts
from deploy.supervision.processes import find_engine, find_stubs

Measure = Callable[[], float]
"""Runs once, returns tokens per second."""


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def compare(ours: Measure, theirs: Measure, repeats: int) -> dict[str, float | list[float]]:
    """Alternates the two, after one warm-up each."""
    ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(repeats)]
    ratios = sorted(a / b for a, b in pairs)
    return {
        "ours": statistics.median(a for a, _ in pairs),
        "theirs": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "range": [ratios[0], ratios[-1]],
    }


def offline(llm: LLM, requests: list[tuple[str, int]], method: str) -> Measure:
    """All requests at once through LLM.generate; the prefix cache is emptied of them by a fresh leading comment each time."""
    turn = iter(range(10**6))

    def run() -> float:
        mark = f"# {next(turn)}\n"
        started = time.perf_counter()
        llm.generate([mark + p for p, _ in requests], [greedy(n) for _, n in requests], speculative={"method": method}, use_tqdm=False)
        return sum(n for _, n in requests) / (time.perf_counter() - started)

    return run


def one_by_one(llm: LLM, requests: list[tuple[str, int]], method: str) -> Measure:
    runs = [offline(llm, [request], method) for request in requests]

    def run() -> float:
        total = sum(n for _, n in requests)
        return total / sum(n / r() for r, (_, n) in zip(runs, requests))

    return run


class Transformers:
    """LlamaForCausalLM.generate on the same folder."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer, LlamaForCausalLM

        self.model = LlamaForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL, padding_side="left")

    @torch.inference_mode()
    def generate(self, prompts: list[str], max_tokens: int) -> None:
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        self.model.generate(**inputs, max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False, pad_token_id=1)

    def one_by_one(self, requests: list[tuple[str, int]]) -> Measure:
        def run() -> float:
            started = time.perf_counter()
            for prompt, count in requests:
                self.generate([prompt], count)
            return sum(n for _, n in requests) / (time.perf_counter() - started)

        return run

    def padded(self, requests: list[tuple[str, int]]) -> Measure:
        """One padded batch; it runs until its longest request is done, and only the tokens asked for count."""

        def run() -> float:
            started = time.perf_counter()
            self.generate([p for p, _ in requests], max(n for _, n in requests))
            return sum(n for _, n in requests) / (time.perf_counter() - started)

        return run


def mixed_requests(count: int) -> list[tuple[str, int]]:
    """Prompts of 200 to 1600 characters, outputs of 16 to 128 tokens."""
    return [(p, 16 + (i * 37) % 113) for i, p in enumerate(completion_prompts(count, seed=1))]


def against_transformers(repeats: int) -> dict[str, dict]:
    peer, llm = Transformers(), LLM()
    single = [(p, 64) for p in completion_prompts(6)]
    return {
        "engine / transformers, batch 1": compare(one_by_one(llm, single, "none"), peer.one_by_one(single), repeats),
        "engine / transformers padded batch, 16 mixed": compare(offline(llm, mixed_requests(16), "none"), peer.padded(mixed_requests(16)), repeats),
    }


def ngram_on_editing(repeats: int) -> dict[str, dict]:
    llm = LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 5})
    count = lambda text: min(192, len(llm.engine.tokenizer.encode(text, add_special_tokens=False)))  # noqa: E731
    edits = [(prompt, count(rest)) for prompt, rest in editing_prompts(10)]
    completions = [(p, 64) for p in completion_prompts(10)]
    return {
        f"ngram k=5 / none, {name}, batch 1": compare(one_by_one(llm, requests, "ngram"), one_by_one(llm, requests, "none"), repeats)
        for name, requests in (("code editing", edits), ("completion", completions))
    }


def ranks_against_one(repeats: int) -> dict[str, dict]:
    """Two processes of one thread each, which exchange sums by the memory that they share, against one process of one thread."""
    pair, one = LLM(tensor_parallel_size=2, num_threads=1), LLM(num_threads=1)
    results = {
        f"two ranks / one, {name}": compare(offline(pair, requests, "none"), offline(one, requests, "none"), repeats)
        for name, requests in (("batch 1", [(p, 64) for p in completion_prompts(1)]), ("16 mixed", mixed_requests(16)))
    }
    pair.close()
    return results


def served_against_offline(repeats: int) -> dict[str, dict]:
    from client import AsyncClient
    from deploy.demo import free_ports, running_server

    llm, requests = LLM(), mixed_requests(16)
    ports = free_ports(3)
    turn = iter(range(10**6))

    async def serve_all() -> None:
        mark = f"# served {next(turn)}\n"
        async with AsyncClient(f"127.0.0.1:{ports[1]}", inactivity_timeout=60) as client:
            calls = [client.generate(mark + p, max_tokens=n, temperature=0.0, ignore_eos=True, speculative={"method": "none"}) for p, n in requests]
            answers = await asyncio.gather(*calls)
        assert [len(a[0].token_ids) for a in answers] == [n for _, n in requests]

    def served() -> float:
        started = time.perf_counter()
        asyncio.run(serve_all())
        return sum(n for _, n in requests) / (time.perf_counter() - started)

    with tempfile.TemporaryDirectory() as folder, running_server(*ports, Path(folder) / "log", f"--repository={folder}/repository") as process:
        result = compare(served, offline(llm, requests, "none"), repeats)
        memory = decode_memory(process.pid)
    return {"served (gRPC) / offline, 16 concurrent": result, "decode processes, MB resident beyond the KV cache": {"ours": memory}}


def decode_memory(launcher_pid: int) -> float:
    """Resident MB of decode's two processes, the engine's and the one that answers, less what the KV cache mapping holds, from /proc."""
    stubs = (stub for own in psutil.Process(launcher_pid).children(recursive=True) for stub in find_stubs(own.pid))
    stub = next(stub for stub in stubs if stub.model == "decode")
    resident = cache = 0
    for pid in (stub.pid, find_engine(stub.pid)):
        for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text()):
            size, rss = (int(re.search(rf"^{key}:\s+(\d+) kB", block, re.M)[1]) for key in ("Size", "Rss"))
            resident += rss
            if "/dev/zero" in block.split("\n")[0] and size > 50_000:  # the cache's planes are the large shared mappings
                cache += rss
    return (resident - cache) / 1024


def host_time(repeats: int) -> dict[str, dict]:
    """Milliseconds of a step at batch 32 outside the model's forward: scheduling, drafting, sampling, text, bookkeeping."""
    llm = LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 5})
    results = {}
    for method in ("none", "ngram"):
        times = []
        for repeat in range(repeats):
            prompts = [f"# {method} {repeat}\n" + p for p in completion_prompts(32, (200, 600))]
            llm.generate(prompts, greedy(1), use_tqdm=False)
            metrics = llm.engine.metrics
            steps, seconds, model = metrics.steps, metrics.step_seconds, metrics.forward_seconds
            llm.generate(prompts, greedy(48), speculative={"method": method}, use_tqdm=False)
            outside = (metrics.step_seconds - seconds) - (metrics.forward_seconds - model)
            times.append(1e3 * outside / (metrics.steps - steps))
        results[f"host ms a step outside the model, batch 32, {method}"] = {"ours": statistics.median(times)}
    return results


PARTS = {
    "transformers": against_transformers,
    "editing": ngram_on_editing,
    "ranks": ranks_against_one,
    "served": served_against_offline,
    "host": host_time,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    print(f"{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}, commit {commit}")
    results: dict[str, dict] = {}
    for name in args.only:
        for row, values in PARTS[name](args.repeats).items():
            results[row] = values
            if "ratio" in values:
                low, high = values["range"]
                print(
                    f"{row:52s} {values['ours']:8.1f} / {values['theirs']:8.1f} tokens/s = {values['ratio']:.2f} [{low:.2f}, {high:.2f}]", flush=True
                )
            else:
                print(f"{row:52s} {values['ours']:8.2f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
