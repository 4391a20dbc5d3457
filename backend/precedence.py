"""Who goes first where threads share Python's lock."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

SWITCH_SECONDS = 0.0005
"""For which a thread keeps Python's lock while others want it. With Python's own 5 ms a step's end waits as long for the thread that sends the
answers of the one before: ten times a second where steps take 6 ms for 128 requests (measured, two H100s). And a prompt passes through a dozen
threads of two nodes, beside others that compute all the time: they wait for a tenth of a second in all (ten threads, measured: 70 to 325 ms; so
0.4 to 44)."""
MOST_SECONDS = 0.05
"""That anybody gives way for: no launch takes so long."""


def take_short_turns() -> None:
    """Of a process with threads that step, take requests in and send answers."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))


class Precedence:
    """One thread's pieces of work that others do not begin theirs beside.

    A step that is launched kernel by kernel gives the lock away at each of some hundred calls, and gets it back when whoever took it is through
    with what he does: of a hundred microseconds each time. The device waits meanwhile, and with it every request.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._is_free = threading.Event()
        self._is_free.set()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """By the one thread that has it."""
        self._is_held = True
        self._is_free.clear()
        try:
            yield
        finally:
            self._is_held = False
            self._is_free.set()

    def give_way(self) -> None:
        """Of any other thread, before a piece of work that can wait."""
        if self._is_held:
            self._is_free.wait(MOST_SECONDS)
