"""What bodies of requests have in common. Each wrong thing is an error of its own, and each takes time that all other requests wait for: of a million
like ones there is to be one.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


def drop_unknown(model: type[BaseModel], values: Any) -> Any:
    """An object's keys without those that the model does not know, but for the first of these: it is an error."""
    if not isinstance(values, dict) or values.keys() <= model.model_fields.keys():
        return values
    known = {name for field, info in model.model_fields.items() for name in (field, info.alias)}
    unknown = [key for key in values if key not in known]
    return {key: value for key, value in values.items() if key in known or key == unknown[0]} if len(unknown) > 1 else values


class Strict(BaseModel):
    """Unknown keys are errors; null is as good as absent."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        return drop_unknown(cls, {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values)
