"""Memory in huge pages, for weights that every step reads whole: the processor fetches ahead within a page alone, and looks fewer of them up."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Sequence

import torch

PAGE = 1 << 21
CHUNK = 16 * PAGE
"""Of memory that is asked for at a time; what of it is not used yet takes no memory, but for the rest of a page."""
ALIGNMENT = 64

_lock = threading.Lock()
_rest = torch.empty(0, dtype=torch.uint8)
"""Of the chunk that was asked for last."""


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """As torch.zeros, on CPU; it begins at a cache line. Where Linux has no huge pages for it these are ordinary ones."""
    global _rest
    size = math.prod(shape) * dtype.itemsize
    taken = -(-size // ALIGNMENT) * ALIGNMENT
    with _lock:
        if taken > len(_rest):
            # Private, as shared memory has huge pages elsewhere.
            chunk = mmap.mmap(-1, max(CHUNK, -(-taken // PAGE) * PAGE) + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(AttributeError, OSError):
                chunk.madvise(mmap.MADV_HUGEPAGE)
            whole = torch.frombuffer(chunk, dtype=torch.uint8)
            _rest = whole[-whole.data_ptr() % PAGE :]
        own, _rest = _rest[:taken], _rest[taken:]
    return own[:size].view(dtype).view(tuple(shape))
