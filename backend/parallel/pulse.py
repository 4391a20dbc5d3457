"""Whether rank 0's process runs at all. Its store answers by a thread of its own, which needs no lock of Python's and waits for no step."""

from __future__ import annotations

import atexit
import threading
import time

import torch.distributed as dist

PULSE_SECONDS = 0.25
STOP_SECONDS = 1.0
"""A question to a rank 0 that is gone may stay without an answer."""


class Pulse(threading.Thread):
    """Asks all the time, by a connection that nobody else uses: one question at most is without an answer."""

    def __init__(self, store: dist.Store) -> None:
        """store: rank 0's, as another rank reaches it."""
        super().__init__(name="pulse", daemon=True)
        self._store = store
        self._asked: float | None = None
        self._is_over = threading.Event()
        atexit.register(self.stop)  # a call of the library that comes back while Python ends aborts the process

    def silence(self, now: float) -> float:
        """Seconds until `now` for which a question has had no answer."""
        asked = self._asked
        return 0.0 if asked is None else now - asked

    def stop(self) -> None:
        """Waits until the last question is answered."""
        self._is_over.set()
        atexit.unregister(self.stop)
        if self.is_alive():
            self.join(STOP_SECONDS)

    def run(self) -> None:
        while not self._is_over.is_set():
            self._asked = time.monotonic()
            try:
                self._store.check(["pulse"])
            except RuntimeError:  # rank 0 has ended, as whoever has another connection to it finds too
                return
            self._asked = None
            self._is_over.wait(PULSE_SECONDS)
