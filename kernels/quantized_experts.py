"""Products of tokens with the experts that they take, whose weights are stored in 8 or 4 bits, on a GPU: `experts.py` for `QuantizedWeight`.

Few rows to an expert: `wide_quantized_experts.cu`, or on other GPUs than Hopper `quantized_experts.cu`, reads the stored weights of the experts that
are hit, once for each chunk of rows. Many: the weights of all experts are written out for `experts.multiply_sorted`, where they take no more than
MAX_EXPANDED_BYTES. What neither takes: one expert after the other over all tokens, by torch.
"""

from __future__ import annotations

import torch

from kernels import experts as plain
from kernels import wide_quantized_experts
from kernels._load import gpu_of, load
from kernels.experts import Activation, add_mixed, combine, is_many, make_groups, mix_every, multiply_sorted, sort_pairs
from kernels.quantized import THREADS, TILE, can_expand, expand_weight
from kernels.quantized_weight import STEP, QuantizedWeight, is_grouped, kind_of, pointer
from kernels.route import ExpertGroups

BLOCKS = 2
"""To a multiprocessor; of chunks of more than 16 rows one."""
MAX_EXPANDED_BYTES = 2**30


def choose_quantized_groups(
    num_tokens: int, num_chosen: int, first: int, num_own: int, gate_up: QuantizedWeight, down: QuantizedWeight, dtype: torch.dtype
) -> ExpertGroups | None:
    """As `experts.choose_groups`, for `mix_quantized_experts`."""
    device = down.codes.device
    if device.type == "cuda" and num_tokens and wide_quantized_experts.is_wide(gate_up, down, num_own, dtype):
        if is_many(num_tokens, num_chosen, num_own, plain.most_mean_rows(True)):
            return None
        return make_groups(num_tokens, num_chosen, first, num_own, dtype, device, wide_quantized_experts.choose_rows(num_tokens))
    return plain.choose_groups(num_tokens, num_chosen, first, num_own, dtype, device)


def mix_quantized_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: QuantizedWeight,
    down: QuantizedWeight,
    activation: Activation,
    is_silu: bool,
    first: int = 0,
    residual: torch.Tensor | None = None,
    beside: torch.Tensor | None = None,
    lists: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `experts.mix_experts`, of weights that hold all experts one below the other: gate_up [E 2 inner, hidden], down [E hidden, inner]."""
    num_tokens, hidden = x.shape
    num_own, inner = len(down.codes) // hidden, down.num_columns
    _check(x, experts, weights, gate_up, down, residual, beside)
    if not num_tokens:
        return x.new_empty(0, hidden) if residual is None else residual
    num_chosen = experts.shape[1]
    is_wide = x.is_cuda and wide_quantized_experts.is_wide(gate_up, down, num_own, x.dtype)
    is_read = is_wide or _is_skinny(x, gate_up, down, hidden, inner)
    most_mean = plain.most_mean_rows(is_wide)
    if _is_written(x, gate_up, down, hidden, inner) and (not is_read or is_many(num_tokens, num_chosen, num_own, most_mean)):
        made, places = multiply_sorted(
            x,
            experts,
            lambda: expand_weight(gate_up, x.dtype).view(num_own, 2 * inner, hidden),
            lambda: expand_weight(down, x.dtype).view(num_own, hidden, inner),
            num_own,
            activation,
            is_silu,
            first,
        )
    elif not is_read:
        own = ((gate_up.part(e, num_own).expand().to(x.dtype), down.part(e, num_own).expand().to(x.dtype)) for e in range(num_own))
        made = mix_every(x, experts, weights, own, activation, first)
        return add_mixed(made, residual, beside)
    elif num_tokens * num_chosen > plain.MAX_PAIRS:
        out = torch.empty_like(x) if residual is None else residual
        for part in (slice(0, num_tokens // 2), slice(num_tokens // 2, num_tokens)):
            added = (None if t is None else t[part] for t in (residual, beside))
            made = mix_quantized_experts(x[part], experts[part], weights[part], gate_up, down, activation, is_silu, first, *added)
            if residual is None:
                out[part] = made
        return out
    else:
        made, places = _multiply_chunks(x, experts, gate_up, down, num_own, activation, is_silu, first, lists, is_wide), None
    return combine(made, places, experts, weights, first, num_own, residual, beside)


def count_expanded(gate_up: QuantizedWeight, down: QuantizedWeight, item: int = 2) -> int:
    """Weights that products of many tokens write out at a time."""
    most = max(len(weight.codes) * weight.num_columns for weight in (gate_up, down))
    return most if most * item <= MAX_EXPANDED_BYTES else 0


def _check(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: QuantizedWeight,
    down: QuantizedWeight,
    residual: torch.Tensor | None,
    beside: torch.Tensor | None,
) -> None:
    hidden, inner = x.shape[-1], down.num_columns
    num_own = len(down.codes) // hidden
    if x.dim() != 2 or len(down.codes) != num_own * hidden or len(gate_up.codes) != 2 * inner * num_own or gate_up.num_columns != hidden:
        raise ValueError(
            f"mix_quantized_experts: gate_up [{len(gate_up.codes)}, {gate_up.num_columns}] and down [{len(down.codes)}, {inner}] are not "
            f"[E 2 inner, hidden] and [E hidden, inner] for x {tuple(x.shape)}"
        )
    if gate_up.order is not None or down.order is not None:
        raise ValueError("mix_quantized_experts: the columns of experts' weights must lie as x's do")
    plain.check_routing("mix_quantized_experts", x, {"experts": experts, "weights": weights}, residual, beside)


def _is_skinny(x: torch.Tensor, gate_up: QuantizedWeight, down: QuantizedWeight, hidden: int, inner: int) -> bool:
    return (
        plain.has_kernel(x, hidden, inner)
        and hidden % TILE == 0
        and inner % TILE == 0
        and all(weight.is_interleaved and weight.codes.shape[1] % STEP == 0 and weight.group_size % STEP == 0 for weight in (gate_up, down))
    )


def _is_written(x: torch.Tensor, gate_up: QuantizedWeight, down: QuantizedWeight, hidden: int, inner: int) -> bool:
    return (
        x.dtype == torch.bfloat16
        and gpu_of(x.device).generation == 9
        and hidden % 8 == 0
        and inner % 8 == 0
        and can_expand(x, gate_up)
        and can_expand(x, down)
        and count_expanded(gate_up, down) > 0
    )


def _multiply_chunks(
    x: torch.Tensor,
    experts: torch.Tensor,
    gate_up: QuantizedWeight,
    down: QuantizedWeight,
    num_own: int,
    activation: Activation,
    is_silu: bool,
    first: int,
    lists: torch.Tensor | None,
    is_wide: bool,
) -> torch.Tensor:
    """What each token's experts make of it [T k, hidden], by pairs; rows of experts that the rank does not hold are not written."""
    (num_tokens, num_chosen), hidden, inner = experts.shape, x.shape[1], down.num_columns
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    num_pairs, gpu = num_tokens * num_chosen, gpu_of(x.device)
    chunk_rows = wide_quantized_experts.choose_rows(num_tokens) if is_wide else None
    groups = make_groups(num_tokens, num_chosen, first, num_own, x.dtype, x.device, chunk_rows)
    lists, rows = sort_pairs(experts, groups, x.dtype, lists), groups.rows_per_chunk
    for weight in (gate_up, down):
        load(x.device, "quantized_expand", "quantized_expand", kind_of(x.dtype, weight))  # forwards of many tokens must not wait for nvcc either
    if is_wide:
        act = wide_quantized_experts.launch(x, gate_up, lists, groups, num_pairs, num_chosen, is_silu, True)
        return wide_quantized_experts.launch(act if is_silu else activation(act), down, lists, groups, num_pairs, num_chosen, False, False)
    grid = (gpu.num_multiprocessors * (BLOCKS if rows <= 16 else 1), 1)

    def multiply(out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, num_rows: int, is_gated: bool, is_gathered: bool) -> torch.Tensor:
        defines = kind_of(x.dtype, weight) | {"TOKENS": rows, "GROUPED": int(is_grouped(weight)), "GATED": int(is_gated), "GATHER": int(is_gathered)}
        kernel = load(x.device, "quantized_experts", "quantized_expert_linear", defines, programmatic=True)
        sizes = (groups.max_chunks, num_pairs, num_chosen, num_rows, weight.codes.shape[1], weight.group_size, weight.scale_stride, x.stride(0))
        kernel(grid, (THREADS, 1, 1), out, x, weight.codes, weight.scales, pointer(weight.zeros), lists, *sizes)
        return out

    act = multiply(x.new_empty(num_pairs, inner if is_silu else 2 * inner), x, gate_up, 2 * inner, is_silu, True)
    act = act if is_silu else activation(act)
    return multiply(x.new_empty(num_pairs, hidden), act, down, hidden, False, False)
