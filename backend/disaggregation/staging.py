"""The bytes of pages, as connections take and give them: the host's memory where it lies, a GPU's through pinned memory, piece by piece.

Nothing here waits for steps: pages are offered once the host has seen the step end that wrote them, and pages that are read belong to no step.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from backend.errors import TransferError

PIECE_BYTES = 4 << 20
MAX_PAIRS = 32
"""Of pieces, for as many transfers at a time in each direction: 256 MiB of pinned memory."""
PAIR_SECONDS = 8.0
"""For a pair to be free. The other node waits less than tcp_transfer.SILENCE_SECONDS for the first byte."""

Runs = Iterable[Sequence[int]]
"""First page, and how many."""
Pieces = Generator[memoryview, None, None]
Parts = list[tuple[torch.Tensor, torch.Tensor]]
"""Targets and sources of copies, one of each pair on the device."""


class Pages(Protocol):
    """Memory of pages. Every piece is used before the next one is asked for; to be closed where not all are (`contextlib.closing`)."""

    def outgoing(self, runs: Runs) -> Pieces:
        """What the pages hold, in their order. Raises TransferError where nothing can be staged for now."""
        ...

    def incoming(self, runs: Runs) -> Pieces:
        """What is to be filled. The pages hold it once there is no further piece; nothing is written to them after that, or after `close`.
        Raises TransferError where nothing can be staged for now."""
        ...


class HostPages:
    """No copies: the connection reads and writes the pages themselves."""

    def __init__(self, memory: torch.Tensor) -> None:
        """memory: [n, page_bytes] uint8"""
        self._memory = memory.numpy()

    def outgoing(self, runs: Runs) -> Pieces:
        for first, length in runs:
            yield self._memory[first : first + length].data.cast("B")

    incoming = outgoing


class Copier(Protocol):
    """Copies between a device and pinned memory of the host."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Pinned: [num_bytes] uint8."""
        ...

    def start(self, parts: Parts) -> Any:
        """-> what `wait` takes."""
        ...

    def wait(self, started: Any) -> None:
        """Until these copies are done."""
        ...


class CudaCopier:
    """On a stream of its own. Safe from any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        torch.cuda.set_device(self._device)  # of this thread
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def start(self, parts: Parts) -> torch.cuda.Event:
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            for target, source in parts:
                target.copy_(source, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # whoever waits sleeps
            done.record()
        return done

    def wait(self, started: torch.cuda.Event) -> None:
        torch.cuda.set_device(self._device)
        started.synchronize()


class Pairs:
    """Two pieces of pinned memory for each transfer under way; kept, for to allocate them can wait for the device. Safe from any thread."""

    def __init__(self, allocate: Callable[[int], torch.Tensor], limit: int = MAX_PAIRS) -> None:
        self._allocate, self._limit = allocate, limit
        self._free: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_made = 0
        self._has_room = threading.Condition()

    @contextlib.contextmanager
    def lend(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Raises TransferError."""
        pair = self._take()
        try:
            yield pair
        finally:
            with self._has_room:
                self._free.append(pair)
                self._has_room.notify()

    def _take(self) -> tuple[torch.Tensor, torch.Tensor]:
        with self._has_room:
            if not self._has_room.wait_for(lambda: self._free or self._num_made < self._limit, PAIR_SECONDS):
                raise TransferError(f"{self._limit} transfers of pages, which is the limit, were under way for {PAIR_SECONDS:g} s")
            if self._free:
                return self._free.pop()
            self._num_made += 1
        try:
            first, second = self._allocate(2 * PIECE_BYTES).split(PIECE_BYTES)
        except BaseException:
            with self._has_room:
                self._num_made -= 1
                self._has_room.notify()
            raise
        return first, second


class StagedPages:
    """Of a device: while one piece is sent, or comes, the one beside it is copied."""

    def __init__(self, memory: torch.Tensor, copier: Copier, outgoing: Pairs, incoming: Pairs) -> None:
        """memory: [n, page_bytes] uint8; outgoing, incoming: of their own each, else nodes that read from each other could wait for each other."""
        self._memory, self._page_bytes, self._copier = memory.view(-1), memory.shape[1], copier
        self._outgoing, self._incoming = outgoing, incoming

    def outgoing(self, runs: Runs) -> Pieces:
        with self._outgoing.lend() as pair, self._copying() as started:
            ahead: torch.Tensor | None = None
            for ranges, buffer in zip(cut(runs, self._page_bytes, PIECE_BYTES), itertools.cycle(pair), strict=False):
                piece, parts = self._match(ranges, buffer)
                started.append(self._start([(staged, own) for own, staged in parts]))
                if ahead is not None:
                    self._copier.wait(started.popleft())
                    yield ahead.numpy().data
                ahead = piece
            if ahead is not None:
                self._copier.wait(started.popleft())
                yield ahead.numpy().data

    def incoming(self, runs: Runs) -> Pieces:
        with self._incoming.lend() as pair, self._copying() as started:
            for ranges, buffer in zip(cut(runs, self._page_bytes, PIECE_BYTES), itertools.cycle(pair), strict=False):
                if len(started) == len(pair):
                    self._copier.wait(started.popleft())  # out of this buffer
                piece, parts = self._match(ranges, buffer)
                yield piece.numpy().data
                started.append(self._start(parts))

    @contextlib.contextmanager
    def _copying(self) -> Iterator[deque[Any]]:
        """Copies under way, the oldest first. In the end they are waited for: their buffers are the next one's, and their pages perhaps somebody
        else's."""
        started: deque[Any] = deque()
        try:
            yield started
        finally:
            for copy in started:
                self._copier.wait(copy)

    def _match(self, ranges: list[tuple[int, int]], buffer: torch.Tensor) -> tuple[torch.Tensor, Parts]:
        """What of a buffer is used, and each range of the pages with its part of that."""
        piece = buffer[: sum(size for _, size in ranges)]
        own = [self._memory[begin : begin + size] for begin, size in ranges]
        return piece, list(zip(own, piece.split([size for _, size in ranges]), strict=True))

    def _start(self, parts: Parts) -> Any:
        with torch.inference_mode():  # in which the pages may have been made
            return self._copier.start(parts)


def cut(runs: Runs, page_bytes: int, limit: int) -> Iterator[list[tuple[int, int]]]:
    """Begins and sizes, in bytes, of what makes up each piece of `limit` bytes, the last one of fewer: several runs, and parts of them."""
    piece: list[tuple[int, int]] = []
    room = limit
    for first, length in runs:
        begin, end = first * page_bytes, (first + length) * page_bytes
        while begin < end:
            size = min(end - begin, room)
            piece.append((begin, size))
            begin, room = begin + size, room - size
            if not room:
                yield piece
                piece, room = [], limit
    if piece:
        yield piece


def make_pages(memories: Sequence[torch.Tensor]) -> list[Pages]:
    """memories: [n, page_bytes] uint8, of one device."""
    device = memories[0].device
    return [HostPages(memory) for memory in memories] if device.type == "cpu" else stage_pages(memories, CudaCopier(device))


def stage_pages(memories: Sequence[torch.Tensor], copier: Copier) -> list[Pages]:
    outgoing, incoming = (Pairs(copier.allocate) for _ in range(2))
    return [StagedPages(memory, copier, outgoing, incoming) for memory in memories]
