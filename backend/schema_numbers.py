"""Numbers of JSON schemas that the compiler of grammars does not read as they are written: bounds are doubles for it, of integers in 64 bits.
And patterns, and keywords that it refuses at any value, where theirs asks for nothing."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

_LARGEST = 2**63 - 1
_LEAST = -(2**63) + 1024
"""The next double above -2**63, on which it breaks."""
_MOST = 2**63 - 1024
"""The next double below 2**63, from which on it has no numbers that are no integers."""
_STEP = 1e-12
"""The least by which it tells a bound from a whole number, which has 64 times its last place beside it."""
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_VALUES = ("const", "enum")
_REMARKS = ("default", "example", "examples")
_PATTERNS = "patternProperties"
_BY_NAME = ("properties", _PATTERNS, "$defs", "definitions", "dependentSchemas")
"""Of names that are the schema's own, and what may stand for each."""
_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "format": ("password", "path"),
}
"""Values at which a keyword allows everything: zod writes the names of its records so, pydantic the rest (SecretStr, Path)."""


def settle_numbers(schema: Any, is_lenient: bool) -> Any:
    """The schema with bounds that are read as they are, or closer. is_lenient: those that are not are left out.

    Raises ValueError for others, and for values that would be written otherwise: it says which.
    """
    try:
        return _settle(schema, is_lenient)
    except RecursionError:  # which the compiler refuses
        return schema


def _settle(schema: Any, is_lenient: bool) -> Any:
    if isinstance(schema, list):
        return [_settle(item, is_lenient) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    schema = _read_draft_4(schema)
    if not is_lenient:
        _check_count(schema)
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            value = {_leave_nul_out(name) if key == _PATTERNS else name: _settle(item, is_lenient) for name, item in value.items()}
        elif key == "pattern" and isinstance(value, str):
            value = _leave_nul_out(value)
        elif key in _VALUES:
            _check_values(key, value)
        elif key in _ASKS_NOTHING and value in _ASKS_NOTHING[key]:
            continue
        elif key in _LOWER or key in _UPPER:
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{key} must be a finite number, got {value}")
            if key in _UPPER and schema.get("type") != "integer" and isinstance(value, (int, float)) and value > _MOST:
                key, value = "maximum", _MOST
            if key in _LOWER and isinstance(value, (int, float)) and value < _LEAST:
                key, value = "minimum", _LEAST
            if isinstance(value, (int, float)) and not _is_kept(key, value):
                if is_lenient:
                    continue
                raise ValueError(f"{key} {value!s:.40} cannot be enforced: integers beyond 2**53 are compared as doubles, and none beyond 2**63 - 1")
            if key.startswith("exclusive") and schema.get("type") != "integer":
                value = _step_off(key, value, schema, is_lenient)
        elif key not in _REMARKS:
            value = _settle(value, is_lenient)
        found[key] = value
    return found


_CLASS_BEGINS = re.compile(r"""\\.|\[\^(?!\])|\[\]?(?:\\.|[^\]\\])*\]""", re.DOTALL)
"""In a regular expression: an escape, what a negated class begins with, or a class that is none, whole."""


def _leave_nul_out(pattern: str) -> str:
    """With that character forbidden by negated classes: of those that take it the compiler allows quotation marks and backslashes as well."""
    return _CLASS_BEGINS.sub(lambda found: found[0] + r"\x00" if found[0] == "[^" else found[0], pattern)


def _check_count(schema: dict[str, Any]) -> None:
    """Of properties: names that are not the schema's own may come again, and count once for who reads the answer."""
    least, required = schema.get("minProperties"), schema.get("required")
    if not isinstance(least, (int, float)) or (schema.get("additionalProperties") is False and not schema.get("patternProperties")):
        return
    if least > (most := 1 + (len(required) if isinstance(required, list) else 0)):
        raise ValueError(f"minProperties {least!s:.40} cannot be enforced: beyond {most} a name may be one that was there")


def _read_draft_4(schema: dict[str, Any]) -> dict[str, Any]:
    """With exclusive bounds as numbers: in draft 4 they are flags that say of the bound beside them whether it is excluded."""
    for key, bound in ((_LOWER[1], _LOWER[0]), (_UPPER[1], _UPPER[0])):
        if isinstance(flag := schema.get(key), bool):
            schema = {name: value for name, value in schema.items() if name != key}
            if flag and bound in schema:
                schema = {key if name == bound else name: value for name, value in schema.items()}
    return schema


def _step_off(key: str, value: Any, schema: dict[str, Any], is_lenient: bool) -> Any:
    """Of a whole number that is excluded, the next that is taken: with another bound less than one away, in this schema or in what it is combined
    with, the compiler would allow it itself."""
    if not _is_plain(value) or value != int(value):
        return value
    step = max(_STEP, 64 * math.ulp(value))
    beyond = [own for name in (_UPPER if key in _LOWER else _LOWER) if _is_plain(own := schema.get(name))]
    if min((abs(own - value) for own in beyond), default=1) <= min(step, 1 - _STEP):
        if is_lenient:
            return value
        raise ValueError(f"{key} {value} cannot be enforced beside a bound that is no more than {step:.3g} away")
    return value + (step if key in _LOWER else -step) if step < 1 else value  # a larger one would pass over whole numbers


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**53


def _is_kept(key: str, value: float) -> bool:
    """Whether no integer is taken that the bound forbids."""
    if abs(value) <= 2**53:
        return True
    is_lower, is_exclusive = key in _LOWER, key.startswith("exclusive")
    read = _read(value, (1.0 if is_lower else -1.0) if is_exclusive else 0.0)
    return (read > value or (not is_exclusive and read == value)) if is_lower else (read < value or (not is_exclusive and read == value))


def _read(value: float, more: float = 0.0) -> int:
    """An integer, as the compiler has it: a double, to which what an exclusive bound leaves out is added, as 64 bits."""
    if abs(value) > 2.0**64:
        return _LARGEST if value > 0 else -(2**63)
    return min(max(int(float(value) + more), -(2**63)), _LARGEST)


def _check_values(key: str, value: Any) -> None:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_values(key, item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} has {value}, which JSON cannot write")
    elif isinstance(value, int) and abs(value) > 2**53 and (_read(value) != value or value == -(2**63)):
        try:
            is_written = abs(value) > 2**63 and Decimal(repr(float(value))) == value
        except OverflowError:
            is_written = False
        if not is_written:
            raise ValueError(f"{key} {value!s:.40} cannot be enforced: it would be written as the nearest double")
