"""RMS norm, alone or after the addition of a projection's output to the residual stream."""

from __future__ import annotations

import torch

from kernels import cpu_rows, reference
from kernels._load import ELEMENTS, load

STRANDS = 256
"""Threads of a block; kernels/dense.cuh."""
NARROW_BYTES = 1024
"""Rows up to this long are normalised by one warp each."""
MAX_BYTES = STRANDS * 16 * 16


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    if x.dim() != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"rms_norm: x {tuple(x.shape)} must be [T, N] and weight {tuple(weight.shape)} [N]")
    if weight.dtype != x.dtype or (residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype)):
        other = "" if residual is None else f", residual {tuple(residual.shape)} {residual.dtype}"
        raise ValueError(f"rms_norm: shapes and types must agree: x {tuple(x.shape)} {x.dtype}, weight {weight.dtype}{other}")


def _launch(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    num_rows, size = x.shape
    per_vector = 16 // x.element_size()
    if size % per_vector or size * x.element_size() > MAX_BYTES:
        raise ValueError(f"rms_norm: N = {size} must be a multiple of {per_vector} and at most {MAX_BYTES // x.element_size()} in {x.dtype}")
    if not (x.is_contiguous() and weight.is_contiguous() and (residual is None or residual.is_contiguous())):
        raise ValueError("rms_norm: x, weight and residual must be contiguous")
    out = torch.empty_like(x)
    if not num_rows:
        return out
    per_thread = -(-size // per_vector // STRANDS)
    vectors = 2 if per_thread <= 2 else 4 if per_thread <= 4 else 16
    defines: dict[str, int | str] = {"ELEMENT": ELEMENTS[x.dtype], "VECTORS": vectors}
    added = 0 if residual is None else residual
    if size * x.element_size() <= NARROW_BYTES:
        kernel = load(x.device, "norm", "rms_norm_narrow", defines, programmatic=True)
        kernel((-(-num_rows // (STRANDS // 32)), 1), (STRANDS, 1, 1), out, added, x, weight, num_rows, size, eps)
    else:
        kernel = load(x.device, "norm", "rms_norm", defines, programmatic=True)
        kernel((num_rows, 1), (STRANDS, 1, 1), out, added, x, weight, size, eps)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, N] over its root mean square, times weight [N] (Zhang and Sennrich 2019), computed in float32."""
    _check(x, weight, None)
    if x.is_cuda:
        return _launch(x.contiguous(), weight, eps, None)
    return cpu_rows.rms_norm(x, weight, eps) if cpu_rows.is_usable(x) else reference.rms_norm(x, weight, eps)


def norm_heads(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Normalises the leading N heads of heads [T, H, D] in place, each by its own root mean square and with its own weights [N, D]."""
    if heads.ndim != 3 or weight.shape[1:] != heads.shape[2:] or len(weight) > heads.shape[1] or weight.dtype != heads.dtype:
        raise ValueError(
            f"norm_heads: heads {tuple(heads.shape)} {heads.dtype} must be [T, H, D] and weight {tuple(weight.shape)} {weight.dtype} [N, D]"
        )
    if cpu_rows.is_usable(heads) and heads.stride()[1:] == (heads.shape[2], 1):
        cpu_rows.norm_heads(heads, weight, eps)
    else:
        reference.norm_heads(heads, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x [T, N] to residual [T, N] in place, and normalises the sum as it was rounded."""
    _check(x, weight, residual)
    return _launch(x, weight, eps, residual) if x.is_cuda else reference.add_rms_norm(x, residual, weight, eps)
