"""The dense part of a layer: norms, projections, activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, N] over its root mean square, times weight [N] (Zhang and Sennrich 2019)."""
    if x.dtype != torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    out = x * x  # torch's own has the same operations and results, and allocates anew for each
    scale = out.mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    return torch.mul(x, scale, out=out).mul_(weight)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2N] = gate | up -> silu(gate) * up [T, N]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: torch.Tensor, is_exact: bool) -> torch.Tensor:
    """[T, 2N] = gate | up -> gelu(gate) * up [T, N]; by tanh where it is not exact."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="none" if is_exact else "tanh").mul_(up)


def norm_heads(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Normalises the leading N heads of heads [T, H, D] in place, each by its own root mean square and with its own weights [N, D]."""
    own = heads[:, : len(weight)]
    own.copy_(F.rms_norm(own, own.shape[2:], None, eps).mul_(weight))


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap tanh(x / cap), in place."""
    return x.div_(cap).tanh_().mul_(cap)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x [T, N] to residual [T, N] in place, and normalises the sum as it was rounded -> [T, N]."""
    return rms_norm(residual.add_(x), weight, eps)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N] -> [M, N]."""
    return F.linear(x, weight, bias)


def add_linear(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Adds linear(x, weight, bias), rounded, to residual [M, N] in place; returns residual."""
    return residual.add_(linear(x, weight, bias))


def norm_linear(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """linear(rms_norm(x, norm_weight, eps), weight, bias)."""
    return linear(rms_norm(x, norm_weight, eps), weight, bias)


def norm_gated_linear(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor) -> torch.Tensor:
    """silu_mul(norm_linear(x, norm_weight, eps, weight)): weight [2N, K] = gate | up -> [M, N]."""
    return silu_mul(norm_linear(x, norm_weight, eps, weight))
