"""One number of the engine's, with what it is called on a metrics port."""

from __future__ import annotations

from typing import NamedTuple


class Count(NamedTuple):
    name: str
    text: str
    """What it counts."""
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    is_gauge: bool = False
    """It may fall; else it is what came together since the start."""
