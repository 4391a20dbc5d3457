"""Logits -> the target's choice per row, under every sampling parameter, with the step's earlier drafts in the history."""

from __future__ import annotations

import torch

from kernels import cpu_drafts, cpu_rows, reference
from kernels._load import Gpu, gpu_of, load
from kernels.reference import request_table as reference_table
from kernels.request_state import RequestState
from kernels.structs import GREEDY, RequestParams, Requests

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def check_logits(logits: torch.Tensor, vocab_size: int | None = None) -> None:
    if logits.ndim != 2 or not logits.is_contiguous() or logits.dtype not in DTYPES:
        raise ValueError(f"logits are {list(logits.shape)} of {logits.dtype}; contiguous [R, V] of float32, bfloat16 or float16 are needed")
    if vocab_size is not None and logits.shape[1] != vocab_size:
        raise ValueError(f"logits have V = {logits.shape[1]}; the request table has {vocab_size}")


MAX_SHARED, STATIC_SHARED = 144 * 1024, 16 * 1024
"""Bytes of a block's dynamic shared memory at most, and what is left for its own variables."""


CLUSTERS = (1, 2, 4, 8)
"""Blocks that share a row."""


def _threads(num_rows: int) -> int:
    """Of a block. Where some tens of rows fill the chip, less of them wait for one another."""
    return 256 if 16 < num_rows <= 32 else 512


Defines = dict[str, "int | str"]


def _defines(dtype: torch.dtype, vocab_size: int, cluster: int, threads: int, ring: int = 0) -> Defines:
    return {"LOGIT": DTYPES[dtype], "VECTOR": int(vocab_size % 8 == 0), "CLUSTER": cluster, "THREADS": threads, "RING": ring}


def choose_shape(num_rows: int, vocab_size: int, dtype: torch.dtype, gpu: Gpu) -> tuple[Defines, int]:
    """What sampling.cu is compiled with to choose in so many rows, and the bytes of dynamic shared memory of a block.

    Raises ValueError when a row is too long.
    """
    threads = _threads(num_rows)
    cluster = _cluster_size(gpu, num_rows, threads)
    most = min(MAX_SHARED, gpu.block_memory - STATIC_SHARED)
    for ring in (4, 0) if vocab_size % 8 == 0 and cluster == 1 else (0,):
        shared = threads * dtype.itemsize * (8 * ring + -(-vocab_size // (8 * threads * cluster)))
        if shared <= most:
            return _defines(dtype, vocab_size, cluster, threads, ring), shared
    raise ValueError(f"logits have V = {vocab_size} of {dtype}: {shared} bytes of shared memory; the limit is {most}")


def _cluster_size(gpu: Gpu, num_rows: int, threads: int) -> int:
    """As many blocks for each row as keep all rows on the chip at once: a multiprocessor runs 1024 threads."""
    if not gpu.has_clusters:
        return 1
    return max(c for c in CLUSTERS if c == 1 or num_rows * c * threads <= gpu.num_multiprocessors * 1024)


def load_all(device: torch.device, dtype: torch.dtype, vocab_size: int, max_rows: int) -> None:
    """Loads what up to max_rows rows of logits need; inside `_load.compiling` it is compiled."""
    gpu = gpu_of(device)
    shared = min(MAX_SHARED, gpu.block_memory - STATIC_SHARED)
    shapes = {str(defines): defines for defines in (choose_shape(rows, vocab_size, dtype, gpu)[0] for rows in range(1, max_rows + 1))}
    for defines in shapes.values():
        load(device, "sampling", "choose", defines, shared)
    for threads in {_threads(rows) for rows in range(1, max_rows + 1)}:
        load(device, "sampling", "process_logits", _defines(dtype, vocab_size, 1, threads))


def _check_rows(logits: torch.Tensor, table: RequestState, request_indices: torch.Tensor, cu_logit_rows: torch.Tensor) -> None:
    check_logits(logits, table.vocab_size)
    batch = len(request_indices)
    for name, tensor, length in (("request_indices", request_indices, batch), ("cu_logit_rows", cu_logit_rows, batch + 1)):
        if tensor.shape != (length,) or tensor.dtype != torch.int32:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; int32 [{length}] is needed")


def process_logits(logits: torch.Tensor, table: RequestState, request_indices: torch.Tensor, cu_logit_rows: torch.Tensor, first_row: int = 0) -> None:
    """Applies penalties, then biases, then bans of early stops to logits [R, V], in place.

    Batch row b is request request_indices[b] of the table and has the rows cu_logit_rows[b] to cu_logit_rows[b + 1], of which logits are those
    from first_row on; row j has its first j drafts in the history. Rows past the last request's are left alone. float32, bfloat16 or float16,
    computed in float32 and rounded once by each rule; request_indices [B] and cu_logit_rows [B + 1] int32.
    """
    _check_rows(logits, table, request_indices, cu_logit_rows)
    if not logits.is_cuda:
        return reference_table.process_logits(logits, table, request_indices, cu_logit_rows, first_row)
    if not len(logits):
        return
    threads = _threads(len(logits))
    kernel = load(logits.device, "sampling", "process_logits", _defines(logits.dtype, logits.shape[1], 1, threads))
    kernel((len(logits), 1), (threads, 1, 1), logits, table.arguments, request_indices, cu_logit_rows, len(request_indices), first_row)


Outputs = tuple[torch.Tensor, torch.Tensor]


def choose(
    logits: torch.Tensor,
    table: RequestState,
    request_indices: torch.Tensor,
    cu_logit_rows: torch.Tensor,
    outputs: Outputs | None = None,
    ahead: int = 0,
    first_row: int = 0,
) -> Outputs:
    """The target's token for every row of processed logits [R, V] -> (token_ids [R] int32, is_broken [R] bool).

    Rows as in `process_logits`. Greedy requests get the likeliest token, the others what `sample` draws at the row's position, which is so
    many tokens `ahead`. is_broken: a logit is NaN or +inf. Padding rows give token 0. outputs: where a GPU writes them.
    """
    _check_rows(logits, table, request_indices, cu_logit_rows)
    if not logits.is_cuda:
        return reference_table.choose(logits, table, request_indices, cu_logit_rows, ahead, first_row)
    return _choose(logits, table.arguments, request_indices, cu_logit_rows, outputs, is_processed=True, ahead=ahead, first_row=first_row)


def process_and_choose(
    logits: torch.Tensor,
    table: RequestState,
    request_indices: torch.Tensor,
    cu_logit_rows: torch.Tensor,
    outputs: Outputs | None = None,
    first_row: int = 0,
) -> Outputs:
    """`process_logits`, then `choose`, while the row is in the cache."""
    _check_rows(logits, table, request_indices, cu_logit_rows)
    if not logits.is_cuda:
        reference_table.process_logits(logits, table, request_indices, cu_logit_rows, first_row)
        return reference_table.choose(logits, table, request_indices, cu_logit_rows, first_row=first_row)
    return _choose(logits, table.arguments, request_indices, cu_logit_rows, outputs, is_processed=False, first_row=first_row)


def _choose(
    logits: torch.Tensor,
    requests: Requests,
    request_indices: torch.Tensor,
    cu_logit_rows: torch.Tensor,
    outputs: Outputs | None,
    *,
    is_processed: bool,
    ahead: int = 0,
    first_row: int = 0,
) -> Outputs:
    rows, vocab_size = logits.shape
    token_ids, is_broken = outputs or (logits.new_empty(rows, dtype=torch.int32), logits.new_empty(rows, dtype=torch.bool))
    if not rows:
        return token_ids, is_broken
    gpu = gpu_of(logits.device)
    defines, shared = choose_shape(rows, vocab_size, logits.dtype, gpu)
    cluster, threads = int(defines["CLUSTER"]), int(defines["THREADS"])
    kernel = load(logits.device, "sampling", "choose", defines, min(MAX_SHARED, gpu.block_memory - STATIC_SHARED))
    sizes = (len(request_indices), vocab_size, int(is_processed), ahead, first_row)
    inputs = (logits, requests, request_indices, cu_logit_rows)
    kernel((rows * cluster, 1), (threads, 1, 1), token_ids, is_broken, *inputs, *sizes, shared=shared)
    return token_ids, is_broken


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One token id per row of logits [R, V] -> [R] (int32 on a GPU): `reference.sample`. A temperature of 0 is greedy there."""
    check_logits(logits)
    if not logits.is_cuda:
        return reference.sample(logits, temperature, top_k, top_p, min_p, seeds, positions)
    count, device = len(logits), logits.device
    params = torch.zeros(count, len(RequestParams._fields), dtype=torch.int32, device=device)
    places = {name: number for number, name in enumerate(RequestParams._fields)}
    for name, values in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        params.view(torch.float32)[:, places[name]] = values
    params[:, places["top_k"]] = top_k.clamp(max=logits.shape[1])
    params[:, places["flags"]] = (temperature == 0) * GREEDY
    params.view(torch.int64)[:, places["seed_low"] // 2] = seeds
    rows = torch.arange(count + 1, dtype=torch.int32, device=device)
    requests = Requests(num_tokens=positions.int(), params=params, vocab_size=logits.shape[1])
    return _choose(logits, requests, rows[:-1], rows, None, is_processed=True)[0]


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, V] -> the place of the greatest [R] int32, as `argmax` has it, and what softmax gives it [R] float32; NaN where a logit is NaN or +inf."""
    if cpu_rows.is_usable(logits):
        return cpu_drafts.likeliest(logits)
    return reference.argmax(logits).int(), (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).float().exp_()
