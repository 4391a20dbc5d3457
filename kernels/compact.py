"""After a step with trees: what is kept of accepted drafts moves to where a chain's would lie."""

from __future__ import annotations

import torch

from kernels._load import load
from kernels.reference import compact as reference

THREADS = 128


def compact_rows(
    memory: torch.Tensor,
    planes: torch.Tensor,
    slots: torch.Tensor,
    page_stride: int,
    cu_query_lens: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
) -> None:
    """Row path[b, d] of request b becomes its row d, for d from 1 to num_accepted [b], in every plane of the paged memory.

    memory [P, page bytes] uint8; planes [N, 2] int64: where each begins in a page, and bytes of a token; slots [T] int64: of packed rows, page *
    page_stride + place; cu_query_lens [B + 1], path [B, W] and num_accepted [B] int32: see `verify_tree`. Paths only ever go on: d <= path[b, d].
    """
    batch, width = path.shape
    for name, tensor, shape, dtype in (
        ("planes", planes, (len(planes), 2), torch.int64),
        ("slots", slots, (len(slots),), torch.int64),
        ("cu_query_lens", cu_query_lens, (batch + 1,), torch.int32),
        ("path", path, (batch, width), torch.int32),
        ("num_accepted", num_accepted, (batch,), torch.int32),
    ):
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; must be {dtype} {list(shape)}, contiguous")
    if memory.ndim != 2 or memory.dtype != torch.uint8 or not memory.is_contiguous():
        raise ValueError(f"memory is {memory.dtype} {list(memory.shape)}; must be uint8 [P, page bytes], contiguous")
    if not memory.is_cuda:
        reference.compact_rows(memory, planes, slots, page_stride, cu_query_lens, path, num_accepted)
        return
    kernel = load(memory.device, "compact", "compact_rows")
    kernel((batch, len(planes)), (THREADS, 1, 1), memory, planes, slots, cu_query_lens, path, num_accepted, width, page_stride, memory.shape[1])
