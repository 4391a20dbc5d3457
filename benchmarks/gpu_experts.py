"""Mixtures of experts on a GPU: a layer's router and its experts, by number of tokens, with each kernel that takes so many.

    python -m benchmarks.gpu_experts [--shapes deepseek-v2-lite ernie-21b-a3b mixtral] [--tokens 1,8,32,64,128,512,2048] [--codes int4 [--group 128]]

Tokens and routers are random, so that nearly all experts are hit from some tens of tokens on. Every figure is the median of replays of a captured
graph over several layers, whose experts the cache cannot hold: us of a layer, and TB/s of the weights of the experts that were hit. With --codes
weights are stored in 8 or 4 bits: "few" is `quantized_experts.cu`, "wide" `wide_quantized_experts.cu`, and "grouped" has them written out.
"""

from __future__ import annotations

import argparse
import contextlib
from unittest import mock

import torch

from benchmarks.gpu_linear import measure, measure_bandwidth
from benchmarks.models import check_gpus
from kernels import experts, quantized_experts, wide_experts, wide_quantized_experts
from kernels._load import device_stream
from kernels.activation import silu_mul
from kernels.quantized_weight import QuantizedWeight
from kernels.route import ExpertGroups, Routing, route_tokens

SHAPES = {
    "deepseek-v2-lite": (64, 6, 2048, 1408),
    "ernie-21b-a3b": (64, 6, 2560, 1536),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral": (8, 2, 4096, 14336),
}
"""Experts, experts of a token, hidden and inner size."""
LAYERS, LEAST_HIT = 3, 18
"""LEAST_HIT: experts that a graph hits, lest it is short."""


CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}


def draw_codes(kind: str, group: int, num_rows: int, num_columns: int, device: torch.device) -> QuantizedWeight:
    """Random codes [num_rows, num_columns], with a scale for each `group` columns; 0: for a row."""
    bits, num_groups = 4 if kind == "int4" else 8, num_columns // (group or num_columns)
    codes = torch.randint(0, 120, (num_rows, num_columns * bits // 8), dtype=torch.uint8, device=device)  # e4m3's numbers are up to 1.875 so
    scales = torch.rand(num_rows, num_groups, device=device).add_(0.5).mul_(0.02 / num_columns**0.5)
    return QuantizedWeight(codes.view(CODES[kind]), scales, None, None, bits).interleave()


class Layer:
    """Random weights of a mixture."""

    def __init__(self, num_experts: int, hidden: int, inner: int, device: torch.device, codes: str | None, group: int) -> None:
        def draw(*shape: int) -> torch.Tensor | QuantizedWeight:
            if codes is not None:
                return draw_codes(codes, group, num_experts * shape[1], shape[2], device)
            return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(std=shape[-1] ** -0.5)

        self.gate = torch.randn(num_experts, hidden, device=device) / hidden**0.5
        self.gate_up, self.down = draw(num_experts, 2 * inner, hidden), draw(num_experts, hidden, inner)

    def groups(self, num_tokens: int, shape: tuple[int, int, int, int]) -> ExpertGroups | None:
        num_experts, num_chosen, hidden, inner = shape
        if isinstance(self.down, QuantizedWeight):
            return quantized_experts.choose_quantized_groups(num_tokens, num_chosen, 0, num_experts, self.gate_up, self.down, torch.bfloat16)
        return experts.choose_groups(num_tokens, num_chosen, 0, num_experts, torch.bfloat16, self.gate.device, (hidden, inner))


def compare(name: str, counts: list[int], device: torch.device, codes: str | None, group: int) -> None:
    shape = num_experts, num_chosen, hidden, inner = SHAPES[name]
    layers = [Layer(num_experts, hidden, inner, device, codes, group) for _ in range(LAYERS)]
    mixes = quantized_experts.mix_quantized_experts if codes else experts.mix_experts
    size = {"int4": 0.5 + 4 / group if group else 0.5, None: 2}.get(codes, 1.0)
    norm = torch.ones(hidden, device=device, dtype=torch.bfloat16), 1e-5
    for num_tokens in counts:
        turns = max(1, LEAST_HIT // (LAYERS * num_chosen))
        xs = [torch.randn(num_tokens, hidden, device=device, dtype=torch.bfloat16) for _ in range(LAYERS * turns)]
        own = [(x, layers[i % LAYERS]) for i, x in enumerate(xs)]

        def route(own: list[tuple[torch.Tensor, Layer]] = own, num_tokens: int = num_tokens) -> list[Routing]:
            return [route_tokens(x, layer.gate, num_chosen, norm=norm, groups=layer.groups(num_tokens, shape)) for x, layer in own]

        cells, hit, mean = [f"router {measure(route) / len(own) * 1e3:6.1f}"], 0.0, num_tokens * num_chosen / num_experts
        never = 2**31
        for kind, fewest, largest in (("few", never, never), ("wide", 0, never), ("grouped", never, 0)):
            if (kind == "few" and mean > 64) or (kind == "grouped" and num_tokens < experts.MIN_MANY_TOKENS):
                continue
            limits = {"MAX_MEAN_ROWS": largest, "MAX_WIDE_MEAN_ROWS": largest}
            with contextlib.ExitStack() as patches:
                patches.enter_context(mock.patch.object(wide_experts, "MIN_TOKENS", fewest))
                patches.enter_context(mock.patch.multiple(experts, **limits))
                if kind == "few":
                    patches.enter_context(mock.patch.object(wide_quantized_experts, "is_wide", lambda *_: False))
                routings = route()

                def mix(routings: list[Routing] = routings, own: list[tuple[torch.Tensor, Layer]] = own) -> None:
                    for routing, (x, layer) in zip(routings, own, strict=True):
                        weights = (routing.experts, routing.weights, layer.gate_up, layer.down)
                        mixes(routing.x, *weights, silu_mul, True, 0, x, routing.lists)  # type: ignore[operator]

                hit = sum(len(routing.experts.unique()) for routing in routings) / len(own)
                time = measure(mix) / len(own) * 1e3
            cells.append(f"{kind} {time:7.1f} ({hit * 3 * hidden * inner * size / time / 1e6:4.2f})")
        print(f"{name:16} {num_tokens:5} tokens, {hit:5.1f} experts: " + ", ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", default="1,8,32,64,128,512,2048")
    parser.add_argument("--codes", choices=sorted(CODES), help="of stored weights")
    parser.add_argument("--group", type=int, default=0, help="columns that share a scale; 0: a row's")
    arguments = parser.parse_args()
    check_gpus(parser)
    device = torch.device("cuda:0")
    with device_stream(device), torch.inference_mode():
        print(f"{torch.cuda.get_device_name()}: copy and sum {measure_bandwidth(device)} TB/s")
        for name in arguments.shapes:
            compare(name, [int(count) for count in arguments.tokens.split(",")], device, arguments.codes, arguments.group)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
