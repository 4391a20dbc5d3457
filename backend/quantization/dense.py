"""Dense weights in the model's own dtype, laid out for the processor that multiplies them."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from backend.quantization.unfused import UnfusedLinear, put
from kernels import ops


@functools.cache
def is_intel() -> bool:
    """Whether the processor is Intel's; False where the machine does not say."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


class DenseLinear:
    """Weights [out, in] in the model's own dtype."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)

    def takes_pieces(self, x: torch.Tensor) -> bool:
        return True

    def after_norm(self, x: torch.Tensor, norm: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is not None:
            return ops.write_linear(out, ops.rms_norm(x, norm, eps), self.weight, self.bias)
        return ops.norm_linear(x, norm, eps, self.weight, self.bias)

    def gated_after_norm(self, x: torch.Tensor, norm: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.bias is None:
            return ops.norm_gated_linear(x, norm, eps, self.weight, out)
        return put(ops.silu_mul(self.after_norm(x, norm, eps)), out)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        ops.add_linear(residual, x, self.weight, self.bias)

    def write_to(self, out: torch.Tensor, x: torch.Tensor, is_ready: bool = False) -> None:
        ops.write_linear(out, x, self.weight, self.bias, is_ready)


class TransposedLinear(UnfusedLinear):
    """Dense weights [in, out] in float32, for Intel's processors, and small ones for any: MKL reads them once for up to some rows, where it reads
    those of [out, in] (and on Intel's oneDNN its own layout) two to four times as long (`benchmarks.cpu_linear`)."""

    __slots__ = ("bias", "weight")

    MAX_SMALL = 1 << 19
    """Weights. So few take MKL no longer than oneDNN on AMD's processors, which spends 20 us on finding a product's code."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight.t().contiguous()
        self.bias = bias

    @staticmethod
    def is_usable(weight: torch.Tensor) -> bool:
        is_possible = weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkl.is_available()
        return is_possible and (is_intel() or weight.numel() <= TransposedLinear.MAX_SMALL)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        residual.addmm_(x, self.weight)
        if self.bias is not None:
            residual.add_(self.bias)


class PackedLinear(UnfusedLinear):
    """Dense weights in oneDNN's blocked layout, for CPU: of many weights on AMD's processors torch's own product (MKL) is the slower one."""

    __slots__ = ("bias", "weight")

    TYPICAL_ROWS = 8

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.TYPICAL_ROWS)
        self.bias = bias

    @staticmethod
    def is_usable(weight: torch.Tensor) -> bool:
        if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
