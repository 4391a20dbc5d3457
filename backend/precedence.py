"""Who goes first where threads share Python's lock."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

MOST_SECONDS = 0.05
"""That anybody gives way for: no launch takes so long."""


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
