"""An object of config.json whose values are asked for one by one. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from backend.errors import ModelError


class Values:
    """Each complaint names file, key, value and limit. A key that is null is one that is not there, but for flags."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def refuse(self, key: str, rule: str) -> ModelError:
        return ModelError(f"{self.where}: {key} is {self._values.get(key)!r:.80}; it must be {rule}")

    def _take(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where} has no {key!r}")
        return value

    def integer(self, key: str, high: int, low: int = 1, default: int | None = None) -> int:
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, high: float, default: float | None = None) -> float:
        """Above 0, and no more than `high`."""
        value = self._take(key, default)
        if not _is_number(value) or not 0 < value <= high:
            raise self.refuse(key, f"a number above 0, and {high:g} at most")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """null is false, as the models' own code has it: they test the value."""
        value = self._take(key, default and not self.names(key))
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` numbers above 0."""
        values = self._take(key, None)
        if not isinstance(values, list) or len(values) != count or not all(_is_number(v) and v > 0 for v in values):
            raise self.refuse(key, f"a list of {count} numbers above 0")
        return tuple(float(value) for value in values)

    def integers(self, key: str, high: int) -> tuple[int, ...]:
        """A list of integers from 0 to `high`; none where it is not there."""
        values = self._take(key, [])
        if not isinstance(values, list) or not all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= high for v in values):
            raise self.refuse(key, f"a list of integers from 0 to {high}")
        return tuple(values)

    def choice(self, key: str, known: Sequence[str], default: str | None = None) -> str:
        value = self._take(key, default)
        if value not in known:
            raise ModelError(f"{self.where}: {key} {value!r:.80} is not supported; known: {', '.join(known)}")
        return value

    def section(self, key: str) -> Values:
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(key, "an object, or null")
        return Values(value or {}, f"{self.where}: {key}")

    @property
    def is_empty(self) -> bool:
        return not self._values

    def without(self, *keys: str) -> Values:
        """The same but for these."""
        return Values({key: value for key, value in self._values.items() if key not in keys}, self.where)

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def names(self, key: str) -> bool:
        """Whether the key is written at all, be it as null."""
        return key in self._values

    def get(self, key: str) -> Any:
        return self._values.get(key)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of more digits than a float has
        return False
