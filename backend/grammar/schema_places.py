"""Where in a JSON schema a fault is: the compiler says what is wrong, and not where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]
DEFINITIONS = ("$defs", "definitions")
_NAMED = ("properties", "patternProperties")
_LISTED = ("prefixItems", "items", "anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalProperties", "additionalItems")
_OUTER = "Unsatisfiable schema"
"""How it begins what it says of a schema of which a part cannot be fulfilled, in the place of what is wrong with that part."""


def find_place(schema: Schema, fault: str, check: Callable[[Schema], str | None]) -> tuple[str, str]:
    """(the JSON pointer of the innermost part that has the fault, what is wrong with that part); '' where it is the schema as a whole.

    check: says what is wrong with a schema, or None.
    """
    definitions = {name: schema[name] for name in DEFINITIONS if isinstance(schema.get(name), dict)}
    place, seen = "", {""}
    while True:
        for inner, part in _parts(schema, place, definitions):
            if inner in seen or not isinstance(part, dict) or (isinstance(ref := part.get("$ref"), str) and ref[1:] in seen):
                continue  # what a schema says of itself again is no closer
            seen.add(inner)
            found = check({**definitions, **part})  # which its references lead to
            if found is not None and (found == fault or (fault.startswith(_OUTER) and found.startswith(_OUTER))):
                place, schema, fault = inner, part, found
                break
        else:
            return place, fault


def _parts(schema: Schema, place: str, definitions: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """A schema's own parts, and what it refers to, each with its pointer."""
    for key in _NAMED:
        if isinstance(named := schema.get(key), dict):
            yield from ((f"{place}/{key}/{escape(name)}", part) for name, part in named.items())
    for key in _LISTED:
        if isinstance(listed := schema.get(key), list):
            yield from ((f"{place}/{key}/{i}", part) for i, part in enumerate(listed))
    for key in _SINGLE:
        yield f"{place}/{key}", schema.get(key)
    if isinstance(target := schema.get("$ref"), str):
        for key, named in definitions.items():
            yield from ((target[1:], part) for name, part in named.items() if target == f"#/{key}/{escape(name)}")


def escape(name: str) -> str:
    """As JSON pointers have it (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
