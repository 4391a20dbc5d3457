"""Rows of logits that tests of sampling and of distributions have in common."""

from __future__ import annotations

import torch


def make_logits(kind: str, rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random logits [R, V]; kind: what is special about them, "flat" is nothing."""
    logits = torch.randn(rows, vocab_size, device=device) * 1.3
    if kind == "peaked":
        logits += 14 * (torch.rand_like(logits) < 8 / vocab_size)
    elif kind == "ties":
        logits = logits.round()
    elif kind == "constant":
        logits.fill_(0.5)
    elif kind == "zeros":
        logits = torch.where(logits > 0, 0.0, -0.0)
    elif kind == "negative":
        logits = -logits.abs() - 3
    elif kind == "wide":
        logits *= 40
    elif kind == "banned":
        logits.masked_fill_(torch.rand_like(logits) < 0.9, float("-inf"))
        logits[:, -1] = 0
    elif kind == "few":  # the others cannot be drawn
        logits.masked_fill_(torch.rand_like(logits) < 1 - 3 / vocab_size, float("-inf"))
        logits[:, vocab_size // 2] = 0
    elif kind == "certain":
        logits[torch.arange(rows), torch.randint(0, vocab_size, (rows,))] += 40
    return logits.to(dtype)
