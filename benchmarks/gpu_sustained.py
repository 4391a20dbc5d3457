"""What a model's products take of prompts' tokens once a GPU's power bounds them: cuBLAS's alone, and layers with norms and SiLU by either.

    python -m benchmarks.gpu_sustained [--shape llama-8b llama-70b] [--ranks 1 4] [--tokens 4096] [--seconds 3] [--codes]

A GPU that was idle runs products at its highest clock for some tenths of a second; then power is what it has too little of, and the clock falls. A
product measured alone tells of the first, a server under load has the second. Nothing is exchanged between ranks and there is no attention: what is
printed for 128 prompts of 512 is what no program with these products takes less than. --ranks: sizes are those that one of as many has.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu_linear import EPS, Layer, run_fused, run_unfused
from benchmarks.models import check_gpus
from kernels._load import device_stream
from kernels.quantized import quantized_add_linear, quantized_norm_gated_linear, quantized_norm_linear
from kernels.quantized_weight import QuantizedWeight
from kernels.rounded import rounding_activations

COPIES, BATCH, PROMPTS = 3, 0.05, 128 * 512
"""COPIES: layers that take turns; BATCH: seconds of one timed run, about."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """hidden, intermediate size, and query and key heads of 128, of all layers."""

    num_layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int = 8

    def products(self, ranks: int) -> dict[str, tuple[int, int]]:
        """[N, K] of a layer's weights on one of so many ranks."""
        queries, keys, inner = self.heads * 128 // ranks, max(self.kv_heads // ranks, 1) * 128, self.inner // ranks
        return {
            "qkv": (queries + 2 * keys, self.hidden),
            "o": (self.hidden, queries),
            "gate_up": (2 * inner, self.hidden),
            "down": (self.hidden, inner),
        }


SHAPES = {"llama-8b": Shape(32, 4096, 14336, 32), "llama-70b": Shape(80, 8192, 28672, 64)}


def read_sensors() -> str:
    """The first GPU's power and clock, as they are now."""
    query = ["nvidia-smi", "-i", "0", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().replace(",", " |")


def sustain(call: Callable[[], object], seconds: float) -> tuple[float, float, str]:
    """Milliseconds of what `call` launches in the first run and in the last half of so many seconds, and what the sensors say then."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()

    def run(replays: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / replays

    replays = max(1, round(1e3 * BATCH / run(1)))
    time.sleep(2)  # idle, as between requests
    times, deadline = [run(replays)], time.monotonic() + seconds
    while time.monotonic() < deadline:
        times.append(run(replays))
    sensors, late = read_sensors(), times[len(times) // 2 :]
    return times[0], sum(late) / len(late), sensors


Call = Callable[[], object]


def plain_layers(products: dict[str, tuple[int, int]], num_tokens: int, device: torch.device) -> Iterator[tuple[str, Call]]:
    """Ways to compute the layers' products in bfloat16."""
    x = torch.randn(num_tokens, products["qkv"][1], device=device, dtype=torch.bfloat16)
    layers = [Layer(device, products) for _ in range(COPIES)]
    inputs = {name: torch.randn(num_tokens, size[1], device=device, dtype=torch.bfloat16) for name, size in products.items()}

    def alone() -> None:
        for layer in layers:
            for name, own in inputs.items():
                F.linear(own, getattr(layer, name))

    yield "cuBLAS, products alone", alone
    yield "cuBLAS, norms and SiLU", lambda: run_unfused(x.clone(), layers, F.linear)
    yield "ours", lambda: run_fused(x.clone(), layers)


def code_layers(products: dict[str, tuple[int, int]], num_tokens: int, device: torch.device) -> Iterator[tuple[str, Call]]:
    """The same with weights and activations in e4m3."""
    hidden, queries = products["qkv"][1], products["o"][1]
    x = torch.randn(num_tokens, hidden, device=device, dtype=torch.bfloat16)
    norm = torch.ones(hidden, device=device, dtype=torch.bfloat16)

    def draw(*size: int) -> torch.Tensor:  # what a product's power depends on: numbers as they are, the largest ones near 448
        return torch.randn(*size, device=device).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)

    def stored(*size: int) -> QuantizedWeight:
        return QuantizedWeight(draw(*size), torch.full((size[0], 1), 1e-4, device=device), bits=8).interleave()

    layers = [{name: stored(*size) for name, size in products.items()} for _ in range(COPIES)]
    inputs = {name: draw(num_tokens, size[1]) for name, size in products.items()}
    scales = torch.full((num_tokens, 1), 1e-3, device=device)

    def alone() -> None:
        for weights in layers:
            for name, weight in weights.items():
                factors = (scales, weight.scales.view(1, -1))
                torch._scaled_mm(inputs[name], weight.codes.t(), *factors, out_dtype=torch.bfloat16, use_fast_accum=True)

    def layer() -> None:
        state = x.clone()
        with rounding_activations(True):
            for weights in layers:
                made = quantized_norm_linear(state, norm, EPS, weights["qkv"])
                quantized_add_linear(state, made[:, :queries], weights["o"])
                quantized_add_linear(state, quantized_norm_gated_linear(state, norm, EPS, weights["gate_up"]), weights["down"])

    yield "cuBLAS, products of e4m3 alone", alone
    yield "ours, rounded to e4m3", layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["llama-8b"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1], help="for each shape, of how many ranks one is")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--codes", action="store_true", help="in e4m3 too")
    arguments = parser.parse_args()
    if len(arguments.ranks) != len(arguments.shape):
        parser.error(f"--ranks {arguments.ranks}: one for each of the {len(arguments.shape)} shapes")
    check_gpus(parser)
    device = torch.device("cuda:0")
    print(f"{torch.cuda.get_device_name(device)}, steps of {arguments.tokens} tokens, first run and after {arguments.seconds / 2} s")
    print("| shape, ranks | | ms a layer | TFLOP/s | 128 prompts of 512, s | W | MHz |\n|---|---|---|---|---|---|---|")
    with device_stream(device), torch.inference_mode():
        for name, ranks in zip(arguments.shape, arguments.ranks, strict=True):
            shape = SHAPES[name]
            products = shape.products(ranks)
            work = 2e-9 * arguments.tokens * sum(n * k for n, k in products.values())  # of a layer, so that milliseconds give TFLOP/s
            ways = [plain_layers] + [code_layers] * arguments.codes
            for label, call in (way for make_ways in ways for way in make_ways(products, arguments.tokens, device)):
                first, late, sensors = sustain(call, arguments.seconds)
                cells = [f"{ms / COPIES:.3f}" for ms in (first, late)], [f"{work * COPIES / ms:.0f}" for ms in (first, late)]
                whole = [f"{1e-3 * ms / COPIES * shape.num_layers * PROMPTS / arguments.tokens:.3f}" for ms in (first, late)]
                print(f"| {name}, {ranks} | {label} | {' | '.join(', '.join(pair) for pair in (*cells, whole))} | {sensors} |", flush=True)


if __name__ == "__main__":
    main()
