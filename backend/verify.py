"""Which drafts stand: one verdict per entry, by the strategy that its request chose."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from backend.config import SpeculativeConfig
from backend.core import Batch, Draft, Verdict
from backend.runner import Forward
from backend.sampling import Sampler, is_deterministic, pick_logprobs
from kernels import ops


@torch.inference_mode()
def verify(batch: Batch, draft: Draft, forward: Forward, sampler: Sampler, config: SpeculativeConfig) -> Verdict:
    """1 to K + 1 tokens for each entry that emits. Changes the logits.

    An entry with no drafts, or whose next token is certain, needs no strategy: it gets what the target chose.
    """
    entries, starts, count = batch.entries, forward.row_starts, len(batch.entries)
    wanted = [b for b, e in enumerate(entries) if e.emits and e.request.params.logprobs is not None]
    is_finite = forward.logits.isfinite().all(dim=-1).tolist()
    raw = {b: forward.logits[starts[b] : starts[b + 1]].clone() for b in wanted}
    sampler.process(entries, draft.token_ids, forward.logits, starts)
    chosen = sampler.choose(entries, forward.logits, starts).tolist()
    verdict = Verdict([chosen[starts[b] : starts[b + 1]] for b in range(count)], [0] * count, [None] * count, [False] * count)
    for b in range(count):
        verdict.is_broken[b] = not all(is_finite[starts[b] : starts[b + 1]])
    by_strategy: dict[str, list[int]] = {}
    for b in range(count):
        if draft.token_ids[b] and not verdict.is_broken[b]:
            request = entries[b].request
            strategy = "target_match" if is_deterministic(request) else request.speculation.verify_strategy
            by_strategy.setdefault(strategy if config.accept_policy == "normal" else config.accept_policy, []).append(b)
    for strategy, own in by_strategy.items():
        spans, accepted = STRATEGIES[strategy](own, batch, draft, forward, sampler, config, verdict)
        for b, span, num_accepted in zip(own, spans, accepted, strict=True):
            verdict.token_ids[b], verdict.num_accepted[b] = span, num_accepted
    for b in wanted:
        verdict.logprobs[b] = pick_logprobs(raw[b], verdict.token_ids[b], entries[b].request.params.logprobs or 0)
    return verdict


Spans = tuple[list[list[int]], list[int]]


def _padded(rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows])


def _rows(own: Sequence[int], draft: Draft, starts: Sequence[int], width: int) -> torch.Tensor:
    """Logits rows [B', width + 1] of the entries; a short one repeats its last."""
    return torch.tensor([[starts[b] + min(i, len(draft.token_ids[b])) for i in range(width + 1)] for b in own])


def _cut(token_ids: torch.Tensor, num_accepted: torch.Tensor) -> Spans:
    accepted = num_accepted.tolist()
    return [row[: n + 1] for row, n in zip(token_ids.tolist(), accepted, strict=True)], accepted


def _match(own: Sequence[int], batch: Batch, draft: Draft, forward: Forward, sampler: Sampler, config: SpeculativeConfig, verdict: Verdict) -> Spans:
    """Accept while a draft is what the target chose, drawn or likeliest. The tokens are those of plain decoding."""
    drafts = [draft.token_ids[b] for b in own]
    width = max(map(len, drafts))
    targets = _padded([verdict.token_ids[b] for b in own], width + 1)
    return _cut(*ops.verify(_padded(drafts, width), torch.tensor([len(d) for d in drafts]), targets))


def _distributions(
    own: Sequence[int], batch: Batch, draft: Draft, forward: Forward, sampler: Sampler, *, use_top_p: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Probabilities [B', K + 1, V] after every parameter (top_p only if asked for), and the rows' parameters [B' * (K + 1)]."""
    width = max(len(draft.token_ids[b]) for b in own)
    rows = _rows(own, draft, forward.row_starts, width).to(forward.logits.device)
    parameters = sampler.parameters([batch.entries[b] for b in own], [width + 1] * len(own))
    temperature, top_k, top_p, min_p, _, _ = parameters
    probs = ops.probabilities(forward.logits[rows.flatten()], temperature, top_k, top_p if use_top_p else torch.ones_like(top_p), min_p)
    return probs.view(len(own), width + 1, -1), parameters


def _reject(own: Sequence[int], batch: Batch, draft: Draft, forward: Forward, sampler: Sampler, config: SpeculativeConfig, verdict: Verdict) -> Spans:
    """Exact in distribution with any drafter, by rejection sampling."""
    probs, (*_, seeds, positions) = _distributions(own, batch, draft, forward, sampler, use_top_p=True)
    drafts = [draft.token_ids[b] for b in own]
    width = probs.shape[1] - 1
    lengths = torch.tensor([len(d) for d in drafts], device=probs.device)
    ids = _padded(drafts, width).to(probs.device)
    drawn_from = None
    if any(b in draft.probs for b in own):
        drawn_from = torch.zeros_like(probs[:, :width]).scatter_(2, ids.clamp(min=0)[:, :, None], 1.0)
        for i, b in enumerate(own):
            if b in draft.probs:
                known = draft.probs[b][: len(drafts[i])]
                drawn_from[i, : len(known)] = known
    return _cut(*ops.verify_rejection(probs, ids, lengths, drawn_from, seeds[:: width + 1], positions[:: width + 1]))


def _top_p(own: Sequence[int], batch: Batch, draft: Draft, forward: Forward, sampler: Sampler, config: SpeculativeConfig, verdict: Verdict) -> Spans:
    """FastDeploy's rule: accepts what is likely enough. Not exact in distribution."""
    probs, (_, _, top_p, _, seeds, positions) = _distributions(own, batch, draft, forward, sampler, use_top_p=False)
    drafts = [draft.token_ids[b] for b in own]
    ids, lengths = _padded(drafts, probs.shape[1] - 1), torch.tensor([len(d) for d in drafts])
    return _cut(*accept_likely(probs, ids.to(probs.device), lengths.to(probs.device), top_p, seeds, positions, config))


def accept_likely(
    probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    num_drafts: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    config: SpeculativeConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.verify_top_p` of distributions [B, K + 1, V]; top_p, seeds and positions [B * (K + 1)]."""
    batch, width, vocab_size = probs.shape
    ids, weights, num_candidates = ops.top_p_candidates(probs.view(batch * width, vocab_size), top_p, config.max_candidate_len)
    corrections = ops.sample_candidates(ids, weights, num_candidates, seeds, positions).view(batch, width)
    return ops.verify_top_p(
        draft_token_ids, num_drafts, ids.view(batch, width, -1), num_candidates.view(batch, width), corrections, config.verify_window
    )


def _accept_all(
    own: Sequence[int], batch: Batch, draft: Draft, forward: Forward, sampler: Sampler, config: SpeculativeConfig, verdict: Verdict
) -> Spans:
    """For debugging: every draft stands, then what the target chose after the last."""
    return [[*draft.token_ids[b], verdict.token_ids[b][-1]] for b in own], [len(draft.token_ids[b]) for b in own]


def _reject_all(
    own: Sequence[int], batch: Batch, draft: Draft, forward: Forward, sampler: Sampler, config: SpeculativeConfig, verdict: Verdict
) -> Spans:
    """For debugging: no draft stands; the target's first choice does."""
    return [verdict.token_ids[b][:1] for b in own], [0] * len(own)


def _simulate(
    own: Sequence[int], batch: Batch, draft: Draft, forward: Forward, sampler: Sampler, config: SpeculativeConfig, verdict: Verdict
) -> Spans:
    """For benchmarks: each draft stands with a given probability, by the token's place."""
    spans, accepted = [], []
    for b in own:
        known, drafts, count = len(batch.entries[b].request.token_ids), draft.token_ids[b], 0
        while count < len(drafts) and random.Random(known + count).random() < config.simulated_acceptance_rate:
            count += 1
        spans.append([*drafts[:count], verdict.token_ids[b][count]])
        accepted.append(count)
    return spans, accepted


STRATEGIES = {
    "target_match": _match,
    "greedy": _match,
    "rejection": _reject,
    "topp": _top_p,
    "accept_all": _accept_all,
    "reject_all": _reject_all,
    "simulated": _simulate,
}
