"""How many prefill nodes for how many decode nodes: a simulation of up to 64 of them, from times that were measured on one GPU each.

    python -m benchmarks.disaggregation_plan [--nodes 2 4 8] [--inputs 512 2048 8192] [--outputs 64 256 1024] [--first-ms 2000] [--token-ms 20]
        [--svg FILE]
    python -m benchmarks.disaggregation_plan --check

Requests come at random (Poisson) and go to the decode node with the fewest open ones; its prompt goes to the prefill node that has the fewest
tokens to compute. Goodput: the most requests a second of which 99% have their first token within --first-ms and a mean time per token within
--token-ms. Compared with as many nodes that do both. --check: the load of `benchmarks.disaggregation` on two H200s, simulated beside what
was measured there.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.plot_disaggregation import draw

GOOD_SHARE = 0.99


@dataclass(frozen=True)
class Costs:
    """Of a model on one GPU. The default: the 8B shape in bfloat16 on an H200, from RESULTS.md (gpu_step, gpu_mixed, disaggregation)."""

    batches: tuple[int, ...] = (1, 8, 32, 128)
    steps: tuple[float, ...] = (3.70e-3, 3.81e-3, 4.06e-3, 4.70e-3)
    """Seconds of a step that decodes so many, without reading their contexts."""
    context_token: float = 131072 / 4.1e12
    """Seconds to read one token's keys and values in a step."""
    prompt: float = 3e-3
    """Seconds that a prompt takes beside its computation."""
    prompt_token: float = 2.33e-5
    prompt_pair: float = 6.5e-10
    """Seconds a token, and a pair of token and earlier token."""
    hand_off: float = 6e-3
    """Seconds from a prompt's end to the decode node's first step with it, beside its pages."""
    moved_token: float = 131072 / 164e9
    """Seconds to move one token's pages; all but the last chunk's move while the rest is computed."""
    chunk: int = 4096
    chunk_seconds: float = 0.05
    """Of a step with a prompt in it, on a node that does both: about the most (max_step_ms)."""
    max_batch: int = 128
    kv_tokens: int = 800_000
    """That a node's memory holds."""

    def step(self, batch: int, context: int) -> float:
        place = min(max(bisect.bisect_left(self.batches, batch), 1), len(self.batches) - 1)
        (low, high), (fast, slow) = self.batches[place - 1 : place + 1], self.steps[place - 1 : place + 1]
        return fast + (slow - fast) * (batch - low) / (high - low) + context * self.context_token

    def prefill(self, begin: int, end: int) -> float:
        return (end - begin) * self.prompt_token + (end * end - begin * begin) * self.prompt_pair

    def prefill_end(self, begin: int, seconds: float) -> int:
        """How far a prompt comes in so many seconds."""
        half = self.prompt_token / (2 * self.prompt_pair)
        return int(math.sqrt((begin + half) ** 2 + seconds / self.prompt_pair) - half)


@dataclass
class Request:
    arrival: float
    prompt_len: int
    output_len: int
    first: float = 0.0
    """When the first token came."""
    last: float = 0.0
    on_end: Callable[[float], None] | None = None


class Clock:
    """Runs what is to happen, in the order of its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), action))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()


@dataclass
class Prefill:
    """Steps over the prompts that wait, the first ones first, of so many tokens in all; a prompt is there when the step with its end is."""

    clock: Clock
    costs: Costs
    owed: int = 0
    _waiting: deque[tuple[Request, int, Callable[[Request], None]]] = field(default_factory=deque)
    """And how many tokens of each were computed."""
    _is_running: bool = False

    def compute(self, request: Request, then: Callable[[Request], None]) -> None:
        self.owed += request.prompt_len
        self._waiting.append((request, 0, then))
        if not self._is_running:
            self._is_running = True
            self._begin()

    def _begin(self) -> None:
        costs, room, seconds, done = self.costs, self.costs.chunk, self.costs.prompt, []
        while self._waiting and room:
            request, begin, then = self._waiting.popleft()
            end = min(request.prompt_len, begin + room)
            seconds += costs.prefill(begin, end)
            room -= end - begin
            if end < request.prompt_len:
                self._waiting.appendleft((request, end, then))
            else:
                done.append((request, then))
        self.clock.at(self.clock.now + max(costs.steps[0], seconds), lambda: self._finish(done, costs.chunk - room))

    def _finish(self, done: list[tuple[Request, Callable[[Request], None]]], num_tokens: int) -> None:
        costs = self.costs
        self.owed -= num_tokens
        for request, then in done:
            arrives = self.clock.now + costs.hand_off + min(request.prompt_len, costs.chunk) * costs.moved_token
            self.clock.at(arrives, partial(then, request))
        self._is_running = bool(self._waiting)
        if self._is_running:
            self._begin()


@dataclass
class Decode:
    """Steps over all requests that it has. prompts: those that it computes itself, in chunks beside the others' tokens."""

    clock: Clock
    costs: Costs
    num_open: int = 0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Each step's seconds, and how many requests waited for it."""
    _waiting: list[Request] = field(default_factory=list)
    _prompts: list[tuple[Request, int]] = field(default_factory=list)
    _ends: list[tuple[int, int, Request]] = field(default_factory=list)
    """By the step after which a request is over."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _num_steps: int = 0
    _context: int = 0
    _held: int = 0
    _is_running: bool = False

    def take(self, request: Request, *, has_prompt: bool) -> None:
        """has_prompt: its first token is there, and was computed elsewhere."""
        if has_prompt:
            request.first = self.clock.now
            self._waiting.append(request)
        else:
            self._prompts.append((request, 0))
        if not self._is_running:
            self._is_running = True
            self._begin()

    def _join(self, request: Request) -> None:
        heapq.heappush(self._ends, (self._num_steps + request.output_len - 1, next(self._numbers), request))
        self._context += request.prompt_len
        self._held += request.prompt_len + request.output_len

    def _has_room(self, request: Request) -> bool:
        return len(self._ends) < self.costs.max_batch and self._held + request.prompt_len + request.output_len <= self.costs.kv_tokens

    def _begin(self) -> None:
        while self._waiting and self._has_room(self._waiting[0]):
            self._join(self._waiting.pop(0))
        batch = len(self._ends)
        seconds = self.costs.step(batch, self._context) if batch else 0.0
        room, done = self.costs.chunk, []
        while self._prompts and room and self._has_room(self._prompts[0][0]):
            request, begin = self._prompts[0]
            end = min(request.prompt_len, begin + room)
            if batch:  # running requests wait for it
                end = min(end, max(begin + 256, self.costs.prefill_end(begin, max(0.0, self.costs.chunk_seconds - seconds))))
            seconds += self.costs.prefill(begin, end) + (self.costs.prompt if begin == 0 and not batch else 0.0)
            room -= end - begin
            if end < request.prompt_len:
                self._prompts[0] = (request, end)
                break
            done.append(self._prompts.pop(0)[0])
        if not seconds:
            self._is_running = False
            return
        self.gaps.append((seconds, batch))
        self.clock.at(self.clock.now + seconds, lambda: self._finish(done))

    def _finish(self, done: list[Request]) -> None:
        self._num_steps += 1
        self._context += len(self._ends)
        while self._ends and self._ends[0][0] <= self._num_steps:
            request = heapq.heappop(self._ends)[2]
            request.last = self.clock.now
            self._context -= request.prompt_len + request.output_len - 1
            self._held -= request.prompt_len + request.output_len
            self.num_open -= 1
            if request.on_end is not None:
                request.on_end(self.clock.now)
        for request in done:
            request.first = self.clock.now
            self._join(request)
        self._begin()


class Cluster:
    """num_prefill nodes for num_decode; with none of the first, every node does both."""

    def __init__(self, num_prefill: int, num_decode: int, costs: Costs) -> None:
        self.clock = Clock()
        self.prefill = [Prefill(self.clock, costs) for _ in range(num_prefill)]
        self.decode = [Decode(self.clock, costs) for _ in range(num_decode)]

    def send(self, request: Request) -> None:
        target = min(self.decode, key=lambda node: node.num_open)
        target.num_open += 1
        if self.prefill:
            min(self.prefill, key=lambda node: node.owed).compute(request, partial(target.take, has_prompt=True))
        else:
            target.take(request, has_prompt=False)


def is_good(request: Request, first_seconds: float, token_seconds: float) -> bool:
    per_token = (request.last - request.first) / max(1, request.output_len - 1)
    return bool(request.last) and request.first - request.arrival <= first_seconds and per_token <= token_seconds


def holds(rate: float, split: tuple[int, int], lengths: tuple[int, int], args: argparse.Namespace, costs: Costs) -> bool:
    """Whether so many requests a second are served well."""
    cluster, numbers, requests = Cluster(*split, costs), random.Random(7), []
    count, now = max(200, int(rate * args.seconds)), 0.0
    for _ in range(count):
        now += numbers.expovariate(rate)
        request = Request(now, max(16, int(numbers.gauss(1, 0.25) * lengths[0])), max(2, int(numbers.gauss(1, 0.25) * lengths[1])))
        requests.append(request)
        cluster.clock.at(now, partial(cluster.send, request))
    cluster.clock.run(now + args.first_ms / 1000 + 3 * lengths[1] * args.token_ms / 1000)
    return sum(is_good(r, args.first_ms / 1000, args.token_ms / 1000) for r in requests) >= GOOD_SHARE * count


def goodput(split: tuple[int, int], lengths: tuple[int, int], args: argparse.Namespace, costs: Costs) -> float:
    """Requests a second, to 3%."""
    low, high = 0.0, 0.25 * sum(split)
    while holds(high, split, lengths, args, costs):
        low, high = high, 2 * high
    while high - low > 0.03 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle, split, lengths, args, costs) else (low, middle)
    return low


def advise(args: argparse.Namespace, costs: Costs) -> None:
    print("| nodes | input, output | nodes that do both: requests/s | prefill + decode: requests/s (best split) | ratio |\n|---|---|---|---|---|")
    drawn: dict[int, dict[tuple[int, int], tuple[float, str]]] = {total: {} for total in args.nodes}
    for total, *lengths in itertools.product(args.nodes, args.inputs, args.outputs):
        pair = (lengths[0], lengths[1])
        mixed = goodput((0, total), pair, args, costs)
        step = max(1, total // 8)
        found = {(n, total - n): goodput((n, total - n), pair, args, costs) for n in range(step, total, step)}
        best = max(found, key=found.__getitem__)
        ratio = f"{found[best] / mixed:.2f}" if mixed else "-"
        print(f"| {total} | {pair[0]}, {pair[1]} | {mixed:.1f} | {found[best]:.1f} ({best[0]} + {best[1]}) | {ratio} |", flush=True)
        drawn[total][pair] = found[best] / mixed if mixed else 0.0, f"{best[0]} + {best[1]}"
    if args.svg:
        limits = f"first token within {args.first_ms / 1000:g} s and {args.token_ms:g} ms a token for {GOOD_SHARE:.0%}"
        args.svg.write_text(draw(drawn, args.inputs, args.outputs, limits))


MEASURED = {
    "one": {"tokens/s": 9506, "token p50 ms": 4.9, "token p99 ms": 38.2, "first token p50 ms": 298},
    "two": {"tokens/s": 11621, "token p50 ms": 4.9, "token p99 ms": 7.8, "first token p50 ms": 306},
}
"""RESULTS.md, two H200s at 5386746: 64 streams of 64 + 400 tokens, one after the other, and a prompt of 8,192 tokens every second."""


def check(costs: Costs) -> None:
    seconds, num_streams = 24.0, 64
    print("| servers | | measured | simulated | ratio |\n|---|---|---|---|---|")
    for name, split in (("one", (0, 1)), ("two", (1, 1))):
        cluster, prompts = Cluster(*split, costs), list[Request]()

        def stream(now: float, cluster: Cluster = cluster) -> None:
            cluster.send(Request(now, 64, 400, on_end=lambda end: stream(end)))

        for _ in range(num_streams):
            stream(0.0)
        for i in range(1, int(seconds)):
            prompts.append(Request(float(i), 8192, 2))
            cluster.clock.at(float(i), partial(cluster.send, prompts[-1]))
        cluster.clock.run(seconds)
        gaps = sorted((gap, count) for gap, count in cluster.decode[0].gaps if count)
        total, tokens = 0, sum(count for _, count in gaps)
        quantiles: list[float] = []
        for gap, count in gaps:
            while len(quantiles) < 2 and total + count >= (0.5, 0.99)[len(quantiles)] * tokens:
                quantiles.append(1000 * gap)
            total += count
        first = sorted(1000 * (r.first - r.arrival) for r in prompts if r.first)
        found = dict(zip(MEASURED[name], (tokens / seconds, *quantiles, first[len(first) // 2]), strict=True))
        for what, value in MEASURED[name].items():
            print(f"| {name} | {what} | {value} | {found[what]:.4g} | {found[what] / value:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8], help="in all")
    parser.add_argument("--inputs", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--outputs", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--first-ms", type=float, default=2000.0)
    parser.add_argument("--token-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="of requests")
    parser.add_argument("--svg", type=Path, help="draws the ratios")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        check(Costs())
    else:
        advise(args, Costs())


if __name__ == "__main__":
    main()
