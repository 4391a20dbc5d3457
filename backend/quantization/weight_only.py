"""Weights in 8 or 4 bits, activations in the model's dtype: a half or a quarter of bfloat16's memory.

Symmetric rounding to the nearest, by output channel (wint8, fp8) or by groups of GROUP inputs (wint4). The product runs in the
activation's dtype on weights that are expanded for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from backend.errors import ConfigError
from backend.quantization.unfused import UnfusedLinear

GROUP = 64


class WeightOnlyLinear(UnfusedLinear):
    """One projection [out, in] stored as `scheme` says: wint8, wint4 or fp8. Raises ConfigError for a shape that the scheme cannot hold."""

    __slots__ = ("bias", "scales", "scheme", "shape", "stored")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, scheme: str) -> None:
        self.bias, self.scheme, self.shape = bias, scheme, tuple(weight.shape)
        values = weight.float()
        if scheme == "wint4":
            if values.shape[1] % GROUP:
                raise ConfigError(f"quantization wint4 needs input sizes that are multiples of {GROUP}, got {values.shape[1]}")
            values = values.view(-1, GROUP)
        top = {"wint8": 127.0, "wint4": 7.0, "fp8": 448.0}[scheme]
        scales = values.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / top
        scaled = values / scales
        self.scales = scales.to(weight.dtype)
        if scheme == "fp8":
            self.stored = scaled.to(torch.float8_e4m3fn)
        elif scheme == "wint8":
            self.stored = scaled.round().to(torch.int8)
        else:
            digits = (scaled.round() + 8).to(torch.uint8)
            self.stored = digits[:, ::2] | digits[:, 1::2] << 4

    def expand(self) -> torch.Tensor:
        """The weights [out, in] as the product sees them, in the activations' dtype."""
        stored = self.stored
        if self.scheme == "wint4":
            stored = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(1).to(torch.int8) - 8
        return (stored.to(self.scales.dtype) * self.scales).view(self.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.expand(), self.bias)
