"""Products of quantized weights on a GPU: each shape of Llama-3.1-8B by scheme and number of tokens, against bf16 and the memory.

    python -m benchmarks.gpu_quantized [--tokens 1,8,16,32,64,128,2048] [--in-layer]

Every figure is the median of replays of a captured graph over weights that the cache cannot hold.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_linear import SHAPES, measure, measure_bandwidth
from benchmarks.models import check_gpus
from kernels._load import device_stream
from kernels.linear import linear, norm_gated_linear, norm_linear
from kernels.quantized import quantized_linear, quantized_norm_gated_linear, quantized_norm_linear
from kernels.quantized_weight import QuantizedWeight
from kernels.rounded import rounding_activations

SCHEMES: dict[str, tuple[torch.dtype, int | None, bool]] = {
    "wint8": (torch.int8, None, False),
    "fp8": (torch.float8_e4m3fn, None, False),
    "fp8, x too": (torch.float8_e4m3fn, None, True),
    "block fp8": (torch.float8_e4m3fn, 128, False),
    "block fp8, x too": (torch.float8_e4m3fn, 128, True),
    "int4, 128": (torch.uint8, 128, False),
    "int4, 128, x fp8": (torch.uint8, 128, True),
    "wint4": (torch.uint8, 64, False),
    "wint4, x fp8": (torch.uint8, 64, True),
}
"""Dtype of the stored codes, columns that share a scale, and whether x is rounded to e4m3."""


def make(stored: torch.dtype, group: int | None, out_size: int, in_size: int, device: torch.device) -> QuantizedWeight:
    """Random codes: the time does not depend on them."""
    row_bytes, bits = (in_size // 2, 4) if stored == torch.uint8 else (in_size, 8)
    codes = torch.randint(0, 120, (out_size, row_bytes), dtype=torch.uint8, device=device).view(stored)
    return QuantizedWeight(codes, torch.full((out_size, in_size // (group or in_size)), 1e-3, device=device), bits=bits).interleave()


def with_norm(product: Callable[..., torch.Tensor], norm: torch.Tensor, x: torch.Tensor, weight: Any) -> torch.Tensor:
    return product(x, norm, 1e-5, weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,8,16,32,64,128,2048")
    parser.add_argument("--shapes", default="qkv,o,gate_up,down")
    parser.add_argument("--schemes", default=";".join(SCHEMES), help="of all, those named, a semicolon between them")
    parser.add_argument(
        "--in-layer", action="store_true", help="with what a layer has beside them: the norm before qkv and gate_up, and SiLU after that"
    )
    arguments = parser.parse_args()
    check_gpus(parser)
    device, counts = torch.device("cuda:0"), [int(n) for n in arguments.tokens.split(",")]
    with device_stream(device), torch.inference_mode():
        print(f"{torch.cuda.get_device_name()}: copy and sum {measure_bandwidth(device)} TB/s")
        chosen = {name: SCHEMES[name] for name in arguments.schemes.split(";")}
        print(f"{'us':8} {'tokens':>6} {'bf16':>8} " + " ".join(f"{name:>20}" for name in chosen))
        for name in arguments.shapes.split(","):
            out_size, in_size = SHAPES[name]
            copies = max(3, int(6e8 // (out_size * in_size)))
            plain = [torch.randn(out_size, in_size, device=device, dtype=torch.bfloat16) for _ in range(copies)]
            stored = {scheme: [make(*kind[:2], out_size, in_size, device) for _ in range(copies)] for scheme, kind in chosen.items()}
            for num_tokens in counts:
                x = torch.randn(num_tokens, in_size, device=device, dtype=torch.bfloat16)
                norm = torch.ones(in_size, device=device, dtype=torch.bfloat16)
                beside = {"qkv": (norm_linear, quantized_norm_linear), "gate_up": (norm_gated_linear, quantized_norm_gated_linear)}
                base_product, product = (linear, quantized_linear)
                if arguments.in_layer and name in beside:
                    base_product, product = (functools.partial(with_norm, own, norm) for own in beside[name])
                base = measure(lambda: [base_product(x, weight) for weight in plain]) / copies * 1e3  # noqa: B023
                cells = []
                for scheme, weights in stored.items():
                    with rounding_activations(SCHEMES[scheme][2]):
                        time = measure(lambda: [product(x, weight) for weight in weights]) / copies * 1e3  # noqa: B023
                    cells.append(f"{time:8.2f} {weights[0].codes.nbytes / time / 1e6:5.2f} TB/s")
                print(f"{name:8} {num_tokens:6} {base:8.2f} " + " ".join(f"{cell:>20}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
