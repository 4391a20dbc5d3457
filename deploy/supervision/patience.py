"""Vouches for the models' processes, so that the server does not give one up that only did not come to run.

The server's Python backend (release 24.10; as of 2026-07 its newest, too) asks a process that has a message of its in hand for a sign of life: a
byte in their shared memory, which the server clears, and which a thread of the process sets every 0.3 s. When that has not come for a second, as
of a process that is stopped or that a busy machine does not let run, the server answers the requests with an error, frees the message that lies
in the process's queue, and puts an empty one behind it. Whatever it is, the process reads both when it goes on: the first one's memory may be
another's by then, and with the second it writes beyond its mapping and dies, mostly (segmentation fault in IPCMessage::LoadFromSharedMemory). It
holds the lock of the shared memory then, so that the server aborts (lock_exception). Whether a process is lost is this supervisor's to say,
which ends those that it gives up; until then it gives the sign for them.
"""

from __future__ import annotations

import logging
import mmap
import os
import platform
import struct
import threading
import time

from deploy.supervision.probe import LOOK_SECONDS
from deploy.supervision.processes import SHARED_MEMORY_FOLDER, StoppedProcesses, Stub, find_stubs, is_running

logger = logging.getLogger(__name__)

FIND_SECONDS = 1.0
STOPPED_SLACK_SECONDS = 5.0
"""After the limit for a process that hangs: those that are watched are ended before. Of others, which are being loaded, the server may think then
what it likes."""
OWNERSHIP_BYTES = 16
"""Before each object in the shared memory (AllocatedShmOwnership)."""
NUM_FLAGS = 4
"""Of the control block's beginning (IPCControlShm): stub_health, parent_health, uses_env, decoupled."""
QUEUES = struct.Struct("<2q")
"""Further on in it: where the two processes' queues of messages lie."""
QUEUES_PLACES = {"x86_64": 88, "aarch64": 104}
"""Behind two mutexes, whose size is the C library's, by the kind of machine."""


class SignOfLife:
    """Of one process, in its shared memory."""

    def __init__(self, stub: Stub) -> None:
        """Raises FileNotFoundError when there is no such memory any more, OSError when this user may not write to it, ValueError when it is not as
        servers' are known to be."""
        self._offset = stub.control + OWNERSHIP_BYTES
        place = QUEUES_PLACES.get(platform.machine(), 0)
        with (SHARED_MEMORY_FOLDER / stub.region).open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            self._memory = mmap.mmap(file.fileno(), self._offset + place + QUEUES.size)
        where = f"{self._offset} of {stub.model}'s shared memory"
        try:
            if others := set(self._memory[self._offset : self._offset + NUM_FLAGS]) - {0, 1}:
                raise ValueError(f"the flags at {where} have the values {sorted(others)}; they must be 0 or 1")
            queues = QUEUES.unpack_from(self._memory, self._offset + place)
            if place and not self._offset < queues[0] < queues[1] < size:
                raise ValueError(f"the control block at {where} has queues at {queues}; they must lie behind it, up to {size}")
        except ValueError:
            self.close()
            raise

    def give(self) -> None:
        self._memory[self._offset] = 1

    def close(self) -> None:
        self._memory.close()


class Voucher(threading.Thread):
    """Gives the signs of all models' processes of one server that live. Of one that is stopped, not for ever."""

    def __init__(self, server_pid: int, hang_seconds: float) -> None:
        super().__init__(name="voucher", daemon=True)
        self._server_pid = server_pid
        self._limit = hang_seconds + STOPPED_SLACK_SECONDS
        self._signs: dict[Stub, tuple[SignOfLife, StoppedProcesses] | None] = {}
        """None: one that cannot be vouched for."""
        self._given_up: set[Stub] = set()
        self._is_over = threading.Event()

    def give_up(self, stub: Stub) -> None:
        """Before it is ended, which may take long: the server, too, is to think that it is lost, and not ask it to finalize."""
        self._given_up.add(stub)

    def stop(self) -> None:
        self._is_over.set()

    def run(self) -> None:
        due = time.monotonic()
        while not self._is_over.wait(LOOK_SECONDS):
            now = time.monotonic()
            if now >= due:
                due = now + FIND_SECONDS
                self._follow(find_stubs(self._server_pid))
            self._vouch(now)
        self._follow([])

    def _follow(self, stubs: list[Stub]) -> None:
        for stub in set(self._signs) - set(stubs):
            if (known := self._signs.pop(stub)) is not None:
                known[0].close()
        for stub in set(stubs) - set(self._signs):
            try:
                self._signs[stub] = SignOfLife(stub), StoppedProcesses(self._limit)
            except FileNotFoundError:
                continue  # it ends
            except (OSError, ValueError) as error:
                self._signs[stub] = None
                logger.warning("%s: the server may give up process %d of %s when that does not run for a second", error, stub.pid, stub.model)

    def _vouch(self, now: float) -> None:
        for stub, known in self._signs.items():
            if known is None or stub in self._given_up or not is_running(stub.pid):
                continue
            sign, stopped = known
            if stopped.find([stub.pid], now) is None:
                sign.give()
