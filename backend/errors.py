"""Errors a caller may see. Each message names the request or key, the value seen and the limit."""

from __future__ import annotations

import re


class ConfigError(ValueError):
    """A configuration key is unknown, or its value is of the wrong type or out of range."""


class ModelError(ValueError):
    """A model folder is missing a file, or a weight is missing, truncated or of another shape."""


class RequestError(ValueError):
    """The request itself is wrong; only that request fails (INVALID_ARG on Triton)."""


class LengthError(RequestError):
    """A prompt is so long that nobody counts its tokens; with fewer messages it may do."""


class CapacityError(RuntimeError):
    """The server is full; the message says what to change (UNAVAILABLE on Triton)."""


class EngineError(RuntimeError):
    """The engine broke or was shut down; every open request is told."""


class KvStoreError(RuntimeError):
    """Pages that there are not, or that another store's layout does not allow to exchange."""


class TransferError(RuntimeError):
    """Pages could not be read from another node; the prompt is computed here."""


class InternalError(RuntimeError):
    """Something went wrong in what is done for one request; only that request fails (INTERNAL on Triton)."""


def error_code(error: Exception) -> str:
    """Triton's name for what went wrong."""
    if isinstance(error, CapacityError | EngineError):
        return "UNAVAILABLE"
    return "INVALID_ARG" if isinstance(error, ValueError) else "INTERNAL"


_PRIVATE = re.compile(r"\S*triton_python_backend_shm\S*|/dev/shm/\S*")
"""Names of shared-memory regions: who knows one can have the server map it."""


FROM_ELSEWHERE: dict[str, type[Exception]] = {"INVALID_ARG": RequestError, "UNAVAILABLE": EngineError, "INTERNAL": InternalError}
"""By its code, what an error of another process is here."""


def describe_error(error: Exception) -> str:
    """An error's message as clients may see it: without names of shared-memory regions, and as text that the server can carry."""
    return _PRIVATE.sub("(a shared-memory region)", str(error)).encode("utf-8", "backslashreplace").decode()
