"""Signals that ask a command to end are exceptions, as Ctrl-C is, where it has something to put away first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Besides SIGINT, which is an exception by itself."""


@contextlib.contextmanager
def raised_signals() -> Iterator[None]:
    """For the main thread: the first of them raises SystemExit within; others are ignored then, as the command is ending."""
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}  # nohup

    def end(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
