"""Errors in OpenAI's form, with the HTTP status that its clients act on."""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import JSONResponse

from client.gateway.limits import TOO_MANY
from client.gateway.no_ops import RENAMED, say_rule
from client.messages import PARAMETERS, GenerateError

logger = logging.getLogger("foretoken.gateway")

RETRY_SECONDS = 1
SHOWN = 101
"""Values of a list, or characters, that are looked at to show the first hundred characters."""
NAMES = {"text_input": "prompt", "input_ids": "prompt"}
"""What the server calls a prompt."""


class ApiError(HTTPException):
    """What a client is told: an HTTP status, and OpenAI's message, code and param."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, message)
        self.message = message
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": str(RETRY_SECONDS)}}
        return JSONResponse(self.body(), self.status_code, headers.get(self.status_code))


def from_unreadable(cause: BaseException) -> ApiError:
    """A body that is no JSON in a way of its own."""
    if isinstance(cause, RecursionError):
        reason = "it is nested too deeply"
    elif isinstance(cause, UnicodeDecodeError):
        reason = f"it is not {cause.encoding.upper()} at byte {cause.start}"
    else:  # of integers, how many digits they may have
        reason = str(cause).partition(";")[0]
    return ApiError(400, f"the body is not valid JSON: {reason}", "invalid_json")


_UPSTREAM = {"INVALID_ARG": (400, "invalid_value"), "UNAVAILABLE": (503, "unavailable"), "TIMEOUT": (504, "timeout")}


_TOO_LONG = re.compile(
    r"prompt has \d+ tokens; the context holds|(prompt|chat) has \d+ characters; at most|prompt that it writes has more than \d+ characters|"
    r"(messages|text_input|input_ids) has \d+ (characters( or more)?|bytes); the limit"
)
"""Of the server's refusals, those of a prompt that no parameter makes fit: clients look for their code, and send a shorter one."""


_PLACES = {
    r"; last error: .*": "",
    r"errors resolving .*": "the server's name has no address",
    r"(ipv[46]|dns|unix):[^\s,;]*[^\s,;:]": "the server",
}
"""Where a server is that cannot be reached, as gRPC tells it, and what a client is told, who has no business there."""


def hide_places(message: str) -> str:
    """A server's error as anybody may read it."""
    for place, words in _PLACES.items():
        message = re.sub(place, words, message, flags=re.DOTALL)
    return message


def from_server(error: GenerateError, names: Mapping[str, str] = NAMES) -> ApiError:
    """The server's refusal as the client sees it. names: what the client's request calls what the server calls otherwise."""
    status, code = _UPSTREAM.get(error.code, (500, "internal_error"))
    if status != 400:
        message = hide_places(str(error)) if code == "unavailable" else str(error)
        if message != str(error):
            logger.warning("%s", error)
        return ApiError(status, message, code)
    named = re.match(r"(?:request '[^']*': )?(\w+)", str(error))
    param = names.get(named[1], named[1]).partition(".")[0] if named and named[1] in PARAMETERS else None
    if _TOO_LONG.search(str(error)):
        code = "context_length_exceeded"
    known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return ApiError(status, re.sub(rf"(?<![\w.])(?:{known})(?!\w)", lambda found: names[found[0]], str(error)), code, param)


def from_validation(error: RequestValidationError) -> ApiError:
    """What is wrong with a body: the first thing, or of a value that may be of several types, what is wrong with the one that it is most like."""
    errors = [(_find(error.body, e["loc"][1:], e["type"] == "missing"), e) for e in error.errors()]
    # It is most like the type that was read the farthest.
    where, chosen = max(((path, e) for path, e in errors if path[:1] == errors[0][0][:1]), key=lambda found: _progress(found[0]))
    kind = chosen["type"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {chosen['ctx']['error']}", "invalid_json")
    if kind == "value_error" and not where:  # a rule over several keys
        return ApiError(400, str(chosen["ctx"]["error"]), "invalid_value")
    if not where and kind == "string_unicode":
        return ApiError(400, f"a key of the body is not valid Unicode: {_show(chosen['input'])}", "unknown_parameter")
    if not where:
        return ApiError(400, f"the body must be a JSON object, sent with content-type application/json: {chosen['msg']}", "invalid_body")
    name, path = str(where[0])[:100], f"{where[0]}{''.join(f'[{part}]' if isinstance(part, int) else f'.{part}' for part in where[1:])}"
    if kind == "extra_forbidden":
        rule = say_rule(name) if len(where) == 1 else ""
        return ApiError(400, f"unknown or unsupported parameter {path!r:.100}{rule}", "unknown_parameter", name)
    if kind == TOO_MANY:
        return ApiError(400, f"{path:.100} {chosen['msg']}", "invalid_value", name)
    if kind == "value_error":
        return ApiError(400, f"{path:.100}: {chosen['ctx']['error']}", "invalid_value", name)
    rules = dict.fromkeys(e["msg"] for other, e in errors if other == where)
    return ApiError(400, f"{path:.100}: {'; or '.join(rules):.500}, got {_show(chosen['input'])}", "invalid_value", name)


def _find(body: Any, loc: Sequence[str | int], is_missing: bool) -> tuple[str | int, ...]:
    """The way to a value of the body, of pydantic's, which names the types too that it tried. is_missing: there is none at its end."""
    if isinstance(body, dict) and loc and loc[0] not in body:  # of a field that the client calls otherwise
        loc = next((name for name, own in RENAMED.items() if own == loc[0] and name in body), loc[0]), *loc[1:]
    if not is_missing:
        return _walk(body, loc)[0]
    found, _ = _walk(body, loc[:-1])
    if found and functools.reduce(lambda value, part: value[part], found, body) is None:  # a key of null, called as a type is: not on the way
        found = found[:-1]
    return (*found, *loc[-1:])


def _walk(body: Any, loc: Sequence[str | int]) -> tuple[tuple[str | int, ...], bool]:
    """(the way, whether it goes to loc's end). A type may be called as a key is: the way to the end is the right one, and else the longest."""
    if not loc:
        return (), True
    part, rest = loc[0], loc[1:]
    ways = []
    if part in body if isinstance(body, dict) else isinstance(body, list) and isinstance(part, int):
        path, is_end = _walk(body[part], rest)
        ways.append(((part, *path), is_end))
    if rest and not isinstance(part, int):
        ways.append(_walk(body, rest))
    return max(ways, key=lambda way: (way[1], len(way[0])), default=((), False))


def _progress(path: Sequence[str | int]) -> tuple[int, list[int]]:
    return len(path), [part for part in path if isinstance(part, int)]


def _show(value: Any) -> str:
    if isinstance(value, str | list):  # more is not shown
        value = value[:SHOWN]
    elif isinstance(value, dict):
        value = dict(itertools.islice(value.items(), SHOWN))
    try:
        return f"{value!r:.100}"
    except (RecursionError, ValueError):  # of integers, how many digits are written
        return f"a {type(value).__name__} that cannot be shown"
