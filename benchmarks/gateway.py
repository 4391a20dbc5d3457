"""What the gateway costs: against direct gRPC at 16 concurrent requests, and the memory that 500 open streams hold.

    python -m benchmarks.gateway [--repeats 5] [--only NAME ...]

Bundled model, greedy, prompts of held-out code, one server (its engine on one core) and one gateway. Direct and
through the gateway run together, half of the requests each (what else the machine does meets both alike), and in turns (which also shows what
the gateway's own work takes from the server). Medians over the repeats, with the least and the greatest in brackets.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from benchmarks.workloads import Requests, completion_requests
from client import AsyncClient
from deploy.demo import free_ports, running_gateway, running_server

CONCURRENCY = 16
NUM_REQUESTS = 48
NUM_STREAMS = 500
IDLE_SECONDS = 15.0
"""Long enough for the gateway's keep-alives."""
SPECULATION: dict[str, dict | None] = {"plain": {"num_speculative_tokens": 0}, "speculating": None}

Arrivals = AsyncIterator[float]
"""As tokens come: how long, in milliseconds, whoever answers has itself waited for the first of them; the direct client waits for nobody else."""
Open = Callable[[str, int, dict | None], Arrivals]


@dataclass
class Timing:
    """Of one request, in milliseconds."""

    first: float
    per_token: float
    added: float
    """Of the first token: by everything between the client and the one that talks to the server."""


@dataclass
class Address:
    host: str
    port: int
    pid: int

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_megabytes(self) -> float:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def body_of(prompt: str, max_tokens: int, speculative: dict | None) -> dict:
    values = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "stream": True}
    return {**values, "speculative": speculative} if speculative is not None else values


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def post(connection: Connection, body: dict) -> None:
    """Sends a request. A client of a few lines: a full HTTP library would cost more than the gateway does."""
    data = orjson.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection[1].write(head.encode() + data)


def through_gateway(address: Address) -> Open:
    idle: list[Connection] = []  # kept open, as clients do

    async def run(prompt: str, max_tokens: int, speculative: dict | None) -> Arrivals:
        connection = idle.pop() if idle else await asyncio.open_connection(address.host, address.port)
        reader = connection[0]
        post(connection, body_of(prompt, max_tokens, speculative))
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert head.startswith("HTTP/1.1 200"), head
        waited = float(head.partition("first-token;dur=")[2].partition("\r\n")[0])
        while (line := await reader.readline()) != b"data: [DONE]\n":
            if line.startswith(b"data: "):
                orjson.loads(line[6:])
                yield waited
        await reader.readuntil(b"\r\n0\r\n\r\n")  # the last of the chunks that HTTP sends
        idle.append(connection)

    return run


def straight(client: AsyncClient) -> Open:
    async def run(prompt: str, max_tokens: int, speculative: dict | None) -> Arrivals:
        started, waited = time.perf_counter(), 0.0
        async for _ in client.stream(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, speculative=speculative):
            waited = waited or 1e3 * (time.perf_counter() - started)
            yield waited

    return run


async def time_one(run: Open, prompt: str, max_tokens: int, speculative: dict | None) -> Timing:
    started, first, last, waited = time.perf_counter(), 0.0, 0.0, 0.0
    async for waited in run(prompt, max_tokens, speculative):  # noqa: B007
        last = time.perf_counter()
        first = first or last
    first_ms = 1e3 * (first - started)
    return Timing(first_ms, 1e3 * (last - first) / (max_tokens - 1), first_ms - waited)


async def time_all(ways: dict[str, Open], requests: dict[str, Requests], speculative: dict | None) -> dict[str, list[Timing]]:
    """CONCURRENCY workers in all, shared evenly by the ways, each with one request open at a time."""
    waiting = {way: iter(requests[way]) for way in ways}
    timings: dict[str, list[Timing]] = {way: [] for way in ways}

    async def work(way: str) -> None:
        for prompt, max_tokens in waiting[way]:
            timings[way].append(await time_one(ways[way], prompt, max_tokens, speculative))

    await asyncio.gather(*(work(way) for way in ways for _ in range(CONCURRENCY // len(ways))))
    return timings


def summarize(timings: list[Timing]) -> tuple[float, float, float]:
    """(p50 of the first token, mean time per token, p50 of what was added to the first), milliseconds."""
    return statistics.median(t.first for t in timings), statistics.fmean(t.per_token for t in timings), statistics.median(t.added for t in timings)


def spread(values: list[float], form: str = "{:.2f}") -> str:
    low, middle, high = (form.format(v) for v in (min(values), statistics.median(values), max(values)))
    return f"{middle} [{low}, {high}]"


async def compare(address: Address, grpc: str, repeats: int, are_together: bool, results: dict) -> None:
    """are_together: both ways at once, in one batch, so that what else the machine does meets both alike; else in turns."""
    turn = itertools.count()
    title = "together" if are_together else "in turns"
    async with AsyncClient(grpc, inactivity_timeout=60) as client:
        ways = {"direct": straight(client), "gateway": through_gateway(address)}
        for name, speculative in SPECULATION.items():
            measured: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
            cpu: list[float] = []
            for repeat in range(repeats + 1):
                for group in [ways] if are_together else [{way: ways[way]} for way in sorted(ways, reverse=bool(repeat % 2))]:
                    prompts = completion_requests(NUM_REQUESTS // len(group))
                    requests = {way: [(f"# {next(turn)}\n{p}", n) for p, n in prompts] for way in group}  # the prefix cache knows none of them
                    before = address.cpu_seconds()
                    timings = await time_all(group, requests, speculative)
                    if repeat:  # the first is the warm-up
                        for way in group:
                            measured[way].append(summarize(timings[way]))
                        if "gateway" in group:
                            cpu.append(1e6 * (address.cpu_seconds() - before) / sum(n for _, n in prompts))
            pairs = list(zip(measured["direct"], measured["gateway"]))
            first = [g[0] - d[0] for d, g in pairs]
            ratio = [g[1] / d[1] for d, g in pairs]
            results[f"{name}, {title}"] = {**measured, "first_more_ms": first, "per_token_ratio": ratio, "gateway_cpu_us_per_token": cpu}
            print(f"{name}, {title}")
            for label, place in (("first token p50, ms", 0), ("time per token, ms", 1), ("added to first, ms", 2)):
                direct, gateway = ([v[place] for v in measured[way]] for way in ("direct", "gateway"))
                print(f"  {label:20s} direct {spread(direct):24s} gateway {spread(gateway)}")
            print(f"  first token {spread(first)} ms later, time per token {spread(ratio, '{:.3f}')} times,", end=" ")
            print(f"gateway's CPU time {spread(cpu, '{:.0f}')} us per token", flush=True)


async def hold_streams(
    address: Address, max_tokens: int, seconds: float, is_read: Callable[[asyncio.StreamReader], Awaitable[object]] | None = None
) -> float:
    """The gateway's resident MB at its largest, while NUM_STREAMS streams are open."""
    prompt = completion_requests(1)[0][0]
    connections = await asyncio.gather(*(asyncio.open_connection(address.host, address.port) for _ in range(NUM_STREAMS)))
    for i, connection in enumerate(connections):
        post(connection, body_of(f"# {i}\n{prompt}", max_tokens, None))
    reading = [asyncio.ensure_future(is_read(reader)) for reader, _ in connections] if is_read else []
    largest = 0.0
    for _ in range(round(4 * seconds)):
        await asyncio.sleep(0.25)
        largest = max(largest, address.resident_megabytes())
    for task in reading:
        task.cancel()
    for _, writer in connections:
        writer.close()
    return largest


@contextlib.contextmanager
def serving(*options: str) -> Iterator[tuple[Address, str]]:
    """A server with a gateway in front: the gateway's address, and the server's for gRPC."""
    ports = free_ports(3)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(*ports, Path(folder) / "log", f"--repository={folder}/repository", *options),
        running_gateway(Path(folder) / "gateway", f"127.0.0.1:{ports[1]}") as (url, process),
    ):
        host, _, port = url.removeprefix("http://").partition(":")
        yield Address(host, int(port), process.pid), f"127.0.0.1:{ports[1]}"


def measure_cost(repeats: int, results: dict) -> None:
    with serving("--num-threads=1") as (address, grpc):
        for are_together in (True, False):
            asyncio.run(compare(address, grpc, repeats, are_together, results))
        results["running_mb"] = asyncio.run(hold_streams(address, 64, 5.0, lambda reader: reader.read()))
        print(f"{NUM_STREAMS} streams that receive tokens: {results['running_mb']:.0f} MB resident", flush=True)


def measure_idle(repeats: int, results: dict) -> None:
    with serving("--max-batch-size=1") as (address, _):  # all but one wait
        empty = address.resident_megabytes()
        results["idle_mb"] = asyncio.run(hold_streams(address, 1900, IDLE_SECONDS))
        print(f"{NUM_STREAMS} idle streams: {results['idle_mb']:.0f} MB resident (none: {empty:.0f} MB)", flush=True)


PARTS = {"cost": measure_cost, "idle": measure_idle}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, commit {commit}")
    results: dict = {}
    for name in args.only:
        PARTS[name](args.repeats, results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
