"""Ranks that choose a share of a step's tokens each: nobody has the scores of all rows, and what is chosen is told to all."""

from __future__ import annotations

import torch

from backend.parallel.ranks import Ranks
from backend.step.options import Options
from kernels import ops
from kernels.request_table import RequestTable

NEED_ALL = Options.LOGPROBS | Options.BAD_WORDS | Options.MASKS | Options.REJECTION | Options.TOP_P
"""What looks at rows of other requests, or at scores once more after the choice."""


def choose_own_rows(
    logits: torch.Tensor, table: RequestTable, request_indices: torch.Tensor, cu_logit_rows: torch.Tensor, num_rows: int, ranks: Ranks
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.process_and_choose` of a step's num_rows rows on every rank -> (token_ids [num_rows] int32, is_broken [num_rows] bool).

    logits [S, V]: of the rows that this rank chooses (`Ranks.share_rows`).
    """
    share = len(logits)
    words = torch.empty(-(-(share + -(-share // 4)) // 4) * 4, dtype=torch.int32, device=logits.device)  # of vectors of 16 bytes
    token_ids, is_broken = words[:share], words[share:].view(torch.bool)[:share]
    made = ops.process_and_choose(logits, table, request_indices, cu_logit_rows, (token_ids, is_broken), ranks.rank * share)
    if not logits.is_cuda:
        token_ids.copy_(made[0])
        is_broken.copy_(made[1])
    of_all = ranks.gather_words(words)
    parts = of_all[:, :share], of_all[:, share:].view(torch.bool)[:, :share]
    token_ids, is_broken = (part.contiguous().view(-1)[:num_rows] for part in parts)
    return token_ids, is_broken
