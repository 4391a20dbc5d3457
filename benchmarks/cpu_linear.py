"""Products of float32 weights on one CPU thread, by how the weights lie: what a step of the bundled model multiplies, each weight once.

    python -m benchmarks.cpu_linear [--rows N ...] [--rounds N]

Milliseconds of processor time, the least of all rounds, forms in turns: other work on the machine does not count. `benchmarks.speculation`
shows what it is in whole steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

SHAPES = [(512, 192), (192, 256), (1024, 192), (192, 512)] * 20 + [(4096, 192)]
"""[out, in] of the bundled model's projections: 20 layers and the head, 38.5 MB."""
REPEATS = 20


def measure(rows: int, rounds: int) -> dict[str, float]:
    weights = [torch.randn(shape) for shape in SHAPES]
    inputs = [torch.randn(rows, shape[1]) for shape in SHAPES]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 8) for weight in weights]
    transposed = [weight.t().contiguous() for weight in weights]

    def plain() -> None:
        for x, weight in zip(inputs, weights):
            F.linear(x, weight)

    def blocked() -> None:
        for x, weight in zip(inputs, packed):
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    def turned() -> None:
        for x, weight in zip(inputs, transposed):
            torch.mm(x, weight)

    forms: dict[str, Callable[[], None]] = {"[out, in]": plain, "oneDNN's": blocked, "[in, out]": turned}
    best = dict.fromkeys(forms, float("inf"))
    for _ in range(rounds):
        for name, run in forms.items():
            run()
            started = time.process_time()
            for _ in range(REPEATS):
                run()
            best[name] = min(best[name], 1e3 * (time.process_time() - started) / REPEATS)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 256])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for rows in options.rows:
        best = measure(rows, options.rounds)
        print(f"{rows:4d} rows: " + ", ".join(f"{name} {own:.2f} ms" for name, own in best.items()), flush=True)


if __name__ == "__main__":
    main()
