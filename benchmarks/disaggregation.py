"""Prefill and decode on two servers against one server that does both, side by side in one run.

    python -m benchmarks.disaggregation [--repeats 3] [--streams 4] [--seconds 20] [--gap 1.0] [--model DIR] [--devices cuda:0 cuda:1]
        [--shape llama-8b --options '{"kv_cache_memory": "24GiB"}' --lengths 512 2048 8192 --streams 64 --speculative-config '{"method": "none"}'] ...

First greedy answers of both, which must be the same. Then prompts of several lengths, one at a time: time to first token of both, and what was
moved. Then streams of tokens while long prompts arrive at a steady rate: time between a stream's tokens, and time to first token of those prompts.
A Redis server is started for the run.
On CPU all servers share the cores; the server that does both then has them alone while it is measured, for the others have nothing to do.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from backend.text import Tokenizer
from benchmarks.gpu_step import SHAPES, write_target
from benchmarks.models import model_folder
from benchmarks.workloads import completion_prompts
from client import AsyncClient
from deploy.demo import free_ports, open_url, running_server

ROOT = Path(__file__).parent.parent
UNPACKED = ROOT / ".venv" / "redis" / "usr"
MARKS = itertools.count(10)


@dataclass
class Times:
    """Seconds."""

    first: list[float] = field(default_factory=list)
    """To the first token, of the prompts that arrive."""
    between: list[float] = field(default_factory=list)
    """Per token of the streams: each response's, shared out over its tokens."""


def start_redis(port: int, folder: str) -> subprocess.Popen[bytes]:
    executable = shutil.which("redis-server") or str(UNPACKED / "bin" / "redis-server")
    libraries = ":".join([*map(str, UNPACKED.glob("lib/*")), os.environ.get("LD_LIBRARY_PATH", "")])
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries} if executable.startswith(str(UNPACKED)) else None
    command = [executable, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)


def fresh(token_ids: list[int], length: int) -> list[int]:
    """So many of them, after a beginning that no cache knows."""
    mark = next(MARKS)
    return [10 + mark % 1000, 10 + mark // 1000, *token_ids[: length - 2]]


async def first_token(client: AsyncClient, token_ids: list[int]) -> float:
    started = time.perf_counter()
    first = 0.0
    async for chunk in client.stream(token_ids, max_tokens=2, temperature=0.0, ignore_eos=True):
        if chunk.token_ids and not first:
            first = time.perf_counter() - started
    return first


async def read_stream(client: AsyncClient, token_ids: list[int], until: float, times: Times) -> None:
    """One answer after another."""
    while time.perf_counter() < until:
        last = 0.0
        async with aclosing(client.stream(fresh(token_ids, len(token_ids)), max_tokens=400, temperature=0.0, ignore_eos=True)) as chunks:
            async for chunk in chunks:
                now = time.perf_counter()
                if chunk.token_ids and last:
                    times.between += [(now - last) / len(chunk.token_ids)] * len(chunk.token_ids)
                last = now if chunk.token_ids else last
                if now >= until:
                    break


async def read_streams(address: str, short: list[int], count: int, seconds: float) -> list[float]:
    times = Times()
    async with AsyncClient(address, inactivity_timeout=60) as client:
        until = time.perf_counter() + seconds
        await asyncio.gather(*(read_stream(client, short, until, times) for _ in range(count)))
    return times.between


def run_streams(mark: int, *args: Any) -> list[float]:
    """In a process of its own: several streams' clients are too much for one."""
    global MARKS
    MARKS = itertools.count(mark)
    return asyncio.run(read_streams(*args))


async def ask_steadily(address: str, long: list[int], args: argparse.Namespace) -> list[float]:
    async with AsyncClient(address, inactivity_timeout=60) as client:
        until = time.perf_counter() + args.seconds
        prompts = []
        while time.perf_counter() < until - args.gap:
            await asyncio.sleep(args.gap)
            prompts.append(asyncio.create_task(first_token(client, fresh(long, len(long)))))
        return list(await asyncio.gather(*prompts))


def load(address: str, short: list[int], long: list[int], args: argparse.Namespace, readers: ProcessPoolExecutor) -> Times:
    counts = [len(range(i, args.streams, args.readers)) for i in range(args.readers)]
    running = [readers.submit(run_streams, 1000 * next(MARKS), address, short, count, args.seconds) for count in counts if count]
    first = asyncio.run(ask_steadily(address, long, args))
    return Times(first, [t for one in running for t in one.result()])


async def alone(address: str, token_ids: list[int]) -> float:
    async with AsyncClient(address, inactivity_timeout=60) as client:
        return await first_token(client, token_ids)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def read_metric(port: int, name: str) -> float:
    with open_url(f"http://127.0.0.1:{port}/metrics", 10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


def read_transfers(port: int) -> tuple[float, float]:
    """Bytes, and seconds of reading."""
    return read_metric(port, "foretoken_pd_transferred_bytes_total"), read_metric(port, "foretoken_pd_transfer_seconds_total")


def wait_until_fetched(address: str, port: int, token_ids: list[int]) -> None:
    """The nodes know of each other."""
    end = time.monotonic() + 60
    while not read_metric(port, "foretoken_pd_fetched_prompts_total"):
        if time.monotonic() > end:
            raise RuntimeError("no prompt was computed by the prefill node")
        asyncio.run(alone(address, fresh(token_ids, len(token_ids))))
        time.sleep(0.5)


def measure_prompts(addresses: dict[str, str], port: int, token_ids: list[int], lengths: list[int], repeats: int) -> list[dict[str, float]]:
    rows = []
    for length in lengths:
        before = read_transfers(port)
        pairs = []
        for _ in range(repeats + 1):
            pairs.append({name: asyncio.run(alone(address, fresh(token_ids, length))) for name, address in addresses.items()})
        time.sleep(0.5)  # metrics are published
        bytes_and_seconds = zip(read_transfers(port), before, strict=True)
        moved, seconds = ((after - earlier) / (repeats + 1) for after, earlier in bytes_and_seconds)
        one, two = (statistics.median(pair[name] for pair in pairs[1:]) for name in ("one", "two"))
        ratios = sorted(pair["two"] / pair["one"] for pair in pairs[1:])
        rows.append(
            {
                "tokens": length,
                "one": one,
                "two": two,
                "ratio": statistics.median(ratios),
                "least": ratios[0],
                "greatest": ratios[-1],
                "moved": moved,
                "reading": seconds,
            }
        )
        print(
            f"prompt of {length:5d} tokens: first token after {1e3 * one:7.1f} ms (one server), {1e3 * two:7.1f} ms (two): "
            f"{rows[-1]['ratio']:.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}], "
            f"{moved / 1e6:.1f} MB moved in {1e3 * seconds:.1f} ms of reading",
            flush=True,
        )
    return rows


def compare_answers(addresses: dict[str, str], token_ids: list[int]) -> None:
    """Greedy answers to the same prompts; in bfloat16 near-ties may differ."""

    async def ask(address: str) -> list[list[int]]:
        async with AsyncClient(address, inactivity_timeout=60) as client:
            prompts = [token_ids[i * 150 : i * 150 + 90 + 16 * i] for i in range(12)]
            answers = await asyncio.gather(*(client.generate(ids, max_tokens=64, temperature=0.0, ignore_eos=True) for ids in prompts))
            return [answer[0].token_ids for answer in answers]

    one, two = (asyncio.run(ask(address)) for address in addresses.values())
    print(f"greedy answers of 64 tokens that are the same: {sum(a == b for a, b in zip(one, two, strict=True))} of {len(one)}", flush=True)


def measure_load(addresses: dict[str, str], short: list[int], long: list[int], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The two take turns."""
    total = {name: Times() for name in addresses}
    with ProcessPoolExecutor(args.readers, mp_context=multiprocessing.get_context("spawn")) as readers:
        list(readers.map(time.sleep, [1.0] * args.readers))  # all of them have started
        for _ in range(args.repeats):
            for name, address in addresses.items():
                times = load(address, short, long, args, readers)
                total[name].first += times.first
                total[name].between += times.between
    found = {}
    for name, times in total.items():
        found[name] = {
            "tokens_per_second": len(times.between) / (args.seconds * args.repeats),
            **{f"token_p{int(100 * s)}": quantile(times.between, s) for s in (0.5, 0.9, 0.99)},
            **{f"first_p{int(100 * s)}": quantile(times.first, s) for s in (0.5, 0.99)},
        }
        print(
            f"{name} server{'s' * (name == 'two')}: "
            + ", ".join(f"{k} {v:.1f}" if k.endswith("second") else f"{k} {1e3 * v:.1f} ms" for k, v in found[name].items())
        )
    print("two / one: " + ", ".join(f"{k} {found['two'][k] / found['one'][k]:.2f}" for k in found["one"]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4, help="that decode all the time")
    parser.add_argument("--seconds", type=float, default=20.0, help="of load, for each turn")
    parser.add_argument("--gap", type=float, default=1.0, help="seconds between two long prompts")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024, 1536])
    parser.add_argument("--model", type=model_folder, help="default: the bundled one")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="of a model with random weights, in place of --model")
    parser.add_argument("--readers", type=int, default=1, help="processes that read the streams")
    parser.add_argument("--options", type=json.loads, default={}, help="of all servers, as in a configuration file: JSON")
    parser.add_argument("--devices", nargs=2, default=["cpu", "cpu"], help="of the two nodes, or of their first ranks; the one server has the first")
    parser.add_argument("--speculative-config", default='{"method": "mtp", "num_speculative_tokens": 3}')
    parser.add_argument("--backend-directory", help="Triton's backends, where the server on PATH has none beside it")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    common = [f"--speculative-config={args.speculative_config}"] + ([f"--model={args.model}"] if args.model else [])
    token_ids: list[int] = []
    tokenizer = Tokenizer(args.model) if args.model else Tokenizer(str(ROOT / "model_repository/standalone/decode/1"))
    for prompt in completion_prompts(64, (2000, 4000), seed=5):
        token_ids += tokenizer.encode(prompt, add_special_tokens=False)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        (redis_port,) = free_ports(1)
        redis = start_redis(redis_port, folder)
        stack.callback(redis.kill)
        options = dict(args.options)
        if args.shape:
            target = write_target(args.shape, Path(folder), max_position_embeddings=2 * args.lengths[-1] + 4096)
            (target / "model.safetensors").touch()  # the launcher looks for weights; they are not read
            options |= {"model": str(target), "load_format": "dummy"}
        (Path(folder) / "options.yaml").write_text(json.dumps(options))
        common += [f"--scheduler-port={redis_port}", f"--config={folder}/options.yaml"]
        devices = {"mixed": args.devices[0], "prefill": args.devices[0], "decode": args.devices[1]}
        ports = {}
        for role, device in devices.items():
            ports[role] = free_ports(3)
            flags = [f"--repository={folder}/{role}", f"--role={role}", f"--device={device}", *common]
            if args.backend_directory:
                flags.append(f"--backend-directory={args.backend_directory}")
            stack.enter_context(running_server(*ports[role], Path(folder) / f"{role}.log", *flags))
        addresses = {"one": f"127.0.0.1:{ports['mixed'][1]}", "two": f"127.0.0.1:{ports['decode'][1]}"}
        metrics = ports["decode"][2]
        wait_until_fetched(addresses["two"], metrics, token_ids[:300])
        where = torch.cuda.get_device_name() if devices["decode"].startswith("cuda") else platform.processor() or platform.machine()
        print(f"{where}, {os.cpu_count()} cores, torch {torch.__version__}", flush=True)
        compare_answers(addresses, token_ids)
        prompts = measure_prompts(addresses, metrics, token_ids, args.lengths, args.repeats)
        found = measure_load(addresses, token_ids[:64], token_ids[: args.lengths[-1]], args)
        print(f"prompts that the decode node computed itself: {read_metric(metrics, 'foretoken_pd_fallbacks_total'):.0f}")
    if args.json:
        with suppress(FileNotFoundError):
            os.unlink(args.json)
        Path(args.json).write_text(json.dumps({"prompts": prompts, "load": found}, indent=1))


if __name__ == "__main__":
    main()
