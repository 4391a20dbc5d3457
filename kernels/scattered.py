"""Sums over ranks of more rows than `all_reduce` takes, on GPUs of one host: each rank adds a share of the rows ("reduce-scatter"), and sends
the others what it made ("all-gather").

Copy engines send, so that multiprocessors compute meanwhile: a product's rows of the next share while those of one are on their way, and whatever
follows of the rows that have come. At any time each rank sends to another one and gets from another one (a ring's order): no link is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernels._load import ELEMENTS, Kernel, device_of, gpu_of, is_compiling, load
from kernels.peer_memory import Exchange, Mapped, Waited, make_filler, map_memory

THREADS, TOGETHER = 512, 4
MAX_SHARE_BYTES = 32 * 2**20
"""Of the rows that one rank adds: 4,096 rows of 8,192 elements over two ranks."""
MIN_BYTES = 16 * 2**20
"""Of all rows. Twice as many gain 5% of a layer (benchmarks/RESULTS.md); a sum of so many takes NCCL a quarter less, where nothing runs beside it."""
TILE = 128
"""Rows that a product has whole tiles of."""
WORDS_BYTES = 4096
"""In front of each rank's memory: a word for each part that comes, and behind them one for each share."""


@dataclass(frozen=True, slots=True)
class ScatterMemory:
    """One rank's room for what the others send it, and the way to theirs."""

    rank: int
    size: int
    device: torch.device
    waited: Waited
    _words: torch.Tensor
    """[2] int32 on the device: a one that is copied behind what is sent, and what kernels count their blocks by."""
    _mapped: Mapped
    _stream: Any
    """PyCUDA's, for the copies: with one for each rank that they go to, or two for halves, they take longer."""
    _events: tuple[Any, Any]
    """How far the kernels are that a copy comes behind; how far the copies are."""

    def send(self, rows: torch.Tensor, target: int, *, is_share: bool) -> None:
        """To another rank's memory, once the kernels launched so far have ended. is_share: what this rank made, not a part of what `target` adds."""
        if is_compiling():
            return
        own, (computed, _) = device_of(self.device), self._events
        place, word = self._place(target, self.rank, is_share)
        computed.record(own.stream)
        self._stream.wait_for_event(computed)
        own.driver.memcpy_dtod_async(place, rows.data_ptr(), rows.numel() * rows.element_size(), self._stream)
        own.driver.memcpy_dtod_async(word, self._words.data_ptr(), 4, self._stream)

    def join(self) -> None:
        """The next kernel, which must not be launched programmatically, comes behind all that is sent."""
        if is_compiling():
            return
        _, sent = self._events
        sent.record(self._stream)
        device_of(self.device).stream.wait_for_event(sent)

    def add(self, x: torch.Tensor, part: torch.Tensor) -> None:
        """x += the sum of this rank's part of it and the others', in place, once they have come."""
        begin, num_vectors = self._mapped.addresses[self.rank], _count_vectors(x)
        pointers = (x, part, begin + WORDS_BYTES, begin, self._words[1:])
        self._kernel(x, "add_share")(self._grid(num_vectors, 1), (THREADS, 1, 1), *pointers, num_vectors, MAX_SHARE_BYTES // 16, self.rank)

    def take(self, x: torch.Tensor, source: int) -> None:
        """x = what `source` made of its share, once it has come."""
        (place, word), num_vectors = self._place(self.rank, source, True), _count_vectors(x)
        kernel = self._kernel(x, "take_share")
        kernel(self._grid(num_vectors, TOGETHER), (THREADS, 1, 1), x, place, word, self._words[1:], num_vectors)

    def close(self) -> None:
        """When no kernel that reads or writes it is left, on this rank and the others."""
        self._mapped.close()

    def _place(self, owner: int, source: int, is_share: bool) -> tuple[int, int]:
        """Addresses, in `owner`'s memory, of what `source` sends it, and of the word behind that."""
        begin, slot = self._mapped.addresses[owner], source - (source > owner) + (self.size - 1) * is_share
        return begin + WORDS_BYTES + slot * MAX_SHARE_BYTES, begin + 4 * slot

    def _kernel(self, x: torch.Tensor, name: str) -> Kernel:
        return load(self.device, "scattered", name, {"ELEMENT": ELEMENTS[x.dtype], "RANKS": self.size})

    def _grid(self, num_vectors: int, per_thread: int) -> tuple[int, int]:
        return min(-(-num_vectors // (THREADS * per_thread)), 2 * gpu_of(self.device).num_multiprocessors), 1


def meet_scattering(device: torch.device, rank: int, size: int, exchange: Exchange) -> ScatterMemory | None:
    """`ScatterMemory` of every rank of this host; None on all ranks where their GPUs cannot write each other's memory. See `map_memory`."""
    mapped = map_memory(device, rank, size, WORDS_BYTES + 2 * (size - 1) * MAX_SHARE_BYTES, 0, exchange, "scattered")
    if mapped is None:
        return None
    driver = device_of(device).driver
    words = torch.tensor([1, 0], dtype=torch.int32, device=device)
    waited = Waited(mapped.addresses[rank], WORDS_BYTES, make_filler(1, WORDS_BYTES))
    first, second = (driver.Event(driver.event_flags.DISABLE_TIMING) for _ in range(2))
    return ScatterMemory(rank, size, device, waited, words, mapped, driver.Stream(), (first, second))


def _count_vectors(x: torch.Tensor) -> int:
    return x.numel() * x.element_size() // 16


def cut_shares(num_rows: int, size: int) -> list[slice]:
    """Rows of each rank: as many, but that all of them begin with a whole tile."""
    bounds = [round(rank * num_rows / size / TILE) * TILE for rank in range(size)] + [num_rows]
    return [slice(begin, end) for begin, end in zip(bounds, bounds[1:])]


def can_scatter(x: torch.Tensor, size: int) -> bool:
    """Whether sums of x's shape [T, N] go by shares; the same on every rank."""
    row_bytes = x.shape[-1] * x.element_size()
    is_known = x.dim() == 2 and x.is_contiguous() and x.dtype in ELEMENTS and row_bytes % 16 == 0
    if not is_known or len(x) < TILE * size or len(x) * row_bytes < MIN_BYTES:
        return False
    return max(share.stop - share.start for share in cut_shares(len(x), size)) * row_bytes <= MAX_SHARE_BYTES


def add_product(x: torch.Tensor, y: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor], memory: ScatterMemory) -> Iterator[slice]:
    """Adds the sum of the ranks' product(y) [T, N] to x [T, N], in place. Gives the rows of x whose sums are there, as they come: until all are
    given, others must be neither read nor written. For what `can_scatter` takes.

    The sum is rounded before it is added. Every rank calls it in the same order with the same shape and type."""
    rank, size, shares = memory.rank, memory.size, cut_shares(len(x), memory.size)
    parts = []
    for owner in ((rank + distance) % size for distance in range(1, size)):
        parts.append(product(y[shares[owner]]).contiguous())
        memory.send(parts[-1], owner, is_share=False)
    part = product(y[shares[rank]]).contiguous()
    memory.join()
    memory.add(x[shares[rank]], part)
    for target in ((rank - distance) % size for distance in range(1, size)):
        memory.send(x[shares[rank]], target, is_share=True)
    return _arrive(x, shares, memory)


def _arrive(x: torch.Tensor, shares: list[slice], memory: ScatterMemory) -> Iterator[slice]:
    yield shares[memory.rank]
    for distance in range(1, memory.size):
        source = (memory.rank + distance) % memory.size
        if distance == memory.size - 1:
            memory.join()  # with the last copy that comes the last one is sent
        memory.take(x[shares[source]], source)
        yield shares[source]
