"""Activations between projections."""

from __future__ import annotations

import torch

from kernels import reference
from kernels._load import ELEMENTS, load

THREADS = 256


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2N] = gate | up -> silu(gate) * up [T, N], computed in float32 and rounded once."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_mul: gate_up {tuple(gate_up.shape)} must be [T, 2N]")
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    per_vector = 16 // gate_up.element_size()
    if not gate_up.is_cuda or size % per_vector:
        return reference.silu_mul(gate_up)
    if not gate_up.is_contiguous():
        raise ValueError(f"silu_mul: gate_up {tuple(gate_up.shape)} must be contiguous, has strides {gate_up.stride()}")
    out = gate_up.new_empty(num_rows, size)
    if num_rows:
        kernel = load(gate_up.device, "activation", "silu_mul", {"ELEMENT": ELEMENTS[gate_up.dtype]}, programmatic=True)
        kernel((num_rows, -(-size // per_vector // THREADS)), (THREADS, 1, 1), out, gate_up, size)
    return out
