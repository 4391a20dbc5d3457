"""Projections whose weights are stored in 8 or 4 bits, by groups of inputs that share a scale.

On a GPU few tokens are multiplied with the stored weights themselves, which are read once; for many the weights are written out in the
activations' type first (`expand_weight`). A row of a result does not depend on how many rows there are as long as one of the two computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kernels import reference
from kernels._load import ELEMENTS, gpu_of, load
from kernels.activation import silu_mul

MAX_TOKENS, MAX_GROUPED_TOKENS = 64, 32
"""From which on writing the weights out takes no longer; where rows have several scales that is earlier."""
TILE, STEP, THREADS = 16, 64, 256
PIECE = 16
"""Bytes that a thread writes out."""
KINDS = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.uint8: 2}

Defines = dict[str, "int | str"]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [N, K] as kernels read it: (digit - zero) * scale."""

    codes: torch.Tensor
    """[N, K] int8 or float8_e4m3fn; of 4 bits [N, K / 2] uint8, whose byte j holds the digits 0 to 15 of columns j (low) and j + K / 2 (high)."""
    scales: torch.Tensor
    """[N, G] float32: each is of K / G neighbouring columns."""
    zeros: torch.Tensor | None = None
    """[N, G] float32; None: 0, and 8 of 4 bits."""
    order: torch.Tensor | None = None
    """[K] int64: which column of x each column is multiplied with; one past x's last is a padding of zeros. None: they lie as x's do."""
    bits: int = 8

    @property
    def num_columns(self) -> int:
        """K, paddings included."""
        return self.codes.shape[1] * (2 if self.bits == 4 else 1)

    @property
    def group_size(self) -> int:
        return self.num_columns // self.scales.shape[1]

    def ordered(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, in] -> [M, K] as the columns lie. A column of zeros is there for the paddings."""
        return x if self.order is None else F.pad(x, (0, 1)).index_select(1, self.order)

    def part(self, number: int, count: int) -> QuantizedWeight:
        """One of so many parts of equal size, one below the other."""
        size = len(self.codes) // count
        rows = slice(number * size, (number + 1) * size)
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=None if self.zeros is None else self.zeros[rows])

    def expand(self) -> torch.Tensor:
        """The weights [N, K] in float32, in the stored order of columns."""
        shape = (len(self.scales), self.num_columns)
        return reference.expand_rows(self, slice(None), torch.empty(shape, dtype=torch.float32, device=self.scales.device))


def is_skinny(x: torch.Tensor, weight: QuantizedWeight, is_gated: bool = False) -> bool:
    """Whether `quantized_linear.cu` computes x [M, K], as the columns lie, times the weight."""
    return (
        x.is_cuda
        and 0 < x.shape[0] <= (MAX_TOKENS if weight.scales.shape[1] == 1 else MAX_GROUPED_TOKENS)
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.codes.shape[1] % STEP == 0
        and weight.group_size % STEP == 0
        and len(weight.codes) % (2 * TILE if is_gated else TILE) == 0
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
    )


def can_expand(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """Whether `expand_weight` writes the weight out for x."""
    is_fit = weight.codes.shape[1] % PIECE == 0 and weight.group_size % PIECE == 0
    return x.is_cuda and len(x) > 0 and x.dtype in (torch.bfloat16, torch.float16) and is_fit


def kind_of(dtype: torch.dtype, weight: QuantizedWeight) -> Defines:
    """What quantized.cuh is compiled for."""
    return {"ELEMENT": ELEMENTS[dtype], "KIND": KINDS[weight.codes.dtype], "ZEROS": int(weight.zeros is not None)}


def _launch(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None, is_gated: bool = False
) -> torch.Tensor:
    (num_tokens, _), out_size, num_groups = x.shape, *weight.scales.shape
    num_outputs = out_size // 2 if is_gated else out_size
    out = x.new_empty(num_tokens, num_outputs) if residual is None else residual
    num_tiles = out_size // TILE
    tokens = next(size for size in (8, 16, 32, 64) if num_tokens <= size)
    # Two tiles to a block read x half as often; of few tiles each has a block of its own, or multiprocessors would be idle.
    tiles = 2 if is_gated or num_tiles >= 4 * gpu_of(x.device).num_multiprocessors else 1
    defines = kind_of(x.dtype, weight) | {
        "TOKENS": tokens,
        "TILES": tiles,
        "DEPTH": 4 // tiles,
        "GROUPED": int(num_groups > 1),
        "GATED": int(is_gated),
    }
    kernel = load(x.device, "quantized_linear", "quantized_linear", defines)
    pointers = (0 if t is None else t for t in (weight.zeros, bias, residual))
    sizes = (num_tokens, out_size, weight.codes.shape[1], num_groups, weight.group_size, x.stride(0))
    kernel((-(-num_tiles // tiles), 1), (THREADS, 1, 1), out, x, weight.codes, weight.scales, *pointers, *sizes)
    return out


def expand_weight(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weights [N, K] on a GPU, rounded to bf16 or fp16."""
    (num_rows, row_bytes), num_groups = weight.codes.shape, weight.scales.shape[1]
    out = torch.empty(num_rows, weight.num_columns, dtype=dtype, device=weight.codes.device)
    kernel = load(out.device, "quantized_expand", "quantized_expand", kind_of(dtype, weight))
    num_blocks = -(-num_rows * (row_bytes // PIECE) // THREADS)
    zeros = 0 if weight.zeros is None else weight.zeros
    kernel((num_blocks, 1), (THREADS, 1, 1), out, weight.codes, weight.scales, zeros, num_rows, row_bytes, num_groups, weight.group_size)
    return out


def _check(name: str, x: torch.Tensor, weight: QuantizedWeight) -> None:
    wanted = weight.num_columns if weight.order is None else None
    if x.dim() != 2 or (wanted is not None and x.shape[1] != wanted):
        raise ValueError(
            f"{name}: x {tuple(x.shape)} must be [M, {weight.num_columns}], as the weight {tuple(weight.codes.shape)} of {weight.bits} bits"
        )


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, in] times a quantized weight [N, in] transposed, plus bias [N] -> [M, N]."""
    _check("quantized_linear", x, weight)
    x = weight.ordered(x)
    if is_skinny(x, weight):
        return _launch(x, weight, bias)
    return F.linear(x, expand_weight(weight, x.dtype), bias) if can_expand(x, weight) else reference.quantized_linear(x, weight, bias)


def quantized_add_linear(residual: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Adds quantized_linear(x, weight, bias), rounded, to residual [M, N] in place; returns residual."""
    _check("quantized_add_linear", x, weight)
    if residual.shape != (len(x), len(weight.scales)) or residual.dtype != x.dtype or not residual.is_contiguous():
        wanted = f"[{len(x)}, {len(weight.scales)}] {x.dtype}, contiguous"
        raise ValueError(f"quantized_add_linear: residual {tuple(residual.shape)} {residual.dtype} must be {wanted}")
    x = weight.ordered(x)
    if is_skinny(x, weight):
        return _launch(x, weight, bias, residual)
    if can_expand(x, weight) and bias is None:
        return residual.addmm_(x, expand_weight(weight, x.dtype).t())  # cuBLAS adds in float32
    made = F.linear(x, expand_weight(weight, x.dtype), bias) if can_expand(x, weight) else reference.quantized_linear(x, weight, bias)
    return residual.add_(made)


def quantized_gated_linear(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """silu_mul(quantized_linear(x, weight)): weight [2N, in] = gate | up -> [M, N]."""
    _check("quantized_gated_linear", x, weight)
    x = weight.ordered(x)
    if is_skinny(x, weight, is_gated=True):
        return _launch(x, weight, is_gated=True)
    made = F.linear(x, expand_weight(weight, x.dtype)) if can_expand(x, weight) else reference.quantized_linear(x, weight)
    return silu_mul(made)
