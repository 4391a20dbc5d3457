"""Log-probabilities of emitted tokens and of prompts, from logits that nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from backend.core import TokenLogprobs
from backend.sampling_params import MAX_LOGPROBS

PROMPT_ROWS = 128
"""Tokens of a prompt that are scored at a time: each takes a row as wide as the vocabulary."""


def score_width(vocab_size: int) -> int:
    """Words of a scored token: the bits of its log-probability, then the N likeliest ids, then the bits of theirs."""
    return 1 + 2 * min(MAX_LOGPROBS, vocab_size)


def padded_rows(cu_rows: torch.Tensor, width: int, num_rows: int) -> torch.Tensor:
    """[B, width]: the packed rows of each request; a short one repeats its last, and one without rows gets any."""
    last = (cu_rows.diff() - 1).clamp(min=0)
    places = torch.arange(width, dtype=torch.int32, device=cu_rows.device)
    return (cu_rows[:-1, None] + torch.minimum(places, last[:, None])).clamp(max=num_rows - 1).long()


def _fill(scores: torch.Tensor, raw: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """scores [..., 1 + 2 N] int32 of the tokens [...] that rows [...] of raw [R, V] may choose."""
    logprobs = raw.log_softmax(dim=-1, dtype=torch.float32)
    values, ids = logprobs.topk(scores.shape[-1] // 2, dim=-1)
    own = token_ids.long().clamp(0, raw.shape[1] - 1)  # past a request's end there is none
    chosen = logprobs.view(-1)[rows * raw.shape[1] + own]
    scores[..., 0] = chosen.view(torch.int32)
    scores[..., 1 : 1 + ids.shape[1]] = ids[rows]
    scores[..., 1 + ids.shape[1] :] = values.view(torch.int32)[rows]


def score_emitted(
    scores: torch.Tensor, raw: torch.Tensor, emitted: torch.Tensor, cu_logit_rows: torch.Tensor, path: torch.Tensor | None = None
) -> None:
    """Fills scores [B, W, 1 + 2 N] of the tokens emitted [B, >= W]; path [B, >= W]: of trees, the row of each among its request's."""
    rows = padded_rows(cu_logit_rows, scores.shape[1], len(raw))
    if path is not None:
        rows = rows.gather(1, path[:, : scores.shape[1]].clamp(0, rows.shape[1] - 1).long())  # past what is emitted they are anything
    _fill(scores, raw, rows, emitted[:, : scores.shape[1]])


def score_prompt(states: torch.Tensor, following: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor], vocab_size: int) -> torch.Tensor:
    """[n, 1 + 2 N] of the prompt's tokens `following` [n], after those of states [n, hidden]."""
    scores = torch.zeros(len(states), score_width(vocab_size), dtype=torch.int32, device=states.device)
    for begin in range(0, len(states), PROMPT_ROWS):
        part = slice(begin, begin + PROMPT_ROWS)
        raw = logits(states[part])
        _fill(scores[part], raw, torch.arange(len(raw), device=raw.device), following[part])
    return scores


def read_scores(scores: np.ndarray, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Of one request: scores [>= len(token_ids), 1 + 2 N] as they were filled for these tokens."""
    most = scores.shape[1] // 2
    values, ids = scores.view(np.float32), scores[:, 1 : 1 + num_top].tolist()
    own, tops = values[:, 0].tolist(), values[:, 1 + most : 1 + most + num_top].tolist()
    return [TokenLogprobs(token_id, own[i], list(zip(ids[i], tops[i], strict=True))) for i, token_id in enumerate(token_ids)]
