"""Pages that are read over TCP while a node is killed: the other one goes on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import json, os, signal, sys, time
import torch
from backend.disaggregation import transfer as transfers
from backend.disaggregation.transfer import PageAddress, PageTransfer
from backend.errors import TransferError

transfers._load_nixl()  # once: the processes that are made below have it
PAGES, PAGE_BYTES = list(range(64)), 1 << 18

class Store:
    memory, page_bytes, device = torch.zeros(len(PAGES), PAGE_BYTES, dtype=torch.uint8), PAGE_BYTES, torch.device("cpu")

def offer(tell):
    transfer = PageTransfer(f"offerer {os.getpid()}", Store())
    tell(json.dumps(transfer.address.as_dict()))
    while True:
        transfer.serve()
        time.sleep(0.0005)

def read(transfer, address):
    handle = transfer.read(address, PAGES, PAGES)
    while not transfer.is_done(handle):
        time.sleep(0.0002)

def read_on(address, tell):
    transfer = PageTransfer(f"reader {os.getpid()}", Store())
    while True:
        read(transfer, address)
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
    reader, line = begin(read_on, address)
    assert line.readline() == "read\\n", f"after {number} readers were killed: {os.waitpid(offerer, os.WNOHANG)}"
    time.sleep(0.002 * number)
    end(reader, line)
end(offerer, told)
"""
OFFERERS = """
offerers = [begin(offer) for _ in range(8)]  # before UCX has threads in this process
transfer = PageTransfer("reader", Store())
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


@pytest.mark.parametrize("code", [READERS, OFFERERS], ids=["readers", "offerers"])
def test_the_others_go_on(code: str) -> None:
    """UCX fails a dead reader's requests by fields that it has not set: whatever the allocator gives, here never zeros."""
    own = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "MALLOC_PERTURB_": "85"}
    result = subprocess.run([sys.executable, "-c", CODE + code], env=os.environ | own, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr[-2000:]
