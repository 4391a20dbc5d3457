"""Jobs of a prefill node whose grammars are compiled first: on a thread of their own, for no other prompt is to wait for one."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from backend.disaggregation.records import Job

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Between two looks whether the node ends."""


class SlowJobs:
    """In the order in which they come."""

    def __init__(self, take: Callable[[bytes, Job], object]) -> None:
        """take: called on this thread with a job's entry in the stream, and the job."""
        self._take = take
        self._queue: queue.SimpleQueue[tuple[bytes, Job]] = queue.SimpleQueue()
        self._open: set[bytes] = set()
        self._is_stopping = False
        self.thread = threading.Thread(target=self._run, name="forms", daemon=True)

    def __len__(self) -> int:
        """Those that wait, and the one whose grammar is compiled."""
        return len(self._open)

    @property
    def entry_ids(self) -> set[bytes]:
        return set(self._open)

    def put(self, entry_id: bytes, job: Job) -> None:
        self._open.add(entry_id)
        self._queue.put((entry_id, job))

    def stop(self) -> None:
        """Those that wait are left to whoever takes this node's jobs over."""
        self._is_stopping = True

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                entry_id, job = self._queue.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            try:
                self._take(entry_id, job)
            except Exception:  # the next ones are to come all the same
                logger.exception("job %s", entry_id)
            self._open.discard(entry_id)
