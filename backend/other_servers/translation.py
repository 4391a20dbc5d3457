"""Keys of other servers' configurations in those of this one.

None is lost without a word: it is another name of an option here, or nothing is needed and one line says why, or it is refused with the name of what
does it here. An option that this version has itself is not looked for in the tables.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from backend.errors import ConfigError
from backend.other_servers.kinds import Alias, Needless, Refused
from backend.other_servers.tables import OTHERS, VALUES

_SECRET = re.compile(r"(api_key|token|password)$")
"""Options whose values are for no log."""


@dataclass
class Translation:
    """A configuration in own keys."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """A line for each option that has no effect, which says why."""
    sources: dict[str, str] = field(default_factory=dict)
    """What own keys were given as, where that is another name."""

    def explain(self, error: Exception) -> str:
        """An error's message, with the names that its keys were given as."""
        message = str(error)
        named = [f"{own} was given as {theirs}" for own, theirs in self.sources.items() if _names(message, own) and theirs not in message]
        return f"{message} ({'; '.join(named)})" if named else message

    def put(self, key: str, value: Any, given_as: str) -> None:
        section, _, name = key.rpartition(".")
        place = self.values
        if section:
            place = self.values.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{section} must be an object of keys and values, got {place!r:.80}")
        if name in place and place[name] != value:
            raise ConfigError(f"{key} is given twice: {place[name]!r:.80}, and {value!r:.80} as {given_as}")
        place[name] = value
        if given_as != key:
            self.sources[key] = given_as


def _names(message: str, key: str) -> bool:
    """Whether a message is about a key: it names it whole, for `model` is a word of many others."""
    section, _, name = key.rpartition(".")
    if "_" in name:
        return re.search(rf"(?<![\w-]){name}(?![\w-])", message) is not None
    return re.match(rf"{section}\.{name}\b" if section else rf"((disaggregation|parallel_config)\.)?{name}( must|:)", message) is not None


def translate(values: Mapping[str, Any], own: Collection[str]) -> Translation:
    """Keys of any server in those of this one; unknown ones stay as they are. Raises ConfigError for what is done otherwise here, or not at all."""
    found = Translation({key: _own_value(key, value) for key, value in values.items() if key in own})
    if isinstance(nested := found.values.get("speculative_config"), dict):
        found.values["speculative_config"] = dict(nested)
    refused = []
    for given_as, value in values.items():
        if given_as in own:
            continue
        key, other = given_as, OTHERS.get(given_as)
        while isinstance(other, Alias):
            if value in other.unless:
                other = Needless(other.why)
                break
            key, value = other.own, not value if other.is_inverted else value
            other = None if key.split(".")[0] in own else OTHERS.get(key)
        if isinstance(other, Needless):
            found.notes.append(f"{given_as} has no effect, and none is needed: {other.why}")
        elif isinstance(other, Refused):
            if value and value not in other.unless:
                shown = "" if _SECRET.search(given_as) else f" {value!r:.80}"
                refused.append(f"{given_as}{shown} is not an option here: {other.instead}")
        else:
            found.put(key, _own_value(key, value), given_as)
    if refused:
        raise ConfigError("; ".join(refused))
    return found


def _own_value(key: str, value: Any) -> Any:
    return VALUES.get(key, {}).get(value, value) if isinstance(value, str | int) else value
