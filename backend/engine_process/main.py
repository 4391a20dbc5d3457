"""The engine's process: its arguments are the number of the line's descriptor, and the id of the process that Triton has, at the other end."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
import sys
import threading
from multiprocessing.connection import Connection

from backend.engine_process.host import EngineHost
from backend.engine_process.line import Line
from backend.errors import ConfigError, EngineError, ModelError, describe_error
from backend.own_process import end_with_parent, has_begun

EXPECTED = (ConfigError, ModelError, EngineError)
"""Whose words say enough."""


class LineHandler(logging.Handler):
    """Log records for the server's log."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._line.send("log", record.levelno, self.format(record))
        except Exception:
            self.handleError(record)


def serve(line: Line, host: EngineHost) -> None:
    """Loads what the other end says, and serves until that is gone."""
    message = line.receive()
    if message is None:
        return
    reader = threading.Thread(target=host.serve, name="line", daemon=True)
    reader.start()
    try:
        host.load(*message.values)
        has_begun()
        host.start()
    except Exception as error:
        kind = next((known.__name__ for known in EXPECTED if isinstance(error, known)), "")
        if not kind:
            logging.getLogger(__name__).exception("the engine could not be loaded")
        line.send("failed", kind, describe_error(error) if kind else describe_failure(error))
        return
    line.send("ready", host.engine.scheduler.max_model_len)
    reader.join()


def describe_failure(error: Exception) -> str:
    """What was not expected; of memory that is not to be had with the limit that this process has, if there is one."""
    said = f"{type(error).__name__}: {describe_error(error)}"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    is_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM or "can't allocate memory" in said
    if not is_memory or limit == resource.RLIM_INFINITY:
        return said
    return f"{said}: each process may have {limit >> 20} MiB of addresses (ulimit -v), used or not, which limits no memory: raise that limit"


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the server has it too, and says when it is over
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(int(sys.argv[2]))  # which may have died meanwhile: imports take seconds, and it has said what to load
    line = Line(Connection(int(sys.argv[1])))
    logger = logging.getLogger("backend")
    logger.handlers, logger.propagate = [LineHandler(line)], False
    logger.setLevel(logging.INFO)
    serve(line, EngineHost(line))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # whatever the engine's threads do


if __name__ == "__main__":
    main()
