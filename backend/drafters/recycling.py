"""Token recycling (Luo et al. 2024): what the target found likely after a token when it last saw it is what is drafted after it, as a tree.

Without weights or training. All requests share what is remembered, which is of candidates alone: it shows in speed, never in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from backend.drafters.protocol import BlockPass, CandidateMemory, DrafterRows, StateKeeper
from backend.kv_store import CacheSpec, KvStore
from backend.models.decoder_layer import AttentionKinds
from backend.speculative_config import MAX_SPECULATIVE_TOKENS
from kernels import ops


class RecyclingDrafter:
    """A StepDrafter, and its memory. Its states are token ids."""

    block: BlockPass | None = None
    keeper: StateKeeper | None = None
    heads: ops.Heads | None = None
    attention_kinds: AttentionKinds = frozenset()
    attends_drafts = False
    max_drafts, tap_width = MAX_SPECULATIVE_TOKENS, 0
    tapped_layers: tuple[int, ...] = ()

    def __init__(self, vocab_size: int, num_candidates: int, device: torch.device) -> None:
        """num_candidates: that are remembered of each token, within the vocabulary; -1: there are no more."""
        self._nobody = vocab_size
        self._candidates = torch.full((vocab_size + 1, num_candidates), -1, dtype=torch.int32, device=device)
        """[V + 1, N]: the last ones are of rows of nobody."""
        self._likeliest = self._candidates[:, :vocab_size]

    @property
    def memory(self) -> CandidateMemory:
        return self

    def learn(self, token_ids: torch.Tensor, logits: torch.Tensor, is_own: torch.Tensor | None = None) -> None:
        likeliest = logits.topk(self._likeliest.shape[1], dim=-1).indices
        own = token_ids if is_own is None else torch.where(is_own, token_ids, self._nobody)
        self._likeliest.index_copy_(0, own, likeliest.int())

    def recall(self, states: list[torch.Tensor], count: int) -> torch.Tensor:
        return self._candidates[states[0][:, 0], :count]

    def tap(self, hidden: torch.Tensor, entering: Mapping[int, torch.Tensor]) -> torch.Tensor:
        raise AssertionError("nothing is kept of the target's states")

    def cache_specs(self, dtype: torch.dtype) -> list[CacheSpec]:
        return []

    def attach(self, store: KvStore) -> None:
        pass

    def advance(self, rows: DrafterRows, last: torch.Tensor) -> list[torch.Tensor]:
        return [rows.token_ids[last][:, None]]

    def extend(self, rows: DrafterRows, states: list[torch.Tensor], step: int) -> list[torch.Tensor]:
        return [rows.token_ids[:, None]]

    def logits(self, states: list[torch.Tensor], step: int) -> torch.Tensor:
        raise AssertionError("candidates are remembered")
