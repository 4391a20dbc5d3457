"""Whether rank 0's process runs at all. Its store answers by a thread of its own, which needs no lock of Python's and waits for no step."""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

PULSE_SECONDS = 0.25


class Pulse(threading.Thread):
    """Asks all the time, by a connection that nobody else uses: one question at most is without an answer."""

    def __init__(self, store: dist.Store) -> None:
        """store: rank 0's, as another rank reaches it."""
        super().__init__(name="pulse", daemon=True)
        self._store = store
        self._asked: float | None = None
        self._is_over = False

    def silence(self, now: float) -> float:
        """Seconds until `now` for which a question has had no answer."""
        asked = self._asked
        return 0.0 if asked is None else now - asked

    def stop(self) -> None:
        self._is_over = True

    def run(self) -> None:
        while not self._is_over:
            self._asked = time.monotonic()
            try:
                self._store.check(["pulse"])
            except RuntimeError:  # rank 0 has ended, as whoever has another connection to it finds too
                return
            self._asked = None
            time.sleep(PULSE_SECONDS)
