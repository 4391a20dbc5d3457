"""Mixtures of experts on a GPU: a layer's router and its experts, by number of tokens, with each kernel that takes so many.

    python -m benchmarks.gpu_experts [--shapes deepseek-v2-lite ernie-21b-a3b mixtral] [--tokens 1,8,32,64,128,512,2048]

Tokens and routers are random, so that nearly all experts are hit from some tens of tokens on. Every figure is the median of replays of a captured
graph over several layers, whose experts the cache cannot hold: us of a layer, and TB/s of the weights of the experts that were hit.
"""

from __future__ import annotations

import argparse
from unittest import mock

import torch

from benchmarks.gpu_linear import measure, measure_bandwidth
from kernels import experts, wide_experts
from kernels._load import device_stream
from kernels.activation import silu_mul
from kernels.route import Routing, route_tokens

SHAPES = {
    "deepseek-v2-lite": (64, 6, 2048, 1408),
    "ernie-21b-a3b": (64, 6, 2560, 1536),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral": (8, 2, 4096, 14336),
}
"""Experts, experts of a token, hidden and inner size."""
LAYERS, LEAST_HIT = 3, 18
"""LEAST_HIT: experts that a graph hits, lest it is short."""


class Layer:
    """Random weights of a mixture."""

    def __init__(self, num_experts: int, hidden: int, inner: int, device: torch.device) -> None:
        def draw(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(std=shape[-1] ** -0.5)

        self.gate = torch.randn(num_experts, hidden, device=device) / hidden**0.5
        self.gate_up, self.down = draw(num_experts, 2 * inner, hidden), draw(num_experts, hidden, inner)


def compare(name: str, counts: list[int], device: torch.device) -> None:
    num_experts, num_chosen, hidden, inner = SHAPES[name]
    layers = [Layer(num_experts, hidden, inner, device) for _ in range(LAYERS)]
    norm = torch.ones(hidden, device=device, dtype=torch.bfloat16), 1e-5
    for num_tokens in counts:
        turns = max(1, LEAST_HIT // (LAYERS * num_chosen))
        xs = [torch.randn(num_tokens, hidden, device=device, dtype=torch.bfloat16) for _ in range(LAYERS * turns)]
        own = [(x, layers[i % LAYERS]) for i, x in enumerate(xs)]

        def route(own: list[tuple[torch.Tensor, Layer]] = own, num_tokens: int = num_tokens) -> list[Routing]:
            sizes = (num_tokens, num_chosen, 0, num_experts, torch.bfloat16, device, (hidden, inner))
            return [route_tokens(x, layer.gate, num_chosen, norm=norm, groups=experts.choose_groups(*sizes)) for x, layer in own]

        cells, hit, mean = [f"router {measure(route) / len(own) * 1e3:6.1f}"], 0.0, num_tokens * num_chosen / num_experts
        never = 2**31
        for kind, fewest, largest in (("few", never, never), ("wide", 0, never), ("grouped", never, 0)):
            if (kind == "few" and mean > 64) or (kind == "grouped" and num_tokens < experts.MIN_MANY_TOKENS):
                continue
            limits = {"MAX_MEAN_ROWS": largest, "MAX_WIDE_MEAN_ROWS": largest}
            with mock.patch.object(wide_experts, "MIN_TOKENS", fewest), mock.patch.multiple(experts, **limits):
                routings = route()

                def mix(routings: list[Routing] = routings, own: list[tuple[torch.Tensor, Layer]] = own) -> None:
                    for routing, (x, layer) in zip(routings, own, strict=True):
                        weights = (routing.experts, routing.weights, layer.gate_up, layer.down)
                        experts.mix_experts(routing.x, *weights, silu_mul, True, 0, x, routing.lists)

                hit = sum(len(routing.experts.unique()) for routing in routings) / len(own)
                time = measure(mix) / len(own) * 1e3
            cells.append(f"{kind} {time:7.1f} ({hit * 3 * hidden * inner * 2 / time / 1e6:4.2f})")
        print(f"{name:16} {num_tokens:5} tokens, {hit:5.1f} experts: " + ", ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", default="1,8,32,64,128,512,2048")
    arguments = parser.parse_args()
    device = torch.device("cuda:0")
    with device_stream(device), torch.inference_mode():
        print(f"{torch.cuda.get_device_name()}: copy and sum {measure_bandwidth(device)} TB/s")
        for name in arguments.shapes:
            compare(name, [int(count) for count in arguments.tokens.split(",")], device)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
