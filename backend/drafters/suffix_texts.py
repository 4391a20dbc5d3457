"""What `SuffixLookup` knows of a text in a suffix tree, and of an open request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from backend.core import Request


@dataclass(slots=True, eq=False)
class SuffixText:
    """A sequence in a tree: a long one in pieces, each with the end of the one before at its start, so that matches cross the cuts."""

    tree: Any
    token_ids: list[int] | array[int]
    num_inserted: int = 0
    """Tokens that the tree has; the others wait."""
    piece_ids: list[int] = field(default_factory=list)
    num_in_piece: int = 0
    """In the last piece."""
    is_evicted: bool = False


@dataclass(slots=True, eq=False)
class OpenText:
    """An open request: all its tokens in a tree of its own, its output in the shared one."""

    request: Request
    text: SuffixText
    answer: SuffixText | None = None
    num_reserved: int = 0
    is_queued: bool = False
    is_wanted: bool = False
    """Its drafts are waited for, not only watched."""
