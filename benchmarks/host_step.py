"""What the host does for a step of plain requests: processor time of the engine's thread with a worker that computes nothing.

    python -m benchmarks.host_step [--batches 1 32 128 256] [--outputs 300]

A GPU computes the next step meanwhile; where that takes it less, it waits for the host. Launches of graphs, copies and events are not in it. Prompts
are computed; of the steps that follow, the tokens are random.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from backend import LLM, SamplingParams
from backend.config import BUNDLED_MODEL
from backend.step.plan import StepPlan
from backend.step.times import StepTimes
from backend.step.worker import Begun, Launched, Results, Worker, _Read
from kernels.structs import RESULT_HEAD

PROMPT, REPEATS = 16, 3


class IdleWorker:
    """Takes the place of a worker's `begin` and `go_on` for steps without prompts."""

    def __init__(self, worker: Worker) -> None:
        self._begin, self._go_on, self._read = worker.begin, worker.go_on, worker._read
        self._random = np.random.default_rng(0)
        self._plan: StepPlan | None = None

    def begin(self, plan: StepPlan) -> Begun | None:
        self._plan = None if plan.num_prompts else plan
        return self._begin(plan) if plan.num_prompts else None

    def go_on(self, begun: Begun | None, *rest: object) -> Launched:
        plan = self._plan
        if begun is not None or plan is None:
            return self._go_on(begun, *rest)  # type: ignore[arg-type]
        rows = np.zeros((plan.num_rows, RESULT_HEAD + 1), dtype=np.int32)
        rows[:, 0], rows[:, RESULT_HEAD] = 1, self._random.integers(300, 4000, plan.num_rows)
        return Launched(lambda: Results(self._read(plan, _Read(rows, None, None, {}, None)), rows, StepTimes(1e-3, 1e-3, 0.0)), lambda: True)


def measure(batch: int, outputs: int) -> list[float]:
    """Milliseconds of each step of so many requests."""
    config = {"method": "none"}
    llm = LLM(str(BUNDLED_MODEL), max_batch_size=batch, max_model_len=PROMPT + outputs + 16, speculative_config=config, async_scheduling=True)
    engine, times = llm.engine, list[float]()
    idle = IdleWorker(engine.worker)
    engine.worker.begin, engine.worker.go_on = idle.begin, idle.go_on  # type: ignore[method-assign, assignment]
    step = engine.step

    def timed() -> bool:
        started = time.thread_time()
        is_going_on = step()
        if idle._plan is not None and idle._plan.num_rows == batch:
            times.append(1000 * (time.thread_time() - started))
        return is_going_on

    engine.step = timed  # type: ignore[method-assign]
    prompts = [{"prompt_token_ids": [(7 * i + j) % 4000 for j in range(PROMPT)]} for i in range(batch)]
    for _ in range(1 + REPEATS):
        llm.generate(prompts, SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True), use_tqdm=False)
    llm.close()
    return times[len(times) // (1 + REPEATS) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--outputs", type=int, default=300)
    arguments = parser.parse_args()
    print("| requests | ms a step: median | a tenth are below |\n|---|---|---|")
    for batch in arguments.batches:
        times = measure(batch, arguments.outputs)
        print(f"| {batch} | {statistics.median(times):.3f} | {statistics.quantiles(times, n=10)[0]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
