"""Steps that were launched, until what came of them is read and booked. On the engine's thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from backend.booking import Booking
from backend.chunk_limit import ChunkLimit
from backend.errors import RequestError
from backend.group import Group
from backend.launching import InFlight
from backend.metrics import Metrics
from backend.open_requests import OpenRequests
from backend.planner import Planner

POLL_SECONDS = 0.0001
"""Between two looks whether a step has ended."""


class UnderWay:
    """The oldest one first."""

    def __init__(
        self,
        booking: Booking,
        planner: Planner,
        open_requests: OpenRequests,
        metrics: Metrics,
        chunks: ChunkLimit | None,
        group: Group | None,
        check_ranks: Callable[[], None],
    ) -> None:
        """chunks: learns what steps with prompts take; check_ranks: raises EngineError when one is gone."""
        self._booking, self._planner, self._open, self._metrics = booking, planner, open_requests, metrics
        self._chunks, self._group, self._check_ranks = chunks, group, check_ranks
        self._steps: deque[InFlight] = deque()
        self.num_finished = 0
        """Steps that were read."""
        self.phase_seconds = self.device_seconds = 0.0
        """Of the last one, with the drafts of the host and without them."""
        self.waited_seconds = 0.0
        """For steps that had not ended when they were to be read, all together."""

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: InFlight) -> None:
        self._steps.append(step)

    def drop(self) -> None:
        """Nobody will read them."""
        self._steps.clear()

    def await_one(self, wake: threading.Condition, has_news: Callable[[], bool], deadline: float | None) -> bool:
        """Waits for the oldest to end. False: before that there was news (asked with `wake` held), of which a step may be launched behind it, or the
        time of a request was over (time.monotonic())."""
        while self._steps and not self._steps[0].read.is_done():
            with wake:
                if has_news() or (deadline is not None and time.monotonic() >= deadline):
                    return False
                wake.wait(POLL_SECONDS)
        return True

    def finish(self) -> None:
        """Reads the oldest, and books it. Requests that ended meanwhile are left out."""
        oldest = self._steps.popleft()
        step, is_late, started = oldest.step, not oldest.read.is_done(), time.perf_counter()
        results = oldest.read()
        if is_late:
            self.waited_seconds += time.perf_counter() - started
        self._check_ranks()
        self.num_finished = oldest.number
        if self._group is not None:
            self._group.verdicts.add(results.rows)
            if any(entry.request.is_prefill_only for entry in step.entries):
                self._group.await_done(oldest.number)  # other nodes read the pages of all ranks
        times = results.times
        draft_seconds = times.draft + step.host_seconds
        self.device_seconds, self.phase_seconds = times.total, times.total + step.host_seconds
        self._metrics.add_times(draft_seconds, times.forward, times.decide)
        if self._chunks is not None:
            self._chunks.observe(step.plan.prompt_rows, times.total)
        self._booking.begin()
        for number, (entry, outcome) in enumerate(zip(step.entries, results.outcomes, strict=True)):
            own = self._open.get(entry.request)
            if own is None:
                continue  # it ended while this step was under way
            try:
                self._booking.book(own, step, number, entry, outcome)
            except RequestError as error:
                self._open.fail(own, error)
            except Exception as error:  # it belongs to this request only
                self._open.fail_internally(own, error)
        self._booking.end()
        self._planner.observe(step, results.outcomes, times)
        self._planner.keep_pages(step.entries)

    def finish_all(self) -> None:
        while self._steps:
            self.finish()
