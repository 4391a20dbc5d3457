"""The step on one screen: propose, forward, verify. Plain decoding is the same step with no drafts."""

from __future__ import annotations

import time
from dataclasses import dataclass

from backend.config import SpeculativeConfig
from backend.core import Batch, Draft, Verdict
from backend.drafters import Drafters
from backend.runner import Runner
from backend.sampling import Sampler, score_prompt
from backend.verify import verify


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step's parts."""

    propose: float = 0.0
    forward: float = 0.0
    verify: float = 0.0


def speculate(
    batch: Batch, drafters: Drafters, runner: Runner, sampler: Sampler, config: SpeculativeConfig, times: StepTimes
) -> tuple[Draft, Verdict]:
    """One step of every entry: 1 to K + 1 tokens for each that emits. The pages are prepared, and the drafters know of the step."""
    started = time.perf_counter()
    draft = drafters.propose(batch.entries)
    proposed = time.perf_counter()
    forward = runner.forward(batch, draft)
    computed = time.perf_counter()
    verdict = verify(batch, draft, forward, sampler, config)
    for b, states in forward.prompt_states.items():
        with runner.threads_for(len(states)):
            verdict.prompt_logprobs[b] = score_prompt(batch.entries[b].request, states, runner.logits)
    times.propose, times.forward, times.verify = proposed - started, computed - proposed, time.perf_counter() - computed
    return draft, verdict
