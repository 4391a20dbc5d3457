"""Whether models that are being loaded get on: by what their processes compute, read and hold, as nothing is known of how far a load is.

A server that waits for a process which was killed before the two knew each other waits for ever, and says nothing (measured, release 24.10).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from deploy.supervision.processes import Stub, dump_threads, find_ended, find_stubs, is_running
from deploy.supervision.watch import ModelState

SAMPLE_SECONDS = 2.0
"""Between two looks at how far the processes are: each goes through all of the machine's."""
MAX_SAMPLE_SECONDS = 2 * SAMPLE_SECONDS
"""What is beyond that, this process did not run: nor did the others, where the machine stood still."""
BUSY_SHARE = 0.02
"""Of one core, for the processes of a model together: those that only wait have less (0.002, measured)."""
GROWTH_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Effort:
    """What some processes have done so far, and hold."""

    cpu_seconds: float = 0.0
    read_bytes: int = 0
    """From disks."""
    resident_bytes: int = 0

    def is_more(self, before: Effort, seconds: float) -> bool:
        """Whether they were at work since then, `seconds` ago. What one that has ended did is missing: then less is more, too."""
        return (
            abs(self.cpu_seconds - before.cpu_seconds) >= BUSY_SHARE * seconds
            or abs(self.read_bytes - before.read_bytes) >= GROWTH_BYTES
            or abs(self.resident_bytes - before.resident_bytes) >= GROWTH_BYTES
        )


def measure(pids: Sequence[int]) -> Effort:
    """Of processes and all that they have started."""
    cpu, read, resident = 0.0, 0, 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            for process in [(own := psutil.Process(pid)), *own.children(recursive=True)]:
                with contextlib.suppress(psutil.Error), process.oneshot():
                    times = process.cpu_times()
                    cpu, resident = cpu + times.user + times.system, resident + process.memory_info().rss
                    read += process.io_counters().read_bytes
    return Effort(cpu, read, resident)


@dataclass(slots=True)
class _Load:
    """One model's, since its state is `loading`."""

    since: float
    sampled: float
    effort: Effort = field(default_factory=Effort)
    idle_seconds: float = 0.0
    stubs: set[Stub] = field(default_factory=set)
    """All that were seen, those that have ended among them."""


class Loads:
    """Those of all models during one life of the server."""

    def __init__(self, server_pid: int, start_seconds: float, hang_seconds: float) -> None:
        """start_seconds: for which a load may not get on; hang_seconds: the same where the model's process has ended, which nobody brings back."""
        self._server_pid = server_pid
        self._start_seconds, self._hang_seconds = start_seconds, hang_seconds
        self._loads: dict[str, _Load] = {}
        self._looked = -math.inf

    def find(self, states: Sequence[ModelState], now: float) -> str | None:
        """Why the server must be started again: a model whose load has not got on for as long as the limit. To be called all the time."""
        loading = {state.name: state for state in states if state.state == "loading"}
        self._loads = {name: load for name, load in self._loads.items() if name in loading and load.since == loading[name].since}
        if not loading or now - self._looked < SAMPLE_SECONDS:
            return None
        self._looked = now
        stubs = find_stubs(self._server_pid)
        for name, state in loading.items():
            load = self._loads.setdefault(name, _Load(state.since, now))
            own = [stub for stub in stubs if stub.model == name]
            load.stubs.update(own)
            self._sample(load, [stub.pid for stub in own], now)
            if (failure := self._judge(name, load)) is not None:
                return failure
        return None

    def _sample(self, load: _Load, pids: list[int], now: float) -> None:
        seconds, load.sampled = now - load.sampled, now
        # Before a model has a process, the server is at work.
        effort = measure(pids or ([] if load.stubs else [self._server_pid]))
        if effort.is_more(load.effort, seconds):
            load.idle_seconds, load.effort = 0.0, effort
        else:  # bytes are compared with those of the last progress: what comes slowly counts, too
            load.idle_seconds += min(seconds, MAX_SAMPLE_SECONDS)
            load.effort = dataclasses.replace(load.effort, cpu_seconds=effort.cpu_seconds)

    def _judge(self, name: str, load: _Load) -> str | None:
        ended = sorted(stub.pid for stub in load.stubs if not is_running(stub.pid)) if load.stubs else find_ended(self._server_pid)
        if ended and load.idle_seconds >= (limit := min(self._hang_seconds, self._start_seconds)):
            return f"{name}: it is being loaded, and its process {ended[0]} has ended; nothing has come of it for {limit:g} s (hang_seconds)"
        if load.idle_seconds < self._start_seconds or math.isinf(self._start_seconds):
            return None
        running = sorted(stub.pid for stub in load.stubs)
        dump_threads(running)
        what = f"its process {running[0]}" if running else "the server"
        return (
            f"{name}: it is being loaded, and {what} has neither computed nor read anything for {self._start_seconds:g} s, the limit: "
            "see above where it stands; a longer --start-seconds waits for disks and hosts that are slower"
        )
