"""What the planner of drafts knows of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from backend.budget.forecast import Kind
from backend.core import Chain

MAX_SCORE = 16
"""Scores of lookups, and half tokens that they promise, from which on they are alike."""


@dataclass(frozen=True, slots=True)
class Ability:
    """What may draft for a request."""

    model: str = ""
    """The model drafter's name; "": none."""
    num_model: int = 0
    """Drafts that it makes for the request at most."""
    lookup: str = ""
    """The lookup in the step; "": none."""
    has_host: bool = False
    """Lookups on the host draft as well."""
    is_remote: bool = False
    """The model is asked when a step is planned, with all tokens known."""


@dataclass(slots=True)
class Own:
    """What is known of one request."""

    ability: Ability
    kind: Kind
    is_paced: bool
    value: float
    """Drafts of the model that were right in a step, on average; a new request begins with that of others like it."""
    lookup_value: float
    """Those of lookups, where there is no model."""
    num_steps: int = 0
    promised: int = 0
    """What the host's lookups promised when they were asked last, in half drafts."""
    was_asked: bool = True
    """The model, for the next step."""
    pending: list[tuple[int, list[int], Chain]] = field(default_factory=list)
    """(place, tokens, evidence) of drafts that were not verified, whose text is not all there yet."""


def as_promise(worth: Sequence[float]) -> int:
    """The most that lookups' drafts are worth, in half tokens."""
    return min(MAX_SCORE, max(0, round(2 * max((0.0, *worth)))))
