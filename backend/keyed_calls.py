"""Arguments of calls that are written key by key, as GLM-4.5's and Qwen3-Coder's are: a text stands bare, up to the mark that closes it, and what is
no text is JSON. Their grammar, from the function's schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backend.errors import RequestError

DEFINITIONS = ("$defs", "definitions")
MAX_REFERENCES = 16
"""Of references that lead to references; what leads further is taken for any value."""
MAX_RULES = 4096
"""Of one function: alternatives may lead to one another."""
_TEXT, _EMPTY = r"(.|\n)", '""'
_BARE = ("minLength", "maxLength", "pattern")
"""What of a text's schema is kept to where it stands bare."""
_WORDS = ("title", "description", "default", "examples", "type", "enum", "const", "deprecated", "readOnly", "writeOnly", "$comment", *_BARE)
"""Keywords of a text that are kept to, or ask for nothing."""


@dataclass(frozen=True, slots=True)
class KeyMarks:
    """Around each argument: before KEY between VALUE after."""

    before: str
    between: str
    after: str
    close: str
    """Of `after`: what no bare text has in it."""


def write_arguments(name: str, marks: KeyMarks, function: Mapping[str, Any], write: Callable[[str], str]) -> str:
    """Rules of Lark's; `name` is that of all arguments: in the schema's order, those that need not be there left out or not.

    write: texts as special tokens and others. Raises RequestError for a text that `strict` would have to keep to what a bare one cannot be kept to.
    """
    schema = function.get("parameters") or {}
    properties = schema.get("properties")
    is_any = not properties and schema.get("additionalProperties", function.get("parameters") is not None) is not False
    if not isinstance(properties, Mapping) or not properties:
        if not is_any:
            return f"{name}: {_EMPTY}"
        free = f"{write(marks.before)} {name}_key {write(marks.between)} {name}_any"
        return "\n".join([f"{name}: ({free})*", f"{name}_key: /[^<>\\s]{{1,64}}/", *_bare(f"{name}_any", f"{_TEXT}*", marks, write)])
    required = schema["required"] if isinstance(schema.get("required"), list) else []
    parts: list[str] = []
    rules: list[str] = []
    for number, (key, own) in enumerate(properties.items()):
        place = f"{name}_{number}"
        whole = f"{write(marks.before + key + marks.between)} {place}"
        parts.append(whole if key in required else f"({whole})?")
        what = f"tools: the parameter {key!r:.80} of {function['name']!r}"
        for rule in _write_value(place, own, schema, marks, write, what, bool(function.get("strict"))):
            rules.append(rule)
            if len(rules) > MAX_RULES:
                raise RequestError(f"{what}: with it the schema has more than {MAX_RULES} alternatives, the limit")
    return "\n".join([f"{name}: {' '.join(parts)}", *rules])


def _write_value(
    name: str, own: Any, schema: Mapping[str, Any], marks: KeyMarks, write: Callable[[str], str], what: str, is_strict: bool, depth: int = 0
) -> Iterator[str]:
    """A rule of a value and what closes it, and those that it needs. depth: of what leads from one schema to another."""
    own = _resolve(own, schema)
    known = own if isinstance(own, Mapping) and depth < MAX_REFERENCES else {}
    kinds, parts = known.get("type"), known.get("anyOf") or known.get("oneOf")
    if isinstance(kinds, list) and kinds:
        parts = [{**known, "type": kind} for kind in kinds]
    values = [known["const"]] if "const" in known else known.get("enum")
    if isinstance(values, list) and values:
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        yield f"{name}: ({' | '.join(write(text) or _EMPTY for text in texts)}) {write(marks.after)}"
    elif isinstance(parts, list) and parts:
        yield f"{name}: {' | '.join(f'{name}_{i}' for i in range(len(parts)))}"
        for i, part in enumerate(parts):
            yield from _write_value(f"{name}_{i}", part, schema, marks, write, what, is_strict, depth + 1)
    elif kinds == "string":
        if is_strict and (unknown := [key for key in known if key not in _WORDS]):
            raise RequestError(
                f"{what}: {unknown[0]!r:.80} cannot be enforced of a text that stands bare, as this model's calls have it: leave out strict"
            )
        yield from _bare(name, _pattern(known, what), marks, write)
    elif isinstance(kinds, str):
        definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
        whole = {**definitions, **known, "x-guidance": {"coerce_one_of": True, "lenient": not is_strict}}
        yield f"{name}: %json {json.dumps(whole)} {write(marks.after)}"
    else:
        yield from _bare(name, f"{_TEXT}*", marks, write)


def _bare(name: str, pattern: str, marks: KeyMarks, write: Callable[[str], str]) -> Iterator[str]:
    """A text up to its mark. That its end is the first mark is what the second expression says: a shorter text might not fulfil the first."""
    text, close = f"{name.upper()}_TEXT", marks.close.replace("/", "\\/")
    head, _, tail = marks.after.partition(marks.close)
    closing = write(head + marks.close)
    yield f"{text}: /{pattern}/ & ~/{_TEXT}*{close}{_TEXT}*/"
    yield f"{name}: {name}_text {write(tail)}" if tail else f"{name}: {name}_text"
    yield f"{name}_text{'' if '<[' in closing else '[lazy]'}: {text} {closing}"


def _pattern(own: Mapping[str, Any], what: str) -> str:
    """A regular expression of what a bare text may be."""
    least, most, pattern = (own.get(key) for key in _BARE)
    for key, value in (("minLength", least), ("maxLength", most)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise RequestError(f"{what}: {key} must be a whole number from 0 on, got {value!r:.80}")
    if pattern is None:
        return f"{_TEXT}{{{least or 0},{'' if most is None else most}}}"
    if not isinstance(pattern, str):
        raise RequestError(f"{what}: pattern must be a regular expression, got {pattern!r:.80}")
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[int(begins) : len(pattern) - int(ends)].replace("\\/", "/").replace("/", "\\/")
    whole = f"{'' if begins else _TEXT + '*'}({inner}){'' if ends else _TEXT + '*'}"
    return whole if least is None and most is None else f"{whole}/ & /{_TEXT}{{{least or 0},{'' if most is None else most}}}"


def _resolve(own: Any, schema: Mapping[str, Any]) -> Any:
    """What a property's schema refers to."""
    found = {key: schema.get(key) for key in DEFINITIONS}
    targets = {f"#/{key}/{name}": part for key, named in found.items() if isinstance(named, Mapping) for name, part in named.items()}
    for _ in range(MAX_REFERENCES):
        if not isinstance(own, Mapping):
            break
        if isinstance(own.get("$ref"), str) and own["$ref"] in targets:
            own = targets[own["$ref"]]
        elif isinstance(parts := own.get("allOf"), list) and len(parts) == 1 and "type" not in own:  # as pydantic writes a reference with a default
            own = parts[0]
        else:
            break
    return own
