"""Pages in a GPU's memory that go over TCP, through pinned memory: what is read is what was offered, whatever else the GPU does."""

from __future__ import annotations

import contextlib
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from backend.core import HandOff, Outcome
from backend.disaggregation.reads import Fetch, PageReads
from backend.disaggregation.records import Message, probs_to_pages
from backend.disaggregation.staging import StagedPages
from backend.disaggregation.tcp_transfer import TcpTransfer, connect, receive
from backend.disaggregation.transfer import make_scratch
from backend.kv_store import CacheSpec, KvStore
from tests.servers import wait_until

NUM_PAGES = 400
"""Of 68 KiB: pieces end within them."""
BUSY_CYCLES = 6 * 10**9
"""Some seconds of a GPU; reads here take some tens of milliseconds."""


def make(device: torch.device) -> tuple[TcpTransfer, KvStore]:
    store = KvStore([CacheSpec("keys", (8, 128), torch.float16, 2), CacheSpec("states", (64,), torch.bfloat16, 2)], 16, NUM_PAGES, device)
    store.memory.copy_(torch.randint(0, 256, store.memory.shape, dtype=torch.uint8, device=device))
    return TcpTransfer(store, ("127.0.0.1",), make_scratch(store, 3 * store.page_bytes)), store


@pytest.mark.parametrize("is_busy", [False, True])
def test_pages_are_read_byte_for_byte(device: torch.device, is_busy: bool) -> None:
    """By several nodes at once, one of them on the host, of which others are killed in the middle. Nothing waits for the stream of steps."""
    (offerer, there), readers = make(device), [make(own) for own in (device, device, device, torch.device("cpu"))]
    content = there.memory.cpu()
    everything, random_ = struct.pack("<III", 1, 0, len(there.memory)), random.Random(5)

    def read(count: int) -> None:
        torch.cuda.synchronize()
        before, handles = [here.memory.cpu().clone() for _, here in readers], []
        busy = torch.cuda.Event()
        if is_busy and count < NUM_PAGES:
            torch.cuda._sleep(BUSY_CYCLES)
        busy.record()
        for (reader, _), expected in zip(readers, before, strict=True):
            half = count // 2
            own = [*range(half), *random_.sample(range(half, NUM_PAGES), half)]  # the first half side by side on both
            remote = [*range(NUM_PAGES - half, NUM_PAGES), *random_.sample(range(NUM_PAGES - half), half)]
            expected[own] = content[remote]
            handles.append((reader, reader.read(offerer.address, own, remote)))
            handles.append((reader, reader.read(offerer.address, [2, 0], [5, 4], to_scratch=True)))
        for _ in range(3):
            with connect(offerer.address) as killed:
                killed.sendall(everything)
                receive(killed, 1 << 20)
        for reader, handle in handles:
            assert wait_until(lambda reader=reader, handle=handle: reader.is_done(handle))
        assert busy.query() != (is_busy and count < NUM_PAGES), "the reads were over first"
        for (reader, here), expected in zip(readers, before, strict=True):
            assert torch.equal(here.memory.cpu(), expected)
            assert torch.equal(reader.scratch[[2, 0]].cpu(), content[[5, 4]])

    # To make pinned memory may wait for the device: all that is wanted below is made before it is busy.
    assert isinstance(offerer._pages, StagedPages)
    with contextlib.ExitStack() as lent:
        for _ in range(16):
            lent.enter_context(offerer._pages._outgoing.lend())
    read(NUM_PAGES)
    for count in (2, 50, 320):
        read(count)
    for one in (offerer, *(reader for reader, _ in readers)):
        one.close()


def test_distributions_are_taken_while_a_graph_is_captured(device: torch.device) -> None:
    """By a thread beside the engine's, which captures steps while nobody waits, as where all requests wait for their pages."""
    transfer, store = make(device)
    probs, counts = torch.rand(3, 17_000), torch.zeros(8, device=device)
    pages = probs_to_pages(probs, store.page_bytes)
    transfer.scratch[: len(pages)].copy_(pages)
    torch.cuda.synchronize()
    reads: Any = PageReads(transfer, store.page_bytes, 10.0)  # type: ignore[arg-type]
    fetch: Any = Fetch(None, "job", [], 0, 0, 0.0, 0, 0)  # type: ignore[arg-type]
    fetch.done = Message("done", "job", "other", probs_pages=list(range(len(pages))), probs_shape=(3, 17_000))
    fetch.hand_off = HandOff(Outcome([1]))
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        counts.add_(1)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(reads._take_probs, fetch).result()
    finally:
        graph.capture_end()
    graph.replay()
    assert torch.equal(fetch.hand_off.draft_probs, probs)
    assert counts.tolist() == [1.0] * 8
    transfer.close()
