"""Token masks: which tokens a row of logits may choose, a bit each."""

from __future__ import annotations

import torch

from kernels._load import Kernel, load
from kernels.reference import request_table as reference
from kernels.sampling import DTYPES, check_logits

THREADS = 256
MAX_BLOCKS = 16
"""That share a row."""


def load_mask(device: torch.device, dtype: torch.dtype) -> Kernel:
    """Inside `_load.compiling` it is compiled."""
    return load(device, "token_mask", "mask_logits", {"LOGIT": DTYPES[dtype]})


def mask_logits(logits: torch.Tensor, masks: torch.Tensor, mask_starts: torch.Tensor, cu_logit_rows: torch.Tensor) -> None:
    """Sets logits [R, V] of tokens whose bit is 0 to -inf, in place.

    Request b has rows cu_logit_rows[b] to cu_logit_rows[b + 1] [B + 1]; row j of these takes mask mask_starts[b] + j; where mask_starts [B] is
    -1, none. masks [M, ceil(V / 32)] int32: bit i % 32 of word i // 32 is token i's. float32, bfloat16 or float16.
    """
    check_logits(logits)
    vocab_size, batch = logits.shape[1], len(mask_starts)
    if masks.ndim != 2 or masks.shape[1] != -(-vocab_size // 32) or masks.dtype != torch.int32 or not masks.is_contiguous():
        raise ValueError(f"masks are {masks.dtype} {list(masks.shape)}; contiguous int32 [M, {-(-vocab_size // 32)}] is needed for V = {vocab_size}")
    for name, tensor, length in (("mask_starts", mask_starts, batch), ("cu_logit_rows", cu_logit_rows, batch + 1)):
        if tensor.shape != (length,) or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; contiguous int32 [{length}] is needed")
    if not logits.is_cuda:
        reference.mask_logits(logits, masks, mask_starts, cu_logit_rows)
        return
    if len(logits):
        blocks = max(1, min(MAX_BLOCKS, -(-vocab_size // (8 * THREADS))))
        sizes = (batch, vocab_size, masks.shape[1])
        load_mask(logits.device, logits.dtype)((len(logits), blocks), (THREADS, 1, 1), logits, masks, mask_starts, cu_logit_rows, *sizes)
