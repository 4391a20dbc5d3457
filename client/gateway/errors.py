"""Errors in OpenAI's form, with the HTTP status that its clients act on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import JSONResponse

from client.gateway.no_ops import say_rule
from client.messages import PARAMETERS, GenerateError

RETRY_SECONDS = 1
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


def from_server(error: GenerateError, names: Mapping[str, str] = NAMES) -> ApiError:
    """The server's refusal as the client sees it. names: what the client's request calls what the server calls otherwise."""
    status, code = _UPSTREAM.get(error.code, (500, "internal_error"))
    if status != 400:
        return ApiError(status, str(error), code)
    named = re.match(r"(?:request '[^']*': )?(\w+)", str(error))
    param = names.get(named[1], named[1]).partition(".")[0] if named and named[1] in PARAMETERS else None
    known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return ApiError(status, re.sub(rf"(?<![\w.])(?:{known})(?!\w)", lambda found: names[found[0]], str(error)), code, param)


def from_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    errors = error.errors()
    first = errors[0]
    kind, place = first["type"], first["loc"][1:]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}", "invalid_json")
    if kind == "value_error":  # a rule over several keys
        return ApiError(400, str(first["ctx"]["error"]), "invalid_value")
    if not place:
        return ApiError(400, f"the body must be a JSON object, sent with content-type application/json: {first['msg']}", "invalid_body")
    name = str(place[0])[:100]
    if kind == "extra_forbidden":
        rule = say_rule(name) if len(place) == 1 else ""
        return ApiError(400, f"unknown or unsupported parameter {'.'.join(map(str, place))!r:.100}{rule}", "unknown_parameter", name)
    rules = dict.fromkeys(e["msg"] for e in errors if e["loc"][1:2] == place[:1])  # a key that may be of several types has one of each
    return ApiError(400, f"{name}: {'; or '.join(rules):.500}, got {first['input']!r:.100}", "invalid_value", name)
