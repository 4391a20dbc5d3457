"""The step on one screen: propose, forward, verify. Plain decoding is the same step with no drafts."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from backend.core import Batch, Draft, Verdict
from backend.drafters import Drafters
from backend.runner import Forward, Runner
from backend.sampling import Sampler, pick_logprobs
from kernels import reference as ops


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step's parts."""

    propose: float = 0.0
    forward: float = 0.0
    verify: float = 0.0


def speculate(batch: Batch, drafters: Drafters, runner: Runner, sampler: Sampler, times: StepTimes) -> tuple[Draft, Verdict]:
    """One step of every entry: 1 to K + 1 tokens for each that emits."""
    started = time.perf_counter()
    draft = drafters.propose(batch.entries)
    proposed = time.perf_counter()
    forward = runner.forward(batch, draft)
    computed = time.perf_counter()
    verdict = verify(batch, draft, forward, sampler)
    drafters.observe(batch.entries, verdict, forward.hidden)
    times.propose, times.forward, times.verify = proposed - started, computed - proposed, time.perf_counter() - computed
    return draft, verdict


@torch.inference_mode()
def verify(batch: Batch, draft: Draft, forward: Forward, sampler: Sampler) -> Verdict:
    """Accepts each row of drafts while it equals what the target chose under the request's own parameters."""
    starts, count = forward.row_starts, len(batch.entries)
    wanted = [b for b, e in enumerate(batch.entries) if e.emits and e.request.params.logprobs is not None]
    raw = {b: forward.logits[starts[b] : starts[b + 1]].clone() for b in wanted}
    chosen = sampler.choose(batch.entries, draft.token_ids, forward.logits, starts).tolist()
    verdict = Verdict([[] for _ in range(count)], [0] * count, [None] * count)
    drafting = [b for b in range(count) if draft.token_ids[b]]
    for b in range(count):
        verdict.token_ids[b] = chosen[starts[b] : starts[b + 1]]
    if drafting:
        width = max(len(draft.token_ids[b]) for b in drafting)
        drafts = [draft.token_ids[b] + [-1] * (width - len(draft.token_ids[b])) for b in drafting]
        targets = [verdict.token_ids[b] + [-1] * (width + 1 - len(verdict.token_ids[b])) for b in drafting]
        lengths = [len(draft.token_ids[b]) for b in drafting]
        emitted, accepted = ops.verify(torch.tensor(drafts), torch.tensor(lengths), torch.tensor(targets))
        for b, row, num_accepted in zip(drafting, emitted.tolist(), accepted.tolist(), strict=True):
            verdict.token_ids[b] = row[: num_accepted + 1]
            verdict.num_accepted[b] = num_accepted
    for b in wanted:
        verdict.logprobs[b] = pick_logprobs(raw[b], verdict.token_ids[b], batch.entries[b].request.params.logprobs or 0)
    return verdict
