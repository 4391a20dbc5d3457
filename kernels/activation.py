"""Activations between projections."""

from __future__ import annotations

import torch

from kernels import reference
from kernels._load import ELEMENTS, load

THREADS = 256
MAX_ROWS = 65535
"""CUDA's limit of blocks in y."""


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2N] = gate | up -> silu(gate) * up [T, N], computed in float32 and rounded once."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_mul: gate_up {tuple(gate_up.shape)} must be [T, 2N]")
    if not gate_up.is_cuda:
        return reference.silu_mul(gate_up)
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    per_vector = 16 // gate_up.element_size()
    if size % per_vector or num_rows > MAX_ROWS or not gate_up.is_contiguous():
        raise ValueError(f"silu_mul: N = {size} must be a multiple of {per_vector}, T = {num_rows} at most {MAX_ROWS}, gate_up contiguous")
    out = gate_up.new_empty(num_rows, size)
    if num_rows:
        kernel = load(gate_up.device, "activation", "silu_mul", {"ELEMENT": ELEMENTS[gate_up.dtype]}, programmatic=True)
        kernel((-(-size // per_vector // THREADS), num_rows), (THREADS, 1, 1), out, gate_up, size)
    return out
