"""What a model drafter's layers take in, and its few tokens' scores as scores of all: one launch each, for a draft is made of little else."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels._load import ELEMENTS, load
from kernels.norm import MAX_BYTES, STRANDS, rms_norm

_HIDDEN_FIRST, _MASKS_PAIR, _KEEPS_NORMED = 1, 2, 4
NEVER_MASKED = -1


class Pairs(NamedTuple):
    """Of T rows."""

    rows: torch.Tensor
    """[T, E + H]"""
    states: torch.Tensor | None
    """[T, H], to be changed in place, where they were asked for."""


def pair_rows(
    table: torch.Tensor,
    token_ids: torch.Tensor | None,
    states: torch.Tensor,
    positions: torch.Tensor,
    *,
    embedding_norm: torch.Tensor | None = None,
    hidden_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    masked: int = NEVER_MASKED,
    masks_pair: bool = False,
    is_hidden_first: bool = False,
    keeps_states: bool = False,
    keeps_normed: bool = False,
    factor: float = 1.0,
) -> Pairs:
    """A row's embedding and state, each normed if it has a norm, side by side: what EAGLE-3 (Li et al. 2025) and multi-token prediction
    (DeepSeek-V3, 2024) compute with.

    table [V, E] by token_ids [T] int64, or None: [T, E] by row; states [T, H]; positions [T] int64; norms [E], [H]; masked: the position whose
    embedding, or with masks_pair all of the pair, is 0; keeps_states: a copy of them is wanted, normed with keeps_normed; factor: of embeddings.
    """
    num_rows, widths = len(states), (table.shape[1], states.shape[1])
    if states.is_cuda:
        states, positions = states.contiguous(), positions.contiguous()  # a mask's state is one for all rows
        flags = _HIDDEN_FIRST * is_hidden_first | _MASKS_PAIR * masks_pair | _KEEPS_NORMED * keeps_normed
        tensors = [states, table, *(norm for norm in (embedding_norm, hidden_norm) if norm is not None)]
        _check(tensors, widths, positions, token_ids)
        pairs = torch.empty(num_rows, sum(widths), dtype=states.dtype, device=states.device)
        kept = torch.empty_like(states) if keeps_states else None
        if num_rows:
            optional = [0 if tensor is None else tensor for tensor in (embedding_norm, hidden_norm)]
            ids = 0 if token_ids is None else token_ids
            sizes = (*widths, masked, flags, eps, factor)
            kernel = load(states.device, "drafter", "pair_rows", _defines(states.dtype, max(widths)), programmatic=True)
            kernel((num_rows, 2), (STRANDS, 1, 1), pairs, 0 if kept is None else kept, table, ids, states, positions, *optional, *sizes)
        return Pairs(pairs, kept)
    embedded = table if token_ids is None else table[token_ids]
    if factor != 1.0:
        embedded = embedded * factor
    is_masked = None if masked == NEVER_MASKED else (positions == masked)[:, None]
    if is_masked is not None and not masks_pair:  # the norm leaves zeros as they are
        embedded = embedded.masked_fill(is_masked, 0)
    if embedding_norm is not None:
        embedded = rms_norm(embedded, embedding_norm, eps)
    normed = states if hidden_norm is None else rms_norm(states, hidden_norm, eps)
    pairs = torch.cat([normed, embedded] if is_hidden_first else [embedded, normed], dim=-1)
    if is_masked is not None and masks_pair:
        pairs.masked_fill_(is_masked, 0)
    if not keeps_states:
        return Pairs(pairs, None)
    return Pairs(pairs, normed if keeps_normed and hidden_norm is not None else states.clone())


def _check(tensors: list[torch.Tensor], widths: tuple[int, int], positions: torch.Tensor, token_ids: torch.Tensor | None) -> None:
    states, size = tensors[0], max(widths)
    per_vector = 16 // states.element_size()
    if widths[0] % per_vector or widths[1] % per_vector or size * states.element_size() > MAX_BYTES:
        raise ValueError(f"pair_rows: {widths} must be multiples of {per_vector} and at most {MAX_BYTES // states.element_size()} in {states.dtype}")
    if any(tensor.dtype != states.dtype or not tensor.is_contiguous() for tensor in tensors):
        raise ValueError(f"pair_rows: all must be contiguous {states.dtype}: {[(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]}")
    for name, ids in (("positions", positions), ("token_ids", token_ids)):
        if ids is not None and (ids.shape != (len(states),) or ids.dtype != torch.int64 or not ids.is_contiguous()):
            raise ValueError(f"pair_rows: {name} is {ids.dtype} {list(ids.shape)}; contiguous int64 [{len(states)}] is needed")


def _defines(dtype: torch.dtype, size: int) -> dict[str, int | str]:
    per_thread = -(-size * dtype.itemsize // 16 // STRANDS)
    return {"ELEMENT": ELEMENTS[dtype], "VECTORS": 2 if per_thread <= 2 else 4 if per_thread <= 4 else 16}


class Spread:
    """Scores of some tokens as scores of all, -inf for the others."""

    def __init__(self, token_ids: torch.Tensor, vocab_size: int) -> None:
        """token_ids [N] int64: which tokens they are of, none twice."""
        self.token_ids, self.vocab_size = token_ids, vocab_size
        self._places = torch.full((vocab_size,), -1, dtype=torch.int32, device=token_ids.device)
        self._places[token_ids] = torch.arange(len(token_ids), dtype=torch.int32, device=token_ids.device)

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """[R, N] -> [R, V]"""
        if scores.shape[1:] != self.token_ids.shape:
            raise ValueError(f"scores {list(scores.shape)} must be [R, {len(self.token_ids)}]")
        if not scores.is_cuda:
            return scores.new_full((len(scores), self.vocab_size), float("-inf")).index_copy_(1, self.token_ids, scores)
        scores, out = scores.contiguous(), scores.new_empty(len(scores), self.vocab_size)
        if len(scores):
            per_block = STRANDS * 16 // scores.element_size()
            kernel = load(scores.device, "drafter", "spread_scores", _defines(scores.dtype, 0), programmatic=True)
            grid = (len(scores), -(-self.vocab_size // per_block))
            kernel(grid, (STRANDS, 1, 1), out, scores, self._places, scores.shape[1], self.vocab_size)
        return out
