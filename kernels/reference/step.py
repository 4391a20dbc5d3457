"""Twins of `kernels.step` in pure torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.step import StepSizes


def _kv_slots(page_table: torch.Tensor, slots: torch.Tensor, num_pages: torch.Tensor, positions: torch.Tensor, sizes: StepSizes) -> torch.Tensor:
    pages = positions // sizes.page_size
    ids = page_table[slots, pages.clamp(max=sizes.table_width - 1)].long()
    ids = torch.where(pages < num_pages, ids, sizes.scratch_page)
    return ids * sizes.page_size + positions % sizes.page_size


def _rows_of(starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Owner [N] and place within it [N] of the packed rows that somebody owns."""
    counts = starts.diff().long()
    owners = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return owners, torch.arange(len(owners)) - starts.long()[owners]


def prepare_step(
    packed: torch.Tensor,
    cu_query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    num_verified: torch.Tensor,
    fields: torch.Tensor,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    page_table: torch.Tensor,
    sizes: StepSizes,
) -> None:
    slots, num_pages, end, limits = (row.long() for row in fields[:4])
    known = num_tokens[slots]
    allowed = torch.minimum(limits, end - known - 1).clamp(min=0)
    counts = torch.where((slots != sizes.dummy_slot) & (known < end), 1 + torch.minimum(num_drafts[slots], allowed), 0)
    cu_query_lens[0] = 0
    cu_query_lens[1:] = counts.cumsum(0).clamp(max=sizes.rows)
    counts = cu_query_lens.diff()
    seq_lens.copy_(torch.where(counts > 0, known - 1 + counts, 0))
    num_verified.copy_((counts - 1).clamp(min=0))
    owners, places = _rows_of(cu_query_lens)
    own, positions = slots[owners], known[owners].long() - 1 + places
    packed[:2] = 0
    packed[2] = sizes.scratch_page * sizes.page_size
    packed[0, : len(owners)] = torch.where(places == 0, tokens[own, known[owners].long() - 1], drafts[own, (places - 1).clamp(min=0)]).long()
    packed[1, : len(owners)] = positions
    packed[2, : len(owners)] = _kv_slots(page_table, own, num_pages[owners], positions, sizes)


def prepare_drafter(
    packed: torch.Tensor,
    seq_lens: torch.Tensor,
    last_rows: torch.Tensor,
    fields: torch.Tensor,
    cu_query_lens: torch.Tensor,
    emitted: torch.Tensor,
    num_emitted: torch.Tensor,
    num_tokens: torch.Tensor,
    page_table: torch.Tensor,
    sizes: StepSizes,
) -> None:
    slots, num_pages = fields[0].long(), fields[1].long()
    counts, out = cu_query_lens.diff(), num_emitted.long()
    first = num_tokens[slots].long() - out
    seq_lens.copy_(torch.where(counts > 0, first + counts, 0))
    last_rows.copy_((cu_query_lens[:-1] + (out - 1).clamp(min=0)).clamp(max=sizes.rows - 1))
    owners, places = _rows_of(cu_query_lens)
    positions = first[owners] + places
    packed[:2] = 0
    packed[2:] = sizes.scratch_page * sizes.page_size
    newest = emitted[owners, torch.minimum(places, out[owners] - 1).clamp(min=0)].long()
    packed[0, : len(owners)] = torch.where(out[owners] > 0, newest, 0)
    packed[1, : len(owners)] = positions
    packed[2, : len(owners)] = _kv_slots(page_table, slots[owners], num_pages[owners], positions, sizes)
    packed[3, : len(owners)] = _kv_slots(page_table, slots[owners], num_pages[owners], positions - 1, sizes)


def append_draft(
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    packed: torch.Tensor,
    seq_lens: torch.Tensor,
    fields: torch.Tensor,
    chosen: torch.Tensor,
    num_tokens: torch.Tensor,
    page_table: torch.Tensor,
    sizes: StepSizes,
    step: int,
) -> None:
    slots, num_pages, end, _, limits = (row.long() for row in fields[:5])
    known = num_tokens[slots].long()
    is_wanted = (slots != sizes.dummy_slot) & (step < torch.minimum(limits, end - known - 1))
    drafts[slots[is_wanted], step] = chosen[is_wanted].int()
    num_drafts[slots[is_wanted]] = step + 1
    positions = torch.where(is_wanted, known + step, 0)
    packed[0], packed[1] = chosen, positions
    packed[2] = _kv_slots(page_table, slots, torch.where(is_wanted, num_pages, 0), positions, sizes)
    seq_lens.copy_(positions + 1)


def pack_results(
    results: torch.Tensor,
    emitted: torch.Tensor,
    num_emitted: torch.Tensor,
    num_accepted: torch.Tensor,
    num_verified: torch.Tensor,
    is_broken: torch.Tensor,
    cu_query_lens: torch.Tensor,
) -> None:
    owners, _ = _rows_of(cu_query_lens)
    broken = torch.zeros(len(results), dtype=torch.int32).index_add_(0, owners, is_broken[: len(owners)].int()).clamp(max=1)
    results.copy_(torch.cat([torch.stack([num_emitted, num_accepted, num_verified, broken], dim=1), emitted], dim=1))


def simulate_acceptance(
    chosen: torch.Tensor,
    fields: torch.Tensor,
    cu_query_lens: torch.Tensor,
    drafts: torch.Tensor,
    num_tokens: torch.Tensor,
    sizes: StepSizes,
    rate: float,
) -> None:
    owners, places = _rows_of(cu_query_lens)
    slots, low = fields[0].long()[owners], 0xFFFFFFFF
    x = ((num_tokens[slots].long() + places) * 1024 + slots) & low
    x = (x ^ 61) ^ (x >> 16)
    x = (x * 9) & low
    x = x ^ (x >> 4)
    x = (x * 0x27D4EB2D) & low
    x = x ^ (x >> 15)
    has_draft = places + 1 < cu_query_lens.diff()[owners]
    is_taken = has_draft & ((x >> 8).double() * 2.0**-24 < rate)
    rows = torch.arange(len(owners))[is_taken]
    chosen[rows] = drafts[slots[is_taken], places[is_taken]]


def write_values(target: torch.Tensor, updates: torch.Tensor, count: int) -> None:
    pairs = updates[: 2 * count].view(-1, 2)
    target.view(-1)[pairs[:, 0].long()] = pairs[:, 1]
