"""The gateway's log: nobody who reads it slowly, or no more, keeps requests waiting."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from typing import TextIO

MAX_LINES = 10_000
"""That wait to be written; those beyond are lost, and counted."""
END_SECONDS = 1.0
"""For what waits to be written when the process ends."""


def log_to(stream: TextIO | None) -> logging.Handler:
    """None: the process was started without one."""
    if stream is None:
        return logging.NullHandler()
    try:
        return WaitingLines(stream.fileno())
    except (OSError, ValueError):  # no file: a program that has the gateway in it put it there
        return logging.StreamHandler(stream)


class WaitingLines(logging.Handler):
    """Writes lines to a file descriptor from a thread of its own: a pipe whose reader stands still (a terminal after Ctrl-S, a container's log) takes
    nothing more once it is full, and whoever writes to it stands still, too."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[str] = queue.Queue(MAX_LINES)
        self._num_lost = 0
        # Not by a stream of Python's: the interpreter's end would wait for its lock.
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._num_lost += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Waits until all is written, for END_SECONDS at most."""
        ending = time.monotonic() + END_SECONDS
        while self._lines.unfinished_tasks and time.monotonic() < ending:
            time.sleep(0.01)

    def _write_all(self) -> None:
        while True:
            self._write(self._lines.get())
            if self._num_lost:
                lost, self._num_lost = self._num_lost, 0
                self._write(f"{lost} lines of this log were lost: it was not read")
            self._lines.task_done()

    def _write(self, line: str) -> None:
        data = f"{line}\n".encode("utf-8", "backslashreplace")
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:  # its reader is gone, or the disk is full: the next one may be written
            pass
