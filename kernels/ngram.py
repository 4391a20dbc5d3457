"""Prompt lookup on the device, so that it does not break a captured step."""

from __future__ import annotations

import torch

from kernels import cpu_ngram
from kernels._load import load
from kernels.reference import request_table as reference
from kernels.request_state import RequestState

THREADS = 512


def draft_ngram(
    table: RequestState,
    request_indices: torch.Tensor,
    draft_limits: torch.Tensor,
    max_size: int,
    min_size: int,
    num_given: torch.Tensor | None = None,
    min_scores: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
) -> None:
    """Searches the last max_size to min_size tokens of request_indices [B] earlier in the request: what followed them is drafted.

    The longest size first, then the earliest place. draft_limits [B]: most drafts of the step, -1: leave the request's drafts alone.
    num_given [B]: drafts that are there already; they end the text, and more are put behind them. A request never gets drafts past its
    end. scores [B], written: tokens that match, counted on up to MAX_SCORE_PAST past the size; 0: none, or no room for drafts. A request
    whose score is below its min_scores [B] gets none. All int32. Writes table.drafts and table.num_drafts.
    """
    if not 1 <= min_size <= max_size:
        raise ValueError(f"sizes go from {min_size} to {max_size}; 1 <= min_size <= max_size is needed")
    batch = len(request_indices)
    lists = {"request_indices": request_indices, "draft_limits": draft_limits, "num_given": num_given, "min_scores": min_scores, "scores": scores}
    for name, tensor in lists.items():
        if tensor is not None and (tensor.shape != (batch,) or tensor.dtype != torch.int32 or not tensor.is_contiguous()):
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; int32 [{batch}], contiguous, is needed")
    if not request_indices.is_cuda:
        draft = cpu_ngram.draft_ngram if cpu_ngram.is_usable() else reference.draft_ngram
        draft(table, request_indices, draft_limits, max_size, min_size, num_given, min_scores, scores)
        return
    kernel = load(request_indices.device, "ngram", "draft_ngram", {"THREADS": THREADS})
    optional = (0 if tensor is None else tensor for tensor in (num_given, min_scores, scores))
    kernel((batch, 1), (THREADS, 1, 1), table.arguments, request_indices, draft_limits, *optional, max_size, min_size)
