"""The bundled model's drafters side by side, one request at a time: eagle3 (`foretoken serve`'s default) and mtp, alone and with ngram.

    python -m benchmarks.bundled --device cpu --prompts 6     # one thread, by its processor time
    python -m benchmarks.bundled --device cuda --tokens 192 --temperature 1

All servers take turns at the same prompts, as in benchmarks/trees.py; x none is the median of the turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from backend import LLM
from backend.config import DEFAULT_DRAFTER
from benchmarks.trees import Server, add_arguments, take_turns
from benchmarks.workloads import editing_prompts

HEADS: dict[str, dict[str, Any]] = {"mtp": {"method": "mtp"}, "eagle3": {"method": "eagle3", "model": str(DEFAULT_DRAFTER)}}


def servers_of(fixed: list[int], hybrids: list[tuple[int, int]]) -> list[Server]:
    """fixed: drafts of each step; hybrids: of the model, and with what ngram adds, as many as are worth it."""
    found = [Server("none", {"method": "none"}), Server("ngram 10", {"method": "ngram", "num_speculative_tokens": 10})]
    for count in fixed:
        own = {"num_model_steps": count, "num_speculative_tokens": count, "adaptive": False}
        found += [Server(f"{name} {count}", {**head, **own}) for name, head in HEADS.items()]
    for steps, count in hybrids:
        own = {"num_model_steps": steps, "num_speculative_tokens": count, "mtp_strategy": "with_ngram"}
        found += [Server(f"{name} {steps} + ngram, {count}", {**head, **own}) for name, head in HEADS.items()]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    servers = servers_of([3, 4], [(3, 5), (4, 6)])
    for server in servers:
        options = {"kv_cache_memory": "128MiB", "max_batch_size": args.batch, "enable_prefix_caching": False, "device": args.device}
        server.llm = LLM(speculative_config=server.speculative, **options)
        server.clock = time.process_time if server.llm.engine.worker.device.type == "cpu" else time.perf_counter
    editing = [prompt for prompt, _ in editing_prompts(args.prompts, seed=3)]
    print("| | drafts | tokens a step | x none | the same tokens |\n|---|---|---|---|---|")
    for name, prompts in (("completion", None), ("editing", editing)):
        take_turns(servers, args, prompts)
        for server in servers:
            speed = statistics.median(a / b for a, b in zip(servers[0].seconds, server.seconds))
            is_same = "yes" if server.tokens == servers[0].tokens else "no"
            print(f"| {name} | {server.name} | {server.emitted / server.steps:.2f} | {speed:.2f} | {is_same} |", flush=True)


if __name__ == "__main__":
    main()
