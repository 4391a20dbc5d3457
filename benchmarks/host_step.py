"""What the host does for a step: processor time of the engine's thread with a worker that computes nothing.

    python -m benchmarks.host_step [--batches 1 32 128 256] [--methods none ngram suffix auto] [--outputs 300]

A GPU computes the next step meanwhile; where that takes it less, it waits for the host. Launches of graphs, copies and events are not in it. Steps
bring the tokens of one text (code that the bundled model has not seen, over and over) and are planned as those of a GPU: what a step verifies is
known once it was read. Of its drafts three are right, whoever made them: what drafts bring is not measured here. Steps with prompts do not count.

ngram, suffix: ten and twelve drafts in every step; auto: the planner chooses among mtp and both, and what it chooses goes by this clock.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from backend import LLM, SamplingParams, engine_parts
from backend.config import BUNDLED_MODEL
from backend.step.plan import StepPlan
from backend.step.times import StepTimes
from backend.step.worker import Begun, Launched, Results, Worker, _Read
from benchmarks.workloads import completion_prompts
from kernels.structs import EMITS, RESULT_HEAD, VERIFY_LIMIT

PROMPT, REPEATS, RIGHT = 200, 3, 3
SERVER = {"method": "auto", "request_methods": ["mtp", "suffix"], "num_speculative_tokens": 12, "suffix_decoding_max_cached_requests": 0}
METHODS: dict[str, dict[str, Any] | None] = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 10, "adaptive": False},
    "suffix": {"method": "suffix", "num_speculative_tokens": 12, "adaptive": False},
    "auto": None,
}
"""What a request says."""
TIMES = StepTimes(1e-3, 1e-4, 2e-4)


class IdleWorker:
    """Takes the place of a worker's `begin` and `go_on` for steps without prompts."""

    def __init__(self, worker: Worker, text: list[int]) -> None:
        self._read, self._text, self._place = worker._read, np.array(text * 2, dtype=np.int32), 0
        self.plan = StepPlan()

    def begin(self, plan: StepPlan) -> Begun:
        self.plan = plan
        return Begun(plan, None)  # type: ignore[arg-type]

    def go_on(self, begun: Begun, *_: object) -> Launched:
        plan, drafts = begun.plan, begun.plan.fields[VERIFY_LIMIT]
        rows = np.zeros((plan.num_rows, RESULT_HEAD + RIGHT + 1), dtype=np.int32)
        rows[:, 1], rows[:, 2] = np.minimum(drafts, RIGHT), drafts
        rows[:, 0] = plan.fields[EMITS] * (1 + rows[:, 1])
        rows[:, RESULT_HEAD:] = self._text[self._place : self._place + RIGHT + 1]
        self._place = (self._place + RIGHT + 1) % (len(self._text) // 2)
        return Launched(lambda: Results(self._read(plan, _Read(rows, None, None, {}, None)), rows, TIMES), lambda: True)


def planned_as_on_a_gpu() -> mock._patch:
    """Of an engine that is made meanwhile."""
    makers = {name: getattr(engine_parts, name) for name in ("Planner", "Drafters")}
    padded = {name: (lambda *args, make=make, **options: make(*args, **{**options, "is_layout_exact": False})) for name, make in makers.items()}
    return mock.patch.multiple(engine_parts, **padded)


def measure(batch: int, outputs: int, methods: list[str]) -> Iterator[tuple[str, list[float]]]:
    """Milliseconds of each step of so many requests, by method."""
    with planned_as_on_a_gpu():
        llm = LLM(
            str(BUNDLED_MODEL),
            max_batch_size=batch,
            max_model_len=PROMPT + outputs + 32,
            speculative_config=SERVER,
            enable_prefix_caching=False,
            async_scheduling=True,
        )
    engine, times = llm.engine, list[float]()
    text = list(itertools.chain.from_iterable(llm.engine.tokenizer.encode(prompt) for prompt in completion_prompts(8)))
    idle = IdleWorker(engine.worker, text)
    engine.worker.begin, engine.worker.go_on = idle.begin, idle.go_on  # type: ignore[method-assign, assignment]
    step = engine.step

    def timed() -> bool:
        started = time.thread_time()
        is_going_on = step()
        if idle.plan.num_rows == batch and not idle.plan.num_prompts:
            times.append(1000 * (time.thread_time() - started))
        return is_going_on

    engine.step = timed  # type: ignore[method-assign]
    prompts = [{"prompt_token_ids": [text[(7 * i + j) % len(text)] for j in range(PROMPT)]} for i in range(batch)]
    params = SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)
    for method in methods:
        for number in range(1 + REPEATS):
            if number == 1:
                times.clear()
            llm.generate(prompts, params, use_tqdm=False, speculative=METHODS[method])
        yield method, list(times)
    llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--outputs", type=int, default=300)
    arguments = parser.parse_args()
    print("| requests | method | ms a step: median | a tenth are below | us a request there |\n|---|---|---|---|---|")
    for batch in arguments.batches:
        for method, times in measure(batch, arguments.outputs, arguments.methods):
            least = statistics.quantiles(times, n=10)[0]
            print(f"| {batch} | {method} | {statistics.median(times):.3f} | {least:.3f} | {1000 * least / batch:.1f} |", flush=True)


if __name__ == "__main__":
    main()
