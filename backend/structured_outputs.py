"""What an answer's text has to be, as requests say it. The names are vLLM's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_CHARACTERS = 131_072
"""Of a schema, a grammar, a regular expression, or all choices together."""
MAX_PATTERN_CHARACTERS = 1024
"""Of whitespace_pattern."""
MAX_CHOICES = 4096
_NO_OPS: dict[str, tuple[object, ...]] = {"disable_fallback": (True, False), "disable_additional_properties": (False,), "_backend_was_auto": (False,)}
"""What vLLM's clients send beside: the values that ask for nothing; so does null, whatever the key."""
FORMS = ("json", "json_object", "regex", "choice", "grammar", "allowed_token_ids")


def write_ranges(ids: Sequence[int]) -> str:
    """Ascending token ids as Lark grammars have them: 3,5-9."""
    ranges: list[list[int]] = []
    for token_id in ids:
        if ranges and ranges[-1][1] == token_id - 1:
            ranges[-1][1] = token_id
        else:
            ranges.append([token_id, token_id])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """One of FORMS, and how it is meant. Raises ValueError naming the key, the rule and the value seen.

    The end of text may be chosen where the text is whole, and nowhere else.
    """

    json: Mapping[str, Any] | bool | str | None = None
    """A JSON schema, or its text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Of the whole text; without look-around and back-references."""
    choice: tuple[str, ...] = ()
    """One of these texts."""
    grammar: str | None = None
    """Context-free: Lark's or GBNF's notation."""
    allowed_token_ids: tuple[int, ...] = ()
    """Any number of these tokens, kept in order; the end of text where it is among them."""
    disable_any_whitespace: bool = False
    """JSON: one space after a comma or a colon, and no other; else up to four, or a line break with up to forty."""
    whitespace_pattern: str | None = None
    """JSON: a regular expression of what may stand between its parts, in the place of that."""
    is_lenient: bool = False
    """JSON schema: what cannot be enforced is left out, where it is an error otherwise."""

    def __post_init__(self) -> None:
        choice = self.choice
        if not isinstance(choice, (list, tuple)) or not all(isinstance(c, str) for c in choice):
            raise ValueError(f"structured_outputs.choice must be a list of strings, got {choice!r:.80}")
        if len(choice) > MAX_CHOICES:
            raise ValueError(f"structured_outputs.choice has {len(choice)} strings; the limit is {MAX_CHOICES}")
        object.__setattr__(self, "choice", tuple(choice))
        ids = self.allowed_token_ids
        if not isinstance(ids, (list, tuple)) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ValueError(f"structured_outputs.allowed_token_ids must be a list of token ids from 0 on, got {ids!r:.80}")
        object.__setattr__(self, "allowed_token_ids", tuple(sorted(set(ids))))
        for key in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, key)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"structured_outputs.{key} must be a string, got {value!r:.80}")
        for key in ("json_object", "disable_any_whitespace", "is_lenient"):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f"structured_outputs.{key} must be true or false, got {getattr(self, key)!r:.80}")
        if self.json is not None and not isinstance(self.json, (Mapping, bool, str)):
            raise ValueError(f"structured_outputs.json must be a JSON schema, got {self.json!r:.80}")
        given = [key for key in FORMS if getattr(self, key) not in (None, False, ()) or (key == "json" and self.json is False)]
        if len(given) != 1:
            raise ValueError(f"structured_outputs: give one of {', '.join(FORMS)}; got {' and '.join(given) or 'none'}")
        is_json = given[0] in ("json", "json_object")
        for key in ("disable_any_whitespace", "whitespace_pattern"):
            if getattr(self, key) not in (None, False) and not is_json:
                raise ValueError(f"structured_outputs.{key} has no effect with {given[0]}: it is for json and json_object")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError("structured_outputs: disable_any_whitespace and whitespace_pattern contradict each other: give one of them")
        try:
            count = len(self.text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs.json cannot be written as JSON: {error}") from None
        if count > MAX_CHARACTERS:
            raise ValueError(f"structured_outputs.{given[0]} has {count} characters; the limit is {MAX_CHARACTERS}")
        if (count := len(self.whitespace_pattern or "")) > MAX_PATTERN_CHARACTERS:
            raise ValueError(f"structured_outputs.whitespace_pattern has {count} characters; the limit is {MAX_PATTERN_CHARACTERS}")

    @classmethod
    def from_value(cls, value: object) -> StructuredOutputs:
        """Of an object as JSON has it. Raises ValueError."""
        if isinstance(value, StructuredOutputs):
            return value
        known = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(value, Mapping):
            raise ValueError(f"structured_outputs must be an object with one of {', '.join(FORMS)}, got {value!r:.80}")
        value = {key: own for key, own in value.items() if own is not None and (key in known or key not in _NO_OPS or own not in _NO_OPS[key])}
        if unknown := [key for key in value if key not in known]:
            raise ValueError(f"structured_outputs: unknown key {unknown[0]!r:.80}; known keys: {', '.join(known)}")
        return cls(**value)

    @property
    def form(self) -> str:
        """Which of FORMS."""
        return next((key for key in FORMS if getattr(self, key) not in (None, False, ())), "json")

    @property
    def text(self) -> str:
        """What it has of text: equal texts of one form mean the same."""
        if self.form == "choice":
            return json.dumps(self.choice)
        if self.form == "allowed_token_ids":
            return write_ranges(self.allowed_token_ids)
        value = getattr(self, self.form)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) if self.form == "json" else ""

    @property
    def schema(self) -> Any:
        """The JSON schema. Raises ValueError for text that is no JSON."""
        try:
            return json.loads(self.json) if isinstance(self.json, str) else self.json
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs.json is not valid JSON: {error}") from None

    def as_json(self) -> str:
        """For the wire."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps({key: value for key, value in values.items() if value not in (None, False, ()) or (key == "json" and value is False)})
