"""Twins of `kernels.step`, in NumPy: these tensors are small. Layouts are exact, without padding."""

from __future__ import annotations

import numpy as np
import torch

from kernels.reference.paths import climb
from kernels.request_state import RequestState
from kernels.step_rows import DrafterRows, StepRows
from kernels.structs import (
    COUNT,
    DRAFTER_COUNT,
    EMITS,
    END,
    FIRST,
    INDEX,
    MODEL_LIMIT,
    NUM_PAGES,
    VERIFY_LIMIT,
    StepSizes,
)


def _starts_of(counts: np.ndarray, most: int | None) -> np.ndarray:
    """[B + 1] int32: where each request's rows begin; past `most` there are none."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.add.accumulate(counts, out=starts[1:])
    return starts if most is None else np.minimum(starts, most, out=starts)


class _Pages:
    """The pages that positions of packed rows lie on, and their places there; the scratch page for what lies past a request's pages."""

    def __init__(self, page_table: torch.Tensor, sizes: StepSizes) -> None:
        self._ids, self._sizes = page_table.numpy().reshape(-1), sizes

    def find(self, indices: np.ndarray, num_pages: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 page ids and places of positions, of requests that have so many pages."""
        sizes = self._sizes
        pages = positions // sizes.page_size
        is_own = pages < num_pages
        ids = self._ids.take(indices * sizes.table_width + pages * is_own)
        if not is_own.all():
            ids = np.where(is_own, ids, sizes.scratch_page)
        return ids.astype(np.int64), positions - pages * sizes.page_size


def prepare_step(table: RequestState, fields: torch.Tensor, page_table: torch.Tensor, sizes: StepSizes, most_logit_rows: int | None) -> StepRows:
    own, arrays = fields.numpy(), table.arrays
    indices, counts, host_first = own[INDEX], own[COUNT], own[FIRST]
    known = arrays.num_tokens.take(indices)
    is_newest, room = host_first < 0, own[END] - known
    first = host_first + known * is_newest
    drafts = np.minimum(np.minimum(arrays.num_drafts.take(indices), own[VERIFY_LIMIT]), room - 1)
    is_active = (indices != sizes.dummy_index) & (room > 0)
    starts = _starts_of((counts + np.maximum(drafts, 0) * is_newest) * is_active, sizes.rows)
    begins = starts[:-1]
    lens = starts[1:] - begins
    verified = np.maximum(lens - counts, 0)
    logit_counts = (1 + verified) * ((own[EMITS] != 0) & (lens > 0) & (lens >= counts))
    logit_starts = _starts_of(logit_counts, most_logit_rows)

    total = int(starts[-1])
    mine, positions = np.repeat(indices, lens), np.repeat(first - begins, lens) + np.arange(total, dtype=np.int32)
    packed = np.empty((4, total), np.int64)
    packed[0] = arrays.tokens.reshape(-1).take(mine * table.max_len + positions, mode="clip")
    if verified.any():
        ahead = positions - np.repeat(known, lens)
        is_draft = ahead >= 0
        packed[0, is_draft] = arrays.drafts[mine[is_draft], ahead[is_draft]]
    packed[1], seen = positions, None
    if sizes.has_trees:
        firsts, is_own = np.repeat(first, lens), np.repeat(is_newest, lens)
        depths, seen = climb(table, mine, (positions - firsts) * is_own)
        packed[1, is_own], seen[~is_own] = (firsts + depths)[is_own], 0
    pages, places = _Pages(page_table, sizes).find(mine, np.repeat(own[NUM_PAGES], lens), positions)
    packed[2], packed[3] = pages * sizes.page_stride + places, pages * sizes.tap_stride + places
    kept = logit_starts[1:] - logit_starts[:-1]
    logit_rows = np.repeat(starts[1:] - logit_counts - logit_starts[:-1], kept) + np.arange(logit_starts[-1])
    lists = (starts, (first + lens) * (lens > 0), verified, logit_starts, logit_rows)
    rows = StepRows(torch.from_numpy(packed), *(torch.from_numpy(x) for x in lists))
    rows.seen = None if seen is None else torch.from_numpy(seen)
    return rows


def split_rows(
    cu_prompt_rows: torch.Tensor,
    cu_decoding_rows: torch.Tensor,
    lens: torch.Tensor,
    owners: torch.Tensor,
    lasts: torch.Tensor,
    cu_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    indices: torch.Tensor,
    last_rows: torch.Tensor | None,
    num_prompts: int,
) -> None:
    batch, border = len(seq_lens), cu_rows[num_prompts]
    begins = cu_rows[torch.arange(len(cu_prompt_rows)).clamp_(max=batch)]
    cu_prompt_rows.copy_(begins.clamp(max=border))
    cu_decoding_rows.copy_(begins.clamp(min=border))
    lens.zero_()
    lens[:batch] = seq_lens
    owners.copy_(indices[torch.arange(len(owners)).clamp_(max=batch - 1)])
    if last_rows is not None:
        lasts.zero_()
        lasts[:batch] = last_rows


def prepare_drafter(
    table: RequestState, fields: torch.Tensor, target: StepRows, page_table: torch.Tensor, sizes: StepSizes, most_rows: int | None
) -> DrafterRows:
    own, arrays = fields.numpy(), table.arrays
    indices, asked, target_lens = own[INDEX], own[DRAFTER_COUNT], target.seq_lens.numpy()
    known, first = arrays.num_tokens.take(indices), arrays.num_drafter_tokens.take(indices)
    newest = np.maximum((known if sizes.has_trees else target_lens + 1) - first, 0) * (target_lens > 0)
    starts = _starts_of(np.where(asked < 0, newest, asked) * (indices != sizes.dummy_index), most_rows)
    begins = starts[:-1]
    counts = starts[1:] - begins
    done = counts > 0
    lens = (first + counts) * done
    total = int(starts[-1])
    last_rows = np.maximum(np.minimum(np.maximum(known - 1 - first, 0), counts - 1), 0) + begins
    last_rows = np.maximum(np.minimum(last_rows, (total if most_rows is None else most_rows) - 1), 0)

    mine, num_pages = np.repeat(indices, counts), np.repeat(own[NUM_PAGES], counts)
    positions = np.repeat(first - begins, counts) + np.arange(total, dtype=np.int32)
    packed, paged = np.empty((5, total), np.int64), _Pages(page_table, sizes)
    newest = np.maximum(np.minimum(positions, np.repeat(known - 1, counts)), 0)
    packed[0] = arrays.tokens.reshape(-1).take(mine * table.max_len + newest)
    packed[1] = positions
    pages, places = paged.find(mine, num_pages, positions)
    packed[2], packed[3] = pages * sizes.drafter_stride + places, pages * sizes.tap_stride + places
    pages, places = paged.find(mine, num_pages, np.maximum(positions - 1, 0))
    packed[4] = pages * sizes.tap_stride + places
    arrays.num_drafter_tokens[indices[done]] = np.minimum(lens, known)[done]
    return DrafterRows(torch.from_numpy(packed), *(torch.from_numpy(x) for x in (starts, lens, last_rows.astype(np.int64))))


def append_draft(
    packed: torch.Tensor,
    seq_lens: torch.Tensor,
    table: RequestState,
    fields: torch.Tensor,
    chosen: torch.Tensor,
    page_table: torch.Tensor,
    sizes: StepSizes,
    step: int,
    is_skipped: torch.Tensor | None,
) -> None:
    own, arrays, tokens = fields.numpy(), table.arrays, chosen.numpy()
    indices = own[INDEX]
    known = arrays.num_tokens.take(indices)
    is_wanted = (indices != sizes.dummy_index) & (own[DRAFTER_COUNT] != 0) & (step < np.minimum(own[MODEL_LIMIT], own[END] - known - 1))
    if is_skipped is not None:
        is_wanted &= is_skipped.numpy() == 0
    wanting = indices[is_wanted]
    arrays.drafts[wanting, step] = tokens[is_wanted]
    arrays.num_drafts[wanting] = step + 1
    positions = (known + step) * is_wanted
    pages, places = _Pages(page_table, sizes).find(indices, own[NUM_PAGES] * is_wanted, positions)
    out = packed.numpy()
    out[0], out[1], out[2] = tokens, positions, pages * sizes.drafter_stride + places
    seq_lens.numpy()[:] = positions + 1


def append_tree(table: RequestState, fields: torch.Tensor, token_ids: torch.Tensor, parents: torch.Tensor) -> None:
    own, arrays = fields.numpy(), table.arrays
    known = arrays.num_tokens.take(own[INDEX])
    limits = np.minimum(own[MODEL_LIMIT], own[END] - known - 1) * (own[DRAFTER_COUNT] != 0) * (own[INDEX] != table.dummy_index)
    offered, before = token_ids.tolist(), parents.expand(token_ids.shape).tolist()
    for index, limit, tokens, own_parents in zip(own[INDEX].tolist(), limits.tolist(), offered, before):
        places: list[int] = []  # of those offered, among those that are drafts; -1: it is none
        count = 0
        for token, parent in zip(tokens, own_parents):
            above = places[parent] if parent >= 0 else -1
            is_draft = token >= 0 and count < limit and (parent < 0 or above >= 0)
            places.append(count if is_draft else -1)
            if is_draft:
                arrays.drafts[index, count], arrays.parents[index, count] = token, above
                count += 1
        if limit > 0:
            arrays.num_drafts[index] = count


def pack_results(
    results: torch.Tensor,
    emitted: torch.Tensor,
    num_emitted: torch.Tensor,
    num_accepted: torch.Tensor,
    num_verified: torch.Tensor,
    is_broken: torch.Tensor,
    cu_logit_rows: torch.Tensor,
) -> None:
    out, starts, broken = results.numpy(), cu_logit_rows.numpy(), is_broken.numpy()
    out[:, 0], out[:, 1], out[:, 2], out[:, 3] = num_emitted.numpy(), num_accepted.numpy(), num_verified.numpy(), 0
    out[:, 4:] = emitted.numpy()
    rows = np.flatnonzero(broken[: starts[-1]])
    if len(rows):
        out[np.searchsorted(starts, rows, side="right") - 1, 3] = 1


def simulate_acceptance(chosen: torch.Tensor, table: RequestState, request_indices: torch.Tensor, cu_logit_rows: torch.Tensor, rate: float) -> None:
    starts, low, arrays = cu_logit_rows.numpy(), 0xFFFFFFFF, table.arrays
    lens = starts[1:] - starts[:-1]
    places = np.arange(starts[-1]) - np.repeat(starts[:-1], lens)
    indices = np.repeat(request_indices.numpy(), lens)
    x = ((arrays.num_tokens[indices].astype(np.int64) + places) * 1024 + indices) & low
    x = (x ^ 61) ^ (x >> 16)
    x = (x * 9) & low
    x = x ^ (x >> 4)
    x = (x * 0x27D4EB2D) & low
    x = x ^ (x >> 15)
    has_draft = places + 1 < np.repeat(lens, lens)
    is_taken = has_draft & ((x >> 8) * 2.0**-24 < np.float32(rate))
    chosen.numpy()[np.flatnonzero(is_taken)] = arrays.drafts[indices[is_taken], places[is_taken]]


def write_values(target: torch.Tensor, updates: torch.Tensor, count: int) -> None:
    pairs = updates[: 2 * count].numpy().reshape(-1, 2)
    target.view(-1).numpy()[pairs[:, 0]] = pairs[:, 1]
