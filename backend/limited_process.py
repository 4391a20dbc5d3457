"""Work on what others wrote, which may never end, ask for any amount of memory, or end its process: done in a process of its own.

That process ends itself when its time is over: the request that it had in hand is refused, and the next one gets a new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

_HEADER = struct.Struct("<Q")


# -- in the process that works ------------------------------------------------------------------------------------------------


def serve(work: Callable[[Any], dict[str, Any]], seconds: float, max_memory_bytes: int, first_seconds: float | None = None) -> None:
    """Answers each request in turn, until its pipe ends. seconds: of processor time for each; first_seconds: for the first, which says what is
    served."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal, it is meant for the parent, whose end is this one's
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends this process, in the midst of one endless operation too
    resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    limit = seconds if first_seconds is None else first_seconds
    while len(header := requests.read(_HEADER.size)) == _HEADER.size:
        request = json.loads(requests.read(_HEADER.unpack(header)[0]))
        signal.setitimer(signal.ITIMER_PROF, limit)
        data = json.dumps(work(request)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(_HEADER.pack(len(data)) + data)
        answers.flush()
        limit = seconds


# -- in the process that asks -------------------------------------------------------------------------------------------------


class Lost(Exception):
    """The process ended, or gave no answer."""


class Busy(Exception):
    """Others kept it for as long as a request may wait."""


class LimitedProcess:
    """Asks such a process, and starts it anew when it has ended. Thread-safe; one request at a time."""

    def __init__(self, module: str, first: dict[str, Any], seconds: float) -> None:
        """module: whose `main` serves there; first: what each new process is told first, and answers with `error` where it cannot serve that;
        seconds: its limit, to be said."""
        self._module, self._first, self._seconds = module, first, seconds
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def start(self) -> None:
        """Ahead of the first request."""
        with self._lock:
            if self._child is None:
                self._child = _Child(self._module, self._seconds)

    def ask(self, request: dict[str, Any], answer_seconds: float, queue_seconds: float) -> dict[str, Any]:
        """answer_seconds: until the process is taken for lost; queue_seconds: until others are. Raises Lost, Busy, and what JSON raises."""
        if not self._lock.acquire(timeout=queue_seconds):
            raise Busy(f"busy with other requests for {queue_seconds:g} s")
        try:
            data = _pack(request)
            if self._child is None:
                self._child = _Child(self._module, self._seconds)
            if not self._child.is_told:
                answer = self._child.ask(_pack(self._first), answer_seconds)
                if "error" in answer:
                    self._end()
                    return answer
                self._child.is_told = True
            return self._child.ask(data, answer_seconds)
        except (TypeError, ValueError, RecursionError):  # of what cannot be sent; nothing was
            raise
        except BaseException:
            # Whatever it was in the middle of, the next request must not have this one's answer.
            self._end()
            raise
        finally:
            self._lock.release()

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


def _pack(request: dict[str, Any]) -> bytes:
    data = json.dumps(request).encode()
    return _HEADER.pack(len(data)) + data


class _Child:
    """One process."""

    is_told = False
    """What it serves."""

    def __init__(self, module: str, seconds: float) -> None:
        if not sys.executable:
            raise Lost("it needs an interpreter of its own, and sys.executable names none")
        self._seconds = seconds
        # Modules are looked for where this process found them, whatever was done to its path; in the folder that it is in ("") last of all.
        path = [*(place for place in sys.path if place), *([os.getcwd()] if "" in sys.path else [])]
        code = f"import sys; sys.path[:] = {path!r}; from {module} import main; main()"
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, bufsize=0)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._requests, False)
        self.end = weakref.finalize(self, _end, self._process)

    def ask(self, data: bytes, answer_seconds: float) -> dict[str, Any]:
        """Raises Lost."""
        end = time.monotonic() + answer_seconds
        try:
            self._write(data, end)
            (length,) = _HEADER.unpack(self._read(_HEADER.size, end))
            return json.loads(self._read(length, end))
        except BrokenPipeError:
            raise Lost(self._reason()) from None
        except TimeoutError:
            raise Lost(f"it gave no answer for {answer_seconds:g} s") from None

    def _wait(self, reading: Sequence[int], writing: Sequence[int], end: float) -> None:
        poll = select.poll()  # select itself takes no descriptor above 1,023
        for descriptor in reading:
            poll.register(descriptor, select.POLLIN)
        for descriptor in writing:
            poll.register(descriptor, select.POLLOUT)
        if not poll.poll(1e3 * max(end - time.monotonic(), 0)):
            raise TimeoutError

    def _write(self, data: bytes, end: float) -> None:
        left = memoryview(data)
        while left:
            self._wait([], [self._requests], end)
            left = left[os.write(self._requests, left[:65536]) :]

    def _read(self, length: int, end: float) -> bytes:
        parts, left = [], length
        while left:
            self._wait([self._answers], [], end)
            part = os.read(self._answers, min(left, 1 << 20))
            if not part:
                raise Lost(self._reason())
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _reason(self) -> str:
        try:
            status = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "its process closed its pipe"
        if status == -signal.SIGPROF:
            return f"it ran for more than {self._seconds:g} s, the limit"
        return f"its process ended with status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what the process did not read any more
                pipe.close()
