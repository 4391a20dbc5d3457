"""What bodies of requests have in common. Each wrong thing is an error of its own, and each takes time that all other requests wait for: of a million
like ones there is to be one.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


def drop_others(values: dict[str, Any], known: AbstractSet[str | None]) -> dict[str, Any]:
    """An object's keys without those that are not known, but for the first of these that is not null."""
    if len(values) <= len(known) and values.keys() <= known:
        return values
    first = next((key for key, value in values.items() if value is not None and key not in known), None)
    return {key: value for key, value in values.items() if key in known or key == first}


def drop_unknown(model: type[BaseModel], values: Any) -> Any:
    """An object's keys without those that the model does not know, but for the first of these: it is an error."""
    if not isinstance(values, dict) or values.keys() <= model.model_fields.keys():
        return values
    return drop_others(values, {name for field, info in model.model_fields.items() for name in (field, info.alias)})


class Strict(BaseModel):
    """Unknown keys are errors; null is as good as absent."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in drop_unknown(cls, values).items() if v is not None}
