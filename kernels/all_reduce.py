"""Sums over ranks on GPUs that can read each other's memory: one kernel, which may be captured (vLLM and TensorRT-LLM: one-shot all-reduce)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels._load import ELEMENTS, device_of, load

logger = logging.getLogger(__name__)

THREADS, VECTORS, NUM_REGIONS = 256, 4, 128
"""Blocks that wait for other GPUs must all run at once: any GPU that is served has room for so many."""
REGION = THREADS * VECTORS * 16
MAX_READ_BYTES = 2 * 2**20
"""From the other ranks together: above it NCCL, which sends each value once, is as fast."""


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """One rank's memory for exchanges, and the addresses of all ranks'."""

    rank: int
    addresses: torch.Tensor
    """[size] int64 on the device: where each rank's memory begins, as this one sees it."""
    turns: torch.Tensor
    """[NUM_REGIONS] int32 on the device: how often each block has exchanged."""
    _held: tuple[Any, ...]
    """The driver's allocation and mappings."""

    @property
    def size(self) -> int:
        return len(self.addresses)

    def close(self) -> None:
        """When no kernel that reads them is left, on this rank and the others."""
        own, *mappings = self._held
        for mapping in mappings:
            if mapping is not None:
                mapping.close()
        own.free()


def meet_peers(device: torch.device, rank: int, size: int, exchange: Callable[[str, bytes], list[bytes]]) -> PeerMemory | None:
    """Memory that every rank of this host can read, when there is a way between their GPUs; None on all ranks otherwise.

    exchange: gives every rank what each said under that name, in the ranks' order. Called within kernels.device_stream(device).
    """
    driver = device_of(device).driver
    own = driver.mem_alloc(NUM_REGIONS * (2 * REGION + 4 * size))
    driver.memset_d8(own, 0, NUM_REGIONS * (2 * REGION + 4 * size))
    torch.cuda.synchronize(device)
    handles = exchange("memory", bytes(driver.mem_get_ipc_handle(own)))
    mappings: list[Any] = []
    try:
        mappings = [None if r == rank else driver.IPCMemoryHandle(bytearray(handle)) for r, handle in enumerate(handles)]
    except driver.Error as error:
        logger.info("rank %d: other GPUs' memory cannot be read: %s", rank, error)
    if b"no" in exchange("mapped", b"yes" if mappings else b"no"):
        return None
    addresses = [int(own if mapping is None else mapping) for mapping in mappings]
    turns = torch.zeros(NUM_REGIONS, dtype=torch.int32, device=device)
    return PeerMemory(rank, torch.tensor(addresses, dtype=torch.int64, device=device), turns, (own, *mappings))


def can_all_reduce(part: torch.Tensor, size: int) -> bool:
    """Whether the kernel takes it and is the faster way; the same on every rank, for it looks at shape and type alone."""
    num_bytes = part.numel() * part.element_size()
    return part.is_contiguous() and part.dtype in ELEMENTS and num_bytes > 0 and num_bytes % 16 == 0 and num_bytes * (size - 1) <= MAX_READ_BYTES


def all_reduce(part: torch.Tensor, memory: PeerMemory, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Sum of the ranks' parts, in place of part -> part; or added to residual, in place -> residual. Both contiguous and of the same shape.

    The sum is rounded before it is added, as apart. Every rank calls it in the same order with the same shape and type; it waits for all.
    Raises ValueError for what `can_all_reduce` refuses.
    """
    if not can_all_reduce(part, memory.size):
        raise ValueError(
            f"all_reduce: part {tuple(part.shape)} of {part.dtype} must be contiguous, of 16 to {MAX_READ_BYTES // (memory.size - 1)} bytes"
        )
    if residual is not None and (residual.shape != part.shape or residual.dtype != part.dtype or not residual.is_contiguous()):
        raise ValueError(f"all_reduce: residual {tuple(residual.shape)} of {residual.dtype} must be contiguous and as part, {tuple(part.shape)}")
    num_vectors = part.numel() * part.element_size() // 16
    per_thread = min(VECTORS, -(-num_vectors // (THREADS * NUM_REGIONS)))
    blocks = min(NUM_REGIONS, -(-num_vectors // (THREADS * per_thread)))
    out = part if residual is None else residual
    defines: dict[str, int | str] = {"ELEMENT": ELEMENTS[part.dtype], "RANKS": memory.size}
    kernel = load(part.device, "all_reduce", "all_reduce", defines, programmatic=True)
    arguments = (memory.addresses, memory.turns, num_vectors, per_thread, NUM_REGIONS, memory.rank)
    kernel((blocks, 1), (THREADS, 1, 1), out, part, 0 if residual is None else residual, *arguments)
    return out
