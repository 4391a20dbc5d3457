"""What a model drafter is asked for and answers, once a step: the same for a drafter in this process and for one in another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

LIKELIEST, SHARED_NOISE, OWN_NOISE = 0, 1, 2
"""How drafts are chosen: the likeliest; drawn with the noise that the target will draw with; drawn with noise of their own."""
CHOICES = (LIKELIEST, SHARED_NOISE, OWN_NOISE)


class DraftError(RuntimeError):
    """The drafter cannot be reached, or does not answer as it should; requests go on without its drafts."""


@dataclass(slots=True)
class DraftCall:
    """B requests' known tokens that the drafter has not seen, T in all one after the other, and how many drafts each wants.

    Nothing in it depends on what the drafter remembers of requests: pages say where everything is.
    """

    fresh_pages: list[int] = field(default_factory=list)
    """Pages that changed hands since the last call: to clear first."""
    token_ids: list[int] = field(default_factory=list)
    """[T]"""
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """[T, hidden]: the target's states after its final norm at the tokens before these; before the first token: zeros."""
    query_lens: list[int] = field(default_factory=list)
    """[B], each >= 1, summing to T"""
    seq_lens: list[int] = field(default_factory=list)
    """[B]: tokens with those before them"""
    page_ids: list[list[int]] = field(default_factory=list)
    """[B][pages of seq_len + num_drafts - 1 tokens]"""
    num_drafts: list[int] = field(default_factory=list)
    """[B]; 0: catch up only"""
    choices: list[tuple[int, int, int]] = field(default_factory=list)
    """[B] (LIKELIEST, SHARED_NOISE or OWN_NOISE; top_k; seed as a signed 64-bit integer)"""
    filters: list[tuple[float, float, float]] = field(default_factory=list)
    """[B] (temperature, top_p, min_p)"""


@dataclass(slots=True)
class DraftReply:
    """Drafts [B][num_drafts], and for entries of OWN_NOISE the distributions [num_drafts, V] that they were drawn from."""

    token_ids: list[list[int]]
    probs: dict[int, torch.Tensor] = field(default_factory=dict)


class DraftService(Protocol):
    """Whoever runs the drafter's model."""

    def open(self, num_pages: int, page_size: int) -> None:
        """Begins a session: everything remembered of earlier calls is void. Raises DraftError."""
        ...

    def draft(self, call: DraftCall) -> DraftReply:
        """Raises DraftError; after that a session has to be opened again."""
        ...
