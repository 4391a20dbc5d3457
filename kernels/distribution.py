"""Logits -> the distributions that tokens are drawn from, and draws from distributions."""

from __future__ import annotations

import torch

from kernels import reference
from kernels._load import Kernel, gpu_of, load
from kernels.sampling import DTYPES, check_logits

CLUSTERS = (1, 2, 4, 8)
"""Blocks that share a row."""

THREADS = 512
"""Of a block, as distribution.cu has it; a multiprocessor runs two."""

MAX_SHARED, STATIC_SHARED = 128 * 1024, 16 * 1024
"""Bytes of a block's dynamic shared memory at most, and what is left for its own variables."""


def _check_parameters(num_rows: int, device: torch.device, **parameters: torch.Tensor) -> None:
    for name, tensor in parameters.items():
        if tensor.shape != (num_rows,) or tensor.device != device:
            raise ValueError(f"{name} is {list(tensor.shape)} on {tensor.device}; [{num_rows}] on {device} is needed")


def _cluster_sizes(device: torch.device) -> tuple[int, ...]:
    """Two where not all rows are on the chip at once even so, as one block has half the threads that a row wants."""
    return CLUSTERS[1:] if gpu_of(device).has_clusters else CLUSTERS[:1]


def _cluster_size(device: torch.device, num_rows: int) -> int:
    """As many blocks for each row as keep all rows on the chip at once."""
    sizes = _cluster_sizes(device)
    return max(c for c in sizes if c == sizes[0] or num_rows * c <= gpu_of(device).num_multiprocessors * 2)


def _most_shared(device: torch.device) -> int:
    return min(MAX_SHARED, gpu_of(device).block_memory - STATIC_SHARED)


def _load(device: torch.device, dtype: torch.dtype, vocab_size: int, cluster: int) -> Kernel:
    defines = {"LOGIT": DTYPES[dtype], "VECTOR": int(vocab_size % 8 == 0), "CLUSTER": cluster}
    return load(device, "distribution", "probabilities", defines, _most_shared(device))


def load_all(device: torch.device, dtype: torch.dtype, vocab_size: int) -> None:
    """Loads what `probabilities` needs for any number of rows; inside `_load.compiling` it is compiled."""
    for cluster in _cluster_sizes(device):
        _load(device, dtype, vocab_size, cluster)


def probabilities(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    is_filtered: bool | None = None,
) -> torch.Tensor:
    """`reference.probabilities`: [R, V] float32 of logits [R, V] (float32, bfloat16 or float16, contiguous) and parameters [R].

    On a GPU it never waits: is_filtered = None looks at the parameters there. A row with NaN or +inf, or of -inf alone, gives NaN.
    Raises ValueError on other shapes, types or devices.
    """
    check_logits(logits)
    rows, vocab_size = logits.shape
    _check_parameters(rows, logits.device, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if not logits.is_cuda:
        return reference.probabilities(logits, temperature, top_k, top_p, min_p, is_filtered)
    if not rows:
        return logits.new_empty(rows, vocab_size, dtype=torch.float32)
    cluster = _cluster_size(logits.device, rows)
    shared = -(-vocab_size // (8 * THREADS * cluster)) * THREADS * logits.element_size()
    if shared > _most_shared(logits.device):
        raise ValueError(
            f"logits have V = {vocab_size} of {logits.dtype}: {shared} bytes of shared memory; the limit is {_most_shared(logits.device)}"
        )
    if top_k.dtype != torch.int32:
        top_k = top_k.clamp(max=vocab_size).int()
    temperature, top_p, min_p = (t.float().contiguous() for t in (temperature, top_p, min_p))
    kernel = _load(logits.device, logits.dtype, vocab_size, cluster)
    probs = torch.empty(rows, vocab_size, dtype=torch.float32, device=logits.device)
    parameters = (temperature, top_k.contiguous(), top_p, min_p, vocab_size, int(is_filtered is not False))
    kernel((rows * cluster, 1), (THREADS, 1, 1), probs, logits, *parameters, shared=shared)
    return probs


def draw_tokens(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """`reference.draw_tokens`: a token [B] int32 of each row of probs [B, V] (float32, contiguous).

    seeds [B] are int64, positions [B] of any integer type; stream: SAMPLE_STREAM to DRAFT_STREAM.
    Raises ValueError on other shapes, types or devices.
    """
    if probs.ndim != 2 or not probs.is_contiguous() or probs.dtype != torch.float32:
        raise ValueError(f"probs are {list(probs.shape)} of {probs.dtype}; contiguous [B, V] of float32 are needed")
    rows, vocab_size = probs.shape
    _check_parameters(rows, probs.device, seeds=seeds, positions=positions)
    if seeds.dtype != torch.int64:
        raise ValueError(f"seeds are {seeds.dtype}; int64 is needed")
    if not probs.is_cuda:
        return reference.draw_tokens(probs, seeds, positions, stream)
    token_ids = torch.empty(rows, dtype=torch.int32, device=probs.device)
    if rows:
        kernel = load(probs.device, "verify", "draw_tokens")
        kernel((rows, 1), (1024, 1, 1), token_ids, probs, seeds.contiguous(), positions.int().contiguous(), stream, vocab_size)
    return token_ids
