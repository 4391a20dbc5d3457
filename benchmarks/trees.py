"""Chains against trees at equal numbers of drafts, so many requests at a time: tokens a step and speed, against plain decoding.

    python -m benchmarks.trees --budgets 4 8 16                        # the bundled model and its drafter
    python -m benchmarks.trees --budgets 16 --batch 8 --prompts 16     # eight requests at once
    python -m benchmarks.trees --model DIR --speculative '{"method": "eagle3", "model": "HEAD"}' --device cuda --budgets 16 31 63

All servers of a table take turns at the same prompts, so that what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from backend import LLM, SamplingParams
from benchmarks.models import model_folder
from benchmarks.workloads import completion_prompts

MAX_CHAIN = 16
"""Drafts of a chain at most."""


@dataclass
class Server:
    name: str
    speculative: dict[str, Any]
    llm: LLM = field(init=False)
    clock: Callable[[], float] = time.perf_counter
    seconds: list[float] = field(default_factory=list)
    """Of each turn, all prompts together."""
    emitted: int = 0
    steps: int = 0
    drafted: int = 0
    tokens: list[list[int]] = field(default_factory=list)

    def run(self, prompts: list[str], params: SamplingParams, batch: int) -> None:
        groups = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
        started = self.clock()
        outputs = [result.outputs[0] for group in groups for result in self.llm.generate(group, params, use_tqdm=False)]
        self.seconds.append(self.clock() - started)
        self.tokens = [list(output.token_ids) for output in outputs]
        for output in outputs:
            self.emitted, self.steps = self.emitted + output.stats.emitted, self.steps + output.stats.steps
            self.drafted += output.stats.drafted


def servers_of(base: dict[str, Any], budgets: list[int], depth: int, top_k: int | None) -> list[Server]:
    """Plain decoding, then of each budget the chain, where there is one so long, and the tree, as it is and as large as is worth it."""
    found = [Server("none", {"method": "none"})]
    for count in budgets:
        own = {**base, "adaptive": False}
        if count <= MAX_CHAIN and base["method"] != "token_recycling":
            found.append(Server(f"chain of {count}", {**own, "num_speculative_tokens": count}))
        shape = {"tree_nodes": count, **({"tree_top_k": top_k} if top_k else {})}
        for name, is_adaptive in ((f"tree of {count}", False), (f"tree of up to {count}", True)):
            found.append(Server(name, {**own, "num_speculative_tokens": min(count, depth), **shape, "adaptive": is_adaptive}))
    if base["method"] != "token_recycling":
        found += [Server(f"token recycling, {n}", {"method": "token_recycling", "adaptive": False, "tree_nodes": n}) for n in budgets]
    return found


def take_turns(servers: list[Server], args: argparse.Namespace, prompts: list[str] | None = None) -> None:
    """At the same prompts, in an order of its own each turn. prompts: None: code to be completed."""
    if prompts is None:
        prompts = completion_prompts(args.prompts, (200, 800), seed=2)
    params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=1, ignore_eos=True)
    for server in servers:  # what is compiled or remembered
        server.run(prompts[: args.batch], params, args.batch)
        server.seconds, server.emitted, server.steps, server.drafted = [], 0, 0, 0
    order = list(servers)
    for turn in range(args.turns):
        random.Random(turn).shuffle(order)
        for server in order:
            server.run(prompts, params, args.batch)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `take_turns` reads."""
    parser.add_argument("--batch", type=int, default=1, help="requests at once")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", default="auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=model_folder, help="a folder; default: the bundled model")
    parser.add_argument("--speculative", type=json.loads, default={"method": "mtp"}, metavar="JSON", help="the drafter")
    parser.add_argument("--budgets", type=int, nargs="+", default=[4, 8, 16], help="drafts that a step verifies")
    parser.add_argument("--depth", type=int, default=6, help="of trees")
    parser.add_argument("--top-k", type=int, help="candidates that may follow a draft of a tree")
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    servers = servers_of(args.speculative, args.budgets, args.depth, args.top_k)
    options = {"device": args.device, "enable_prefix_caching": False, **({"model": str(args.model)} if args.model else {})}
    for server in servers:
        server.llm = LLM(speculative_config=server.speculative, kv_cache_memory="256MiB", max_batch_size=args.batch, **options)
    take_turns(servers, args)
    plain = servers[0]
    print("| drafts | drafts a step | tokens a step | x plain | the same tokens |\n|---|---|---|---|---|")
    for server in servers:
        speed = statistics.median(a / b for a, b in zip(plain.seconds, server.seconds))
        is_same = "yes" if server.tokens == plain.tokens else "no"
        print(f"| {server.name} | {server.drafted / server.steps:.1f} | {server.emitted / server.steps:.2f} | {speed:.2f} | {is_same} |", flush=True)


if __name__ == "__main__":
    main()
