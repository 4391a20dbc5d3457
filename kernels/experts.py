"""Products of tokens with the experts that they take, on a GPU: what `reference.mix_experts` is on CPU.

Nothing of which token takes which expert comes to the host. Few tokens, or another GPU than Hopper: `experts.cu`; more: `wide_experts.cu`, both at
the speed of the memory, where a row of the result does not depend on how many rows there are. Many rows to an expert: `prompt_linear.cu`, or
torch's grouped product. float32, for tests, and sizes that no kernel takes: every expert over every token, by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

from kernels import prompt_linear, wide_experts
from kernels._load import ELEMENTS, Gpu, gpu_of, load
from kernels.route import ExpertGroups

TILE, STEP, THREADS, TILES, SLOTS = 16, 32, 256, 2, 32
GROUP_THREADS, BLOCK_PAIRS = 1024, 1024
SHARED = {8: 136 * 1024, 16: 160 * 1024, 32: 216 * 1024}
"""By the rows of a chunk: as in `kernels.linear`."""
LEAST_SHARED = {8: 62 * 1024, 16: 90 * 1024, 32: 148 * 1024}
"""With two stages."""
STATIC_SHARED = 6 * 1024
MAX_MEAN_ROWS = 32
"""Rows to an expert on average up to which `experts.cu` is faster than the grouped product."""
MAX_WIDE_MEAN_ROWS = 128
"""The same of `wide_experts.cu`."""
MAX_FEW_TOKENS, MIN_MANY_TOKENS = 192, 65
"""So that forwards of `warm_up.TOKEN_COUNTS` tokens use every kernel that forwards of any number use."""
MAX_PAIRS = 64 * 1024
"""Of one launch of `group_rows`, which is one block."""

Defines = dict[str, "int | str"]
Activation = Callable[[torch.Tensor], torch.Tensor]
"""gate | up [n, 2 inner] -> [n, inner]."""


def choose_shape(num_tokens: int, num_chosen: int, num_experts: int, dtype: torch.dtype, is_gated: bool, gpu: Gpu) -> tuple[Defines, Defines]:
    """How `experts.cu` is compiled for the products into and out of the experts. Raises ValueError where the GPU has too little shared memory."""
    mean = num_tokens * num_chosen / num_experts
    wanted = 8 if num_tokens <= 8 else 16 if num_tokens <= 16 or (num_tokens <= MAX_FEW_TOKENS and mean <= 10) else 32
    room = gpu.block_memory - STATIC_SHARED
    fits = [tokens for tokens in SHARED if tokens <= wanted and LEAST_SHARED[tokens] <= room]
    if not fits:
        raise ValueError(f"experts need {LEAST_SHARED[8] + STATIC_SHARED} bytes of shared memory a block; this GPU has {gpu.block_memory}")
    tokens = fits[-1]
    common: Defines = {
        "ELEMENT": ELEMENTS[dtype],
        "TOKENS": tokens,
        "TILES": TILES,
        "SLOTS": SLOTS,
        "SHARED": min(SHARED[tokens], room // 1024 * 1024),
    }
    return {**common, "GATED": int(is_gated), "GATHER": 1}, {**common, "GATED": 0, "GATHER": 0}


def choose_groups(
    num_tokens: int,
    num_chosen: int,
    first: int,
    num_own: int,
    dtype: torch.dtype,
    device: torch.device,
    sizes: tuple[int, int] | None = None,
) -> ExpertGroups | None:
    """How a router is to sort pairs for the products of so many tokens; None: where it is to leave that.

    sizes: hidden and inner of `mix_experts`' weights; None: as `experts.cu` takes them in any case.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or not num_tokens:
        return None
    is_wide = sizes is not None and wide_experts.is_wide(num_tokens, *sizes, dtype, device)
    if is_many(num_tokens, num_chosen, num_own, most_mean_rows(is_wide)) or gpu_of(device).block_memory < LEAST_SHARED[8] + STATIC_SHARED:
        return None
    return make_groups(num_tokens, num_chosen, first, num_own, dtype, device, _rows(is_wide))


def make_groups(
    num_tokens: int,
    num_chosen: int,
    first: int,
    num_own: int,
    dtype: torch.dtype,
    device: torch.device,
    rows: tuple[int, int] | None = None,
) -> ExpertGroups:
    """How pairs are sorted for kernels that take them in chunks. rows: of a chunk, at least and at most; None: as `experts.cu` has room for."""
    if rows is None:
        rows = (int(choose_shape(num_tokens, num_chosen, num_own, dtype, True, gpu_of(device))[0]["TOKENS"]),) * 2
    num_pairs = num_tokens * num_chosen
    return ExpertGroups(first, num_own, *rows, min(num_own, num_pairs) + num_pairs // rows[0])


def _rows(is_wide: bool) -> tuple[int, int] | None:
    return (wide_experts.LEAST_ROWS, wide_experts.MOST_ROWS) if is_wide else None


def most_mean_rows(is_wide: bool) -> int:
    """Up to which kernels that take pairs in chunks are faster than the grouped product, of stored weights, too. is_wide: those of Hopper."""
    return MAX_WIDE_MEAN_ROWS if is_wide else MAX_MEAN_ROWS


def is_many(num_tokens: int, num_chosen: int, num_own: int, most_mean: int) -> bool:
    """Whether the grouped product is faster than a kernel that is the faster one up to so many rows to an expert on average."""
    return num_tokens >= MIN_MANY_TOKENS and num_tokens * num_chosen > most_mean * num_own


def mix_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Activation,
    is_silu: bool,
    first: int = 0,
    residual: torch.Tensor | None = None,
    beside: torch.Tensor | None = None,
    lists: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum of what each token's experts make of it: x [T, hidden] -> [T, hidden]; added to residual in place where there is one.
    beside [T, hidden]: what is added to that.

    experts [T, k] int64, weights [T, k] float32; gate_up [E, 2 inner, hidden] and down [E, hidden, inner] of the experts from number `first`
    on: what others would add is left out. is_silu: whether activation is silu(gate) * up, which the kernel has. lists: the pairs as a router
    sorted them by `choose_groups`.
    """
    (num_tokens, hidden), (num_own, _, inner) = x.shape, down.shape
    _check(x, experts, weights, gate_up, down, residual, beside)
    if not num_tokens:
        return x.new_empty(0, hidden) if residual is None else residual
    if not has_kernel(x, hidden, inner):
        made = mix_every(x, experts, weights, zip(gate_up, down, strict=True), activation, first)
        return add_mixed(made, residual, beside)
    num_chosen = experts.shape[1]
    is_wide = wide_experts.is_wide(num_tokens, hidden, inner, x.dtype, x.device)
    if is_many(num_tokens, num_chosen, num_own, most_mean_rows(is_wide)) and x.dtype == torch.bfloat16 and gpu_of(x.device).generation == 9:
        made, places = multiply_sorted(x, experts, lambda: gate_up, lambda: down, num_own, activation, is_silu, first)
    elif num_tokens * num_chosen > MAX_PAIRS:
        half = num_tokens // 2
        parts = [slice(0, half), slice(half, num_tokens)]
        out = torch.empty_like(x) if residual is None else residual
        for part in parts:
            own = (None if t is None else t[part] for t in (residual, beside))
            made = mix_experts(x[part], experts[part], weights[part], gate_up, down, activation, is_silu, first, *own)
            if residual is None:
                out[part] = made
        return out
    else:
        made, places = _multiply_chunks(x, experts, gate_up, down, activation, is_silu, first, lists), None
    return combine(made, places, experts, weights, first, num_own, residual, beside)


def _check(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor | None,
    beside: torch.Tensor | None,
) -> None:
    num_own, hidden, inner = down.shape
    if x.dim() != 2 or x.shape[1] != hidden or gate_up.shape != (num_own, 2 * inner, hidden) or not x.dtype == gate_up.dtype == down.dtype:
        raise ValueError(
            f"mix_experts: x {tuple(x.shape)} {x.dtype} must be [T, hidden], gate_up {tuple(gate_up.shape)} [E, 2 inner, hidden] and "
            f"down {tuple(down.shape)} [E, hidden, inner], of one type"
        )
    check_routing("mix_experts", x, {"experts": experts, "weights": weights, "gate_up": gate_up, "down": down}, residual, beside)


def check_routing(name: str, x: torch.Tensor, tensors: dict[str, torch.Tensor], residual: torch.Tensor | None, beside: torch.Tensor | None) -> None:
    """Of x [T, hidden]. tensors: experts, weights and all that must be contiguous. Raises ValueError."""
    experts, weights = tensors["experts"], tensors["weights"]
    if experts.shape != weights.shape or experts.shape[:1] != x.shape[:1] or experts.dtype != torch.int64 or weights.dtype != torch.float32:
        raise ValueError(
            f"{name}: experts {tuple(experts.shape)} {experts.dtype} must be int64 [{len(x)}, k], weights {tuple(weights.shape)} "
            f"{weights.dtype} float32"
        )
    added = {key: tensor for key, tensor in (("residual", residual), ("beside", beside)) if tensor is not None}
    for key, tensor in (tensors | added).items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: {key} {tuple(tensor.shape)} must be contiguous, has strides {tensor.stride()}")
    for key, tensor in added.items():
        if tensor.shape != x.shape or tensor.dtype != x.dtype:
            raise ValueError(f"{name}: {key} {tuple(tensor.shape)} {tensor.dtype} must be {tuple(x.shape)} {x.dtype}")


def has_kernel(x: torch.Tensor, hidden: int, inner: int) -> bool:
    """Whether `experts.cu` takes these sizes."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and hidden % STEP == 0
        and inner % STEP == 0
        and gpu_of(x.device).block_memory >= LEAST_SHARED[8] + STATIC_SHARED
    )


def mix_every(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    own: Iterable[tuple[torch.Tensor, torch.Tensor]],
    activation: Activation,
    first: int,
) -> torch.Tensor:
    """Every expert over every token: its shapes are the same whatever the tokens take. own: gate_up and down of each expert from `first` on."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for number, (into, back) in enumerate(own, first):
        share = (weights * (experts == number)).sum(dim=1, keepdim=True)
        made = F.linear(activation(F.linear(x, into)), back)
        out += torch.where(share != 0, made.float() * share, 0)  # what nobody takes may overflow
    return out.to(x.dtype)


def add_mixed(made: torch.Tensor, residual: torch.Tensor | None, beside: torch.Tensor | None) -> torch.Tensor:
    """What experts made [T, hidden], in place: added to residual, and beside added to that, where there are such."""
    made = made if residual is None else residual.add_(made)
    return made if beside is None else made.add_(beside)


def _multiply_chunks(
    x: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Activation,
    is_silu: bool,
    first: int,
    lists: torch.Tensor | None,
) -> torch.Tensor:
    """What each token's experts make of it [T k, hidden], by pairs; rows of experts that the rank does not hold are not written."""
    (num_tokens, num_chosen), (num_own, hidden, inner), device = experts.shape, down.shape, x.device
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    num_pairs, gpu = num_tokens * num_chosen, gpu_of(device)
    is_wide = wide_experts.is_wide(num_tokens, hidden, inner, x.dtype, device)
    groups = make_groups(num_tokens, num_chosen, first, num_own, x.dtype, device, _rows(is_wide))
    lists = sort_pairs(experts, groups, x.dtype, lists)
    if is_wide:
        act = wide_experts.launch(x, gate_up, lists, groups, num_pairs, num_chosen, is_silu, True)
        return wide_experts.launch(act if is_silu else activation(act), down, lists, groups, num_pairs, num_chosen, False, False)
    into, back = choose_shape(num_tokens, num_chosen, num_own, x.dtype, is_silu, gpu)
    blocks = max(gpu.num_multiprocessors, -(-groups.max_chunks // (SLOTS - 2)))
    shared, grid, block = int(into["SHARED"]), (blocks, 1), (THREADS, 1, 1)
    act = x.new_empty(num_pairs, inner if is_silu else 2 * inner)
    multiply = load(device, "experts", "expert_linear", into, shared, programmatic=True)
    multiply(grid, block, act, x, gate_up, lists, groups.max_chunks, num_pairs, num_chosen, 2 * inner, hidden, x.stride(0))
    act = act if is_silu else activation(act)
    made = x.new_empty(num_pairs, hidden)
    multiply = load(device, "experts", "expert_linear", back, shared, programmatic=True)
    multiply(grid, block, made, act, down, lists, groups.max_chunks, num_pairs, num_chosen, hidden, inner, inner)
    return made


def sort_pairs(experts: torch.Tensor, groups: ExpertGroups, dtype: torch.dtype, lists: torch.Tensor | None) -> torch.Tensor:
    """Pairs of experts [T, k] by expert, as kernels read them. lists: as a router sorted them."""
    num_pairs, device = experts.numel(), experts.device
    size = 4 * groups.max_chunks + num_pairs + 1
    if lists is None:
        lists = torch.empty(size, dtype=torch.int32, device=device)
        _, defines = choose_shape(1, 1, 1, dtype, True, gpu_of(device))
        group = load(device, "experts", "group_rows", defines, 8 * groups.num_own, programmatic=True)
        numbers = (groups.max_chunks, num_pairs, groups.first, groups.num_own, groups.least_rows, groups.rows_per_chunk)
        group((1, 1), (GROUP_THREADS, 1, 1), lists, experts, *numbers, shared=8 * groups.num_own)
    elif lists.shape != (size,):
        raise ValueError(f"mix_experts: lists {tuple(lists.shape)} are of other tokens: must be [{size}]")
    return lists


def multiply_sorted(
    x: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Callable[[], torch.Tensor],
    down: Callable[[], torch.Tensor],
    num_own: int,
    activation: Activation,
    is_silu: bool,
    first: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each token's experts make of it by `prompt_linear.cu`, or where that takes not such sizes by torch's grouped product, in the order of the
    experts, and where in it each pair lies [T, k].

    gate_up and down give the weights [E, 2 inner, hidden] and [E, hidden, inner] when they are needed.
    """
    tokens, places, ends = order_pairs(experts, num_own, first, x.dtype)
    x, into = x.index_select(0, tokens), gate_up()
    inner, hidden = into.shape[1] // 2, into.shape[2]
    if not (prompt_linear.can_launch_groups(x, num_own, 2 * inner, hidden) and prompt_linear.can_launch_groups(x, num_own, hidden, inner)):
        act = activation(torch._grouped_mm(x, into.transpose(1, 2), offs=ends))
        return torch._grouped_mm(act, down().transpose(1, 2), offs=ends), places
    act = prompt_linear.launch_groups(x, into, ends, is_silu)
    return prompt_linear.launch_groups(act if is_silu else activation(act), down(), ends), places


def order_pairs(experts: torch.Tensor, num_own: int, first: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs of experts [T, k] by expert, those of others than num_own from `first` on last: each place's token [T k] int64, each pair's place
    [T, k] int64, and where each own expert's end [num_own] int32. dtype: bfloat16 or float16."""
    (num_tokens, num_chosen), device = experts.shape, experts.device
    num_pairs, size = num_tokens * num_chosen, 4 * (num_own + 1)
    # Zeros, too, where kernels are looked for only, and nothing is written.
    tokens, places = torch.zeros(num_pairs, dtype=torch.int64, device=device), torch.empty_like(experts)
    ends, counts, taken = torch.zeros(3, num_own + 1, dtype=torch.int32, device=device)
    _, defines = choose_shape(1, 1, 1, dtype, True, gpu_of(device))
    count, order = load(device, "experts", "count_pairs", defines), load(device, "experts", "order_pairs", defines)
    grid, block = (-(-num_pairs // BLOCK_PAIRS), 1), (THREADS, 1, 1)
    count(grid, block, counts, experts, num_pairs, first, num_own, shared=size)
    order(grid, block, tokens, places, ends, taken, counts, experts, num_pairs, num_chosen, first, num_own, shared=2 * size)
    return tokens, places, ends[:num_own]


def combine(
    made: torch.Tensor,
    places: torch.Tensor | None,
    experts: torch.Tensor,
    weights: torch.Tensor,
    first: int,
    num_own: int,
    residual: torch.Tensor | None,
    beside: torch.Tensor | None,
) -> torch.Tensor:
    """The weighted sum of what each token's experts made, by pairs or where places say: [T, hidden], or added to residual; then beside."""
    (num_tokens, num_chosen), size, device = experts.shape, made.shape[1], made.device
    out = made.new_empty(num_tokens, size) if residual is None else residual
    _, defines = choose_shape(1, 1, 1, made.dtype, True, gpu_of(device))
    kernel = load(device, "experts", "combine_experts", defines, programmatic=True)
    threads = 128
    grid = (num_tokens, -(-size // (8 * threads)))
    pointers = (0 if t is None else t for t in (residual, beside))
    kernel(grid, (threads, 1, 1), out, *pointers, made, experts, weights, 0 if places is None else places, size, num_chosen, first, num_own)
    return out
