"""Keys and values in 8 bits: e4m3 (Micikevicius et al. 2022, "FP8 formats for deep learning", section 3), times a scale that many numbers share."""

from __future__ import annotations

import functools

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
"""The largest number of the type, which has no infinity: the next code is no number."""


def round_to_e4m3(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """x times factors (float32, of any shape that x goes with), to the nearest number of e4m3, ties to even.

    What lies beyond +-448 becomes +-448, infinities too. What is no number stays none: a request whose state is broken is to be found out.
    """
    return (x.float() * factors).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """x [M, K] as products with rounded inputs have it, in its own dtype: a row's largest number is 448 steps of e4m3."""
    steps = x.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / E4M3_MAX
    return (read_numbers(round_to_e4m3(x, 1 / steps), torch.float32) * steps).to(x.dtype)


@functools.lru_cache(maxsize=8)
def _table(dtype: torch.dtype) -> torch.Tensor:
    """[256]: what the codes stand for."""
    return torch.arange(256, dtype=torch.uint8).view(E4M3).to(dtype)


def read_rows(rows: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of memory [n, N] that index [...] names -> [..., N], as `read_numbers` has them."""
    taken = (rows.view(torch.uint8) if rows.dtype == E4M3 else rows).index_select(0, index.flatten())
    return read_numbers(taken.view(rows.dtype), dtype).view(*index.shape, -1)


def read_numbers(held: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """What memory holds as numbers to compute with: e4m3 in `dtype`, exactly and without its scale; any other type as it is.

    out: contiguous room for what e4m3 becomes.
    """
    if held.dtype != E4M3:
        return held
    if held.is_cuda:
        return held.to(dtype)
    # torch converts number by number on CPU: 4.2 ns each, against 0.8 by a table.
    codes = held.reshape(-1).view(torch.uint8).int()
    made = torch.index_select(_table(dtype), 0, codes, out=None if out is None else out.view(-1))
    return made.view(held.shape)
