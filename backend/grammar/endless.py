"""Schemas that require themselves: the compiler takes them, and an answer would go on to its limit and never be whole."""

from __future__ import annotations

from typing import Any

from backend.grammar.schema_places import DEFINITIONS, escape

_MAX_ROUNDS = 16
"""In each all definitions are looked at once. Where that is not enough, nothing is said of the schema."""


def is_endless(schema: Any) -> bool:
    """Whether no value fulfils it but those that have no end."""
    if not isinstance(schema, dict):
        return False
    targets = {f"#/{key}/{escape(name)}": part for key in DEFINITIONS for name, part in _items(schema.get(key))}
    targets["#"] = schema
    try:
        return _requires_itself(targets)
    except RecursionError:  # which the compiler refuses
        return False


def _requires_itself(targets: dict[str, Any]) -> bool:
    """Of the schema as a whole, which is the target `#`."""
    open_targets = set(targets)  # not known to have an end
    order = list(targets)
    for _ in range(_MAX_ROUNDS):
        order.reverse()  # definitions may come before what they refer to, or after
        num_open = len(open_targets)
        for target in order:
            if target in open_targets and _ends(targets[target], open_targets):
                open_targets.remove(target)
        if len(open_targets) == num_open:
            return "#" in open_targets
    return False


def _ends(schema: Any, open_targets: set[str]) -> bool:
    """Whether a value with an end may fulfil it."""
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return True
    if _refers(schema, open_targets) or not all(_ends(part, open_targets) for part in _list(schema.get("allOf"))):
        return False
    for key in ("anyOf", "oneOf"):
        if (parts := _list(schema.get(key))) and not any(_ends(part, open_targets) for part in parts):
            return False
    kinds = schema.get("type")
    return any(_kind_ends(kind, schema, open_targets) for kind in (kinds if isinstance(kinds, list) and kinds else [kinds]))


def _refers(schema: dict[str, Any], open_targets: set[str]) -> bool:
    target = schema.get("$ref")
    return isinstance(target, str) and target in open_targets


def _kind_ends(kind: Any, schema: dict[str, Any], open_targets: set[str]) -> bool:
    if kind == "object":
        properties = dict(_items(schema.get("properties")))
        return all(_ends(properties.get(name), open_targets) for name in _list(schema.get("required")) if isinstance(name, str))
    if kind == "array":
        count = schema.get("minItems", 0)
        first = _list(schema.get("prefixItems"))
        own = [*first[: int(count)], *([schema.get("items")] if count > len(first) else [])] if isinstance(count, (int, float)) else []
        return all(_ends(part, open_targets) for part in own)
    return True


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
