"""Dense weights in the model's own dtype, laid out for the processor that multiplies them."""

from __future__ import annotations

import torch

from backend.quantization.unfused import UnfusedLinear, put
from kernels import ops
from kernels.panels import ADD, GATED, PanelWeight, is_usable


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


class PanelLinear:
    """Dense weights in panels of outputs, for float32 on CPU, by compiled kernels (`kernels.panels`)."""

    __slots__ = ("_weight",)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = PanelWeight(weight, bias)

    @staticmethod
    def is_usable(weight: torch.Tensor) -> bool:
        return is_usable(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._weight.multiply(x, x.new_empty(len(x), self._weight.out_features))

    def takes_pieces(self, x: torch.Tensor) -> bool:
        return True

    def after_norm(self, x: torch.Tensor, norm: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
        out = x.new_empty(len(x), self._weight.out_features) if out is None else out
        return self._weight.multiply(x, out, norm=norm, eps=eps)

    def gated_after_norm(self, x: torch.Tensor, norm: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
        out = x.new_empty(len(x), self._weight.out_features // 2) if out is None else out
        return self._weight.multiply(x, out, GATED, norm, eps)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        self._weight.multiply(x, residual, ADD)

    def write_to(self, out: torch.Tensor, x: torch.Tensor, is_ready: bool = False) -> None:
        self._weight.multiply(x, out)


class PackedLinear(UnfusedLinear):
    """Dense weights in oneDNN's blocked layout, for CPU: in bfloat16, and in float32 where nothing compiles kernels."""

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
