"""What can be split over ranks. No torch: the launcher asks too, before anything is started."""

from __future__ import annotations

from backend.errors import ConfigError


class DoesNotDivideError(ConfigError):
    """What is to be split over the ranks cannot be."""


def check_divides(count: int, size: int, what: str, *, can_repeat: bool = False) -> None:
    """Raises DoesNotDivideError where `size` ranks cannot have equal shares. can_repeat: several may hold the same one."""
    if count % size and not (can_repeat and size % count == 0):
        raise DoesNotDivideError(f"tensor_parallel_size {size}: {what} is {count}, which does not divide by it")
