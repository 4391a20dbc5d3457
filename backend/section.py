"""Strict construction of configuration from mappings: unknown keys and wrong types are errors that name the key, the value and what is allowed."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import types
import typing
from typing import TYPE_CHECKING, Any, ClassVar

from backend.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


def closest(name: str, known: typing.Iterable[str]) -> str:
    """'; did you mean "x"?' when a known name is close to `name`, else nothing."""
    match = difflib.get_close_matches(name, sorted(known), n=1)
    return f'; did you mean "{match[0]}"?' if match else ""


def nearest(key: str, known: typing.Iterable[str]) -> str:
    """The known key that is close to `key`, else the list of known keys."""
    return closest(key, known) or f"; known keys: {', '.join(sorted(known))}"


class Section:
    """What every configuration section shares: strict construction from a mapping."""

    aliases: ClassVar[dict[str, str]] = {}

    @classmethod
    def from_dict(cls, values: object, where: str = "") -> Self:
        """Raises ConfigError for an unknown key, a wrong type or a value out of range; `where` opens the message."""
        if not isinstance(values, dict):
            raise ConfigError(f"{where.rstrip('. ') or cls.__name__} must be an object of keys and values, got {values!r:.80}")
        hints = typing.get_type_hints(cls)
        known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        arguments: dict[str, Any] = {}
        for key, value in values.items():
            name = cls.aliases.get(key, key)
            if name not in known:
                raise ConfigError(
                    f"{where.rstrip('. :') + ': ' if where else ''}unknown key {key!r:.80}{nearest(str(key), known | set(cls.aliases))}"
                )
            if name in arguments:
                raise ConfigError(f"{where}{name} is given twice (as {key!r} too)")
            arguments[name] = _convert(f"{where}{name}", value, hints[name])
        try:
            return cls(**arguments)
        except ConfigError as error:  # which names the key alone: another section may have one of that name
            raise ConfigError(f"{where}{error}") from None


def _convert(key: str, value: object, hint: Any) -> object:
    """`value` when it is of the annotated type; sections are built from mappings, ints widen to floats."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    is_choice = len(set(options) - {type(None)}) > 1
    if value is None and type(None) in options:
        return None
    for option in options:
        if isinstance(option, type) and issubclass(option, Section):
            if isinstance(value, option):
                return value
            if isinstance(value, dict) or not is_choice:
                return option.from_dict(value, f"{key}.")
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # an integer that no float holds
                return float(value)
        if typing.get_origin(option) is tuple and isinstance(value, (list, tuple)):
            (element, _) = typing.get_args(option)
            return tuple(_convert(f"{key}[{i}]", v, element) for i, v in enumerate(value))
        if isinstance(option, type) and isinstance(value, option) and (option is bool or not isinstance(value, bool)):
            return value
    names = " or ".join(_describe_type(option) for option in options)
    raise ConfigError(f"{key} must be {names}, got {value!r:.80}")


def _describe_type(option: Any) -> str:
    if option is type(None):
        return "null"
    if typing.get_origin(option) is tuple:
        return "a list"
    return "an object" if issubclass(option, Section) else option.__name__


def choose(key: str, value: object, known: tuple[str, ...]) -> str:
    """One of the known names, whatever its case. Raises ConfigError."""
    require(isinstance(value, str) and value.lower() in known, key, value, "one of " + ", ".join(known))
    return str(value).lower()


def require(is_good: bool, key: str, value: object, rule: str) -> None:
    if not is_good:
        raise ConfigError(f"{key} must be {rule}, got {value!r:.80}")
