"""One request, by either protocol, and what was seen of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from client.aio import AsyncClient
from client.bench.dataset import Prompt
from client.headers import NO_HEADERS, Headers
from client.messages import GenerateError
from client.tls import Tls

if TYPE_CHECKING:
    import aiohttp


@dataclass(slots=True)
class Outcome:
    """A request's times, in seconds of `time.perf_counter`, and counts."""

    started: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """When each response with tokens came. With speculation one response brings several tokens."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.arrivals[0] - self.started

    @property
    def e2el(self) -> float:
        """End-to-end latency."""
        return self.ended - self.started

    @property
    def tpot(self) -> float:
        """Time per output token after the first: of each token, not of each response."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Times between one response and the next, which is what a reader waits."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:])]


@dataclass(frozen=True, slots=True)
class Sent:
    """What one response brought."""

    has_tokens: bool
    num_tokens: int | None = None
    """None: this protocol says only at the end."""
    usage: dict[str, int] | None = None
    finish_reason: str | None = None


class Backend(Protocol):
    """A way of asking."""

    def stream(self, prompt: Prompt, seed: int) -> AsyncIterator[Sent]:
        """Responses as they come. Raises GenerateError."""

    async def close(self) -> None: ...


class GrpcBackend:
    """Triton's gRPC stream, as `client.AsyncClient` speaks it."""

    def __init__(self, url: str, model: str | None, parameters: dict[str, Any], timeout: float, tls: Tls, headers: Headers = NO_HEADERS) -> None:
        self._client = AsyncClient(url, model=model or "decode", inactivity_timeout=timeout, tls=tls, headers=headers)
        self._parameters = parameters

    async def stream(self, prompt: Prompt, seed: int) -> AsyncIterator[Sent]:
        async for chunk in self._client.stream(prompt.text, max_tokens=prompt.output_len, seed=seed, **self._parameters):
            yield Sent(bool(chunk.token_ids), len(chunk.token_ids), chunk.usage, chunk.finish_reason)

    async def close(self) -> None:
        await self._client.close()


class OpenAIBackend:
    """Server-sent events of an OpenAI-compatible server; the key is read from the variable OPENAI_API_KEY."""

    def __init__(self, url: str, endpoint: str, model: str | None, parameters: dict[str, Any], timeout: float, tls: Tls) -> None:
        self._url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._context = tls.context_of(self._url)
        self._endpoint = endpoint
        self._model = model
        self._parameters = parameters
        self._timeout = timeout
        self._opened: aiohttp.ClientSession | None = None

    def _session(self) -> aiohttp.ClientSession:
        """Opened by the first request, since it belongs to a running loop."""
        if self._opened is None:
            import aiohttp

            headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("OPENAI_API_KEY")) else {}
            limits = aiohttp.ClientTimeout(total=None, sock_read=self._timeout, sock_connect=self._timeout)
            connector = aiohttp.TCPConnector(limit=0, ssl=True if self._context is None else self._context)
            self._opened = aiohttp.ClientSession(headers=headers, timeout=limits, connector=connector, read_bufsize=2**20)
        return self._opened

    async def _find_model(self) -> str:
        async with self._session().get(f"{self._url}/v1/models") as response:
            body = await response.text()
            if response.status != 200:
                raise GenerateError(f"{self._url}/v1/models: status {response.status}: {body:.300}")
        return json.loads(body)["data"][0]["id"]

    async def stream(self, prompt: Prompt, seed: int) -> AsyncIterator[Sent]:
        import aiohttp

        try:
            self._model = self._model or await self._find_model()
            body = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}, "seed": seed, **self._parameters}
            if self._endpoint.endswith("/chat/completions"):
                body |= {"messages": [{"role": "user", "content": prompt.text}], "max_completion_tokens": prompt.output_len}
            else:
                body |= {"prompt": prompt.text, "max_tokens": prompt.output_len}
            async with self._session().post(self._url + self._endpoint, json=body) as response:
                if response.status != 200:
                    raise GenerateError(f"{self._url}{self._endpoint}: status {response.status}: {(await response.text()):.300}")
                async for line in response.content:
                    if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                        yield self._read(json.loads(data))
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
            raise GenerateError(f"{self._url}{self._endpoint}: {type(error).__name__}: {error}") from None

    @staticmethod
    def _read(event: dict[str, Any]) -> Sent:
        if "error" in event:
            raise GenerateError(str(event["error"].get("message", event["error"])))
        choice = (event.get("choices") or [{}])[0]
        delta = choice.get("delta") or {}
        text = choice.get("text") or any(delta.get(part) for part in ("content", "reasoning_content", "reasoning"))
        return Sent(bool(text), None, event.get("usage"), choice.get("finish_reason"))

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()


async def send(backend: Backend, prompt: Prompt, seed: int, must_be_full: bool) -> Outcome:
    """Asks, and notes what comes. An answer that is wrong (no end, fewer or more tokens than it says or than were asked for) is an error."""
    outcome = Outcome(started=time.perf_counter())
    counted: int | None = 0
    usage, reason = None, None
    try:
        async for sent in backend.stream(prompt, seed):
            # Where texts alone are told, an answer of nothing but the end of text has none.
            is_end = sent.num_tokens is None and sent.finish_reason == "stop" and not outcome.arrivals
            if sent.has_tokens or is_end:
                outcome.arrivals.append(time.perf_counter())
            counted = None if sent.num_tokens is None or counted is None else counted + sent.num_tokens
            usage, reason = sent.usage or usage, sent.finish_reason or reason
        outcome.error = _find_fault(prompt, outcome, counted, usage, reason, must_be_full)
    except GenerateError as error:
        outcome.error = str(error)
    outcome.ended = time.perf_counter()
    if usage:
        outcome.prompt_tokens, outcome.output_tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return outcome


def _find_fault(
    prompt: Prompt, outcome: Outcome, counted: int | None, usage: dict[str, int] | None, reason: str | None, must_be_full: bool
) -> str | None:
    if reason is None:
        return "the answer ended without a finish reason"
    if usage is None:
        return "the answer has no usage"
    total = usage.get("completion_tokens", 0)
    if counted is not None and counted != total:
        return f"{counted} tokens came, usage says {total}"
    if total > prompt.output_len or (must_be_full and total != prompt.output_len):
        return f"{prompt.output_len} tokens were asked for, {total} came (finish reason {reason})"
    if total and not outcome.arrivals:
        return f"usage says {total} tokens, none came"
    return None
