"""Simulated nodes beside real ones: one and more prefill nodes for one decode node, under a load of requests that come at random.

    python -m benchmarks.disaggregation_check [--prefill 1 2] [--shares 0.5 0.8] [--threads 4] [--devices cuda:0 cuda:1 cuda:2] [--repeats 3]
        [--shape llama-8b --options '{"kv_cache_memory": "24GiB"}' --input 2048 ...]

First what a node takes when nothing else is to be done: prompts of several lengths on a prefill node (by the node's own clock, many at once), what
lies between the end of one alone and the client's first token, and the decode node's steps of several batches. From these the simulation of
`benchmarks.disaggregation_plan` says what a load gives, and the same requests at the same times are sent to the real nodes. A load's share is
that of what one prefill node can compute. On CPU every node has --threads cores of its own: there must be as many, and one or two to spare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from backend.config import BUNDLED_MODEL
from backend.text import Tokenizer
from benchmarks.disaggregation import first_token, fresh, quantile, read_metric, start_redis, wait_until_fetched
from benchmarks.disaggregation_plan import Cluster, Costs, Request
from benchmarks.gpu_serve import count_steps
from benchmarks.gpu_step import SHAPES, write_target
from benchmarks.workloads import completion_prompts
from client import AsyncClient
from deploy.demo import free_ports, running_server

LENGTHS, BATCHES = (0.25, 0.5, 1.0, 1.5), (1, 4, 8, 16)
"""Of prompts, in terms of --input; of steps."""
TOGETHER = 16
"""Prompts that are computed one after the other: a GPU that works without a pause is slower than one that rests between two."""
SPREAD = 0.25
"""Standard deviation of lengths, over their mean."""
SEED = 7


@dataclass
class Asked:
    """One request of a load: its lengths, and what became of it, in seconds."""

    at: float
    prompt_len: int
    output_len: int
    first: float = 0.0
    """From `at` to its first token."""
    token: float = 0.0
    """Mean time of the tokens after it."""


def make_load(rate: float, count: int, lengths: tuple[int, int], longest: int) -> list[Asked]:
    numbers, now, asked = random.Random(SEED), 0.0, []
    for _ in range(count):
        now += numbers.expovariate(rate)
        prompt_len, output_len = (max(16, int(numbers.gauss(1, SPREAD) * length)) for length in lengths)
        asked.append(Asked(now, min(prompt_len, longest), output_len))
    return asked


# -- what nodes take alone ----------------------------------------------------------------------------------------------------


async def ask_many(address: str, asked: list[Asked], token_ids: list[int]) -> None:
    async with AsyncClient(address, inactivity_timeout=120) as client:
        started = time.perf_counter()

        async def ask(own: Asked) -> None:
            await asyncio.sleep(max(0.0, started + own.at - time.perf_counter()))
            begun, first, last = time.perf_counter(), 0.0, 0.0
            prompt = fresh(token_ids, own.prompt_len)
            async for chunk in client.stream(prompt, max_tokens=own.output_len, temperature=0.0, ignore_eos=True):
                if chunk.token_ids:
                    last = time.perf_counter()
                    first = first or last
            own.first, own.token = first - begun, (last - first) / max(1, own.output_len - 1)

        await asyncio.gather(*(ask(own) for own in asked))


def measure_costs(address: str, metrics: dict[str, int], token_ids: list[int], args: argparse.Namespace) -> Costs:
    """Of one prefill and one decode node. metrics: their ports."""
    lengths = [int(share * args.input) for share in LENGTHS]
    computed, handed = [], []
    for length in lengths:
        seconds = [count_steps(metrics["prefill"])[1]]
        times = [asyncio.run(_alone(address, fresh(token_ids, length))) for _ in range(args.repeats + 2)]
        seconds.append(count_steps(metrics["prefill"])[1])
        asyncio.run(ask_many(address, [Asked(0.0, length, 1) for _ in range(TOGETHER)], token_ids))
        seconds.append(count_steps(metrics["prefill"])[1])
        computed.append((seconds[2] - seconds[1]) / TOGETHER)
        handed.append(statistics.median(times) - (seconds[1] - seconds[0]) / len(times))
    terms = np.array([[1.0, length, length**2] for length in lengths])
    fixed, by_token, by_pair = np.linalg.lstsq(terms, np.array(computed), rcond=None)[0].tolist()
    steps = []
    for batch in BATCHES:
        load = [Asked(0.0, args.input, 2 * args.output) for _ in range(batch)]
        asyncio.run(ask_many(address, load, token_ids))  # prompts, too: how long steps take is asked while they all decode
        steps.append(statistics.median(own.token for own in load))
    costs = Costs(
        batches=BATCHES,
        steps=tuple(steps),
        context_token=0.0,
        prompt=max(0.0, fixed),
        prompt_token=max(by_token, 1e-9),
        prompt_pair=max(by_pair, 1e-12),
        hand_off=max(0.0, statistics.median(handed)),
        moved_token=0.0,
    )
    for length, own in zip(lengths, computed, strict=True):
        print(f"prompt of {length} tokens: {1e3 * own:.1f} ms computed, {1e3 * (costs.prompt + costs.prefill(0, length)):.1f} by the fit")
    print(f"from its end to the first token: {1e3 * costs.hand_off:.1f} ms; steps of {BATCHES}: {', '.join(f'{1e3 * own:.2f}' for own in steps)} ms")
    return costs


def wait_until_used(address: str, ports: list[int], token_ids: list[int]) -> None:
    """The decode node knows of every prefill node. ports: of their metrics."""
    end = time.monotonic() + 60
    while not all(read_metric(port, "foretoken_steps_total") for port in ports):
        if time.monotonic() > end:
            raise RuntimeError("a prefill node has computed nothing")
        asyncio.run(ask_many(address, [Asked(0.0, len(token_ids), 1) for _ in range(4 * len(ports))], token_ids))
        time.sleep(0.5)


async def _alone(address: str, token_ids: list[int]) -> float:
    async with AsyncClient(address, inactivity_timeout=60) as client:
        return await first_token(client, token_ids)


# -- a load ---------------------------------------------------------------------------------------------------------------------


def simulate(asked: list[Asked], num_prefill: int, costs: Costs) -> list[Asked]:
    cluster = Cluster(num_prefill, 1, costs)
    requests = [Request(own.at, own.prompt_len, own.output_len) for own in asked]
    for request in requests:
        cluster.clock.at(request.arrival, partial(cluster.send, request))
    cluster.clock.run(float("inf"))
    return [Asked(r.arrival, r.prompt_len, r.output_len, r.first - r.arrival, (r.last - r.first) / max(1, r.output_len - 1)) for r in requests]


FIGURES: dict[str, Callable[[list[Asked]], float]] = {
    "first token p50": lambda asked: quantile([own.first for own in asked], 0.5),
    "first token p90": lambda asked: quantile([own.first for own in asked], 0.9),
    "first token mean": lambda asked: statistics.mean(own.first for own in asked),
    "per token p50": lambda asked: quantile([own.token for own in asked], 0.5),
}


def compare(address: str, prefill_ports: list[int], costs: Costs, token_ids: list[int], args: argparse.Namespace) -> None:
    """prefill_ports: of their metrics."""
    mean, num_prefill = costs.prompt + costs.prefill(0, args.input), len(prefill_ports)

    def alone(asked: Asked) -> float:
        return costs.prompt + costs.prefill(0, asked.prompt_len)

    for share in args.shares:
        made = [make_load(share / mean, args.requests, (args.input, args.output), args.longest) for _ in range(args.repeats)]
        before = [count_steps(port) for port in prefill_ports]
        for load in made:  # the same one each time: what differs is the machine
            asyncio.run(ask_many(address, load, token_ids))
        after = [count_steps(port) for port in prefill_ports]
        steps, seconds = (sum(now[i] - then[i] for now, then in zip(after, before, strict=True)) for i in (0, 1))
        expected = simulate(made[0], num_prefill, costs)
        show = partial(show_row, f"| {num_prefill} + 1 | {share:g} |")
        computed = f"computed a prompt, in {steps / args.repeats:.0f} steps"
        show(computed, [seconds / args.repeats / args.requests], statistics.mean(map(alone, expected)))
        for name, figure in FIGURES.items():
            show(name, [figure(load) for load in made], figure(expected))


def show_row(begin: str, name: str, measured: list[float], simulated: float) -> None:
    """Of one figure, in seconds."""
    found, median = sorted(1e3 * own for own in measured), 1e3 * statistics.median(measured)
    print(f"{begin} {name} | {median:.1f} [{found[0]:.1f}, {found[-1]:.1f}] | {1e3 * simulated:.1f} | {1e3 * simulated / median:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=int, nargs="+", default=[1, 2], help="prefill nodes, from the fewest on")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.8], help="of what one prefill node can compute")
    parser.add_argument("--requests", type=int, default=120, help="of a load")
    parser.add_argument("--input", type=int, default=768, help="tokens of a prompt, in the mean")
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=4, help="of each node, on CPU")
    parser.add_argument("--devices", nargs="+", help="of the decode node and of the prefill nodes; default: all on CPU")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="of a model with random weights, in place of the bundled one")
    parser.add_argument("--options", type=json.loads, default={}, help="of all servers, as in a configuration file: JSON")
    parser.add_argument("--backend-directory", help="Triton's backends, where the server on PATH has none beside it")
    args = parser.parse_args()
    args.longest = 2 * args.input
    devices = args.devices or ["cpu"] * (1 + max(args.prefill))
    if len(devices) != 1 + max(args.prefill) or args.prefill != sorted(args.prefill):
        parser.error(f"--prefill {args.prefill} and --devices {devices}: numbers must grow, and the decode and each prefill node has a device")
    tokenizer, token_ids = Tokenizer(BUNDLED_MODEL), list[int]()
    for prompt in completion_prompts(64, (2000, 4000), seed=5):
        token_ids += tokenizer.encode(prompt, add_special_tokens=False)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        (redis_port,) = free_ports(1)
        stack.callback(start_redis(redis_port, folder).kill)
        options = dict(args.options)
        if args.shape:
            target = write_target(args.shape, Path(folder), max_position_embeddings=2 * args.longest)
            (target / "model.safetensors").touch()  # the launcher looks for weights; they are not read
            options |= {"model": str(target), "load_format": "dummy"}
        (Path(folder) / "options.yaml").write_text(json.dumps(options))
        common = [f"--scheduler-port={redis_port}", f"--config={folder}/options.yaml", '--speculative-config={"method": "none"}']
        if args.backend_directory:
            common.append(f"--backend-directory={args.backend_directory}")

        def start(name: str, role: str, device: str) -> list[int]:
            ports = free_ports(3)
            own = [f"--repository={folder}/{name}", f"--role={role}", f"--device={device}"]
            own += [f"--num-threads={args.threads}"] if device == "cpu" else []
            stack.enter_context(running_server(*ports, Path(folder) / f"{name}.log", *own, *common))
            return ports

        decode = start("decode", "decode", devices[0])
        address, running = f"127.0.0.1:{decode[1]}", list[list[int]]()
        where = torch.cuda.get_device_name() if devices[0].startswith("cuda") else platform.processor() or platform.machine()
        print(f"{where}, {os.cpu_count()} cores, torch {torch.__version__}; {args.requests} requests of {args.input} + {args.output} tokens\n")
        costs: Costs | None = None
        for num_prefill in args.prefill:
            while len(running) < num_prefill:
                running.append(start(f"prefill{len(running)}", "prefill", devices[1 + len(running)]))
            wait_until_fetched(address, decode[2], token_ids[:300])
            wait_until_used(address, [ports[2] for ports in running], token_ids[:300])
            if costs is None:
                costs = measure_costs(address, {"prefill": running[0][2], "decode": decode[2]}, token_ids, args)
                print("\n| nodes | load | ms | measured | simulated | simulated / measured |\n|---|---|---|---|---|---|")
            compare(address, [ports[2] for ports in running], costs, token_ids, args)
        print(f"\nprompts that the decode node computed itself: {read_metric(decode[2], 'foretoken_pd_fallbacks_total'):.0f}")


if __name__ == "__main__":
    main()
