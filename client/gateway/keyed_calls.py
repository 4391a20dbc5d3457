"""Arguments of calls that come key by key, as GLM-4.5's and Qwen3-Coder's do, made JSON as they come. A text stands bare there: the function's schema
says what is one."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_REFERENCES = 16
MAX_KEY = 512
"""Characters that a key may have, with its marks."""
MAX_LITERAL = 4096
"""Characters of a value that may be Python's, and not JSON's."""
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}


@dataclass(frozen=True, slots=True)
class Notation:
    key: re.Pattern[str]
    """Before a value, with its key."""
    close: str
    """Behind a value."""
    end: re.Pattern[str]
    """Behind the last one."""
    marks: tuple[str, ...]
    """What either begins with."""
    has_breaks: bool
    """A line break on either side of a value belongs to the marks."""
    unknown: frozenset[str] | None
    """What a value is of which the schema says nothing; None: whatever it can be read as."""


GLM = Notation(
    re.compile(r"\s*<arg_key>\s*([^<>]*?)\s*</arg_key>\s*<arg_value>"),
    "</arg_value>",
    re.compile(r"\s*</tool_call>"),
    ("<arg_key>", "</tool_call>"),
    False,
    None,
)
QWEN = Notation(
    re.compile(r"\s*<parameter=\s*([^<>]*?)\s*>"),
    "</parameter>",
    re.compile(r"\s*(?:</function>|(?=</tool_call>))"),
    ("<parameter=", "</function>", "</tool_call>"),
    True,
    frozenset({"string"}),
)


class KeyedArguments:
    """One call's. Feed it what is held."""

    def __init__(self, notation: Notation, schema: Any) -> None:
        """schema: of the function's arguments, as the client sent it."""
        self._notation, self._schema = notation, schema if isinstance(schema, Mapping) else {}
        self._kinds: frozenset[str] | None = None
        self._in_value = self._has_begun = False
        """Of the value that is being read."""
        self._count = 0
        self.is_done = False

    def read(self, held: str, is_last: bool) -> tuple[str, str]:
        """More of the arguments' JSON, and what is still held."""
        found = ""
        while not self.is_done:
            if self._in_value:
                piece, held, is_whole = self._read_value(held)
                found += piece
                if not is_whole:
                    break
            elif match := self._notation.key.match(held):
                found += ("{" if not self._count else ", ") + json.dumps(match[1], ensure_ascii=False) + ": "
                self._count += 1
                self._kinds = self._kinds_of_key(match[1])
                self._in_value, self._has_begun, held = True, False, held[match.end() :]
            elif match := self._notation.end.match(held):
                found += "}" if self._count else "{}"
                held, self.is_done = held[match.end() :], True
            elif self._goes_on(held.lstrip()):
                break
            else:  # what it is nobody knows: the call ends before it
                found += "}" if self._count else "{}"
                self.is_done = True
        return found, "" if is_last and not self.is_done else held

    def _goes_on(self, rest: str) -> bool:
        """Whether what is held may become a mark."""
        return len(rest) < MAX_KEY and any(mark.startswith(rest) or rest.startswith(mark) for mark in self._notation.marks)

    def _read_value(self, held: str) -> tuple[str, str, bool]:
        """JSON of what is held of a value, what is left, and whether the value is whole."""
        own, place = self._notation, held.find(self._notation.close)
        is_text = self._kinds == {"string"}
        if place < 0 and not is_text:
            return "", held, False
        if own.has_breaks and not self._has_begun and held[:1] in ("", "\n"):
            if not held:
                return "", held, False
            held, place = held[1:], place - 1
        if place < 0:
            keep = pending(held, (("\n" if own.has_breaks else "") + own.close, own.close))
            text, held = held[: len(held) - keep], held[len(held) - keep :]
        else:
            text, held = held[:place], held[place + len(own.close) :]
            if own.has_breaks:
                text = text.removesuffix("\n")
        if not is_text:
            self._in_value = False
            return read_value(text, self._kinds), held, True
        piece = ("" if self._has_begun else '"') + json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if place >= 0 else "")
        self._has_begun, self._in_value = True, place < 0
        return piece, held, place >= 0

    def _kinds_of_key(self, key: str) -> frozenset[str] | None:
        properties = self._schema.get("properties")
        own = properties.get(key) if isinstance(properties, Mapping) else None
        found = None if own is None else kinds_of(own, self._schema)
        return self._notation.unknown if found is None else found


def read_value(text: str, kinds: frozenset[str] | None) -> str:
    """A value's JSON: what the text is read as, if it may be that, or the text. kinds: types that it may have; None: any."""
    bare = text.strip()
    for read in (json.loads, _read_literal):
        try:
            value = read(bare)
            kind = _KINDS[type(value)]
            if kinds is None or kind in kinds or (kind == "integer" and "number" in kinds):
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
            if kind == "number" and "integer" in kinds and value.is_integer():
                return str(int(value))
        except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError, OverflowError):
            continue
    return json.dumps(text, ensure_ascii=False)


def _read_literal(text: str) -> Any:
    """Python's, which models write as well."""
    if len(text) > MAX_LITERAL:
        raise ValueError("too long")
    return {"true": True, "false": False, "null": None}[text.lower()] if text.lower() in ("true", "false", "null") else ast.literal_eval(text)


def kinds_of(own: Any, schema: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """Types that a value may have by its schema; None: any."""
    if not isinstance(own, Mapping) or depth > MAX_REFERENCES:
        return None
    if isinstance(target := own.get("$ref"), str):
        return kinds_of(_find(target, schema), schema, depth + 1)
    kinds = own.get("type")
    if isinstance(kinds, str):
        return frozenset({kinds})
    if isinstance(kinds, list) and kinds:
        return frozenset(kind for kind in kinds if isinstance(kind, str))
    if isinstance(values := [own["const"]] if "const" in own else own.get("enum"), list) and values:
        return frozenset(_KINDS.get(type(value), "string") for value in values)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := own.get(key), list) and parts:
            found = [kinds_of(part, schema, depth + 1) for part in parts]
            some = [kinds for kinds in found if kinds is not None]
            return frozenset().union(*some) if some and (key == "allOf" or len(some) == len(found)) else None
    return None


def _find(target: str, schema: Mapping[str, Any]) -> Any:
    """What a JSON pointer within the schema leads to; None: nothing."""
    place: Any = schema
    for name in target.removeprefix("#").split("/")[1:] if target.startswith("#") else [""]:
        place = place.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place


def pending(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of the text that begins a mark."""
    return max((n for mark in marks for n in range(1, min(len(mark), len(text)) + 1) if text.endswith(mark[:n])), default=0)
