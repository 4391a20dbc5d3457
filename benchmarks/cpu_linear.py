"""Products of float32 weights on one CPU thread, by how the weights lie: what a step of a model multiplies, each weight once.

    python -m benchmarks.cpu_linear [--rows N ...] [--rounds N] [--model bundled|smollm2|llama-1b]

[out, in] and [in, out]: by MKL; oneDNN's layout; panels (`kernels.panels`), of weights in float32 and of such as bfloat16 has.
Milliseconds of processor time, the least of all rounds, forms in turns: other work on the machine does not count. `benchmarks.speculation`
shows what it is in whole steps.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from backend.quantization.dense import PanelLinear

Shapes = list[tuple[int, int]]
SHAPES: dict[str, Shapes] = {
    "bundled": [(512, 192), (192, 256), (1024, 192), (192, 512)] * 20 + [(4096, 192)],
    "smollm2": [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49152, 576)],
    "llama-1b": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)] * 4,
}
"""[out, in] of projections: the bundled model's (20 layers and the head, 38.5 MB), SmolLM2-135M's (538 MB), four layers of Llama-3.2-1B's (973)."""
REPEATS = {"bundled": 20, "smollm2": 2, "llama-1b": 1}


def measure(shapes: Shapes, rows: int, rounds: int, repeats: int) -> dict[str, float]:
    weights = [torch.randn(shape) for shape in shapes]
    inputs = [torch.randn(rows, shape[1]) for shape in shapes]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 8) for weight in weights]
    transposed = [weight.t().contiguous() for weight in weights]
    panels = [[PanelLinear(own) for own in those] for those in (weights, [weight.bfloat16().float() for weight in weights])]

    def plain() -> None:
        for x, weight in zip(inputs, weights):
            F.linear(x, weight)

    def blocked() -> None:
        for x, weight in zip(inputs, packed):
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    def turned() -> None:
        for x, weight in zip(inputs, transposed):
            torch.mm(x, weight)

    def paneled(own: list[PanelLinear]) -> None:
        for x, linear in zip(inputs, own):
            linear(x)

    forms: dict[str, Callable[[], None]] = {"[out, in]": plain, "oneDNN's": blocked, "[in, out]": turned}
    forms |= {name: functools.partial(paneled, own) for name, own in zip(("panels", "panels in bfloat16"), panels)}
    best = dict.fromkeys(forms, float("inf"))
    for _ in range(rounds):
        for name, run in forms.items():
            run()
            started = time.process_time()
            for _ in range(repeats):
                run()
            best[name] = min(best[name], 1e3 * (time.process_time() - started) / repeats)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 256])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", choices=list(SHAPES), default="bundled")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for rows in options.rows:
        best = measure(SHAPES[options.model], rows, options.rounds, REPEATS[options.model])
        print(f"{rows:4d} rows: " + ", ".join(f"{name} {own:.2f} ms" for name, own in best.items()), flush=True)


if __name__ == "__main__":
    main()
