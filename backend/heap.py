"""The allocator's memory: what a long-lived process has freed, and it keeps; and what it hands out with whatever was there."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator

IDLE_SHARE = 0.1
"""Of one core: a process that uses less has little to do."""
TRIM_SECONDS, MAX_TRIM_SECONDS = 5.0, 120.0
"""Between two times that memory is given back: when there is little to do, and when there always is much. It takes some milliseconds, in which
other threads that allocate may wait."""
MIN_BUSY_SECONDS = 1.0
"""A process that has done less since then has nothing to give back."""
M_PERTURB, ZERO = -6, 0xFF
"""glibc's option, and what it takes for memory to be zero: the complement."""


def give_back() -> None:
    """What is freed, wherever it lies. Where the allocator is another than glibc's: nothing."""
    if _trim is not None:
        _trim(0)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
_set_option = getattr(ctypes.PyDLL(None), "mallopt", None)
"""Python's lock is kept: it takes less than to give it away."""


@contextlib.contextmanager
def zeroed() -> Iterator[None]:
    """What any thread allocates meanwhile is zero, but for pieces of a kilobyte and less. Where the allocator is another than glibc's: nothing."""
    if _set_option is not None:
        _set_option(M_PERTURB, ZERO)
    try:
        yield
    finally:
        if _set_option is not None:
            _set_option(M_PERTURB, 0)


class Heap:
    """Gives freed memory back to the system once the process has had little to do for a while, and now and then when it always has much.

    glibc keeps what is freed below something that is not, and on CPU the engine has it keep the rest as well (`keep_temporaries_on_heap`).
    """

    def __init__(self) -> None:
        self._cpu_seconds, self._looked = time.process_time(), time.monotonic()
        self._busy_since_trim, self._trimmed = 0.0, self._looked

    def look(self) -> bool:
        """To be called every second or so -> whether it was done."""
        cpu_seconds, now = time.process_time(), time.monotonic()
        busy, passed = cpu_seconds - self._cpu_seconds, now - self._looked
        self._cpu_seconds, self._looked = cpu_seconds, now
        self._busy_since_trim += busy
        is_idle = busy < IDLE_SHARE * passed
        wait = TRIM_SECONDS if is_idle else MAX_TRIM_SECONDS
        if _trim is None or self._busy_since_trim < MIN_BUSY_SECONDS or now - self._trimmed < wait:
            return False
        give_back()
        self._busy_since_trim, self._trimmed = 0.0, now
        self._cpu_seconds = time.process_time()
        return True
