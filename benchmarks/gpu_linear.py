"""Projections of few tokens on a GPU: each shape of Llama-3.1-8B, and the dense part of a whole step, against cuBLAS and the memory.

    python -m benchmarks.gpu_linear [--layers 32] [--tokens 1,2,4,6,8,16,24,32,48,64]

Every figure is the median of replays of a captured graph over weights that the cache cannot hold.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from benchmarks.models import check_gpus
from kernels._load import device_stream
from kernels.activation import silu_mul
from kernels.linear import add_linear, linear, norm_gated_linear, norm_linear
from kernels.norm import add_rms_norm, rms_norm

HIDDEN, INNER, QKV, VOCAB, EPS = 4096, 14336, 6144, 128256, 1e-5
SHAPES = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER), "head": (VOCAB, HIDDEN)}


def measure(call: Callable[[], object], replays: int = 15) -> float:
    """Milliseconds of one replay of what `call` launches."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    times = []
    for _ in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def measure_bandwidth(device: torch.device) -> tuple[float, float]:
    """TB/s of a copy (bytes read and written) and of a sum (bytes read)."""
    source, target = torch.randn(2, 1 << 29, device=device).unbind()
    copy, total = measure(lambda: torch.neg(source, out=target)), measure(lambda: source.sum())
    return 2 * source.nbytes / copy / 1e9, source.nbytes / total / 1e9


class Layer:
    """The weights of one layer, at random."""

    def __init__(self, device: torch.device, sizes: Mapping[str, tuple[int, int]] = SHAPES) -> None:
        def draw(out_size: int, in_size: int) -> torch.Tensor:
            return torch.empty(out_size, in_size, device=device, dtype=torch.bfloat16).normal_(std=in_size**-0.5)

        self.qkv, self.o, self.gate_up, self.down = (draw(*sizes[name]) for name in ("qkv", "o", "gate_up", "down"))
        self.norms = torch.ones(2, sizes["qkv"][1], device=device, dtype=torch.bfloat16).unbind()


def run_fused(x: torch.Tensor, layers: list[Layer]) -> None:
    """Layers' products, norms and SiLU, as they change x."""
    for layer in layers:
        y = norm_linear(x, layer.norms[0], EPS, layer.qkv)
        add_linear(x, y[:, : layer.o.shape[1]], layer.o)
        add_linear(x, norm_gated_linear(x, layer.norms[1], EPS, layer.gate_up), layer.down)


def run_unfused(x: torch.Tensor, layers: list[Layer], product: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The same, each by itself -> what comes behind the last norm."""
    y = rms_norm(x, layers[0].norms[0], EPS)
    for layer in layers:
        y = product(product(y, layer.qkv)[:, : layer.o.shape[1]], layer.o)
        y = product(silu_mul(product(add_rms_norm(y, x, layer.norms[1], EPS), layer.gate_up)), layer.down)
        y = add_rms_norm(y, x, layer.norms[0], EPS)
    return y


def compare_shapes(device: torch.device, tokens: list[int]) -> None:
    print(f"\n{'shape':8} {'M':>3} {'cuBLAS us':>10} {'ours us':>8} {'cuBLAS TB/s':>12} {'ours TB/s':>10} {'ratio':>6}")
    for name, (out_size, in_size) in SHAPES.items():
        count = max(3, int(1.2e9 // (out_size * in_size * 2)))
        weights = [torch.empty(out_size, in_size, device=device, dtype=torch.bfloat16).normal_(std=in_size**-0.5) for _ in range(count)]
        for num_tokens in tokens:
            x = torch.randn(num_tokens, in_size, device=device, dtype=torch.bfloat16)
            theirs, ours = (measure(lambda: [f(x, weight) for weight in weights]) / count for f in (F.linear, linear))  # noqa: B023
            speeds = [weights[0].nbytes / t / 1e9 for t in (theirs, ours)]
            print(f"{name:8} {num_tokens:3} {theirs * 1e3:10.2f} {ours * 1e3:8.2f} {speeds[0]:12.2f} {speeds[1]:10.2f} {theirs / ours:6.2f}")


def compare_chain(device: torch.device, tokens: list[int], num_layers: int, copy: float, read: float) -> None:
    layers = [Layer(device) for _ in range(num_layers)]
    head = torch.empty(VOCAB, HIDDEN, device=device, dtype=torch.bfloat16).normal_(std=HIDDEN**-0.5)
    num_bytes = head.nbytes + sum(w.nbytes for layer in layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down))
    print(f"\nnorms, projections and SiLU of {num_layers} layers and the head: {num_bytes / 1e9:.2f} GB of weights")
    print(f"at the copy's speed {num_bytes / copy / 1e9:.2f} ms, at the sum's {num_bytes / read / 1e9:.2f} ms")
    print(f"{'M':>3} {'cuBLAS ms':>10} {'unfused ms':>11} {'fused ms':>9} {'TB/s':>6} {'cuBLAS/fused':>13} {'of the sum':>11}")
    for num_tokens in tokens:
        x = torch.randn(num_tokens, HIDDEN, device=device, dtype=torch.bfloat16)

        def all_fused(x: torch.Tensor = x) -> None:
            state = x.clone()
            run_fused(state, layers)
            norm_linear(state, layers[0].norms[0], EPS, head)

        theirs = measure(lambda: F.linear(run_unfused(x.clone(), layers, F.linear), head))  # noqa: B023
        apart = measure(lambda: linear(run_unfused(x.clone(), layers, linear), head))  # noqa: B023
        fused = measure(all_fused)
        speed = num_bytes / fused / 1e9
        print(f"{num_tokens:3} {theirs:10.3f} {apart:11.3f} {fused:9.3f} {speed:6.2f} {theirs / fused:13.2f} {speed / read:11.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", default="1,2,4,6,8,16,24,32,48,64")
    arguments = parser.parse_args()
    check_gpus(parser)
    device, tokens = torch.device("cuda:0"), [int(n) for n in arguments.tokens.split(",")]
    with device_stream(device), torch.inference_mode():
        copy, read = measure_bandwidth(device)
        print(f"{torch.cuda.get_device_name()}: copy {copy:.2f} TB/s, sum {read:.2f} TB/s")
        compare_shapes(device, tokens)
        compare_chain(device, tokens, arguments.layers, copy, read)


if __name__ == "__main__":
    main()
