"""Twin of `kernels.compact`, in NumPy."""

from __future__ import annotations

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided


def compact_rows(
    memory: torch.Tensor,
    planes: torch.Tensor,
    slots: torch.Tensor,
    page_stride: int,
    cu_query_lens: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
) -> None:
    """All rows are read before one is written."""
    rows, places, begins = path.numpy(), np.arange(path.shape[1]), cu_query_lens.numpy()[:-1, None]
    is_moved = (places >= 1) & (places <= num_accepted.numpy()[:, None]) & (rows != places)
    if not is_moved.any():
        return
    addresses = slots.numpy()
    sources, targets = (np.divmod(addresses[(begins + own)[is_moved]], page_stride) for own in (rows, places[None]))
    held = memory.numpy()
    num_pages, page_bytes = held.shape
    for offset, token_bytes in planes.tolist():
        shape = (num_pages, (page_bytes - offset) // token_bytes, token_bytes)
        plane = as_strided(held.reshape(-1)[offset:], shape, (page_bytes, token_bytes, 1))
        plane[targets] = plane[sources]
