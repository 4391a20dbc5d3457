"""Where the weights of a text model are in a checkpoint that has parts for images too. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import TypeVar

from backend.models.spec import DecoderSpec

PLACES = (("language_model.model.", "language_model.lm_head"), ("model.language_model.", "lm_head"))
"""What the names of its weights begin with, and its head's name: published files, and some that were written anew."""
LAYERS = ("model.layers.", *(f"{body}layers." for body, _ in PLACES))

Part = TypeVar("Part")


def place_weights(spec: DecoderSpec, names: Container[str]) -> DecoderSpec:
    """The model, its weights under the names that a folder has for them."""
    if spec.norm in names:
        return spec
    for body, head in PLACES:
        placed = _rename(spec, {"model.": body, spec.head: head})
        if placed.norm in names:
            has_both = f"{head}.weight" in names and f"{placed.embedding}.weight" in names
            return dataclasses.replace(placed, is_tied=spec.is_tied and not has_both)
    return spec


def _rename(part: Part, beginnings: Mapping[str, str]) -> Part:
    """All names of weights in it, which begin alike."""
    if isinstance(part, str):
        return next((new + part.removeprefix(old) for old, new in beginnings.items() if part.startswith(old)), part)  # type: ignore[return-value]
    if isinstance(part, tuple):
        return tuple(_rename(own, beginnings) for own in part)  # type: ignore[return-value]
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        values = {own.name: _rename(getattr(part, own.name), beginnings) for own in dataclasses.fields(part)}
        return dataclasses.replace(part, **values)
    return part
