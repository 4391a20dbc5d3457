"""Python clients of a running server: `Client` (sync) and `AsyncClient` over gRPC streaming, `HttpClient` over server-sent events."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from client.aio import AsyncClient
    from client.http import HttpClient
    from client.messages import Chunk, Completion, GenerateError
    from client.sync import Client
    from client.tls import Tls

__all__ = ["AsyncClient", "Chunk", "Client", "Completion", "GenerateError", "HttpClient", "Tls"]

_PLACES = {"AsyncClient": "aio", "Client": "sync", "HttpClient": "http", "Tls": "tls"}
_PLACES |= dict.fromkeys(("Chunk", "Completion", "GenerateError"), "messages")


def __getattr__(name: str) -> object:
    # Loaded on first use: the launcher needs a part of this package, and not gRPC.
    if name not in _PLACES:
        raise AttributeError(f"module 'client' has no attribute {name!r}")
    return getattr(importlib.import_module(f"client.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
