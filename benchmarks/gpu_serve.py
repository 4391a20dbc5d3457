"""Tokens per second through a real Triton server and gRPC streams against the same engine offline, on one GPU.

    python -m benchmarks.gpu_serve [--shape llama-8b] [--streams 1 128] [--methods none mtp] [--tensor-parallel 2 --ranks processes instances]
        [--turns 4]

Both run in turn on the same prompts of real code; weights are random and acceptance is simulated, as in gpu_step. Clients are processes
of their own, so that it is the server that is measured. The server is the one on PATH (--backend-directory: its backends). With --turns N
each stream asks N times, one after the other, and the engine offline has all the prompts at once, of which it runs as many as there are streams.
The last columns: after how many ms the first and the last stream had their first token, and their last one; and tokens in a response: above those
of a step, answers wait for the thread that sends them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from backend import LLM, SamplingParams
from backend.config import RANKS
from benchmarks.gpu_step import METHODS, SHAPES, make_prompts, write_drafter, write_target
from benchmarks.models import check_gpus
from deploy.demo import free_ports, open_url, running_server

MAX_STREAMS_OF_PROCESS = 16
PUBLISH_SECONDS = 2.5
TIMES = [f"foretoken_step_{phase}_seconds_total" for phase in ("propose", "forward", "verify")]


def run_offline(llm: LLM, prompts: list[list[int]], outputs: int) -> float:
    """Tokens a second of all prompts at once."""
    started = time.perf_counter()
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    llm.generate(requests, SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True), use_tqdm=False)
    return len(prompts) * outputs / (time.perf_counter() - started)


def client() -> None:
    """A process of streams: reads {address, prompts of each stream, outputs}, says that it is ready, starts on a line, prints what each stream
    received: [tokens, when it had the first and the last one by the machine's monotonic clock, responses with tokens]."""
    from client import AsyncClient

    job = json.loads(sys.stdin.readline())

    async def ask(own: AsyncClient, prompts: list[list[int]]) -> tuple[int, float, float, int]:
        received, first, responses = 0, 0.0, 0
        for ids in prompts:
            async for chunk in own.stream(ids, max_tokens=job["outputs"], temperature=0.0, ignore_eos=True):
                first = first or time.monotonic()
                received += len(chunk.token_ids)
                responses += bool(chunk.token_ids)
        return received, first, time.monotonic(), responses

    async def ask_all() -> list[tuple[int, float, float, int]]:
        async with AsyncClient(job["address"], inactivity_timeout=120) as own:
            await own.generate([1, 2, 3], max_tokens=1)
            print("ready", flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
            return await asyncio.gather(*(ask(own, prompts) for prompts in job["prompts"]))

    print(json.dumps(asyncio.run(ask_all())), flush=True)


def run_served(address: str, streams: list[list[list[int]]], outputs: int) -> tuple[float, list[int], float]:
    """Tokens a second of all streams, from several client processes, the milliseconds to the first and the last stream's first and last token, and
    tokens in a response."""
    parts = [streams[i : i + MAX_STREAMS_OF_PROCESS] for i in range(0, len(streams), MAX_STREAMS_OF_PROCESS)]
    command = [sys.executable, "-m", "benchmarks.gpu_serve", "--client"]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in parts]
    for process, part in zip(processes, parts):
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"address": address, "prompts": part, "outputs": outputs}) + "\n")
        process.stdin.flush()
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    started = time.monotonic()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [answer for process in processes if process.stdout is not None for answer in json.loads(process.stdout.readline())]
    seconds = time.monotonic() - started
    received, wanted = sum(answer[0] for answer in answers), sum(map(len, streams)) * outputs
    assert received == wanted, f"{received} tokens came of {wanted}"
    times = [1000 * (choose(answer[place] for answer in answers) - started) for place in (1, 2) for choose in (min, max)]
    return received / seconds, [round(own) for own in times], received / sum(answer[3] for answer in answers)


def count_steps(port: int) -> tuple[float, float]:
    """Steps that the server has run, and their seconds on the device, once it has published what it has done."""
    time.sleep(PUBLISH_SECONDS)
    with open_url(f"http://127.0.0.1:{port}/metrics", 10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith("foretoken_step")]
    values = {name: sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{")) for name in ("foretoken_steps_total", *TIMES)}
    return values["foretoken_steps_total"], sum(values[name] for name in TIMES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=["none", "mtp"])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--outputs", type=int, default=256)
    parser.add_argument("--turns", type=int, default=1, metavar="N", help="prompts of each stream, one after the other")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--ranks", nargs="+", choices=RANKS, default=RANKS[:1], help="what the server's ranks are, one after the other")
    parser.add_argument("--backend-directory")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        client()
        return
    check_gpus(parser, arguments.tensor_parallel)
    columns = ["method", "ranks", "streams", "offline tokens/s", "served tokens/s", "served / offline", "steps", "on the device, ms a step"]
    print(f"| {' | '.join([*columns, 'first tokens of streams, ms', 'last ones', 'tokens a response'])} |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = write_target(arguments.shape, folder)
        (target / "model.safetensors").touch()  # the launcher looks for weights; they are not read
        for method in arguments.methods:
            speculation: dict[str, Any] = {**METHODS[method], "adaptive": False, "accept_policy": "simulated"}
            if (drafter := write_drafter(method, target)) is not None:
                speculation["model"] = str(drafter)
            config: dict[str, Any] = {
                "model": str(target),
                "load_format": "dummy",
                "device": "cuda",
                "max_batch_size": max(arguments.streams),
                "max_num_batched_tokens": 8192,
                "max_model_len": arguments.prompt + arguments.outputs + 32,
                "enable_prefix_caching": False,
                "tensor_parallel_size": arguments.tensor_parallel,
                "speculative_config": speculation,
            }
            llm = LLM(**config)
            prompts = {count: make_prompts(llm, count * arguments.turns, arguments.prompt) for count in arguments.streams}
            offline = {}
            for count in arguments.streams:
                run_offline(llm, prompts[count], 16)
                offline[count] = run_offline(llm, prompts[count], arguments.outputs)
            llm.close()
            del llm
            gc.collect()
            torch.cuda.empty_cache()
            for ranks in arguments.ranks:
                where = folder / f"{method}-{ranks}"
                where.with_suffix(".yaml").write_text(json.dumps({**config, "ranks": ranks}))  # YAML reads JSON
                ports = free_ports(3)
                options = [f"--config={where.with_suffix('.yaml')}", f"--repository={where}"]
                if arguments.backend_directory:
                    options.append(f"--backend-directory={arguments.backend_directory}")
                with running_server(*ports, where.with_suffix(".log"), *options):
                    address = f"127.0.0.1:{ports[1]}"
                    for count in arguments.streams:
                        streams = [prompts[count][i::count] for i in range(count)]
                        run_served(address, streams, 16)
                        before = count_steps(ports[2])
                        served, times, together = run_served(address, streams, arguments.outputs)
                        steps, seconds = (after - own for after, own in zip(count_steps(ports[2]), before))
                        said = ranks if arguments.tensor_parallel > 1 else "1"
                        speeds = f"{offline[count]:.0f} | {served:.0f} | {served / offline[count]:.3f}"
                        ends = f"{times[0]} to {times[1]} | {times[2]} to {times[3]} | {together:.2f}"
                        print(f"| {method} | {said} | {count} | {speeds} | {steps:.0f} | {1000 * seconds / steps:.2f} | {ends} |", flush=True)


if __name__ == "__main__":
    main()
