"""Verification of drafts, by every strategy."""

from __future__ import annotations

import torch

from kernels.reference.sampling import gumbel_noise, philox
from kernels.structs import ACCEPT_STREAM, RECOVER_STREAM


def verify(draft_token_ids: torch.Tensor, num_drafts: torch.Tensor, target_token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts drafts while they equal what the target chose -> (token_ids [B, K + 1] padded with -1, num_accepted [B]).

    draft_token_ids [B, K]; num_drafts [B]; target_token_ids [B, K + 1]: the target's choice after input token i, so draft i is
    checked against column i, and the first column that differs, or the one after the last draft, is emitted too
    (Leviathan et al. 2023, with a deterministic choice).
    """
    width = draft_token_ids.shape[1]
    columns = torch.arange(width, device=draft_token_ids.device)
    is_match = (draft_token_ids == target_token_ids[:, :width]) & (columns < num_drafts[:, None])
    num_accepted = is_match.long().cumprod(dim=1).sum(dim=1)
    columns = torch.arange(width + 1, device=draft_token_ids.device)
    return target_token_ids.masked_fill(columns > num_accepted[:, None], -1), num_accepted


def verify_rejection(
    probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling (Leviathan et al. 2023; Chen et al. 2023) -> (token_ids [B, K + 1] padded with -1, num_accepted [B]).

    probs [B, K + 1, V] of the target after input token i; draft_probs [B, K, V] that the drafts were drawn from, None for
    certain drafts (one-hot); seeds [B]; positions [B] of the first draft. Draft x is accepted with probability
    min(1, p(x) / q(x)); the first rejected one is replaced by a draw from max(p - q, 0); after the last a bonus is drawn.
    """
    batch, width = draft_token_ids.shape
    draft_token_ids = draft_token_ids.long()
    places = positions[:, None] + torch.arange(width + 1, device=probs.device)
    keys = seeds[:, None].expand(-1, width + 1)
    drafts = draft_token_ids.clamp(min=0)
    if draft_probs is None:
        draft_probs = torch.zeros_like(probs[:, :width]).scatter_(2, drafts[:, :, None], 1.0)
    p, q = (x.gather(2, drafts[:, :, None])[:, :, 0] for x in (probs[:, :width], draft_probs))
    u = philox(keys[:, :width].flatten(), places[:, :width].flatten(), 1, ACCEPT_STREAM).view(batch, width)
    is_accepted = (u.double() + 0.5) * 2.0**-32 * q < p
    is_accepted &= torch.arange(width, device=probs.device) < num_drafts[:, None]
    num_accepted = is_accepted.long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(batch, device=probs.device)
    target = probs[rows, num_accepted]
    residual = (target - draft_probs[rows, num_accepted.clamp(max=max(width - 1, 0))]).clamp(min=0) if width else target
    # Where p <= q everywhere up to rounding, nothing is left: then p is as good as q.
    is_recovered = (num_accepted < num_drafts) & (residual.sum(dim=1) > 0)
    weights = torch.where(is_recovered[:, None], residual, target)
    noise = gumbel_noise(seeds, positions + num_accepted, probs.shape[-1], RECOVER_STREAM)
    last = (weights.log() + noise).argmax(dim=-1)
    columns = torch.arange(width + 1, device=probs.device)
    padded = torch.cat([draft_token_ids, draft_token_ids.new_full((batch, 1), -1)], dim=1)
    token_ids = torch.where(columns < num_accepted[:, None], padded, -1)
    return token_ids.scatter_(1, num_accepted[:, None], last[:, None]), num_accepted


def top_p_candidates(probs: torch.Tensor, top_p: torch.Tensor, max_candidates: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The likeliest tokens of each row -> (token_ids [R, C], probs [R, C], num_candidates [R]), likeliest first, equal ones by id.

    C = max_candidates, or V when that is less. num_candidates: how many it takes to reach top_p [R], or C when they do not.
    """
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    values, ids = values[:, :max_candidates], ids[:, :max_candidates]
    before = values.cumsum(dim=-1) - values
    is_needed = (before < top_p[:, None]) & (values > 0)
    is_needed[:, 0] = True
    return ids, values, is_needed.sum(dim=-1)


def verify_top_p(
    draft_token_ids: torch.Tensor,
    num_drafts: torch.Tensor,
    candidate_ids: torch.Tensor,
    num_candidates: torch.Tensor,
    correction_ids: torch.Tensor,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FastDeploy's rule, which favours speed over the exact distribution -> (token_ids [B, K + 1] padded with -1, num_accepted [B]).

    draft_token_ids [B, K]; num_drafts [B]; candidate_ids [B, K + 1, C]; num_candidates [B, K + 1]; correction_ids [B, K + 1]: what each
    row would emit, drawn from its candidates. A draft among its row's candidates is accepted. One that is not, but is the row's second
    likeliest token, is accepted together with the `window` drafts after it when each of those is the likeliest of its row. Else
    the row's correction ends the span; after the last draft it is the bonus.
    """
    best, counts, corrections = candidate_ids.tolist(), num_candidates.tolist(), correction_ids.tolist()
    token_ids, accepted = torch.full_like(correction_ids, -1), []
    for b, (row, count) in enumerate(zip(draft_token_ids.tolist(), num_drafts.tolist(), strict=True)):
        drafts, place = row[:count], 0
        while place < len(drafts):
            if drafts[place] in best[b][place][: counts[b][place]]:
                place += 1
                continue
            ahead = range(place + 1, place + 1 + window)
            is_second = len(best[b][place]) > 1 and drafts[place] == best[b][place][1]
            if not is_second or ahead.stop > len(drafts) or any(drafts[i] != best[b][i][0] for i in ahead):
                break
            place = ahead.stop
        token_ids[b, : place + 1] = torch.tensor([*drafts[:place], corrections[b][place]])
        accepted.append(place)
    return token_ids, torch.tensor(accepted)
