"""What the target and the drafter compute next, laid out on the device from the state that the last step left there.

A step has B rows, one per request: first those whose tokens the host names (chunks of prompts), then those that decode. `fields`
[NUM_FIELDS, B] int32 is what the host says of each (`structs.Field`). On a GPU the layout is written into memory with room for the most
rows, and nothing of it is known on the host; on CPU it is exact.
"""

from __future__ import annotations

import torch

from kernels import cpu_drafts
from kernels._load import Kernel, load
from kernels.reference import step as reference
from kernels.request_state import RequestState
from kernels.step_rows import DrafterRows, SplitRows, StepRows
from kernels.structs import INDEX, MAX_BATCH, MAX_NODES, NUM_FIELDS, RESULT_HEAD, StepSizes

THREADS = MAX_BATCH
BLOCK_ROWS, MAX_BLOCKS = 1024, 64
"""Packed rows that a block lays out, and blocks at most."""


def _num_blocks(num_rows: int) -> int:
    return max(1, min(-(-num_rows // BLOCK_ROWS), MAX_BLOCKS))


def _kernel(like: torch.Tensor, name: str) -> Kernel:
    return load(like.device, "step", name)


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; must be {dtype} {list(shape)}, contiguous")


def _check_inputs(table: RequestState, fields: torch.Tensor, page_table: torch.Tensor, sizes: StepSizes) -> None:
    _check("fields", fields, (NUM_FIELDS, sizes.batch))
    _check("page_table", page_table, (table.size, sizes.table_width))
    if not 1 <= sizes.batch <= MAX_BATCH:
        raise ValueError(f"a step has {sizes.batch} rows; the limit is {MAX_BATCH}")
    own = (table.max_len, table.drafts.shape[1], table.dummy_index)
    if sizes.has_trees and not table.has_trees:
        raise ValueError("sizes say has_trees; the request table was made without")
    if (sizes.max_tokens, sizes.max_drafts, sizes.dummy_index) != own:
        raise ValueError(
            f"sizes say max_tokens, max_drafts, dummy_index = {sizes.max_tokens, sizes.max_drafts, sizes.dummy_index}; the table has {own}"
        )


def prepare_step(table: RequestState, fields: torch.Tensor, page_table: torch.Tensor, sizes: StepSizes, rows: StepRows | None = None) -> StepRows:
    """Lays out the tokens that each request computes: known ones, or the newest and its drafts, as many as its limit, its end and the room allow.

    page_table [S, N] int32: page ids by request index. rows: where a GPU writes it, and whose room bounds it; not looked at on CPU.
    """
    _check_inputs(table, fields, page_table, sizes)
    if not fields.is_cuda:
        return reference.prepare_step(table, fields, page_table, sizes, None)
    assert rows is not None, "on a GPU the layout is written into memory that is there"
    batch = sizes.batch
    _check("packed", rows.packed, (4, sizes.rows), torch.int64)
    _check("logit_rows", rows.logit_rows, (len(rows.logit_rows),), torch.int64)
    for name, length in (("cu_query_lens", batch + 1), ("seq_lens", batch), ("num_verified", batch), ("cu_logit_rows", batch + 1)):
        _check(name, getattr(rows, name), (length,))
    if rows.seen is not None:
        _check("seen", rows.seen, (sizes.rows,), torch.int64)
    seen = 0 if rows.seen is None else rows.seen
    outputs = (rows.packed, rows.cu_query_lens, rows.seq_lens, rows.num_verified, rows.cu_logit_rows, rows.logit_rows, seen)
    kernel = _kernel(fields, "prepare_step")
    grid = (_num_blocks(sizes.rows), 1)
    kernel(grid, (THREADS, 1, 1), *outputs, len(rows.logit_rows), table.arguments, fields, page_table, sizes)
    return rows


def split_rows(
    split: SplitRows,
    cu_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    indices: torch.Tensor,
    num_prompts: int,
    last_rows: torch.Tensor | None = None,
) -> None:
    """Writes the rows of B requests, cu_rows [B + 1], of which the first num_prompts are prompts, as lists of prompts and of those that decode.
    last_rows [B] int64: of the model drafter's rows."""
    batch, most = len(seq_lens), len(split.seq_lens)
    if not 0 < batch <= most or not 0 <= num_prompts <= batch:
        raise ValueError(f"{num_prompts} prompts of {batch} requests are to be split in lists of {most}")
    _check("cu_rows", cu_rows, (batch + 1,))
    _check("indices", indices, (batch,))
    if last_rows is not None:
        _check("last_rows", last_rows, (batch,), torch.int64)
    outputs = (split.cu_prompt_rows, split.cu_decoding_rows, split.seq_lens, split.indices, split.last_rows)
    if not cu_rows.is_cuda:
        reference.split_rows(*outputs, cu_rows, seq_lens, indices, last_rows, num_prompts)
        return
    inputs = (cu_rows, seq_lens, indices, 0 if last_rows is None else last_rows)
    _kernel(cu_rows, "split_rows")((1, 1), (THREADS, 1, 1), *outputs, *inputs, batch, num_prompts, most)


def prepare_drafter(
    table: RequestState, fields: torch.Tensor, target: StepRows, page_table: torch.Tensor, sizes: StepSizes, rows: DrafterRows | None = None
) -> DrafterRows:
    """Lays out, after `commit`, the known tokens that the model drafter computes, and notes that it has computed them.

    target: the step's rows. rows: where a GPU writes it; not looked at on CPU. Rows of rejected drafts compute something that later rows
    write over.
    """
    _check_inputs(table, fields, page_table, sizes)
    if not fields.is_cuda:
        return reference.prepare_drafter(table, fields, target, page_table, sizes, None)
    assert rows is not None, "on a GPU the layout is written into memory that is there"
    batch, num_rows = sizes.batch, rows.packed.shape[1]
    _check("packed", rows.packed, (5, num_rows), torch.int64)
    _check("last_rows", rows.last_rows, (batch,), torch.int64)
    for name, tensor, length in (("cu_rows", rows.cu_rows, batch + 1), ("seq_lens", rows.seq_lens, batch), ("seq_lens", target.seq_lens, batch)):
        _check(name, tensor, (length,))
    outputs = (rows.packed, rows.cu_rows, rows.seq_lens, rows.last_rows)
    kernel = _kernel(fields, "prepare_drafter")
    grid = (_num_blocks(num_rows), 1)
    kernel(grid, (THREADS, 1, 1), *outputs, num_rows, table.arguments, fields, target.seq_lens, page_table, sizes)
    if grid != (1, 1):
        _kernel(fields, "note_drafter")((1, 1), (THREADS, 1, 1), table.arguments, rows.seq_lens, fields[INDEX], batch)
    return rows


def append_draft(
    packed: torch.Tensor,
    seq_lens: torch.Tensor,
    table: RequestState,
    fields: torch.Tensor,
    chosen: torch.Tensor,
    page_table: torch.Tensor,
    sizes: StepSizes,
    step: int,
    is_skipped: torch.Tensor | None = None,
) -> None:
    """Adds draft number `step`, chosen [B] int32, to the rows that want so many, and lays out the forward that makes the next one:
    packed [3, B] int64 (token ids, positions, KV slots of the drafter), seq_lens [B] int32.

    A row with is_skipped [B] int32 other than 0 wants none. Rows that want no more compute on the scratch page: the batch keeps its shape.
    """
    _check_inputs(table, fields, page_table, sizes)
    _check("packed", packed, (3, sizes.batch), torch.int64)
    _check("seq_lens", seq_lens, (sizes.batch,))
    _check("chosen", chosen, (sizes.batch,))
    if is_skipped is not None:
        _check("is_skipped", is_skipped, (sizes.batch,))
    if not packed.is_cuda:
        append = cpu_drafts.append_draft if cpu_drafts.is_usable() else reference.append_draft
        append(packed, seq_lens, table, fields, chosen, page_table, sizes, step, is_skipped)
        return
    skipped = 0 if is_skipped is None else is_skipped
    _kernel(packed, "append_draft")((1, 1), (THREADS, 1, 1), packed, seq_lens, table.arguments, fields, chosen, skipped, page_table, sizes, step)


def append_tree(table: RequestState, fields: torch.Tensor, token_ids: torch.Tensor, parents: torch.Tensor) -> None:
    """Makes drafts of what is offered to each request, token_ids [B, N] int32, as many as it wants, the first ones.

    parents [N] or [B, N] int32: the number of the one that each follows, which comes before it; -1: the newest token. A token below 0 is none,
    and those that follow it are none.
    """
    batch, count = token_ids.shape
    _check("fields", fields, (NUM_FIELDS, batch))
    _check("token_ids", token_ids, (batch, count))
    _check("parents", parents, (batch, count) if parents.ndim == 2 else (count,))
    if not table.has_trees or count > MAX_NODES:
        raise ValueError(f"{count} tokens are offered to each request; the limit is {MAX_NODES}, of a request table with has_trees")
    if not token_ids.is_cuda:
        reference.append_tree(table, fields, token_ids, parents)
        return
    stride = count if parents.ndim == 2 else 0
    _kernel(token_ids, "append_tree")((batch, 1), (32, 1, 1), table.arguments, fields, token_ids, parents, stride, count, batch, table.dummy_index)


def pack_results(
    results: torch.Tensor,
    emitted: torch.Tensor,
    num_emitted: torch.Tensor,
    num_accepted: torch.Tensor,
    num_verified: torch.Tensor,
    is_broken: torch.Tensor,
    cu_logit_rows: torch.Tensor,
) -> None:
    """Gathers what the host reads of a step in results [B, RESULT_HEAD + K + 1] int32; emitted [B, K + 1], is_broken [R] bool, the others [B]."""
    batch, width = emitted.shape
    _check("results", results, (batch, RESULT_HEAD + width))
    _check("emitted", emitted, (batch, width))
    _check("is_broken", is_broken, (len(is_broken),), torch.bool)
    _check("cu_logit_rows", cu_logit_rows, (batch + 1,))
    for name, tensor in (("num_emitted", num_emitted), ("num_accepted", num_accepted), ("num_verified", num_verified)):
        _check(name, tensor, (batch,))
    inputs = (emitted, num_emitted, num_accepted, num_verified, is_broken, cu_logit_rows)
    if not results.is_cuda:
        reference.pack_results(results, *inputs)
        return
    _kernel(results, "pack_results")((batch, 1), (32, 1, 1), results, *inputs, results.shape[1])


def simulate_acceptance(chosen: torch.Tensor, table: RequestState, request_indices: torch.Tensor, cu_logit_rows: torch.Tensor, rate: float) -> None:
    """For benchmarks of models with random weights: the target's choice chosen [R] int32 is the draft itself with probability `rate`,
    by a hash of the token's position."""
    batch = len(request_indices)
    _check("request_indices", request_indices, (batch,))
    _check("cu_logit_rows", cu_logit_rows, (batch + 1,))
    if not chosen.is_cuda:
        reference.simulate_acceptance(chosen, table, request_indices, cu_logit_rows, rate)
        return
    _kernel(chosen, "simulate_acceptance")((1, 1), (256, 1, 1), chosen, table.arguments, request_indices, cu_logit_rows, batch, rate)


def write_values(target: torch.Tensor, updates: torch.Tensor, count: int) -> None:
    """target[index] = value, both flat int32, for the first `count` pairs (index, value) of updates; each index at most once."""
    if not target.is_cuda:
        reference.write_values(target, updates, count)
        return
    if count:
        _kernel(target, "write_values")((-(-count // 128), 1), (128, 1, 1), target, updates, count)
