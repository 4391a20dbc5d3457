"""Prompt lookup on the device, so that it does not break a captured step."""

from __future__ import annotations

import torch

from kernels._load import load
from kernels.reference import slots as reference_slots
from kernels.state import SLOTS, SlotTable

THREADS = 512


def draft_ngram(
    table: SlotTable,
    row_slots: torch.Tensor,
    draft_limits: torch.Tensor,
    max_size: int,
    min_size: int,
    num_given: torch.Tensor | None = None,
) -> None:
    """Searches the last max_size to min_size tokens of row_slots [B] earlier in the request: what followed them is drafted.

    As `backend.drafters.ngram`: the longest size first, then the earliest place. draft_limits [B]: most drafts of the step, -1: leave the
    request's drafts alone. num_given [B]: drafts that are there already; they end the text, and more are put behind them. A request never
    gets drafts past its end. All int32. Writes table.drafts and table.num_drafts.
    """
    if not 1 <= min_size <= max_size:
        raise ValueError(f"sizes go from {min_size} to {max_size}; 1 <= min_size <= max_size is needed")
    if not row_slots.is_cuda:
        return reference_slots.draft_ngram(table, row_slots, draft_limits, max_size, min_size, num_given)
    kernel = load(row_slots.device, "ngram", "draft_ngram", SLOTS + "PPPii", {"THREADS": THREADS})
    given = 0 if num_given is None else num_given
    kernel((len(row_slots), 1), (THREADS, 1, 1), *table.arguments, row_slots, draft_limits, given, max_size, min_size)
