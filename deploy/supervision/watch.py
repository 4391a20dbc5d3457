"""Watches a model and brings it back where that can be done alone."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from deploy.supervision.probe import ENGINES, LOOK_SECONDS, MAX_LOOK_SECONDS, Probe, ServerApi
from deploy.supervision.processes import StoppedProcesses, Stub, dump_threads, find_engine, find_stubs, is_running

logger = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
ASK_AGAIN_SECONDS = 2.0
MAX_ERRORS = 3
"""Probes in a row that are answered with an error before a model whose process lives counts as down."""
STABLE_SECONDS = 300.0
"""What was up for this long starts afresh with its attempts."""
MAX_DELAY = 30.0
REFILL_SECONDS = 30.0


class RestartBudget:
    """How soon the server may be started again: some restarts at once, then one for every REFILL_SECONDS. There is no last one.

    A server that clients can crash must come back each time, or whoever crashes it a few times has put it out of service.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._left = float(limit)
        self._since = clock()

    def next(self) -> float | None:
        """Takes one restart: seconds to wait before it; None: restarts are not wanted (a limit of 0)."""
        if self._limit == 0:
            return None
        now = self._clock()
        self._left = min(self._left + (now - self._since) / REFILL_SECONDS, float(self._limit)) - 1
        self._since = now
        return max(-self._left * REFILL_SECONDS, 0.0)


@dataclass
class Backoff:
    """How soon to load a model again, and when to stop: then the server is started again."""

    limit: int
    count: int = 0

    def next(self, up_seconds: float) -> float | None:
        """Seconds to wait before the next attempt, after what failed was up for so long: 0, 1, 2, 4, ...; None: no more attempts."""
        self.count = 1 if up_seconds >= STABLE_SECONDS else self.count + 1
        if self.count > self.limit:
            return None
        return 0.0 if self.count == 1 else min(2.0 ** (self.count - 2), MAX_DELAY)


@dataclass
class ModelState:
    """What is known of one model. state: loading, up or down."""

    name: str
    state: str = "loading"
    detail: str = ""
    """Why it went down last."""
    num_restarts: int = 0
    """Times it was up and went down."""
    since: float = field(default_factory=time.monotonic)
    _up_before: float = 0.0

    def set(self, state: str, detail: str | None = None) -> None:
        self.num_restarts += self.state == "up" and state == "down"
        self._up_before = self.up_seconds if state == "down" else 0.0
        self.state, self.since = state, time.monotonic()
        self.detail = self.detail if detail is None else detail

    @property
    def seconds(self) -> float:
        """Since the last change."""
        return time.monotonic() - self.since

    @property
    def up_seconds(self) -> float:
        """How long it is up; of one that went down: how long it was."""
        return self.seconds if self.state == "up" else self._up_before


class ModelWatch(threading.Thread):
    """Watches one model during one life of the server, and brings it back where that can be done alone."""

    def __init__(
        self,
        state: ModelState,
        api: ServerApi,
        repository: Path,
        server_pid: int,
        hang_seconds: float,
        stopped_seconds: float,
        max_restarts: int,
        on_failure: Callable[[str], None],
        give_up: Callable[[Stub], None],
    ) -> None:
        """on_failure: told why the server must be started again; give_up: told of each process that is to be ended."""
        super().__init__(name=f"watch {state.name}", daemon=True)
        self.state = state
        self.regions: set[str] = set()
        self._api = api
        self._repository = repository
        self._server_pid = server_pid
        self._hang_seconds, self._stopped_seconds = hang_seconds, stopped_seconds
        self._backoff = Backoff(max_restarts)
        self._on_failure, self._give_up = on_failure, give_up
        self._is_over = threading.Event()

    def stop(self) -> None:
        self._is_over.set()

    def run(self) -> None:
        model, limit = self.state.name, math.inf
        while self._await_answer(limit):
            logger.info("%s is up after %.1f s", model, self.state.seconds)
            self.state.set("up")
            stubs = self._find_stubs()
            reason = self._watch(stubs)
            if reason is None or self._is_over.is_set():  # what was seen after the end is the end itself
                return
            self.state.set("down", reason)
            logger.error("%s is down: %s", model, reason)
            if model in ENGINES or not self._reload(stubs):
                self._on_failure(f"{model}: {reason}")
                return
            limit = self._hang_seconds
        if not self._is_over.is_set():
            self._on_failure(f"{model}: it was loaded, and has answered nothing for {limit:g} s")

    def _find_stubs(self) -> list[Stub]:
        stubs = [s for s in find_stubs(self._server_pid) if s.model == self.state.name]
        self.regions.update(s.region for s in stubs)
        return stubs

    def _await_answer(self, limit: float) -> bool:
        """False when told to stop, or when there is none for so long, as far as this process ran to see it."""
        waited, looked = 0.0, time.monotonic()
        probe = Probe(self._api, self.state.name)
        while (answer := probe.poll()) != "" and waited < limit and not self._is_over.wait(LOOK_SECONDS):
            now = time.monotonic()
            waited, looked = waited + min(now - looked, MAX_LOOK_SECONDS), now
            if time.monotonic() - probe.since > ASK_AGAIN_SECONDS:  # it may have reached the process that died
                probe.close()
                probe = Probe(self._api, self.state.name)
        probe.close()
        return answer == ""

    def _watch(self, stubs: list[Stub]) -> str | None:
        """Returns why the model is down, or None when told to stop."""
        probe: Probe | None = None
        pids = [pid for s in stubs for pid in (s.pid, find_engine(s.pid)) if pid is not None]
        due, num_errors, stopped = time.monotonic(), 0, StoppedProcesses(self._stopped_seconds)
        while not self._is_over.wait(LOOK_SECONDS):
            if dead := [pid for pid in pids if not is_running(pid)]:
                return f"its process {dead[0]} died"
            now = time.monotonic()
            if (pid := stopped.find(pids, now)) is not None:
                return f"its process {pid} is stopped (SIGSTOP)"
            if probe is None:
                probe = Probe(self._api, self.state.name) if now >= due else None
                continue
            answer = probe.poll()
            if answer is None:
                if not probe.wait_longer(self._hang_seconds):
                    probe.close()
                    dump_threads(pids)
                    return f"it has answered nothing for {self._hang_seconds:g} s, the limit (hang_seconds)"
                continue
            num_errors = num_errors + 1 if answer else 0
            if num_errors == MAX_ERRORS:
                return f"it answers with an error: {answer}"
            probe, due = None, now + PROBE_SECONDS
        return None

    def _reload(self, stubs: list[Stub]) -> bool:
        """False when it could not be loaded, often enough to stop trying."""
        for stub in set(stubs) & set(find_stubs(self._server_pid)):  # one that hangs would keep its memory
            self._give_up(stub)
            with contextlib.suppress(ProcessLookupError):
                os.kill(stub.pid, signal.SIGKILL)
        while (delay := self._backoff.next(self.state.up_seconds)) is not None and not self._is_over.wait(delay):
            self.state.set("loading")
            path = self._repository / self.state.name / "1" / "model.py"
            try:
                os.utime(path)  # what has not changed is not loaded again
                failure = self._api.load(self.state.name)
            except OSError as error:  # it is gone, or its disk takes nothing any more
                failure = f"{path}: {error.strerror}"
            if not failure or self._is_over.is_set():
                return not failure
            self.state.set("down", failure)
            logger.error("%s could not be loaded: %s", self.state.name, failure)
        return False
