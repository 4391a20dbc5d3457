"""How a step's packed rows lie: what `prepare_step` and `prepare_drafter` write, on a GPU into memory that graphs hold the addresses of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.structs import StepSizes


@dataclass(slots=True)
class StepRows:
    """What the target computes: T packed rows of B requests, and which R of them logits are wanted of."""

    packed: torch.Tensor
    """[4, T] int64: token ids, positions, KV slots, slots of the hidden states that drafters read. Rows past the last are on the scratch page."""
    cu_query_lens: torch.Tensor
    """[B + 1] int32: request b has the packed rows cu[b] to cu[b + 1]."""
    seq_lens: torch.Tensor
    """[B] int32: tokens with the new ones; 0: the request computes nothing."""
    num_verified: torch.Tensor
    """[B] int32: drafts among its rows."""
    cu_logit_rows: torch.Tensor
    """[B + 1] int32: request b has the rows cu[b] to cu[b + 1] of the logits."""
    logit_rows: torch.Tensor
    """[R] int64: their packed rows; 0 past the last."""
    seen: torch.Tensor | None = None
    """[T] int64, of a step with trees: which rows of its request a decoding row sees, itself with them: a bit each, the lowest for the newest
    token's row. 0: a row of a prompt. Row i has the KV slot i after the newest token's, whatever its position."""

    @classmethod
    def make(cls, sizes: StepSizes, num_logit_rows: int, device: torch.device) -> StepRows:
        """Room for a step of these sizes, its rows and logit rows padded to the most."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        lists = (zeros(sizes.batch + 1), zeros(sizes.batch), zeros(sizes.batch), zeros(sizes.batch + 1))
        seen = zeros(sizes.rows, dtype=torch.long) if sizes.has_trees else None
        return cls(zeros(4, sizes.rows, dtype=torch.long), *lists, zeros(num_logit_rows, dtype=torch.long), seen)


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Rows of a step of any number of requests, prompts among them, in lists of S requests: what graphs of its forward read. See `split_rows`."""

    cu_prompt_rows: torch.Tensor
    """[S + 1] int32: of requests that are prompts; none of the others."""
    cu_decoding_rows: torch.Tensor
    """[S + 1] int32: of the others, which lie behind the prompts'."""
    seq_lens: torch.Tensor
    """[S] int32: tokens with the new ones; 0: the request computes nothing."""
    indices: torch.Tensor
    """[S] int32: places in the request table; anyone's, of a request that computes nothing."""
    last_rows: torch.Tensor
    """[S] int64: see `DrafterRows`; of the model drafter's rows alone."""

    @classmethod
    def make(cls, count: int, device: torch.device) -> SplitRows:
        def zeros(length: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(length, dtype=dtype, device=device)

        return cls(zeros(count + 1), zeros(count + 1), zeros(count), zeros(count), zeros(count, torch.long))


@dataclass(slots=True)
class DrafterRows:
    """What the model drafter computes of known tokens: T' packed rows of B requests."""

    packed: torch.Tensor
    """[5, T'] int64: token ids, positions, KV slots of the drafter, slots of the hidden states at the position and at the one before
    (any slot where there is none)."""
    cu_rows: torch.Tensor
    """[B + 1] int32"""
    seq_lens: torch.Tensor
    """[B] int32: tokens that the drafter has computed then; 0: none of them now."""
    last_rows: torch.Tensor
    """[B] int64: the packed rows of the newest known tokens, or any row of a request whose newest token is not computed."""

    @classmethod
    def make(cls, sizes: StepSizes, num_rows: int, device: torch.device) -> DrafterRows:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(zeros(5, num_rows, dtype=torch.long), zeros(sizes.batch + 1), zeros(sizes.batch), zeros(sizes.batch, dtype=torch.long))
