"""Exchanges between the ranks of one host, on CPU, by memory that all of them see: cpu/exchange.cpp. What kernels/all_reduce.py is on GPUs.

The memory has no name in any file system: nothing is left of it when processes are killed, and no limit of /dev/shm holds for it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from kernels._cpus import count_cpus
from kernels._load_cpu import find_library
from kernels.tape import Kind, current

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
"""What a rank shows the others at a time, and once more: more goes in several pieces."""
HEAD_BYTES = 64
SPINS = 100
"""Looks before a rank sleeps until it is woken, some 3 us: on a machine with other work more takes the time of the rank that is waited for. Where
there are more ranks than CPUs it sleeps at once. It does not yield in between: Linux makes who does wait for a turn of all others (since 6.6)."""
NAME = "foretoken-exchanges"
"""By which /proc shows the memory."""

Exchange = Callable[[bytes], list[bytes]]
"""Gives every rank what each has said, in the ranks' order."""


class _Exchange(ctypes.Structure):
    """As in cpu/exchange.cpp."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("piece_bytes", ctypes.c_int64),
        ("spins", ctypes.c_int64),
        ("limit", ctypes.c_int64),
        ("failed", ctypes.c_int64),
        ("outcome", ctypes.c_int64),
        ("number", ctypes.c_uint32),
    ]


class Outcome(IntEnum):
    """As in cpu/exchange.cpp."""

    DONE = 0
    OVER = 1
    LATE = 2
    DIFFERENT = 3


@functools.cache
def _library() -> ctypes.CDLL | None:
    own = find_library()
    if own is not None:
        pointer, long = ctypes.c_void_p, ctypes.c_int64
        own.foretoken_all_reduce.argtypes = [pointer, pointer, long, ctypes.c_int]
        own.foretoken_gather.argtypes = [pointer, pointer, long, long, long, pointer]
        own.foretoken_end_exchanges.argtypes = [pointer]
        own.foretoken_all_reduce.restype = own.foretoken_gather.restype = long
        own.foretoken_end_exchanges.restype = None
    return own


class HostMemory:
    """One rank's end of it. Exchanges are made by one thread at a time, on every rank in the same order with the same shapes and types, and wait for
    all ranks. They raise RuntimeError where one does not come in time, makes another exchange, or `abort` was called on any rank: from then on,
    always."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, limit: timedelta) -> None:
        """memory: `num_bytes(size)`, all zeros at first. limit: how long an exchange may wait for another rank."""
        self.size, self._bytes = size, np.frombuffer(memory, dtype=np.uint8)
        spins = SPINS if size <= count_cpus() else 0
        self._own = _Exchange(self._bytes.ctypes.data, rank, size, PIECE_BYTES, spins, 0, -1, Outcome.DONE, 0)
        self.limit(limit)

    def limit(self, timeout: timedelta) -> None:
        self._own.limit = int(timeout.total_seconds() * 1e9)

    def can_all_reduce(self, x: torch.Tensor) -> bool:
        """The same on every rank, for it looks at the type alone."""
        return x.dtype in (torch.float32, torch.bfloat16)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place. Added in the ranks' order in float32 and rounded once: every rank has the same bits."""
        part = x.contiguous()
        library = _library()
        assert library is not None, "meet_host comes first"
        arguments = (part.numel(), x.dtype == torch.bfloat16)
        outcome = library.foretoken_all_reduce(ctypes.addressof(self._own), part.data_ptr(), *arguments)
        self._check(outcome, Kind.ALL_REDUCE, part, *arguments)
        return x if part is x else x.copy_(part)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]: what each rank has."""
        return self._gather(x, 0, len(x) if x.dim() else 1)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """[size * S, ...] of each rank -> [size, S, ...]: of what each has, this rank's S."""
        share = len(x) // self.size
        return self._gather(x, self._own.rank * share, share)

    def _gather(self, x: torch.Tensor, first: int, count: int) -> torch.Tensor:
        x, library = x.contiguous(), _library()
        assert library is not None, "meet_host comes first"
        parts = x.new_empty(self.size, *([count, *x.shape[1:]] if x.dim() else []))
        begin, width = first * (x.nbytes // max(len(x), 1) if x.dim() else 0), parts.nbytes // self.size
        arguments = (x.nbytes, begin, begin + width)
        outcome = library.foretoken_gather(ctypes.addressof(self._own), x.data_ptr(), *arguments, parts.data_ptr())
        self._check(outcome, Kind.GATHER_PARTS, x, *arguments, parts)
        return parts

    def _check(self, outcome: int, kind: Kind, *arguments: Any) -> None:
        if outcome != Outcome.DONE:
            raise self._explain()
        if (tape := current.tape) is not None:
            tape.note(kind, self._own, *arguments)
            tape.explain(kind, self._explain)

    def _explain(self) -> RuntimeError:
        own = self._own
        return RuntimeError(
            {
                Outcome.OVER: f"rank {own.rank} of {own.size}: exchanges were ended, as some rank is gone",
                Outcome.LATE: f"rank {own.rank} of {own.size}: an exchange timed out after {own.limit / 1e9:.1f} s of waiting for rank {own.failed}",
                Outcome.DIFFERENT: f"rank {own.rank} of {own.size} and rank {own.failed} make different exchanges, or of different sizes",
            }[Outcome(own.outcome)]
        )

    def abort(self) -> None:
        """No rank waits for another one any more, now or later. From any thread."""
        library = _library()
        assert library is not None, "meet_host comes first"
        library.foretoken_end_exchanges(ctypes.addressof(self._own))


def num_bytes(size: int) -> int:
    return HEAD_BYTES * (1 + size) + 2 * size * PIECE_BYTES


def _make(size: int) -> int:
    """A file descriptor of memory that is there: more than the machine has left is refused now, and not when it is written. Raises OSError."""
    file = os.memfd_create(NAME)
    try:
        os.posix_fallocate(file, 0, num_bytes(size))
    except BaseException:
        os.close(file)
        raise
    return file


def meet_host(rank: int, size: int, limit: timedelta, exchange: Exchange) -> HostMemory | None:
    """`HostMemory` of every rank of one host; None on all where nothing is compiled, or there is no such memory."""
    made: int | None = None
    memory: mmap.mmap | None = None
    try:
        if rank == 0:
            try:
                made = _make(size)
            except OSError as error:
                logger.warning("ranks exchange by sockets, which takes longer: %d bytes of memory for it cannot be had: %s", num_bytes(size), error)
        path = exchange(b"" if made is None else b"/proc/%d/fd/%d" % (os.getpid(), made))[0]
        if path and _library() is not None:
            try:
                memory = _open(path)
            except OSError as error:
                logger.warning("ranks exchange by sockets, which takes longer: rank 0's memory cannot be opened by rank %d: %s", rank, error)
        has_all = b"no" not in exchange(b"no" if memory is None else b"yes")
    finally:
        if made is not None:
            os.close(made)  # whoever has opened it keeps it
    return HostMemory(memory, rank, size, limit) if memory is not None and has_all else None


def _open(path: bytes) -> mmap.mmap:
    """Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(file, 0)
    finally:
        os.close(file)
