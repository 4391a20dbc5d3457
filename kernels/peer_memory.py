"""Memory of one rank's GPU that the other ranks of its host can write."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels._load import device_of

logger = logging.getLogger(__name__)

FILLER_BYTES = 4 * 2**20
GIVE_UP_SECONDS, LOOK_SECONDS = 10.0, 0.001
"""For which nobody is waited for once a rank is gone (until whoever launches has heard of it), and between two looks whether somebody is."""

Exchange = Callable[[str, bytes], list[bytes]]
"""Gives every rank what each said under that name, in the ranks' order."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """As many bytes on every rank."""

    addresses: tuple[int, ...]
    """Where each rank's memory begins, as this one sees it."""
    _held: tuple[Any, ...]
    """The driver's allocation and mappings."""

    def close(self) -> None:
        """When no kernel that reads or writes them is left, on this rank and the others."""
        own, *mappings = self._held
        for mapping in mappings:
            if mapping is not None:
                mapping.close()
        own.free()


def map_memory(device: torch.device, rank: int, size: int, num_bytes: int, fill: int, exchange: Exchange, name: str) -> Mapped | None:
    """Memory full of the word `fill` that every rank of this host can write, when there is a way between their GPUs; None on all ranks otherwise.

    Called within kernels.device_stream(device), by all ranks with the same num_bytes and name."""
    driver = device_of(device).driver
    own = driver.mem_alloc(num_bytes)
    driver.memset_d32(own, fill, num_bytes // 4)
    torch.cuda.synchronize(device)
    handles = exchange(name, bytes(driver.mem_get_ipc_handle(own)))
    mappings: list[Any] = []
    try:
        mappings = [None if r == rank else driver.IPCMemoryHandle(bytearray(handle)) for r, handle in enumerate(handles)]
    except driver.Error as error:
        logger.info("rank %d: other GPUs' memory cannot be read: %s", rank, error)
    if b"no" in exchange(f"{name} mapped", b"yes" if mappings else b"no"):
        return None
    return Mapped(tuple(int(own if mapping is None else mapping) for mapping in mappings), (own, *mappings))


class Waited(NamedTuple):
    """Memory that kernels wait for other ranks to write."""

    begin: int
    num_bytes: int
    filler: np.ndarray
    """Bytes on the host for which no kernel waits."""


def make_filler(word: int, num_bytes: int = FILLER_BYTES) -> np.ndarray:
    """Made in time: to make it waits for the GPU."""
    return torch.full((num_bytes // 4,), word, dtype=torch.int32, pin_memory=True).numpy().view(np.uint8)


def _is_idle(own_device: Any) -> bool:
    """Whether nothing waits there. A stream of which a graph is captured cannot be asked: what was launched before may wait."""
    try:
        return own_device.stream.is_done()
    except own_device.driver.Error:
        return False


def give_up(device: torch.device, rank: int, waited: Sequence[Waited], seconds: float = GIVE_UP_SECONDS) -> None:
    """Some rank is gone: whoever waits for its values on this one's GPU has others instead, for so long. From any thread.

    A kernel that waits cannot be ended, and all that was launched after it waits too. By the copy engine: waiting kernels may fill the rest.
    """
    own_device = device_of(device)
    driver = own_device.driver
    own_device.context.push()
    try:
        own, end = driver.Stream(), time.monotonic() + seconds
        while time.monotonic() < end:
            if _is_idle(own_device):
                time.sleep(LOOK_SECONDS)
                continue
            for begin, num_bytes, filler in waited:
                for place in range(0, num_bytes, len(filler)):
                    driver.memcpy_htod_async(begin + place, filler[: num_bytes - place], own)
            own.synchronize()
    except driver.Error:
        logger.exception("rank %d: its GPU goes on waiting for a rank that is gone", rank)
    finally:
        driver.Context.pop()
