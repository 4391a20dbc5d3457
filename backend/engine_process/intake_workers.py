"""Threads that make engine requests of what was received, so that whoever receives never waits for a tokenizer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from backend.errors import CapacityError

logger = logging.getLogger(__name__)

LONG_CHARACTERS = 16384
"""Prompts beyond this many characters, and those whose answers need a grammar, wait in a queue of their own: tokenizing 131,000 takes 150 ms
(measured), and short ones are not to wait for it."""

Job = TypeVar("Job")


class IntakeWorkers(Generic[Job]):
    """One thread for short jobs and one for long ones, each in the order of arrival. Safe from any thread."""

    def __init__(self, handle: Callable[[Job], None], max_queued: int) -> None:
        """handle: called with each job on a worker's thread; deals with the job's errors itself. max_queued: of both queues together."""
        self._handle = handle
        self._max_queued = max_queued
        self._queues: tuple[dict[int, Job], dict[int, Job]] = ({}, {})  # by identity, so that any job can be withdrawn
        self._changed = threading.Condition()
        self._is_stopping = False
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=f"{kind} intake", daemon=True)
            for kind, queue in zip(("short", "long"), self._queues, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job, num_characters: int) -> None:
        """Queues a job. Raises CapacityError when too many wait, or none is taken any more."""
        with self._changed:
            count = sum(map(len, self._queues))
            if self._is_stopping:
                raise CapacityError("no more requests are taken: the server is shutting down")
            if count >= self._max_queued:
                raise CapacityError(f"{count} requests wait to be tokenized; the limit is {self._max_queued}: retry later, or raise --max-waiting")
            self._queues[num_characters > LONG_CHARACTERS][id(job)] = job
            self._changed.notify_all()

    def withdraw(self, job: Job) -> bool:
        """Takes a job out of its queue. False: it was begun, or never queued."""
        with self._changed:
            return any(queue.pop(id(job), None) is not None for queue in self._queues)

    def withdraw_all(self) -> list[Job]:
        """Takes out every job that was not begun."""
        with self._changed:
            found = [job for queue in self._queues for job in queue.values()]
            for queue in self._queues:
                queue.clear()
            return found

    def stop(self, timeout: float) -> None:
        """Ends the threads once their queues are empty; waits `timeout` seconds for each at most."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout)

    def _run(self, queue: dict[int, Job]) -> None:
        while True:
            with self._changed:
                while not queue:
                    if self._is_stopping:
                        return
                    self._changed.wait()
                job = queue.pop(next(iter(queue)))
            try:
                self._handle(job)
            except Exception:
                logger.exception("a request was dropped")
