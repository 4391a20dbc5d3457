"""What the engine's process is told first."""

from __future__ import annotations

from dataclasses import dataclass

from backend.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Setup:
    """What a host is to load."""

    config: EngineConfig
    calls_drafter: bool = False
    """The other process calls the drafter's model."""
    has_instances: bool = False
    """Other ranks are the server's: the other process greets them."""
