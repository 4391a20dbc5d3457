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
class Unclosed:
    """What ends a value whose closing mark a model has left out, as vLLM and SGLang read it. The line break before belongs to the value's marks."""

    ends: re.Pattern[str]
    """What ends one, its own mark or not. key: the next one, which counts if the schema has it, and the call not yet."""
    before_key: str
    """What of this goes before such a key."""
    behind_last: str
    """And what stands behind the last value."""
    num_whole: int
    """So many characters of `behind_last` are enough at the answer's end."""


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
    unclosed: Unclosed | None = None
    """None: nothing but `close` ends a value."""


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
    Unclosed(
        re.compile(rf"</parameter>|\n(?=</function>\n</tool_call>|<parameter=(?P<key>[^<>\n]{{1,{MAX_KEY}}})>)"),
        "\n<parameter=",
        "\n</function>\n</tool_call>",
        len("\n</function>"),
    ),
)


class KeyedArguments:
    """One call's. Feed it what is held."""

    def __init__(self, notation: Notation, schema: Any) -> None:
        """schema: of the function's arguments, as the client sent it."""
        self._notation, self._schema = notation, schema if isinstance(schema, Mapping) else {}
        self._kinds: frozenset[str] | None = None
        self._in_value = self._has_begun = False
        """Of the value that is being read."""
        self._keys: set[str] = set()
        properties = self._schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._num_searched = 0
        """Characters of what is held that have none."""
        self.is_done = False

    def read(self, held: str, is_last: bool) -> tuple[str, str]:
        """More of the arguments' JSON, and what is still held."""
        found = ""
        while not self.is_done:
            if self._in_value:
                piece, held, is_whole = self._read_value(held, is_last)
                found += piece
                if not is_whole:
                    break
            elif match := self._notation.key.match(held):
                found += (", " if self._keys else "{") + json.dumps(match[1], ensure_ascii=False) + ": "
                self._keys.add(match[1])
                self._kinds, self._num_searched = self._kinds_of_key(match[1]), 0
                self._in_value, self._has_begun, held = True, False, held[match.end() :]
            elif match := self._notation.end.match(held):
                found += "}" if self._keys else "{}"
                held, self.is_done = held[match.end() :], True
            elif self._goes_on(held.lstrip()):
                break
            else:  # what it is nobody knows: the call ends before it
                found += "}" if self._keys else "{}"
                self.is_done = True
        return found, "" if is_last and not self.is_done else held

    def _goes_on(self, rest: str) -> bool:
        """Whether what is held may become a mark."""
        return len(rest) < MAX_KEY and any(mark.startswith(rest) or rest.startswith(mark) for mark in self._notation.marks)

    def _read_value(self, held: str, is_last: bool) -> tuple[str, str, bool]:
        """JSON of what is held of a value, what is left, and whether the value is whole."""
        own, (place, length) = self._notation, self._find_end(held, is_last)
        is_text, is_whole = self._kinds == {"string"}, place >= 0
        if not is_whole and not is_text:
            self._num_searched = max(0, len(held) - 2 * MAX_KEY)
            return "", held, False
        if not is_whole:
            place, length = len(held) - pending(held, (("\n" if own.has_breaks else "") + own.close, own.close)), 0
            last = held.rfind("\n")
            for begin in (last, held.rfind("\n", 0, max(last, 0))):  # the other marks begin with a line break, and have one more at most
                place = begin if 0 <= begin < place and self._may_end(held[begin:]) else place
            if own.has_breaks and not self._has_begun and not place:
                return "", held, False
        text, held = held[:place], held[place + length :]
        if own.has_breaks:
            text = text if self._has_begun else text.removeprefix("\n")
            text = text.removesuffix("\n") if length == len(own.close) else text
        if not is_text:
            self._in_value = False
            return read_value(text, self._kinds), held, True
        piece = ("" if self._has_begun else '"') + json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if is_whole else "")
        self._has_begun, self._in_value = True, not is_whole
        return piece, held, is_whole

    def _find_end(self, held: str, is_last: bool) -> tuple[int, int]:
        """Where a value ends, and how long the mark is that belongs to it; -1: not yet."""
        close, unclosed = self._notation.close, self._notation.unclosed
        if unclosed is None:
            return held.find(close, self._num_searched), len(close)
        for match in unclosed.ends.finditer(held, self._num_searched):
            if match["key"] is None or (match["key"] in self._properties and match["key"] not in self._keys):
                return match.start(), len(match[0])
        if is_last and (count := pending(held, (unclosed.behind_last,))) >= unclosed.num_whole:
            return len(held) - count, 1
        return -1, 0

    def _may_end(self, tail: str) -> bool:
        """Whether the end of what is held may become what ends a value that is not closed."""
        own = self._notation.unclosed
        if own is None:
            return False
        if own.behind_last.startswith(tail) or own.before_key.startswith(tail):
            return True
        key = tail.removeprefix(own.before_key)
        return key != tail and any(other.startswith(key) for other in self._properties if other not in self._keys)

    def _kinds_of_key(self, key: str) -> frozenset[str] | None:
        own = self._properties.get(key)
        found = None if own is None else kinds_of(own, self._schema)
        return self._notation.unknown if found is None else found


def read_value(text: str, kinds: frozenset[str] | None) -> str:
    """A value's JSON: what the text is read as, if it may be that, or the text. kinds: types that it may have; None: any."""
    bare = text.strip()
    for read in (json.loads, _read_literal):
        try:
            value = read(bare)
            kind = _KINDS[type(value)]
            # Of a value that cannot be a text null is what it says, as vLLM and SGLang read it: that it is given, and is nothing.
            if kinds is None or kind in kinds or (kind == "integer" and "number" in kinds) or (value is None and "string" not in kinds):
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
