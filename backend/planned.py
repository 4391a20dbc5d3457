"""What the planner knows of requests and of the steps that it planned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend.core import Scheduled
from backend.drafters import Placement
from backend.drafters.choice import NEVER
from backend.step.plan import StepPlan

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Drafted:
    """Who made the drafts that the next step verifies. It may hold fewer than these."""

    sources: list[str] = field(default_factory=list)
    alone_score: int = NEVER
    score: int = 0
    """Of the lookup, once the step was read."""
    token_ids: list[int] | None = None
    """Where the host knows them: sources says who made them."""

    def who(self, count: int, lookup_name: str) -> list[str]:
        if self.token_ids is None and self.score >= self.alone_score:
            return [lookup_name] * count
        return self.sources[:count]


@dataclass(slots=True, eq=False)
class Known:
    """What the workers know of a running request."""

    index: int
    place: Placement
    options: int = 0
    num_pages: int = 0
    """Leading page ids in the page table."""
    is_admitted: bool = False
    is_reported: bool = False
    """The host, or another node, wants to see what a step drafted for it."""
    next_drafts: list[int] = field(default_factory=list)
    """What the last step that was read drafted for the next one, where that is reported."""
    drafted: Drafted = field(default_factory=Drafted)
    num_drafter_tokens: int = 0
    """Leading tokens that the model drafter has computed, by the steps that were read or whose rows the host named."""
    is_followed: bool = False
    """The model drafter computes every token in the step that emits it; where not, it lags behind num_drafter_tokens."""


@dataclass(slots=True)
class PlannedStep:
    """A step's plan, and what the host needs to read its outcome."""

    plan: StepPlan
    entries: list[Scheduled]
    """In the plan's order."""
    verified: list[Drafted]
    """[B]: who made the drafts that each entry verifies."""
    made: list[Drafted]
    """[B]: who makes those for the next step."""
    host_probs: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """(request index, distributions) of drafts that the host writes."""
    host_seconds: float = 0.0
    """That it took to make them."""
