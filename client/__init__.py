"""Python clients of a running server: `Client` (sync) and `AsyncClient` over gRPC streaming, `HttpClient` over server-sent events."""

from client.aio import AsyncClient
from client.http import HttpClient
from client.messages import Chunk, Completion, GenerateError
from client.sync import Client

__all__ = ["AsyncClient", "Chunk", "Client", "Completion", "GenerateError", "HttpClient"]
