"""One request of the decode model, from its arrival to its final response."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backend.adapters.answers import Answer


@dataclass(slots=True, eq=False)
class Exchange:
    """One Triton request and the way back to its client."""

    sender: Any
    number: int = 0
    """By which the engine's process knows it."""
    client_id: str = ""
    key: str = ""
    """The engine's name for it."""
    num_open: int = 1
    """Completions whose end was not sent. The sender thread's, once the engine has the request."""
    is_streamed: bool = True
    answer: Answer = field(default_factory=Answer)
    last_sent: float = 0.0
    last_look: float = 0.0
    """When the server was asked whether the client is still there. The sender thread's."""
    is_cancelled: bool = False
    """Its client is gone, or it cannot be answered: its end was asked for."""
    is_closed: bool = False
    """Its final response was sent, or is being sent. The sender thread's."""
    is_over: bool = False
    """Its final response was sent."""
    is_awaited: bool = False
    """Another one's answer comes after its end."""
    is_due: bool = False
    """The sender is to look at it, and has not come to it yet."""
    waits_for: list[Exchange] = field(default_factory=list)
    """Requests that it ended: its own answer comes after theirs."""
