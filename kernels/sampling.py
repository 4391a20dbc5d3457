"""Logits -> the target's choice per row, under every sampling parameter, with the step's earlier drafts in the history."""

from __future__ import annotations

import torch

from kernels import reference
from kernels._load import gpu_of, load
from kernels.reference import slots as reference_slots
from kernels.state import GREEDY, SLOTS, SlotTable

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def check_logits(logits: torch.Tensor, vocab_size: int | None = None) -> None:
    if logits.ndim != 2 or not logits.is_contiguous() or logits.dtype not in DTYPES:
        raise ValueError(f"logits are {list(logits.shape)} of {logits.dtype}; contiguous [R, V] of float32, bfloat16 or float16 are needed")
    if vocab_size is not None and logits.shape[1] != vocab_size:
        raise ValueError(f"logits have V = {logits.shape[1]}; the slots have {vocab_size}")


MAX_SHARED = 144 * 1024


CLUSTERS = (1, 2, 4, 8)
"""Blocks that share a row."""


def _threads(num_rows: int) -> int:
    """Of a block. Where some tens of rows fill the chip, less of them wait for one another."""
    return 256 if 16 < num_rows <= 32 else 512


def _defines(dtype: torch.dtype, vocab_size: int, cluster: int, threads: int) -> dict[str, int | str]:
    return {"LOGIT": DTYPES[dtype], "VECTOR": int(vocab_size % 8 == 0), "CLUSTER": cluster, "THREADS": threads}


def _cluster_size(device: torch.device, num_rows: int, threads: int) -> int:
    """As many blocks for each row as keep all rows on the chip at once: a multiprocessor runs 1024 threads."""
    gpu = gpu_of(device)
    if gpu.generation < 9:
        return 1
    return max(c for c in CLUSTERS if c == 1 or num_rows * c * threads <= gpu.num_multiprocessors * 1024)


def process_logits(logits: torch.Tensor, table: SlotTable, row_slots: torch.Tensor, cu_query_lens: torch.Tensor) -> None:
    """Applies penalties, then biases, then bans of early stops to logits [R, V], in place.

    Request b has slot row_slots [B] and rows cu_query_lens[b] to cu_query_lens[b + 1]; row j has its first j drafts in the history. Rows past
    the last request's are left alone. float32, bfloat16 or float16; row_slots and cu_query_lens [B + 1] int32.
    """
    check_logits(logits, table.vocab_size)
    if not logits.is_cuda:
        return reference_slots.process_logits(logits, table, row_slots, cu_query_lens)
    threads = _threads(len(logits))
    kernel = load(logits.device, "sampling", "process_logits", "P" + SLOTS + "PPi", _defines(logits.dtype, logits.shape[1], 1, threads))
    kernel((len(logits), 1), (threads, 1, 1), logits, *table.arguments, row_slots, cu_query_lens, len(row_slots))


Outputs = tuple[torch.Tensor, torch.Tensor]


def choose(logits: torch.Tensor, table: SlotTable, row_slots: torch.Tensor, cu_query_lens: torch.Tensor, outputs: Outputs | None = None) -> Outputs:
    """The target's token for every row of processed logits [R, V] -> (token_ids [R] int32, is_broken [R] bool).

    Rows as in `process_logits`. Greedy requests get the likeliest token, the others what `sample` draws at the row's position.
    is_broken: a logit is NaN or +inf. Padding rows give token 0.
    """
    check_logits(logits, table.vocab_size)
    if not logits.is_cuda:
        return reference_slots.choose(logits, table, row_slots, cu_query_lens)
    return _choose(logits, table.arguments, row_slots, cu_query_lens, outputs, is_processed=True)


def process_and_choose(
    logits: torch.Tensor, table: SlotTable, row_slots: torch.Tensor, cu_query_lens: torch.Tensor, outputs: Outputs | None = None
) -> Outputs:
    """`process_logits`, then `choose`, while the row is in the cache."""
    check_logits(logits, table.vocab_size)
    if not logits.is_cuda:
        reference_slots.process_logits(logits, table, row_slots, cu_query_lens)
        return reference_slots.choose(logits, table, row_slots, cu_query_lens)
    return _choose(logits, table.arguments, row_slots, cu_query_lens, outputs, is_processed=False)


def _choose(
    logits: torch.Tensor,
    slots: tuple[torch.Tensor | int, ...],
    row_slots: torch.Tensor,
    cu_query_lens: torch.Tensor,
    outputs: Outputs | None,
    *,
    is_processed: bool,
) -> Outputs:
    rows, vocab_size = logits.shape
    token_ids, is_broken = outputs or (logits.new_empty(rows, dtype=torch.int32), logits.new_empty(rows, dtype=torch.bool))
    threads = _threads(rows)
    cluster = _cluster_size(logits.device, rows, threads)
    ring = 4 if vocab_size % 8 == 0 and cluster == 1 else 0
    shared = threads * logits.element_size() * (8 * ring + -(-vocab_size // (8 * threads * cluster)))
    kernel = load(logits.device, "sampling", "choose", "PPP" + SLOTS + "PPiii", _defines(logits.dtype, vocab_size, cluster, threads), MAX_SHARED)
    sizes = (len(row_slots), vocab_size, int(is_processed))
    if shared > MAX_SHARED:
        raise ValueError(f"logits have V = {vocab_size} of {logits.dtype}: {shared} bytes of shared memory; the limit is {MAX_SHARED}")
    kernel((rows * cluster, 1), (threads, 1, 1), token_ids, is_broken, logits, *slots, row_slots, cu_query_lens, *sizes, shared=shared)
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
    params = torch.zeros(count, 16, dtype=torch.int32, device=device)
    params.view(torch.float32)[:, :3] = torch.stack([temperature, top_p, min_p], dim=1)
    params[:, 3] = top_k.clamp(max=logits.shape[1])
    params[:, 7] = (temperature == 0) * GREEDY
    params.view(torch.int64)[:, 4] = seeds
    places = torch.arange(count + 1, dtype=torch.int32, device=device)
    slots: tuple[torch.Tensor | int, ...] = (0, positions.int(), 0, 0, params, *[0] * 9, logits.shape[1])
    return _choose(logits, slots, places[:-1], places, None, is_processed=True)[0]
