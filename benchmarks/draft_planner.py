"""The planner of drafts (method auto) against fixed choices: the part `planner` of `benchmarks.speculation`.

All choices run on the same requests in one engine, in turns; figures are medians over turns. On a GPU in bfloat16 by the wall's clock, on a
CPU by the process's own processor time, on one thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from backend import LLM, SamplingParams
from backend.devices import on_stream
from backend.step.draft_masks import Grammars
from backend.step.worker import Begun, Launched, Results
from benchmarks.workloads import Requests, agent_rounds, chat_requests, completion_requests, editing_requests

FIXED: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "ngram 5": {"method": "ngram", "num_speculative_tokens": 5},
    "ngram 10": {"method": "ngram", "num_speculative_tokens": 10},
    "suffix 5": {"method": "suffix", "num_speculative_tokens": 5},
    "suffix 12": {"method": "suffix", "num_speculative_tokens": 12},
    "mtp 2": {"method": "mtp", "num_speculative_tokens": 2},
    "mtp 3": {"method": "mtp", "num_speculative_tokens": 3},
}
"""Choices that are the same for every request and step."""
AUTO = "auto"
SETS: dict[str, Callable[[int], Requests]] = {
    "completion": completion_requests,
    "editing": editing_requests,
    "chat": chat_requests,
    "agent loop": agent_rounds,
}
WORKLOADS = (*SETS, "mix")
CONCURRENCIES = (1, 4, 16, 64, 128)
LENGTHS = (1.0, 0.8, 1.15, 0.9, 1.2, 0.75, 1.1)
"""What answers' lengths are multiplied with, one after the other. Were they equal, requests without drafts would all end in the same step for ever,
and their prompts share one: on a GPU a step with prompts takes several times as long as one without, and no server's requests end together."""
MIN_BEST, MIN_MIX, MIN_NONE = 0.97, 1.1, 0.99
"""Of the goals: auto against the best fixed choice, on the mix, and against none."""
REQUESTS_ON_GPU = {1: 12, 4: 32, 16: 96}
"""By concurrency; beyond it 3 for each that is open: a quarter of a second or more of the bundled model, which makes 2,500 tokens a second
without drafts for one request and a hundred thousand for 128."""


def count_requests(concurrency: int, is_gpu: bool) -> int:
    return REQUESTS_ON_GPU.get(concurrency, 3 * concurrency) if is_gpu else max(6, 2 * concurrency)


def make_requests(workload: str, count: int) -> Requests:
    if workload != "mix":
        return SETS[workload](count)
    return [own for group in zip(*(make(-(-count // 4)) for make in SETS.values())) for own in group]


@dataclass
class Pass:
    """What one choice's requests took and brought."""

    tokens_per_second: float
    tokens_per_step: float
    """Of a request."""
    ms_per_step: float
    requests_per_step: float
    """Fewer than are open where some sit a step out."""
    drafts_per_step: float
    """Of a request."""
    with_prompts: float
    """Share of the steps that had prompts in them."""
    ms_verify: float
    """Of a step on the device: forward and verdict."""
    ms_draft: float
    """The same of drafting, with that on the host."""
    ms_waited: float
    """Of a step, for the device: near 0 where the host bounds it."""
    drafters: dict[str, float] = field(default_factory=dict)
    """Share of the tokens by who made them."""


@dataclass
class _Watch:
    """Of steps that were read."""

    steps: int = 0
    with_prompts: int = 0
    rows: int = 0
    drafts: int = 0
    waited: float = 0.0


@contextlib.contextmanager
def watch(llm: LLM) -> Iterator[_Watch]:
    worker, found = llm.engine.worker, _Watch()
    go_on = worker.go_on

    def go_on_watched(begun: Begun, masks: np.ndarray, grammars: Grammars | None = None) -> Launched:
        plan, launched = begun.plan, go_on(begun, masks, grammars)

        def read() -> Results:
            started = time.perf_counter()
            results = launched.read()
            found.waited += time.perf_counter() - started
            found.steps += 1
            found.with_prompts += plan.num_prompts > 0
            found.rows += plan.num_rows
            found.drafts += sum(outcome.num_drafts for outcome in results.outcomes)
            return results

        return dataclasses.replace(launched, read=read)

    worker.go_on = go_on_watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        worker.go_on = go_on  # type: ignore[method-assign]


class Runner:
    """One engine's passes."""

    def __init__(self, device: str, num_cached: int) -> None:
        """num_cached: answers that suffix remembers; -1: as many as it has room for."""
        self.is_gpu = device.startswith("cuda")
        speculative = {"method": AUTO, "request_methods": ["mtp", "suffix"], "num_speculative_tokens": 12}
        options: dict[str, Any] = {"dtype": "bfloat16"} if self.is_gpu else {"num_threads": 1}
        self.llm = LLM(
            speculative_config=speculative | {"suffix_decoding_max_cached_requests": num_cached},
            enable_prefix_caching=False,
            max_batch_size=128,
            device=device,
            **options,
        )
        # As servers do: full collections look at what came since alone.
        gc.collect()
        gc.freeze()
        self._clock = time.perf_counter if self.is_gpu else time.process_time
        self._turn = 0

    def run(self, requests: Requests, concurrency: int, choice: dict[str, Any] | None) -> Pass:
        """With always as many requests open: the list over and over. What is measured begins when as many as are open at once have ended, and ends
        when all of the list have once more: there is no end in which few are open, which would be long for who takes some of them faster than
        others."""
        self._turn += 1
        engine, metrics = self.llm.engine, self.llm.engine.metrics
        turn, number = itertools.cycle(requests), itertools.count()
        num_ended = request_steps = 0
        made = Counter[str]()
        open_ids: set[str] = set()

        def sink(delta) -> None:
            nonlocal num_ended, request_steps
            if delta.error is not None:
                raise delta.error
            made.update(delta.sources)
            request_steps += bool(delta.token_ids)
            if delta.finish_reason:
                num_ended += 1
                open_ids.discard(delta.request_id)

        def go_on(until: int) -> None:
            """Until so many requests have ended."""
            while num_ended < until:
                while len(open_ids) < concurrency:
                    (prompt, count), own = next(turn), next(number)
                    request_id = f"{self._turn}-{own}"
                    open_ids.add(request_id)
                    params = SamplingParams(max_tokens=round(count * LENGTHS[own % len(LENGTHS)]), temperature=0.0, ignore_eos=True)
                    engine.submit(prompt, params, sink, request_id=request_id, speculative=choice)
                engine.step()

        go_on(concurrency)
        made.clear()
        request_steps, before = 0, (metrics.forward_seconds + metrics.verify_seconds, metrics.propose_seconds)
        with watch(self.llm) as watched:
            started = self._clock()
            go_on(num_ended + len(requests))
            seconds = self._clock() - started
        tokens, steps = made.total(), max(1, watched.steps)
        after = metrics.forward_seconds + metrics.verify_seconds, metrics.propose_seconds
        for request_id in list(open_ids):
            engine.cancel(request_id)
        while engine.step():
            pass
        verify, draft = (1000 * (new - old) / steps for new, old in zip(after, before))
        return Pass(
            tokens_per_second=tokens / seconds,
            tokens_per_step=tokens / max(1, request_steps),
            ms_per_step=1000 * seconds / steps,
            requests_per_step=watched.rows / steps,
            drafts_per_step=watched.drafts / max(1, watched.rows),
            with_prompts=watched.with_prompts / steps,
            ms_verify=verify,
            ms_draft=draft,
            ms_waited=1000 * watched.waited / steps,
            drafters={name: count / tokens for name, count in made.most_common()},
        )

    def capture(self) -> int:
        """The shapes of steps that had no graph, as a server does when nobody waits -> how many."""
        worker, count = self.llm.engine.worker, 0
        with on_stream(worker.device):
            while worker.capture_waiting():
                count += 1
        return count


def median(passes: Sequence[Pass]) -> Pass:
    """The one in the middle by speed."""
    return sorted(passes, key=lambda one: one.tokens_per_second)[len(passes) // 2]


COLUMNS = f"{'':12s} {'tokens/s':>9s} {'x none':>6s} {'tokens/step':>11s} {'ms/step':>8s} {'verify':>7s} {'draft':>6s} {'waited':>6s}"
HEADER = f"{COLUMNS} {'requests':>8s} {'drafts':>6s} {'prompts':>7s} {'range':>11s}  tokens by"


def _line(name: str, passes: Sequence[Pass], none: float) -> str:
    own, speeds = median(passes), [one.tokens_per_second for one in passes]
    span = f"{min(speeds) / own.tokens_per_second:.2f}-{max(speeds) / own.tokens_per_second:.2f}"
    times = f"{own.ms_per_step:8.3f} {own.ms_verify:7.3f} {own.ms_draft:6.3f} {own.ms_waited:6.3f}"
    drafters = ", ".join(f"{who} {100 * part:.0f}%" for who, part in own.drafters.items())
    return (
        f"{name:12s} {own.tokens_per_second:9.0f} {own.tokens_per_second / none:6.2f} {own.tokens_per_step:11.2f} {times} "
        f"{own.requests_per_step:8.1f} {own.drafts_per_step:6.2f} {100 * own.with_prompts:6.0f}% {span:>11s}  {drafters}"
    )


def run_cell(runner: Runner, requests: Requests, concurrency: int, repeats: int) -> tuple[dict[str, list[Pass]], int]:
    """Passes by choice, and shapes that were captured for them."""
    choices = {name: {**choice, "adaptive": False} for name, choice in FIXED.items()}
    captured = 0
    if runner.is_gpu:  # an eager step takes several times as long
        few = requests[: max(4, len(requests) // 4)]
        for choice in choices.values():
            runner.run(few, concurrency, choice)
        captured += runner.capture()
    runner.run(requests, concurrency, None)  # learns, as a server has after its first requests
    captured += runner.capture()
    passes: dict[str, list[Pass]] = {name: [] for name in (*FIXED, AUTO)}
    for _ in range(repeats):
        for name, column in passes.items():
            column.append(runner.run(requests, concurrency, choices.get(name)))
        captured += runner.capture()
    return passes, captured


def measure(
    repeats: int,
    concurrencies: Sequence[int] = CONCURRENCIES,
    workloads: Sequence[str] = WORKLOADS,
    device: str = "cpu",
    num_requests: int | None = None,
) -> dict[str, Any]:
    """num_requests: of each pass, in the place of what suits the device."""
    if device == "cpu":
        torch.set_num_threads(1)
    started, results, rows = time.monotonic(), dict[str, Any](), list[str]()
    for remembers in (False, True):
        own = [name for name in workloads if (name == "agent loop") == remembers]
        if not own:
            continue
        runner = Runner(device, -1 if remembers else 0)
        print(f"\n{', '.join(own)}: loaded after {time.monotonic() - started:.0f} s", flush=True)
        for concurrency, workload in itertools.product(concurrencies, own):
            requests = make_requests(workload, num_requests or count_requests(concurrency, runner.is_gpu))
            passes, captured = run_cell(runner, requests, concurrency, repeats)
            speeds = {name: median(column).tokens_per_second for name, column in passes.items()}
            print(f"\n{workload}, concurrency {concurrency} ({captured} shapes captured; {time.monotonic() - started:.0f} s)\n{HEADER}")
            for name, column in passes.items():
                print(_line(name, column, speeds["none"]))
            auto, best = speeds.pop(AUTO), max(speeds, key=lambda name: speeds[name])
            over_none, over_best = auto / speeds["none"], auto / speeds[best]
            is_met = over_best >= (MIN_MIX if workload == "mix" else MIN_BEST) and over_none >= MIN_NONE
            # Paired within a turn, which what else runs on the machine changes less.
            paired = statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in zip(passes[AUTO], passes[best]))
            against = f"{best} ({speeds[best] / speeds['none']:.2f})"
            times = f"{over_none:11.2f} {against:>22s} {over_best:11.2f} {paired:8.2f}  {'met' if is_met else 'NOT met'}"
            rows.append(f"{f'{workload}, concurrency {concurrency}':28s} {times}")
            print(f"best fixed choice: {best}; auto x none {over_none:.2f}, auto x best {over_best:.2f}", flush=True)
            results[f"{workload}, {concurrency}"] = {name: [asdict(one) for one in column] for name, column in passes.items()}
        runner.llm.close()
    print(f"\n{'':28s} {'auto x none':>11s} {'best fixed (x none)':>22s} {'auto x best':>11s} {'by turns':>8s}")
    print("\n".join(rows), flush=True)
    return results
