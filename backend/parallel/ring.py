"""Step plans from rank 0 to the other ranks of a host, by shared memory: one writer, and readers that each see every message.

The memory has no name in any file system: nothing is left of it when processes are killed, and no limit of /dev/shm holds for it.
"""

from __future__ import annotations

import functools
import mmap
import os
import time
from collections.abc import Callable

import numpy as np

SLOT_WORDS, NUM_SLOTS = 1 << 14, 256
"""A message takes as many slots as it needs; a prompt of 131,072 tokens takes nine."""
SPINS = 2000
"""Looks before a waiting rank begins to sleep between them: a step is some milliseconds."""
PAUSE_SECONDS = 5e-5
IDLE_LOOKS, IDLE_PAUSE_SECONDS = 2000, 1e-3
"""Such pauses, some 0.2 s, after which nobody is taken to ask for anything, and those from then on: a rank without work took a fifth of a core."""
MAX_READERS = 63
NAME = "foretoken-plans"
"""By which /proc shows the memory."""


class PlanRing:
    """Slots of int32 words. The writer waits for the slowest reader where the ring is full.

    `numbers` [0]: pieces written; [1 + i]: pieces that reader i has read; [1 + MAX_READERS + i]: steps that it is through with; each written by
    its owner alone. A piece is written whole before its number is, and the processors that this runs on keep that order.
    """

    def __init__(self, num_readers: int, path: str | None = None) -> None:
        """path: of the ring to read, in a process of the same user; None makes one."""
        if not 1 <= num_readers <= MAX_READERS:
            raise ValueError(f"num_readers is {num_readers}; the limit is {MAX_READERS}")
        head = 8 * (2 * MAX_READERS + 1)
        size = head + 4 * NUM_SLOTS * (SLOT_WORDS + 2)
        file = os.memfd_create(NAME) if path is None else os.open(path, os.O_RDWR)
        try:
            if path is None:
                os.truncate(file, size)
            self._memory = mmap.mmap(file, size)
        except BaseException:
            os.close(file)
            raise
        self.path, self._num_readers = path or f"/proc/{os.getpid()}/fd/{file}", num_readers
        self._file = file  # whose number others open it by
        self._numbers = np.frombuffer(self._memory, dtype=np.int64, count=2 * MAX_READERS + 1)
        self._slots = np.frombuffer(self._memory, dtype=np.int32, offset=head, count=NUM_SLOTS * (SLOT_WORDS + 2)).reshape(NUM_SLOTS, -1)

    def write(self, words: np.ndarray, check: Callable[[], None]) -> None:
        """One message. check is called while there is no room, and may raise."""
        begin = 0
        while True:
            piece = words[begin : begin + SLOT_WORDS]
            begin += len(piece)
            number = int(self._numbers[0])
            _wait(functools.partial(self._has_room, number), check)
            slot = self._slots[number % NUM_SLOTS]
            slot[0], slot[1] = len(piece), begin >= len(words)
            slot[2 : 2 + len(piece)] = piece
            self._numbers[0] = number + 1
            if begin >= len(words):
                return

    def read(self, reader: int, check: Callable[[], None]) -> np.ndarray:
        """The next message of a reader (0 to num_readers - 1). check is called while there is none, and may raise."""
        pieces = []
        while True:
            number = int(self._numbers[1 + reader])
            _wait(functools.partial(self._has_news, number), check)
            slot = self._slots[number % NUM_SLOTS]
            count, is_last = slot[:2].tolist()
            pieces.append(slot[2 : 2 + count].copy())
            self._numbers[1 + reader] = number + 1
            if is_last:
                return np.concatenate(pieces)

    def note_done(self, reader: int, num_steps: int) -> None:
        """A reader is through with so many steps: nothing of them is written into its memory any more."""
        self._numbers[1 + MAX_READERS + reader] = num_steps

    @property
    def num_done(self) -> int:
        """Steps that all readers are through with."""
        return int(self._numbers[1 + MAX_READERS :][: self._num_readers].min())

    def _has_room(self, number: int) -> bool:
        return number - int(self._numbers[1 : 1 + self._num_readers].min()) < NUM_SLOTS

    def _has_news(self, number: int) -> bool:
        return int(self._numbers[0]) > number

    def close(self) -> None:
        del self._numbers, self._slots
        self._memory.close()
        os.close(self._file)


def _wait(is_ready: Callable[[], bool], check: Callable[[], None]) -> None:
    for _ in range(SPINS):
        if is_ready():
            return
    looks = 0
    while not is_ready():
        check()
        looks += 1
        time.sleep(PAUSE_SECONDS if looks < IDLE_LOOKS else IDLE_PAUSE_SECONDS)
