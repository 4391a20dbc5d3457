"""Signals that ask a command to end are exceptions, as Ctrl-C is, where it has something to put away first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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


def hear_endings(tell: Callable[[int], object], numbers: Sequence[int] = (signal.SIGINT, *ENDING_SIGNALS)) -> dict[int, Any]:
    """For the main thread of a service: `tell` is told of each signal that asks it to end; a terminal that closes sends SIGHUP twice (from its
    shell, and from the kernel), and asks once. Returns the handlers before."""
    before: dict[int, Any] = {}
    is_asked = False

    def hear(number: int, frame: object) -> None:
        nonlocal is_asked
        if number != signal.SIGHUP or not is_asked:
            is_asked = True
            tell(number)

    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            before[number] = signal.signal(number, hear)
    return before
