"""Pages of a device that are sent and read piece by piece, without a device: its copies are made when they are waited for, and no sooner."""

from __future__ import annotations

import random
import struct
import threading

import pytest
import torch

from backend.disaggregation import staging, tcp_transfer
from backend.disaggregation.staging import Pairs, Parts, StagedPages, cut, stage_pages
from backend.disaggregation.tcp_transfer import TcpTransfer, connect, receive
from backend.disaggregation.transfer import make_scratch
from backend.errors import TransferError
from backend.kv_store import CacheSpec, KvStore
from tests.servers import wait_until

PIECE = 1000
"""Bytes; pages have 2,048."""


class Device:
    """Its memory is the host's; whatever is read before the copy was waited for, or overwritten before, is wrong."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails = False

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)

    def start(self, parts: Parts) -> Parts:
        self.log.append("start")
        return parts

    def wait(self, started: Parts) -> None:
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.log.append("wait")
        for target, source in started:
            target.copy_(source)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    own = Device()
    monkeypatch.setattr(staging, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(tcp_transfer, "make_pages", lambda memories: stage_pages(memories, own))
    return own


def make(num_pages: int = 24) -> tuple[TcpTransfer, KvStore]:
    store = KvStore([CacheSpec("keys", (4, 8), torch.float32, 2)], 8, num_pages, torch.device("cpu"))
    store.memory.copy_(torch.randint(0, 255, store.memory.shape, dtype=torch.uint8))
    return TcpTransfer(store, ("127.0.0.1",), make_scratch(store, 3 * store.page_bytes)), store


def all_free(*transfers: TcpTransfer) -> bool:
    """All that was lent has come back."""
    pairs = [own for t in transfers for p in (t._pages, t._scratch_pages) if isinstance(p, StagedPages) for own in (p._outgoing, p._incoming)]
    assert pairs
    return all(len(own._free) == own._num_made for own in pairs)


@pytest.mark.parametrize("limit", [1, 7, 10, 25, 10**6])
def test_pieces_hold_all_bytes_in_their_order(limit: int) -> None:
    runs = [(3, 1), (9, 4), (0, 2), (5, 1)]
    pieces = list(cut(runs, 10, limit))
    assert [begin + i for piece in pieces for begin, size in piece for i in range(size)] == [
        page * 10 + i for first, length in runs for page in range(first, first + length) for i in range(10)
    ]
    sizes = [sum(size for _, size in piece) for piece in pieces]
    assert all(size == limit for size in sizes[:-1]) and 0 < sizes[-1] <= limit
    assert not list(cut([], 10, limit))


def test_a_piece_is_copied_while_another_one_is_sent_or_comes(device: Device) -> None:
    memory = torch.zeros(2, 2 * PIECE, dtype=torch.uint8)
    (pages,) = stage_pages([memory], device)
    for direction, expected in (
        (pages.outgoing, "start start wait used start wait used start wait used wait used"),
        (pages.incoming, "used start used start wait used start wait used start wait wait"),
    ):
        device.log.clear()
        for _ in direction([(0, 2)]):
            device.log.append("used")
        assert " ".join(device.log) == expected
    for direction in (pages.outgoing, pages.incoming):
        device.log.clear()
        pieces = direction([(0, 2)])
        for _ in range(3):
            next(pieces)
        pieces.close()
        assert device.log.count("start") == device.log.count("wait"), "buffers are given back once nothing is copied there"


def test_pages_are_read_byte_for_byte(device: Device) -> None:
    """Some that lie side by side. By several nodes at once, of which some leave in the middle; into the store and beside it."""
    (offerer, there), readers, random_ = make(), [make() for _ in range(3)], random.Random(7)
    everything = struct.pack("<III", 1, 0, len(there.memory))
    for _ in range(4):
        handles = []
        for reader, here in readers:
            own, remote = [*range(8), *random_.sample(range(8, 24), 8)], [*range(4, 12), *random_.sample(range(12, 24), 8)]
            handles.append((reader, reader.read(offerer.address, own, remote), here.memory, own, remote))
            handles.append((reader, reader.read(offerer.address, [2, 0], [5, 4], to_scratch=True), reader.scratch, [2, 0], [5, 4]))
        with connect(offerer.address) as killed:
            killed.sendall(everything)
            receive(killed, 3 * PIECE)
        for reader, handle, memory, own, remote in handles:
            assert wait_until(lambda reader=reader, handle=handle: reader.is_done(handle))
            assert torch.equal(memory[own], there.memory[remote])
    transfers = [offerer, *(reader for reader, _ in readers)]
    assert wait_until(lambda: all_free(*transfers))
    for one in transfers:
        one.close()


def test_a_device_that_fails_ends_a_read_and_no_more(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    (offerer, there), (reader, here) = make(), make()
    device.fails = True
    handle = reader.read(offerer.address, [0], [1])
    with pytest.raises(TransferError):
        wait_until(lambda: reader.is_done(handle))
    assert wait_until(lambda: "pages could not be sent" in caplog.text)
    device.fails = False
    handle = reader.read(offerer.address, [0], [1])
    assert wait_until(lambda: reader.is_done(handle)) and torch.equal(here.memory[0], there.memory[1])
    assert wait_until(lambda: all_free(offerer, reader))
    offerer.close()
    reader.close()


def test_pinned_memory_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes too late waits, and is told in the end; what could not be had is no part of it."""
    monkeypatch.setattr(staging, "PAIR_SECONDS", 0.05)
    sizes: list[int] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        if len(sizes) == 1:
            raise RuntimeError("out of memory")
        return torch.zeros(num_bytes, dtype=torch.uint8)

    pairs = Pairs(allocate, limit=1)
    with pytest.raises(RuntimeError, match="out of memory"), pairs.lend():
        pass
    with pairs.lend() as (first, second):
        assert len(first) == len(second) == staging.PIECE_BYTES
        with pytest.raises(TransferError, match=r"1 transfers of pages, which is the limit, were under way for 0\.05 s"), pairs.lend():
            pass
        monkeypatch.setattr(staging, "PAIR_SECONDS", 60)
        found: list[int] = []

        def wait() -> None:
            with pairs.lend() as (own, _):
                found.append(own.data_ptr())

        waiting = threading.Thread(target=wait)
        waiting.start()
    waiting.join(60)
    assert found == [first.data_ptr()] and len(sizes) == 2
