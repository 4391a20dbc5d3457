"""Exchanges between ranks on GPUs that can write each other's memory: a kernel each, which may be captured.

What a rank sends is written into the others' memory, and its arrival is seen by the values themselves (NCCL's LL protocol; the one-shot
and two-shot kernels of TensorRT-LLM and FlashInfer).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels._load import ELEMENTS, Kernel, load
from kernels.peer_memory import Exchange, Mapped, Waited, make_filler, map_memory

THREADS, VECTORS, NUM_REGIONS = 256, 4, 128
"""Blocks that wait for other GPUs must all run at once: any GPU that is served has room for so many."""
PASS = THREADS * 16
"""Bytes of a block's threads, a vector each."""
MAX_ONE_SHOT_BYTES, MAX_TWO_SHOT_BYTES = 2 * 2**20, 10 * 2**20
"""From the other ranks together, where each adds all parts; of one part, where each adds a share: above it NCCL is as fast."""
TWO_SHOT_SAVES = 2**20
"""Bytes less of a rank's link that pay for the way that they go more."""
MAX_GATHERED_BYTES = 16 * 2**20
"""From the other ranks together, where nothing is sent twice: the scores of 128 tokens, of half a vocabulary of 128k."""
NOTHING = 0x80000000
"""What an empty place holds; kernels/all_reduce.cu."""


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """One rank's memory for exchanges, and the addresses of all ranks'."""

    rank: int
    addresses: torch.Tensor
    """[size] int64 on the device: where each rank's memory begins, as this one sees it."""
    turns: torch.Tensor
    """[NUM_REGIONS] int32 on the device: how often each block has exchanged."""
    waited: Waited
    _mapped: Mapped

    @property
    def size(self) -> int:
        return len(self.addresses)

    def close(self) -> None:
        """When no kernel that reads or writes it is left, on this rank and the others."""
        self._mapped.close()


def _region_bytes(size: int) -> int:
    """What one block gets from one rank at most."""
    return -(-(MAX_GATHERED_BYTES // (size - 1)) // (NUM_REGIONS * PASS)) * PASS


def meet_peers(device: torch.device, rank: int, size: int, exchange: Exchange) -> PeerMemory | None:
    """`PeerMemory` of every rank of this host; None on all ranks where their GPUs cannot write each other's memory. See `map_memory`."""
    num_bytes = 2 * size * NUM_REGIONS * _region_bytes(size)
    mapped = map_memory(device, rank, size, num_bytes, NOTHING, exchange, "memory")
    if mapped is None:
        return None
    turns = torch.zeros(NUM_REGIONS, dtype=torch.int32, device=device)
    waited = Waited(mapped.addresses[rank], num_bytes, make_filler(0))
    return PeerMemory(rank, torch.tensor(mapped.addresses, dtype=torch.int64, device=device), turns, waited, mapped)


def _can_exchange(part: torch.Tensor, max_bytes: int) -> bool:
    num_bytes = part.numel() * part.element_size()
    return part.is_contiguous() and part.dtype in ELEMENTS and 0 < num_bytes <= max_bytes and num_bytes % 16 == 0


def _is_two_shot(num_bytes: int, size: int) -> bool:
    """Whether each of the ranks adds a share of a part's values, in place of all of them."""
    return num_bytes * (size - 1) * (size - 2) // size > TWO_SHOT_SAVES


def _most_summed(num_bytes: int, size: int) -> int:
    """Bytes of the largest part that goes by the kernel that one of so many goes by."""
    if not _is_two_shot(num_bytes, size):
        return MAX_ONE_SHOT_BYTES // (size - 1)
    return min(MAX_TWO_SHOT_BYTES, _region_bytes(size) // (2 * PASS) * PASS * size * NUM_REGIONS)  # parts come there, and sums


def can_all_reduce(part: torch.Tensor, size: int) -> bool:
    """Whether a kernel takes it and is the faster way; the same on every rank, for it looks at shape and type alone."""
    return _can_exchange(part, _most_summed(part.numel() * part.element_size(), size))


def can_all_gather(part: torch.Tensor, size: int) -> bool:
    """As `can_all_reduce`, of parts [R, N] that are put beside each other."""
    return part.dim() == 2 and part.shape[1] * part.element_size() % 16 == 0 and _can_exchange(part, MAX_GATHERED_BYTES // (size - 1))


def _kernel(part: torch.Tensor, memory: PeerMemory, name: str) -> Kernel:
    defines: dict[str, int | str] = {"ELEMENT": ELEMENTS[part.dtype], "RANKS": memory.size}
    return load(part.device, "all_reduce", name, defines, programmatic=True)


def _grid(num_vectors: int, shares: int = 1) -> tuple[int, int]:
    """Blocks, and vectors of each thread in each of a block's shares."""
    per_thread = -(-num_vectors // (THREADS * shares * NUM_REGIONS))
    return -(-num_vectors // (THREADS * shares * per_thread)), per_thread


def all_reduce(part: torch.Tensor, memory: PeerMemory, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Sum of the ranks' parts, in place of part -> part; or added to residual, in place -> residual. Both contiguous and of the same shape.

    The sum is rounded before it is added, as apart. Zeros may lose their sign. Every rank calls it in the same order with the same shape and
    type; it waits for all. Raises ValueError for what `can_all_reduce` refuses.
    """
    if not can_all_reduce(part, memory.size):
        limit = _most_summed(part.numel() * part.element_size(), memory.size)
        raise ValueError(f"all_reduce: part {tuple(part.shape)} of {part.dtype} must be contiguous, of 16 to {limit} bytes")
    if residual is not None and (residual.shape != part.shape or residual.dtype != part.dtype or not residual.is_contiguous()):
        raise ValueError(f"all_reduce: residual {tuple(residual.shape)} of {residual.dtype} must be contiguous and as part, {tuple(part.shape)}")
    num_vectors = part.numel() * part.element_size() // 16
    is_two_shot = _is_two_shot(16 * num_vectors, memory.size)
    blocks, per_thread = _grid(num_vectors, memory.size if is_two_shot else 1)
    out = part if residual is None else residual
    arguments = (memory.addresses, memory.turns, num_vectors, per_thread, NUM_REGIONS, _region_bytes(memory.size), memory.rank)
    kernel = _kernel(part, memory, "all_reduce_two_shot" if is_two_shot else "all_reduce")
    kernel((blocks, 1), (THREADS, 1, 1), out, part, 0 if residual is None else residual, *arguments)
    return out


def all_gather(part: torch.Tensor, memory: PeerMemory) -> torch.Tensor:
    """[R, N] of each rank -> [R, size * N], in the ranks' order. Zeros may lose their sign. Called, and refused, as `all_reduce` is."""
    if not can_all_gather(part, memory.size):
        limit = MAX_GATHERED_BYTES // (memory.size - 1)
        raise ValueError(f"all_gather: part {tuple(part.shape)} of {part.dtype} must be contiguous, of rows of 16 bytes each and {limit} in all")
    rows, width = part.shape
    out = part.new_empty(rows, memory.size * width)
    num_vectors = part.numel() * part.element_size() // 16
    blocks, per_thread = _grid(num_vectors)
    arguments = (num_vectors, num_vectors // rows, per_thread, NUM_REGIONS, _region_bytes(memory.size), memory.rank)
    _kernel(part, memory, "all_gather")((blocks, 1), (THREADS, 1, 1), out, part, memory.addresses, memory.turns, *arguments)
    return out


def can_share_rows(part: torch.Tensor) -> bool:
    """As `can_all_reduce`, of parts [R, N] whose rows go to one rank each."""
    return part.dim() == 2 and part.is_contiguous() and part.dtype in ELEMENTS and len(part) > 0 and part.shape[1] * part.element_size() % 16 == 0


def share_rows(part: torch.Tensor, memory: PeerMemory) -> torch.Tensor:
    """[R, N] of each rank -> [S, size * N]: whole rows, of which rank r gets those from S * r on, S = ceil(R / size); past the last one anything.

    Zeros may lose their sign. Called, and refused, as `all_reduce` is; as many exchanges as what goes at once takes.
    """
    if not can_share_rows(part):
        raise ValueError(f"share_rows: part {tuple(part.shape)} of {part.dtype} must be contiguous, of rows of 16 bytes each")
    (rows, width), size = part.shape, memory.size
    share, row_vectors = -(-rows // size), width * part.element_size() // 16
    out = part.new_empty(share, size * width)
    together = max(1, MAX_GATHERED_BYTES // (size - 1) // (16 * row_vectors))
    kernel = _kernel(part, memory, "share_rows")
    for first in range(0, share, together):
        count = min(together, share - first)
        blocks, per_thread = _grid(count * row_vectors)
        arguments = (rows - first, share, count, row_vectors, per_thread, NUM_REGIONS, _region_bytes(size), memory.rank)
        kernel((blocks, 1), (THREADS, 1, 1), out[first:], part[first:], memory.addresses, memory.turns, *arguments)
    return out
