"""Products of tokens with the experts that they take, whose weights are stored in 8 or 4 bits, on Hopper GPUs: see wide_quantized_experts.cu.

A row of a result does not depend on how many rows there are.
"""

from __future__ import annotations

import torch

from kernels._load import gpu_of, load
from kernels.quantized_weight import STEP, QuantizedWeight, is_grouped, kind_of, pointer
from kernels.route import ExpertGroups
from kernels.tensor_map import tensor_map

LEAST_ROWS, MOST_ROWS = 16, 32
"""Of a chunk, by what the most wanted expert takes, where there are more tokens than a chunk of LEAST_ROWS has room for."""
TILE = 16
"""Rows of weights of a warp."""
SHARED = {2: 110 * 1024, 3: 74 * 1024, 4: 55 * 1024}
"""By the blocks to a multiprocessor: bytes of dynamic shared memory."""

Defines = dict[str, "int | str"]


def is_wide(gate_up: QuantizedWeight, down: QuantizedWeight, num_own: int, dtype: torch.dtype) -> bool:
    """Whether `wide_quantized_experts.cu` makes the products with these weights of num_own experts.

    gate_up [E 2 inner, hidden], down [E hidden, inner]: one expert below the other.
    """
    return (
        dtype in (torch.bfloat16, torch.float16)
        and gpu_of(down.codes.device).generation == 9
        and all(
            weight.is_interleaved
            and weight.codes.shape[1] % STEP == 0
            and weight.group_size % STEP == 0
            and len(weight.codes) // num_own % 32 == 0
            and (weight.scales.shape[1] == 1 or weight.scale_stride % 4 == 0)
            and weight.scales.data_ptr() % 16 == 0
            for weight in (gate_up, down)
        )
    )


def choose_rows(num_tokens: int) -> tuple[int, int]:
    """Rows of a chunk, at least and at most, for so many tokens."""
    for rows in (LEAST_ROWS // 2, LEAST_ROWS):
        if num_tokens <= rows:
            return rows, rows
    return LEAST_ROWS, MOST_ROWS


def choose_shape(num_tokens: int, most_rows: int, row_bytes: int) -> Defines:
    """How `wide_quantized_experts.cu` is compiled for chunks of so many rows and weights of so many bytes to a row."""
    # Small tiles are shared more evenly by the blocks, of which one token's experts give few something to do; of large ones x is read less often.
    warps, blocks = (4, 3) if num_tokens == 1 else (4, 4) if most_rows < LEAST_ROWS else (8, 2)
    units = 2 if row_bytes % (2 * STEP) == 0 else 1
    return {"UNITS": units, "ROWS": most_rows, "WARPS": warps, "BLOCKS": blocks, "SHARED": SHARED[blocks]}


def launch(
    x: torch.Tensor,
    weight: QuantizedWeight,
    lists: torch.Tensor,
    groups: ExpertGroups,
    num_pairs: int,
    num_chosen: int,
    is_gated: bool,
    is_gathered: bool,
) -> torch.Tensor:
    """x of tokens [T, K] (is_gathered) -> [num_pairs, N] in order of the experts, or x in that order [num_pairs, K] -> [num_pairs, N] by pairs.

    weight: of all experts, one below the other; is_gated: silu(gate) * up [num_pairs, N / 2]; lists: pairs sorted as `groups` says (experts.cu).
    """
    num_all, row_bytes = weight.codes.shape
    num_rows = num_all // groups.num_own
    out = x.new_empty(num_pairs, num_rows // 2 if is_gated else num_rows)
    shape, grouped = choose_shape(num_pairs // num_chosen, groups.rows_per_chunk, row_bytes), is_grouped(weight)
    units, warps, blocks, shared = (int(shape[key]) for key in ("UNITS", "WARPS", "BLOCKS", "SHARED"))
    # Not of the tokens, or the order in which terms are added would be.
    span = 2 if grouped and units == 2 and weight.group_size % (2 * STEP) == 0 else 1
    defines = kind_of(x.dtype, weight) | shape
    defines |= {"GROUPED": int(grouped), "SPAN": span, "GATED": int(is_gated), "GATHER": int(is_gathered)}
    line, outputs = STEP * units, warps * TILE // (2 if is_gated else 1)
    codes = tensor_map(weight.codes.data_ptr(), torch.uint8, (line, num_all, row_bytes // line), (row_bytes, line), (line, outputs, 1))
    kernel = load(x.device, "wide_quantized_experts", "wide_quantized_experts", defines, shared, programmatic=True)
    sizes = (groups.max_chunks, num_pairs, num_chosen, num_rows, row_bytes, weight.group_size, weight.scale_stride, x.stride(0))
    grid = (gpu_of(x.device).num_multiprocessors * blocks, 1)
    kernel(grid, (32 * (warps + 1), 1, 1), codes, out, x, weight.scales, pointer(weight.zeros), lists, *sizes)
    return out
