"""What a step took."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step's phases, of the device."""

    forward: float = 0.0
    decide: float = 0.0
    draft: float = 0.0
    drafts: tuple[float, ...] = field(default=(), kw_only=True)
    """Of the phase draft, until each of the model drafter's drafts was made; where they are made one after the other on CPU."""
    is_first: bool = field(default=False, kw_only=True)
    """Something was recorded, which takes longer than it ever will again."""

    @property
    def total(self) -> float:
        return self.forward + self.decide + self.draft
