"""Candidates for the drafts of a tree: the likeliest tokens, or the first ones that would be drawn."""

from __future__ import annotations

import torch

from kernels import distribution
from kernels.reference import request_table as reference
from kernels.request_state import RequestState
from kernels.structs import GREEDY, SAMPLE_STREAM


def choose_candidates(
    logits: torch.Tensor, table: RequestState, request_indices: torch.Tensor, count: int, ahead: int, *, is_likeliest: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` tokens for each row of logits [R, V] of requests [R] int32, the best first -> (token_ids [R, count] int32; -1: no others
    are possible, log-probabilities [R, count] float32 by what they are ordered by).

    Of greedy requests and with is_likeliest: by logits. Else in the order in which `choose` would take them so many tokens `ahead`, were each
    one before it impossible: with its noise, after top_k, top_p and min_p (Gumbel top-k, Kool et al. 2019). Requests with fewer tokens left to
    choose from than `count` have -1 for the others.
    """
    if request_indices.shape != (len(logits),) or request_indices.dtype != torch.int32:
        raise ValueError(f"request_indices is {request_indices.dtype} {list(request_indices.shape)}; int32 [{len(logits)}] is needed")
    own = min(count, logits.shape[1])
    if not logits.is_cuda:
        found = reference.choose_candidates(logits, table, request_indices, own, ahead, is_likeliest)
    else:
        values, likeliest = logits.topk(own, dim=-1)
        token_ids = likeliest.int().masked_fill_(values == float("-inf"), -1)
        scores = values.float() - logits.logsumexp(dim=-1, keepdim=True)
        if not is_likeliest:
            indices = request_indices.long()
            is_greedy = table.flags[indices] & GREEDY != 0
            drawn = _draw(logits, table, indices, is_greedy, own, ahead)
            token_ids, scores = (torch.where(is_greedy[:, None], *pair) for pair in ((token_ids, drawn[0]), (scores, drawn[1])))
        found = token_ids, scores
    if own == count:
        return found
    token_ids, scores = found
    pad = torch.nn.functional.pad
    return pad(token_ids, (0, count - own), value=-1), pad(scores, (0, count - own), value=float("-inf"))


def _draw(
    logits: torch.Tensor, table: RequestState, indices: torch.Tensor, is_greedy: torch.Tensor, count: int, ahead: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the distribution that is drawn from, without the noise."""
    temperature = torch.where(is_greedy, 1.0, table.temperature[indices])
    filters = (table.top_k[indices], table.top_p[indices], table.min_p[indices])
    probs = distribution.probabilities(logits, temperature, *filters, is_filtered=True)
    seeds, positions = table.seeds[indices], table.num_tokens[indices] + ahead
    found, chances = [], []
    for _ in range(count):
        drawn = distribution.draw_tokens(probs, seeds, positions, SAMPLE_STREAM)
        places = drawn.long()[:, None].clamp(0, probs.shape[1] - 1)  # anything where nothing is left
        chances.append(probs.gather(1, places)[:, 0])
        found.append(torch.where(chances[-1] > 0, drawn, -1))
        probs.scatter_(1, places, 0.0)
    return torch.stack(found, dim=1), torch.stack(chances, dim=1).log()
