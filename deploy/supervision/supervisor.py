"""The life of a tritonserver: start, start anew, drain, end."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import queue
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.endings import hear_endings
from deploy.supervision.patience import Voucher
from deploy.supervision.probe import ENGINES, LOOK_SECONDS, ServerApi
from deploy.supervision.processes import (
    StoppedProcesses,
    find_regions,
    find_stubs,
    has_children,
    hide_argument,
    note_regions,
    read_memory,
    remove_regions,
)
from deploy.supervision.starting import Loads
from deploy.supervision.watch import ModelState, ModelWatch, RestartBudget

logger = logging.getLogger(__name__)

NEEDED = (*ENGINES, "tokenizer")
"""Without a drafter answers only take longer."""
DRAIN_FILE = "drain-{pid}"
"""What backend/adapters/decode.py looks for in its version folder, by the server's process id: nobody else's end is taken for its own."""
NEXT_DRAIN_FILE = "drain.new"
"""There, too, from the start on: it only has to be renamed then, on a disk that has become full."""
MAX_STARTS = 2
"""Of a server that has never answered: what it refuses, it says and ends with a status of its own; one that a signal ends has crashed, which under
heavy load it may once (SIGABRT, seen with release 24.10), and is started once more."""
MEMORY_SECONDS = 5.0
JOIN_SECONDS = 5.0
DRAIN_SLACK_SECONDS = 5.0
SAVE_SECONDS = 60
"""For decode to save the suffix cache after the last request."""
END_SECONDS = 5
"""For the server to end after that, when nothing is left to lose. It waits, for as long as it may, for models whose processes died, and for
those that a request holds whose gRPC stream was cancelled just as its answer ended (release 24.10)."""

SIGNALLED = 128
"""As a shell has it: beyond this the exit status says by which signal a process ended."""

_libc = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


class MemoryFull(Exception):
    """tritonserver has grown beyond its limit: it is to be drained and started again."""


class LoadStalled(Exception):
    """A model that is being loaded does not get on: the server is to be ended and started again."""


class Supervisor:
    """Runs a server until it is told to stop by SIGTERM, SIGINT or SIGHUP; the second one ends it at once."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        repository: Path,
        models: Sequence[str],
        api: ServerApi,
        *,
        drain_seconds: float,
        hang_seconds: float,
        max_restarts: int,
        stopped_seconds: float = math.inf,
        max_server_memory: int | None = None,
        start_seconds: float = math.inf,
    ) -> None:
        """models: those with a process. stopped_seconds: after which one that is stopped (SIGSTOP) is hung; infinity: only when hang_seconds say so.
        max_server_memory: of tritonserver alone, in bytes. start_seconds: after which a load that does not get on has failed."""
        self.states = [ModelState(name) for name in models]
        self._engine = next(name for name in models if name in ENGINES)
        self.is_draining = False
        self.num_server_restarts = 0
        self._command = list(command)
        self._environment = dict(environment)
        self._repository = repository
        self._api = api
        self._drain_seconds = drain_seconds
        self._hang_seconds, self._stopped_seconds, self._start_seconds = hang_seconds, stopped_seconds, start_seconds
        self._max_restarts = max_restarts
        self.max_server_memory = max_server_memory
        self._budget = RestartBudget(max_restarts)
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._watches: list[ModelWatch] = []
        self._voucher: Voucher | None = None
        self._num_signals = 0
        self._regions: set[str] = set()
        """Of shared memory, those that were noted."""
        self._process: subprocess.Popen[bytes] | None = None
        self._drain_folder = repository / self._engine / "1"

    # -- what others are told ---------------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        """ready, loading, draining or down."""
        needed = [s.state for s in self.states if s.name in NEEDED]
        if self.is_draining:
            return "draining"
        return "ready" if all(s == "up" for s in needed) else "down" if "down" in needed else "loading"

    def describe(self) -> dict[str, Any]:
        models = {s.name: {"state": s.state, "seconds": round(s.seconds, 1), "restarts": s.num_restarts, "detail": s.detail} for s in self.states}
        return {"status": self.status, "server_restarts": self.num_server_restarts, "server_memory": self.server_memory, "models": models}

    @property
    def server_memory(self) -> int:
        """Bytes that tritonserver has for itself; 0 while it does not run."""
        process = self._process
        return read_memory(process.pid) if process is not None else 0

    # -- the server's life ------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Returns the exit status: 0 after a signal and an orderly end."""
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        hear_endings(self._on_signal)
        try:
            return self._keep_running()
        finally:
            self._end()
            with contextlib.suppress(OSError):
                (self._drain_folder / NEXT_DRAIN_FILE).unlink()

    def _keep_running(self) -> int:
        was_up, num_starts, has_stalled = False, 0, False
        while True:
            self._start()
            num_starts += 1
            try:
                failure = self._attend()
                if failure is None:
                    return self._drain()
            except LoadStalled as error:
                failure, has_stalled = str(error), True
            except MemoryFull as error:
                failure = str(error)
                logger.warning("%s: it is drained and started again", failure)
                self._drain()
                if self._num_signals:
                    return 0
            was_up = was_up or any(s.state != "loading" for s in self.states)
            has_crashed = (self._exit_status or 0) > SIGNALLED
            exit_status = self._end() if not has_stalled else min(self._end(), 1)
            self.is_draining = False
            for state in self.states:
                state.set("loading")
            if not was_up:
                if not (has_crashed or has_stalled) or num_starts >= MAX_STARTS or not self._max_restarts:
                    logger.error("%s before it could answer", failure)
                    return exit_status
                logger.error("%s before it could answer; %s is started once more", failure, "the server" if has_stalled else "it crashed, and")
                self.num_server_restarts, has_stalled = self.num_server_restarts + 1, False
                continue
            has_stalled = False
            delay = self._budget.next()
            if delay is None:
                logger.error("%s; not started again (max_restarts is 0)", failure)
                return 1
            logger.error("%s; the server is started again%s", failure, f" in {delay:.0f} s" if delay else "")
            self.num_server_restarts += 1
            ending = time.monotonic() + delay
            while time.monotonic() < ending:
                if self._num_signals:
                    return 0
                time.sleep(LOOK_SECONDS)

    def _on_signal(self, number: int) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            os._exit(128 + number)

    def _start(self) -> None:
        self._failures = queue.SimpleQueue()
        with contextlib.suppress(OSError):  # it is tried again when it is needed
            self._write_drain_file()
        # Of its own session: Ctrl-C in a terminal is for this process to pass on.
        self._process = subprocess.Popen(self._command, env=self._environment, start_new_session=True, preexec_fn=_die_with_parent)
        self._voucher = Voucher(self._process.pid, self._hang_seconds)
        self._voucher.start()
        limits = self._hang_seconds, self._stopped_seconds
        tell = self._failures.put, self._voucher.give_up
        self._watches = [ModelWatch(s, self._api, self._repository, self._process.pid, *limits, self._max_restarts, *tell) for s in self.states]
        for watch in self._watches:
            watch.start()

    @property
    def _exit_status(self) -> int | None:
        """Of the server; None while it runs. Orphans of it that became this process's children are reaped by the way."""
        assert self._process is not None
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self._process.pid:
                    code = os.waitstatus_to_exitcode(found[1])
                    self._process.returncode = code if code >= 0 else SIGNALLED - code
        return self._process.returncode

    def _attend(self) -> str | None:
        """Returns why the server must be started again, or None after a signal. Raises MemoryFull, LoadStalled."""
        assert self._process is not None
        loads = Loads(self._process.pid, self._start_seconds, self._hang_seconds)
        is_hidden, memory_due, stopped = False, time.monotonic(), StoppedProcesses(self._stopped_seconds)
        while not self._num_signals:
            if (status := self._exit_status) is not None:
                return f"the server ended (exit status {status})"
            with contextlib.suppress(queue.Empty):
                return self._failures.get_nowait()
            if stopped.find([self._process.pid], time.monotonic()) is not None:
                return "the server is stopped (SIGSTOP)"
            if (stalled := loads.find(self.states, time.monotonic())) is not None:
                raise LoadStalled(stalled)
            if not is_hidden and has_children(self._process.pid):  # it has read its arguments, and loads models
                is_hidden = True
                are_hidden = [hide_argument(self._process.pid, secret) for secret in self._api.secrets]
                if not all(are_hidden):
                    logger.warning("the key of the restricted APIs stays on the server's command line: users of this machine can read it")
            self._note_regions()
            if time.monotonic() >= memory_due:
                memory_due = time.monotonic() + MEMORY_SECONDS
                self._check_memory()
            time.sleep(LOOK_SECONDS)  # a signal during a SimpleQueue's timed get can make it wait for ever (CPython 3.11)
        return None

    def _note_regions(self) -> None:
        """For the next supervisor on this folder, if this one is killed."""
        assert self._process is not None
        regions = self._regions | {r for w in self._watches for r in tuple(w.regions)}
        if any(state.state != "up" for state in self.states):  # one that is ended while it loads leaves shared memory, too
            regions |= find_regions(self._process.pid)
        if regions != self._regions:
            self._regions = regions
            note_regions(self._repository, sorted(regions))

    def _check_memory(self) -> None:
        memory, limit = self.server_memory, self.max_server_memory
        if limit is not None and memory > limit and all(s.state == "up" for s in self.states):
            raise MemoryFull(f"the server holds {memory} bytes; the limit is {limit} (max_server_memory)")

    def _wait(self, seconds: float) -> Iterator[None]:
        """Looks until the server has ended, or for so long."""
        ending = time.monotonic() + seconds
        while self._exit_status is None and time.monotonic() < ending:
            yield
            time.sleep(LOOK_SECONDS)

    def _write_drain_file(self) -> Path:
        """Where it is not there yet. Raises OSError; then none is."""
        path = self._drain_folder / NEXT_DRAIN_FILE
        if not path.exists():
            try:
                path.write_text(str(self._drain_seconds))
            except OSError:
                path.unlink(missing_ok=True)
                raise
        return path

    def _drain(self) -> int:
        """Lets open requests end, then the decode model, then the server."""
        assert self._process is not None
        drain_file = self._drain_folder / DRAIN_FILE.format(pid=self._process.pid)
        self.is_draining = True
        is_up = any(s.name == self._engine and s.state == "up" for s in self.states)
        for watch in self._watches:
            watch.stop()
        if not is_up:  # nothing is open, and a server that loads its models does not listen to signals
            return 0
        try:
            self._write_drain_file().replace(drain_file)
            logger.info("shutting down: open requests have %g s; a second signal ends them at once", self._drain_seconds)
        except OSError as error:  # the folder is gone
            logger.error("shutting down: open requests are ended at once: %s cannot be written: %s", drain_file, error.strerror)
        for _ in self._wait(self._drain_seconds + DRAIN_SLACK_SECONDS + SAVE_SECONDS):
            if not drain_file.exists() or not self._has_engine():
                break
        is_saved = not drain_file.exists()
        drain_file.unlink(missing_ok=True)  # another server may be given this process id
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        for _ in self._wait(END_SECONDS):
            pass
        if not is_saved and self._has_engine():
            logger.error("%s has not shut down within %g s and is killed", self._engine, self._drain_seconds + DRAIN_SLACK_SECONDS + SAVE_SECONDS)
            return 1
        logger.info("shut down")
        return 0

    def _has_engine(self) -> bool:
        assert self._process is not None
        return any(s.model == self._engine for s in find_stubs(self._process.pid))

    def _end(self) -> int:
        """Kills whatever is left of the server. Returns its exit status."""
        if self._process is None:
            return 1
        for watch in self._watches:
            watch.stop()
        regions = self._regions | {r for w in self._watches for r in tuple(w.regions)} | find_regions(self._process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        while (status := self._exit_status) is None:
            time.sleep(LOOK_SECONDS)
        remove_regions(self._repository, regions)
        self._regions = set()
        if self._voucher is not None:
            self._voucher.stop()
        for watch in self._watches:  # their calls end with the server
            watch.join(JOIN_SECONDS)
        self._process = None
        return status or 1
