"""How many values lists and objects of a body may have: looked at before any of them is, for going through a million holds up all others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError, PydanticKnownError

MAX_MESSAGES = 16_384
"""Of a conversation, and parts of all of them: 130,000 kept all other requests waiting for seconds, to be refused by the server as too long."""
MAX_STOP_STRINGS, MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS, MAX_LOGIT_BIASES, MAX_TOOLS, MAX_CHOICES = 64, 256, 256, 1024, 256, 4096
"""The server's own, which it says in the same words."""
MAX_TOKEN_IDS = 131_072 // 2
"""That alone may be drawn: the server takes 131,072 characters of them, with the commas between."""
MAX_KEYS = 16_384
"""Of an object that is handed on as it is: the server takes 65,536 characters of one, or knows a few keys alone."""
MAX_CORPUS_TEXTS = 400_000
"""The server takes 2,000,000 characters of them, as JSON."""
MAX_PARAMETER_CHARACTERS = 2**26
"""Of JSON beside the prompts, once for each of them, as each is a request of its own to the server."""
TOO_MANY = "too_many"
"""The type of such an error; its message goes on from the value's name."""


def check_count(value: Any, limit: int, what: str) -> None:
    """Raises PydanticCustomError for a list or an object of more."""
    if isinstance(value, list | dict) and len(value) > limit:
        raise PydanticCustomError(TOO_MANY, "has {count} {what}; the limit is {limit}", {"count": len(value), "what": what, "limit": limit})


def at_most(limit: int, what: str) -> BeforeValidator:
    """Of a field of a request. It is the outermost of a type's marks that is asked first: the last one."""

    def check(value: Any) -> Any:
        check_count(value, limit, what)
        return value

    return BeforeValidator(check)


def _part_counts(messages: Iterable[Any]) -> Iterator[int]:
    for message in messages:
        if isinstance(message, dict):
            for key in ("content", "output", "summary"):
                if isinstance(parts := message.get(key), list):
                    yield len(parts)


def check_parts(messages: Any) -> Any:
    """The messages (or items) of a conversation, and the parts of all of them. Raises PydanticKnownError for too many messages, or parts of one, and
    PydanticCustomError for too many parts in all."""
    if not isinstance(messages, list):
        return messages
    counts = [] if len(messages) > MAX_MESSAGES else list(_part_counts(messages))
    if (most := max(len(messages), *counts, 0)) > MAX_MESSAGES:
        raise PydanticKnownError("too_long", {"field_type": "List", "max_length": MAX_MESSAGES, "actual_length": most})
    if (total := sum(counts)) > MAX_MESSAGES:
        raise PydanticCustomError(TOO_MANY, "has {count} parts in all; the limit is {limit}", {"count": total, "limit": MAX_MESSAGES})
    return messages
