"""The server behind the gateway: generation, the tokenizer, and whether it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from client.aio import AsyncClient
from client.gateway.forms import SpecialToken
from client.headers import NO_HEADERS, Headers
from client.messages import Chunk, GenerateError
from client.silence import Watch
from client.tls import DEFAULT_TLS, Tls

PROBE_SECONDS = 3.0
"""How long a health probe waits for its one token."""
FRESH_SECONDS = 1.0
"""An answer this recent is as good as a probe."""


Corpus = Sequence[str | Sequence[int]]
"""Texts, or lists of token ids."""


class Servers(Protocol):
    """What stands behind a gateway: one server, or several."""

    def stream(self, request_id: str, parameters: dict[str, Any]) -> AsyncGenerator[Chunk, None]: ...

    async def describe(self, limit: float | None = None) -> dict[str, Any]: ...

    async def tokenize(self, prompt: dict[str, Any]) -> list[int]: ...

    async def detokenize(self, token_ids: Sequence[int]) -> str: ...

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]: ...

    async def add_suffix_corpus(self, request_id: str, corpus: Corpus) -> dict[str, int]: ...

    async def check(self) -> None: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class Upstream:
    """One connection to a server, shared by all requests. It mends itself when the server comes back."""

    def __init__(self, url: str, model: str, tls: Tls = DEFAULT_TLS, headers: Headers = NO_HEADERS) -> None:
        self.url = url
        self._client = AsyncClient(url, model=model, tls=tls, headers=headers)
        self._tokens: dict[int, bytes] = {}
        self._answered = -FRESH_SECONDS
        """When a request that was begun lately had its first answer."""
        self._probe: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Nothing is to be done: the connection is made by the first request."""

    async def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
        await self._client.close()

    async def stream(self, request_id: str, parameters: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """As AsyncClient.stream, with its keep-alives."""
        chunks = self._client.stream(request_id=request_id, keep_alives=True, **parameters)
        is_answered = False
        try:
            async for chunk in chunks:
                # Empty ones come from a server whose engine may do nothing; later ones from one that may refuse all who come now.
                if not (chunk.is_empty or is_answered):
                    is_answered = True
                    self._answered = time.monotonic()
                yield chunk
        except GenerateError as error:
            if error.code != "INVALID_ARG":
                self._answered = -FRESH_SECONDS
                self._tokens.clear()  # what comes back may have another vocabulary
            raise
        finally:
            await chunks.aclose()

    async def describe(self, limit: float | None = None) -> dict[str, Any]:
        """What the server says of what it serves. Raises GenerateError."""
        return await self._client.describe(limit)

    async def tokenize(self, prompt: dict[str, Any]) -> list[int]:
        """The token ids of a prompt, text_input or messages. Raises GenerateError."""
        return (await self._client.infer("tokenizer", **prompt))["input_ids"]

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text that tokens make together, special ones included. Raises GenerateError."""
        return (await self._client.infer("tokenizer", input_ids=token_ids))["text_output"][0].decode("utf-8", "replace")

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """What each token writes, of special ones as SpecialToken; asked of the server once for each. Raises GenerateError."""
        if unknown := sorted({i for i in token_ids if i not in self._tokens}):
            found = await self._client.infer("tokenizer", input_ids=unknown)
            marks = found.get("is_special", [False] * len(unknown))  # older servers do not tell
            self._tokens.update((i, SpecialToken(token) if mark else token) for i, token, mark in zip(unknown, found["tokens"], marks))
        return [self._tokens[i] for i in token_ids]

    async def add_suffix_corpus(self, request_id: str, corpus: Corpus) -> dict[str, int]:
        """As AsyncClient.add_suffix_corpus."""
        return await self._client.add_suffix_corpus(corpus, request_id=request_id)

    async def check(self) -> None:
        """Raises GenerateError unless the decode model has taken and answered a request within the last second, or does now.

        Callers share one probe.
        """
        if time.monotonic() - self._answered < FRESH_SECONDS:
            return
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._generate_one())
        await asyncio.shield(self._probe)

    async def _generate_one(self) -> None:
        """One token, ahead of the queue. An end by the deadline is an answer too: the engine lives, and has its hands full."""
        limit = {"priority": -(2**31), "timeout_ms": int(500 * PROBE_SECONDS)}
        task = asyncio.current_task()
        assert task is not None
        watch = Watch(PROBE_SECONDS, task.cancel)
        watch.resume()
        try:
            async for _ in self.stream("health", {"input_ids": [0], "max_tokens": 1, "speculative": {"num_speculative_tokens": 0}, **limit}):
                pass
        except asyncio.CancelledError:
            if not watch.has_fired:
                raise
            raise GenerateError(f"no token within {PROBE_SECONDS:g} s", "TIMEOUT") from None
        finally:
            watch.stop()
