"""Projections of quantized weights.

On a GPU few tokens are multiplied with the stored weights themselves, which are read once: up to 192 (128 of 4 bits) by `wide_quantized.cu` on
Hopper, else up to 16 by `linear.cu`, which also has up to 8 where scales are of groups. Somewhat more have their turns, many have the weights
written out in the activations' type first (`expand_weight`). A row of a result does not depend on how many rows there are as long as one of the
three computes it. What activations are rounded for is `rounded.py`'s.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels import linear, prompt_linear, reference, wide_quantized
from kernels._load import gpu_of, load
from kernels.activation import silu_mul
from kernels.norm import rms_norm
from kernels.quantized_weight import STEP, QuantizedWeight, is_grouped, kind_of, pointer
from kernels.round_rows import as_rounded
from kernels.rounded import is_rounded, is_rounded_by_twin, is_rounded_for_groups, multiply_rounded

MAX_TURNS, MAX_WIDE_TURNS = 4, 2
"""Times that `linear.cu` and `wide_quantized.cu` may read the weights, from which on writing them out takes no longer."""
TILE, THREADS = linear.TILE, linear.THREADS
PIECE = 16
"""Bytes that a thread writes out."""
MAX_KEPT = 4096
"""Columns of eight tokens that a block keeps, at most."""
SMALL_SHARED, LARGE_SHARED = 88 * 1024, 200 * 1024
"""Bytes of shared memory of a block where a GPU has no more, and the most that one takes."""

Defines = dict[str, "int | str"]


def is_readable(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """Whether `linear.cu` reads the stored weight for x [M, K], as the columns lie: up to 16 rows at a time."""
    return (
        x.is_cuda
        and len(x) > 0
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.is_interleaved
        and weight.codes.shape[1] % STEP == 0
        and weight.group_size % STEP == 0
        and len(weight.codes) % TILE == 0
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and gpu_of(x.device).block_memory > SMALL_SHARED
    )


def _is_large(x: torch.Tensor) -> bool:
    """Whether a block has shared memory for 16 tokens and a norm's weight."""
    return gpu_of(x.device).block_memory >= LARGE_SHARED


def can_expand(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """Whether `expand_weight` writes the weight out for x."""
    is_fit = weight.is_interleaved and weight.group_size % PIECE == 0
    return x.is_cuda and len(x) > 0 and x.dtype in (torch.bfloat16, torch.float16) and is_fit


def _stages(weight: QuantizedWeight, tokens: int, tiles: int, num_norm: int, num_kept: int, shared: int) -> int:
    """Of linear.cu's pipeline, as it counts them itself."""
    parts = 2 if weight.bits == 4 else 1
    scales = parts * TILE * 4 * (0 if not is_grouped(weight) else 1 if weight.zeros is None else 2)
    token_bytes = tokens // 8 * parts * 2 * 512
    stage = 2 * tiles * 512 + (0 if num_kept else token_bytes) + tiles * scales
    return (shared - 2 * 8 * min(tiles, 2) * tokens * (TILE + 4) * 4 - num_norm * 2 - 8 * num_kept * token_bytes) // (8 * stage)


def _choose(x: torch.Tensor, weight: QuantizedWeight, num_norm: int, is_gated: bool) -> Defines:
    """How `linear.cu` is compiled for a product. Nothing here changes the order in which an output's terms are added."""
    tokens = -(-len(x) // 8) * 8
    # Tiles to a pass: more read x less often, of fewer the pipeline is longer. Few tiles, or little memory: as many as there are.
    tiles_each = -(-len(weight.codes) // TILE // gpu_of(x.device).num_multiprocessors)
    most, num_kept = min(tiles_each, (4 if weight.bits == 4 else 3) if tokens == 8 else 2), 0
    sizes: tuple[int, ...] = (linear.SHARED[tokens], linear.MAX_SHARED, LARGE_SHARED) if _is_large(x) else (SMALL_SHARED,)
    if tokens == 8 and tiles_each > most and x.shape[1] <= MAX_KEPT and _is_large(x):
        # A block has several passes and the memory for all of x: each warp keeps that of its steps.
        num_kept, sizes = -(-weight.codes.shape[1] // (STEP * linear.WARPS)), (LARGE_SHARED,)
    tiles, shared = next(
        (tiles, size) for size in sizes for tiles in range(max(1, most), 0, -1) if _stages(weight, tokens, tiles, num_norm, num_kept, size) >= 2
    )
    defines = {"TOKENS": tokens, "TILES": tiles, "SHARED": shared, "NORM": num_norm, "GATED": int(is_gated), "GROUPED": int(is_grouped(weight))}
    return kind_of(x.dtype, weight) | defines | ({"KEPT": num_kept} if num_kept else {})


def _launch_skinny(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    is_gated: bool,
    out: torch.Tensor | None,
    is_ready: bool,
) -> torch.Tensor:
    (num_tokens, in_size), (out_size, row_bytes) = x.shape, weight.codes.shape
    if out is None:
        out = x.new_empty(num_tokens, out_size // 2 if is_gated else out_size) if residual is None else residual
    defines = _choose(x, weight, 0 if norm_weight is None else in_size, is_gated)
    kernel = load(x.device, "linear", "linear", defines, shared=int(defines["SHARED"]), programmatic=True)
    pointers = (pointer(bias), pointer(residual), pointer(norm_weight), weight.scales, pointer(weight.zeros))
    sizes = (num_tokens, out_size, row_bytes, weight.group_size, weight.scale_stride, x.stride(0))
    grid = (min(out_size // TILE, gpu_of(x.device).num_multiprocessors), 1)
    kernel(grid, (THREADS, 1, 1), out, x, weight.codes, *pointers, *sizes, eps, int(is_ready))
    return out


def expand_weight(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weights [N, K] on a GPU, rounded to bf16 or fp16."""
    num_rows, row_bytes = weight.codes.shape
    out = torch.empty(num_rows, weight.num_columns, dtype=dtype, device=weight.codes.device)
    kernel = load(out.device, "quantized_expand", "quantized_expand", kind_of(dtype, weight))
    num_blocks = -(-num_rows * (row_bytes // PIECE) // THREADS)
    sizes = (num_rows, row_bytes, weight.group_size, weight.scale_stride)
    kernel((num_blocks, 1), (THREADS, 1, 1), out, weight.codes, weight.scales, pointer(weight.zeros), *sizes)
    return out


def _check(name: str, x: torch.Tensor, weight: QuantizedWeight) -> None:
    wanted = weight.num_columns if weight.order is None else None
    if x.dim() != 2 or (wanted is not None and x.shape[1] != wanted):
        raise ValueError(
            f"{name}: x {tuple(x.shape)} must be [M, {weight.num_columns}], as the weight {tuple(weight.codes.shape)} of {weight.bits} bits"
        )


def _multiply_stored(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    is_gated: bool = False,
    out: torch.Tensor | None = None,
    is_ready: bool = False,
) -> torch.Tensor | None:
    """The product by a kernel that reads the stored weights; None: there is none for it. x as the columns lie; norm: weight and eps;
    out and is_ready: see `linear.write_linear`."""
    rounds = is_rounded_for_groups(x, weight, is_gated)
    is_wide = rounds or wide_quantized.is_wide(x, weight, is_gated)
    if not (is_wide or is_readable(x, weight)):
        return None
    most, turns = (linear.MAX_TOKENS if _is_large(x) else 8), (1 if gpu_of(x.device).generation == 9 else MAX_TURNS)
    if is_wide:
        most, turns = wide_quantized.most_tokens(weight), MAX_WIDE_TURNS
    if len(x) > most * turns:
        return None
    can_fuse = not is_wide and len(x) <= most and x.dtype == torch.bfloat16 and x.shape[1] <= linear.MAX_NORM and _is_large(x)
    if norm is not None and not can_fuse and not (rounds and len(x) <= most):
        x, norm = rms_norm(x, *norm), None

    is_ready = is_ready and len(x) <= most  # turns have results of their own, in memory that may be a running kernel's

    def run(x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        if is_wide:
            return wide_quantized.launch(x, weight, bias, residual, is_gated, rounds, norm, out, is_ready)
        norm_weight, eps = norm or (None, 0.0)
        return _launch_skinny(x, weight, bias, residual, norm_weight, eps, is_gated, out, is_ready)

    if len(x) <= most:
        return run(x, residual, out)
    size = -(-len(x) // -(-len(x) // most) // 8) * 8
    if residual is None:
        return torch.cat([run(part, None, None) for part in x.split(size)], out=out)
    for part, target in zip(x.split(size), residual.split(size), strict=True):
        run(part, target, None)
    return residual


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, in] times a quantized weight [N, in] transposed, plus bias [N] -> [M, N]."""
    _check("quantized_linear", x, weight)
    if is_rounded(x, weight):
        return multiply_rounded(x, weight, bias)
    x = weight.ordered(x)
    made = _multiply_stored(x, weight, bias)
    if made is not None:
        return made
    return _multiply_written(x, weight, bias)


def _multiply_written(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """With the weights written out: the product, added to residual in place, or gated."""
    if is_rounded_for_groups(x, weight, is_gated) or is_rounded_by_twin(x, weight):
        x = as_rounded(x)
    if can_expand(x, weight):
        written = expand_weight(weight, x.dtype)
        if prompt_linear.is_long(x, written, is_gated) and (residual is None or residual.data_ptr() % PIECE == 0):
            return prompt_linear.launch(x, written, bias, residual, is_gated, is_fresh=True)
        if residual is not None and bias is None:
            return residual.addmm_(x, written.t())  # cuBLAS adds in float32
        made = F.linear(x, written, bias)
    else:
        made = reference.quantized_linear(x, weight, bias)
    if is_gated:
        return silu_mul(made)
    return made if residual is None else residual.add_(made)


def quantized_add_linear(residual: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Adds quantized_linear(x, weight, bias), rounded, to residual [M, N] in place; returns residual."""
    _check("quantized_add_linear", x, weight)
    if residual.shape != (len(x), len(weight.scales)) or residual.dtype != x.dtype or not residual.is_contiguous():
        wanted = f"[{len(x)}, {len(weight.scales)}] {x.dtype}, contiguous"
        raise ValueError(f"quantized_add_linear: residual {tuple(residual.shape)} {residual.dtype} must be {wanted}")
    if is_rounded(x, weight):
        return multiply_rounded(x, weight, bias, residual)
    x = weight.ordered(x)
    made = _multiply_stored(x, weight, bias, residual) if residual.data_ptr() % 16 == 0 else None
    if made is not None:
        return made
    return _multiply_written(x, weight, bias, residual)


def write_quantized_linear(
    out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None, is_ready: bool = False
) -> torch.Tensor:
    """Puts quantized_linear(x, weight, bias) in the place of what out [M, N] has, contiguous; returns out. is_ready: see `linear.write_linear`."""
    _check("write_quantized_linear", x, weight)
    if not is_rounded(x, weight) and weight.order is None and out.data_ptr() % 16 == 0:
        made = _multiply_stored(x, weight, bias, out=out, is_ready=is_ready)
        if made is not None:
            return made
    return out.copy_(quantized_linear(x, weight, bias))


def quantized_norm_linear(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: QuantizedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """quantized_linear(rms_norm(x, norm_weight, eps), weight, bias), for few tokens in bf16 in one kernel as `linear.norm_linear`."""
    _check("quantized_norm_linear", x, weight)
    if is_rounded(x, weight):
        return multiply_rounded(x, weight, bias, norm=(norm_weight, eps))
    if weight.order is None and (made := _multiply_stored(x, weight, bias, norm=(norm_weight, eps))) is not None:
        return made
    return quantized_linear(rms_norm(x, norm_weight, eps), weight, bias)


def quantized_norm_gated_linear(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: QuantizedWeight) -> torch.Tensor:
    """silu_mul(quantized_norm_linear(x, norm_weight, eps, weight)): weight [2N, in] = gate | up -> [M, N]."""
    _check("quantized_norm_gated_linear", x, weight)
    if is_rounded(x, weight):
        return multiply_rounded(x, weight, norm=(norm_weight, eps), is_gated=True)
    if weight.order is None and (made := _multiply_stored(x, weight, norm=(norm_weight, eps), is_gated=True)) is not None:
        return made
    return quantized_gated_linear(rms_norm(x, norm_weight, eps), weight)


def quantized_gated_linear(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """silu_mul(quantized_linear(x, weight)): weight [2N, in] = gate | up -> [M, N]."""
    _check("quantized_gated_linear", x, weight)
    if is_rounded(x, weight):
        return multiply_rounded(x, weight, is_gated=True)
    x = weight.ordered(x)
    made = _multiply_stored(x, weight, is_gated=True)
    if made is not None:
        return made
    return _multiply_written(x, weight, is_gated=True)
