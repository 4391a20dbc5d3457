"""Pages that are read between hosts while a node is killed: the other one goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import struct
import subprocess
import sys
import threading

import pytest
import torch

from backend.disaggregation import tcp_transfer
from backend.disaggregation.tcp_transfer import TcpTransfer, connect, find_hosts
from backend.disaggregation.transfer import make_scratch
from backend.errors import ConfigError, TransferError
from backend.kv_store import CacheSpec, KvStore
from tests.servers import wait_until

CODE = """
import json, os, random, signal, sys, time
import torch
from backend.disaggregation.transfer import PageAddress, _load_nixl
from backend.disaggregation.transfers import Transport
from backend.errors import TransferError

_load_nixl()  # once: the processes that are made below have it
PAGES, PAGE_BYTES, transport = list(range(64)), 1 << 18, Transport(sys.argv[1], ("127.0.0.1", 1))

class Store:
    memory, page_bytes, device = torch.zeros(len(PAGES), PAGE_BYTES, dtype=torch.uint8), PAGE_BYTES, torch.device("cpu")

def offer(tell):
    transfer = transport.open(f"offerer {os.getpid()}", Store())
    tell(json.dumps(transfer.address.as_dict()))
    while True:
        transfer.serve()
        time.sleep(0.0005)

def read(transfer, address, count=1):
    handles = [transfer.read(address, PAGES, PAGES) for _ in range(count)]
    for handle in handles:
        while not transfer.is_done(handle):
            time.sleep(0.0002)

def read_on(address, count, tell):
    transfer = transport.open(f"reader {os.getpid()}", Store())
    while True:
        read(transfer, address, count)
        tell("read")

def begin(run, *values):
    there, here = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(there)
        with os.fdopen(here, "w") as told:
            run(*values, lambda text: print(text, file=told, flush=True))
        os._exit(1)
    os.close(here)
    return pid, os.fdopen(there)

def end(pid, told):
    told.close()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

def address_of(told):
    return PageAddress.from_dict(json.loads(told.readline()))
"""
READERS = """
offerer, told = begin(offer)
address = address_of(told)
for number in range(8):
    # Several at once end UCX with an assertion, and so does one that is dead before the first byte of its answer is sent: it has stopped first.
    reader, line = begin(read_on, address, 1 if transport.backend == "nixl" else 4)
    assert line.readline() == "read\\n", f"after {number} readers were killed: {os.waitpid(offerer, os.WNOHANG)}"
    time.sleep(0.002 * number)
    if transport.backend == "nixl":
        os.kill(reader, signal.SIGSTOP)
        time.sleep(0.2)
    end(reader, line)
end(offerer, told)
"""
OFFERERS = """
offerers = [begin(offer) for _ in range(8)]  # before UCX has threads in this process
transfer = transport.open("reader", Store())
for number, (offerer, told) in enumerate(offerers):
    address = address_of(told)
    read(transfer, address)
    handles = [transfer.read(address, PAGES, PAGES) for _ in range(4)]
    time.sleep(0.001 * number)
    end(offerer, told)
    for handle in handles:
        try:
            while not transfer.is_done(handle):
                time.sleep(0.0002)
        except TransferError:
            transfer.forget(address)  # while others are under way
"""


@pytest.mark.parametrize("backend", ["nixl", "tcp"])
@pytest.mark.parametrize("code", [READERS, OFFERERS], ids=["readers", "offerers"])
def test_the_others_go_on(code: str, backend: str) -> None:
    """UCX fails a dead reader's requests by fields that it has not set: whatever the allocator gives, here never zeros."""
    own = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "MALLOC_PERTURB_": "85"}
    result = subprocess.run([sys.executable, "-c", CODE + code, backend], env=os.environ | own, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr[-2000:]


def make(hosts: tuple[str, ...] = ("127.0.0.1",)) -> tuple[TcpTransfer, KvStore]:
    store = KvStore([CacheSpec("keys", (4, 8), torch.float32, 2)], 8, 6, torch.device("cpu"))
    store.memory.copy_(torch.randint(0, 255, store.memory.shape, dtype=torch.uint8))
    return TcpTransfer(store, hosts, make_scratch(store, 0)), store


def test_whoever_is_no_node_reads_nothing_and_keeps_nobody_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token, a wrong one, half of one; with the right one pages that do not exist, no pages, too many, and half a request."""
    monkeypatch.setattr(tcp_transfer, "HELLO_SECONDS", 1)
    monkeypatch.setattr(tcp_transfer, "SILENCE_SECONDS", 1)
    offerer, there = make()
    address = offerer.address
    num_pages = len(there.memory)
    wrong = [(num_pages, 1), (0, num_pages + 1), (2**32 - 1, 2**32 - 1), (0, 0)]
    odd = [struct.pack("<I", 0), struct.pack("<I", 2**32 - 1), b"\x01", struct.pack("<II", 2, 0)]
    requests = odd + [struct.pack("<III", 1, *run) for run in wrong]
    with socket.create_connection((address.hosts[0], address.port)) as silent:
        for hello in (b"", b"x" * 8, b"x" * 16, b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection((address.hosts[0], address.port), timeout=10) as stranger:
                stranger.sendall(hello)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        for request in requests:
            with connect(address) as node:
                node.sendall(request)
                node.settimeout(10)
                with contextlib.suppress(ConnectionResetError):
                    assert node.recv(1) == b"", request
        silent.settimeout(10)
        assert silent.recv(1) == b"", "it said nothing in time"
    reader, here = make()
    handle = reader.read(address, [1, 3], [3, 1])
    assert wait_until(lambda: reader.is_done(handle))
    assert torch.equal(here.memory[[1, 3]], there.memory[[3, 1]])
    assert wait_until(lambda: len(offerer._readers) == 1)
    offerer.close()
    reader.close()
    assert wait_until(lambda: not offerer._readers and not [t for t in threading.enumerate() if t.name.startswith("page")])
    with pytest.raises(TransferError, match="shutting down"):
        reader.read(address, [1], [1])


def test_a_node_that_stands_still_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is taken, and never answered; that ends in the middle; and an address at which nobody listens, before one that is right."""
    monkeypatch.setattr(tcp_transfer, "HELLO_SECONDS", 1)
    reader, _ = make()
    offerer, _ = make()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        own = dataclasses.replace(offerer.address, port=silent.getsockname()[1])
        handle = reader.read(own, [1], [1])
        with pytest.raises(TransferError, match=r"127\.0\.0\.1:.*nothing has come for too long"):
            wait_until(lambda: reader.is_done(handle))
        handles = [reader.read(own, [page], [page]) for page in range(3)]
        silent.accept()[0].close()
        reader.forget(own)
        for handle in handles:
            with pytest.raises(TransferError):
                wait_until(lambda handle=handle: reader.is_done(handle))
    several = dataclasses.replace(offerer.address, hosts=("127.0.0.77", "127.0.0.1"))
    handle = reader.read(several, [2], [2])
    assert wait_until(lambda: reader.is_done(handle))
    for one in (offerer, reader):
        one.close()


def test_addresses_of_this_host() -> None:
    assert find_hosts("127.0.0.1", 6379)[0] == "127.0.0.1" and find_hosts("no.such.host.invalid", 1)
    every, _ = make(("127.0.0.1", "::1"))
    for host in ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
        with socket.create_connection((host, every.address.port)):
            pass
    every.close()
    with pytest.raises(ConfigError, match=r"transfer_host: nothing can listen at 192\.0\.2\.1"):
        make(("192.0.2.1",))
