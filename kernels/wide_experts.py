"""Products of tokens with the experts that they take on Hopper GPUs, where experts have more rows than `experts.cu` is fast for: see wide_experts.cu.

A row of a result does not depend on how many rows there are.
"""

from __future__ import annotations

import torch

from kernels._load import ELEMENTS, gpu_of, load
from kernels.route import ExpertGroups
from kernels.tensor_map import tensor_map

MIN_TOKENS = 33
"""Fewer are `experts.cu`'s, whose blocks share what there is more evenly."""
LEAST_ROWS, MOST_ROWS = 32, 128
"""Of a chunk, by what the most wanted expert takes."""
STEP, TILE, THREADS = 64, 128, 384
SHARED = 222 * 1024
"""Bytes of dynamic shared memory: all but what two small blocks of other kernels need."""


def is_wide(num_tokens: int, hidden: int, inner: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `wide_experts.cu` makes the products with experts of these sizes."""
    is_known = dtype in (torch.bfloat16, torch.float16) and hidden % STEP == 0 and inner % STEP == 0
    return is_known and num_tokens >= MIN_TOKENS and gpu_of(device).generation == 9


def launch(
    x: torch.Tensor,
    weights: torch.Tensor,
    lists: torch.Tensor,
    groups: ExpertGroups,
    num_pairs: int,
    num_chosen: int,
    is_gated: bool,
    is_gathered: bool,
) -> torch.Tensor:
    """x of tokens [T, K] (is_gathered) -> [num_pairs, N] in order of the experts, or x in that order [num_pairs, K] -> [num_pairs, N] by pairs.

    weights [E, N, K]; is_gated: silu(gate) * up [num_pairs, N / 2]; lists: pairs sorted as `groups` says (experts.cu).
    """
    (num_own, num_rows, in_size), item = weights.shape, x.element_size()
    out = x.new_empty(num_pairs, num_rows // 2 if is_gated else num_rows)
    # Rows as a warpgroup's threads have them: eight and eight more in turn, of gate and of up where gated.
    second = num_rows // 2 if is_gated else 8
    strides = tuple(stride * item for stride in (in_size, second * in_size, (8 if is_gated else 16) * in_size, num_rows * in_size))
    sizes = (in_size, 8, 2, num_rows // 16, num_own)
    described = tensor_map(weights.data_ptr(), x.dtype, sizes, strides, (STEP, 8, 2, TILE // 16, 1))
    defines: dict[str, int | str] = {"ELEMENT": ELEMENTS[x.dtype], "GATED": int(is_gated), "GATHER": int(is_gathered), "SHARED": SHARED}
    kernel = load(x.device, "wide_experts", "wide_experts", defines, SHARED, programmatic=True)
    numbers = (groups.max_chunks, num_pairs, num_chosen, -(-num_rows // TILE), out.shape[1], in_size, x.stride(0))
    grid = (gpu_of(x.device).num_multiprocessors, 1)
    kernel(grid, (THREADS, 1, 1), described, out, x, lists, *numbers)
    return out
