"""Runs a request and answers it: as server-sent events or whole, to its end, or until the client is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from client.gateway.errors import ApiError, from_server
from client.gateway.forms import ChatForm, CompletionForm
from client.gateway.limits import MAX_PARAMETER_CHARACTERS
from client.gateway.metrics import Metrics
from client.gateway.openai import ChatRequest, CompletionRequest
from client.gateway.upstream import Servers
from client.messages import Chunk, GenerateError, collect, name_request, write_json
from client.silence import Watch

logger = logging.getLogger("foretoken.gateway")

STALL_SECONDS = 30.0
"""A reader that takes nothing for this long is dropped. Until then the server's answer waits in flow-controlled buffers."""
KEEP_ALIVE_SECONDS = 10.0
"""A stream that had nothing to say for this long gets a comment, about: proxies cut connections that are silent."""
_KEEP_ALIVE = b": keep-alive\n\n"
_EVENT = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store, no-transform"),  # a proxy that compresses may hold an answer back to its end: Caddy does
    (b"x-accel-buffering", b"no"),
]
_JSON = [(b"content-type", b"application/json")]


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Cancels the work when the client hangs up, and ends in peace then: nobody wants its outcome."""
    task, is_gone = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal is_gone
        await wait_for_disconnect(receive)
        is_gone = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        await work
    except (asyncio.CancelledError, Exception):
        if not is_gone:
            raise
    finally:
        watching.cancel()


async def merge(streams: list[AsyncGenerator[Chunk, None]]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """(which, chunk) of several streams as they come. The queue is bounded: a slow reader slows them."""
    queue: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(len(streams))

    async def pump(which: int) -> None:
        try:
            async with contextlib.aclosing(streams[which]) as chunks:
                async for chunk in chunks:
                    await queue.put((which, chunk))
            await queue.put((which, None))
        except Exception as error:
            await queue.put((which, error))

    tasks = [asyncio.create_task(pump(i)) for i in range(len(streams))]
    try:
        num_open = len(tasks)
        while num_open:
            which, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield which, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Answer(Response):
    """The answer to one request, for one or several prompts with n choices each."""

    _closing = b"data: [DONE]\n\n"
    """Of a stream."""

    def __init__(self, upstream: Servers, metrics: Metrics, model: str, request_id: str, request: CompletionRequest | ChatRequest) -> None:
        self.background = None
        self._upstream = upstream
        self._metrics = metrics
        self._request = request
        self._form = ChatForm(request) if isinstance(request, ChatRequest) else CompletionForm(request)
        self._prompts = request.prompts()
        self._names = request.server_names()
        self._parameters = write_json({name: value for name, value in request.parameters().items() if value is not None})
        self._check_size()
        self._request_id = request_id
        self._head = {"id": self._form.id_prefix + request_id, "object": self._form.object, "created": int(time.time()), "model": model}
        self._started = time.perf_counter()
        self._usages: dict[int, dict[str, int]] = {}
        """Of each choice, so far."""
        self._is_single = request.n == 1 and len(self._prompts) == 1
        self._prompt_ids: dict[int, list[int]] = {}
        """Of each prompt, where they are asked for; each choice's first part tells them."""
        self._begun: set[int] = set()
        """Choices whose first part has told them."""
        self._num_ended = 0
        self._num_predicted = self._num_mispredicted = 0
        """Tokens of the answer that the request's prediction had, and drafts made of it that did not stand."""
        self._speculation: dict[str, Any] | None = None

    def _check_size(self) -> None:
        """Raises ApiError where the server would be sent too much: each prompt goes with all parameters."""
        count, size = len(self._prompts), sum(len(value) for value in self._parameters.values() if isinstance(value, str))
        if count > 1 and count * size > MAX_PARAMETER_CHARACTERS:
            name = max(self._parameters, key=lambda name: len(value) if isinstance(value := self._parameters[name], str) else 0)
            name = self._names.get(name, name)
            message = f"{name} is sent with each of {count} prompts, with the other parameters {count * size} characters"
            raise ApiError(400, f"{message}; the limit is {MAX_PARAMETER_CHARACTERS}", "invalid_value", name.partition(".")[0])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_while_connected(self._stream(send) if self._request.stream else self._whole(send), receive)

    # -- from the server ----------------------------------------------------------------------------------------------

    async def _chunks(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        """(choice, chunk) of every prompt's completions, and empty chunks while a server that lives has none. Raises ApiError."""
        several = len(self._prompts) > 1
        ids = [f"{self._request_id}-{i}" if several else self._request_id for i in range(len(self._prompts))]
        streams = [self._upstream.stream(i, {**prompt, **self._parameters}) for i, prompt in zip(ids, self._prompts)]
        first: dict[int, float] = {}
        async with contextlib.aclosing(merge(streams) if several else _numbered(streams[0])) as chunks:
            try:
                async for which, chunk in chunks:
                    choice = which * self._request.n + chunk.index
                    if chunk.token_ids and choice not in first:
                        first[choice] = now = time.perf_counter()
                        self._metrics.time_to_first_token.observe(now - self._started)
                    self._count(choice, chunk)
                    if chunk.finish_reason is not None:
                        self._end(chunk, first.get(choice))
                    yield choice, chunk
            except GenerateError as error:
                raise from_server(error, self._names) from None

    def _count(self, choice: int, chunk: Chunk) -> None:
        """A choice's first chunk and its last one carry its usage; those between them, tokens."""
        self._num_predicted += chunk.sources.count("prediction")
        own = self._usages.setdefault(choice, dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens"), 0))
        if chunk.usage is not None:
            own.update(chunk.usage)
        else:
            own["completion_tokens"] += sum(source != "prompt" for source in chunk.sources)

    @property
    def _usage(self) -> dict[str, int]:
        """Of the whole request, so far. A prompt's n completions share it."""
        firsts = [own for choice, own in self._usages.items() if choice % self._request.n == 0]
        total = {name: sum(own[name] for own in firsts) for name in ("prompt_tokens", "cached_tokens")}
        return total | {name: sum(own[name] for own in self._usages.values()) for name in ("completion_tokens", "reasoning_tokens")}

    def _end(self, chunk: Chunk, first: float | None) -> None:
        """Books a choice's last chunk. Raises ApiError for an end that OpenAI's interface has no word for."""
        self._speculation = chunk.speculation
        self._num_mispredicted += ((chunk.speculation or {}).get("refused") or {}).get("prediction", 0)
        self._num_ended += 1
        usage = chunk.usage or {}
        count = usage.get("completion_tokens", 0)
        if first is not None and count > 1:
            self._metrics.time_per_output_token.observe((time.perf_counter() - first) / (count - 1))
        self._metrics.count_tokens(usage if chunk.index == 0 else {"completion_tokens": count})
        if chunk.finish_reason == "timeout":
            raise ApiError(504, f"request {self._request_id!r}: its timeout_ms passed after {count} tokens", "timeout", "timeout_ms")
        if chunk.finish_reason == "cancelled":
            raise ApiError(400, f"request {self._request_id!r}: it was cancelled after {count} tokens", "cancelled")

    async def _write(self, choice: int, chunk: Chunk, is_streamed: bool) -> dict[str, Any]:
        ids = self._form.tokens_of(chunk)
        try:
            tokens = dict(zip(ids, await self._upstream.token_bytes(ids))) if ids else {}
            prompt = await self._prompt_of(choice) if self._request.return_token_ids and choice not in self._begun else None
        except GenerateError as error:  # of the tokenizer, which does not know whom it is asked for
            raise from_server(GenerateError(name_request(self._request_id, error), error.code)) from None
        part = self._form.write(choice, chunk, tokens, is_streamed)
        return part if prompt is None else {**part, "prompt_token_ids": prompt}

    async def _prompt_of(self, choice: int) -> list[int]:
        """The tokens of a choice's prompt. Raises GenerateError."""
        self._begun.add(choice)
        which = choice // self._request.n
        if which not in self._prompt_ids:
            value = self._prompts[which]
            if "messages" in value:
                assert isinstance(self._request, ChatRequest)
                value = self._request.prompt_value()
            self._prompt_ids[which] = value["input_ids"] if "input_ids" in value else await self._upstream.tokenize(value)
        return self._prompt_ids[which]

    def _usage_body(self) -> dict[str, Any]:
        usage = self._usage
        body: dict[str, Any] = {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
            "prompt_tokens_details": {"cached_tokens": usage["cached_tokens"]},
        }
        details = {} if self._request.prediction is None else {"accepted_prediction_tokens": self._num_predicted}
        if self._num_ended == len(self._prompts) * self._request.n:  # only then they are known
            details |= {"rejected_prediction_tokens": self._num_mispredicted} if details else {}
            details |= {"reasoning_tokens": usage["reasoning_tokens"]} if isinstance(self._form, ChatForm) else {}
        return {**body, "completion_tokens_details": details} if details else body

    def _sglext_body(self) -> dict[str, Any]:
        """SGLang's extension of OpenAI's answers, as far as it is asked for."""
        if not self._request.return_cached_tokens_details:
            return {}
        return {"sglext": {"cached_tokens_details": {"device": self._usage["cached_tokens"], "host": 0}}}

    def _metrics_body(self) -> dict[str, Any]:
        """vLLM's form of what speculation brought, which aiperf reads; of one completion alone, as there."""
        found = self._speculation
        if not self._is_single or not found or not found["drafts"]:
            return {}
        reached = [found["drafts"], *found["accepted_per_position"], 0]  # steps in which so many drafts or more were accepted
        return {
            "metrics": {
                "speculative_decoding": {
                    "acceptance_histogram": [more - fewer for more, fewer in zip(reached, reached[1:])],
                    "num_spec_steps": found["drafts"],
                    "num_spec_tokens": len(reached) - 2,
                    "num_accepted_draft_tokens": found["accepted"],
                    "num_draft_tokens": found["drafted"],
                    "mean_acceptance_length": found["mean_accepted_length"],
                    "draft_acceptance_rate": found["acceptance_rate"],
                }
            }
        }

    # -- what is written ----------------------------------------------------------------------------------------------

    async def _whole_body(self, chunks: list[Chunk]) -> dict[str, Any]:
        choices = [await self._write(c.index, c, is_streamed=False) for c in collect(chunks)]
        prompt: dict[str, Any] = {}
        for choice in choices:
            prompt |= self._take_prompt(choice)
        return {**self._head, **prompt, "choices": choices, "usage": self._usage_body(), **self._metrics_body(), **self._sglext_body()}

    def _take_prompt(self, part: dict[str, Any]) -> dict[str, Any]:
        """A chat's answer tells of the prompt beside its choices, of which a completion's have one each."""
        is_told = isinstance(self._form, ChatForm) and "prompt_token_ids" in part
        return {"prompt_token_ids": part.pop("prompt_token_ids")} if is_told else {}

    def _part_event(self, part: dict[str, Any]) -> bytes:
        """Of a part that says nothing, since its text may turn out to be a call, none."""
        options = self._request.stream_options
        if part["finish_reason"] and part.get("delta", {}).get("tool_calls"):  # openai's library sees the end of a call in a chunk behind it
            nothing: dict[str, Any] = {key: [] for key in ("token_ids", "tokens", "token_sources") if key in part}
            call = {key: value for key, value in part.items() if key != "speculation"}
            last = {key: value for key, value in part.items() if key != "prompt_token_ids"}
            return self._part_event({**call, "finish_reason": None}) + self._part_event({**last, **nothing, "delta": {}, "logprobs": None})
        if part.get("delta") == {} and not (part["finish_reason"] or part["logprobs"] or options.continuous_usage_stats or "token_ids" in part):
            return b""
        usage = {"usage": self._usage_body()} if options.continuous_usage_stats else {"usage": None} if options.include_usage else {}
        return _event({**self._head, "object": self._form.chunk_object, **self._take_prompt(part), **usage, "choices": [part]})

    def _last_events(self) -> bytes:
        body = {**self._head, "object": self._form.chunk_object, "choices": []}
        events = _event({**body, **extension}) if (extension := self._sglext_body()) else b""
        if self._request.stream_options.include_usage:
            events += _event({**body, "usage": self._usage_body(), **self._metrics_body()})
        return events

    def _error_event(self, code: str | None, message: str, body: dict[str, Any]) -> bytes:
        return _event(body)

    # -- to the client ------------------------------------------------------------------------------------------------

    async def _whole(self, send: Send) -> None:
        chunks = []
        async with contextlib.aclosing(self._chunks()) as source:
            async for choice, chunk in source:
                if not chunk.is_empty:
                    chunk.index = choice
                    chunks.append(chunk)
        body = orjson.dumps(await self._whole_body(chunks))
        await send({"type": "http.response.start", "status": 200, "headers": [*_JSON, (b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        """Starts with the first part, or the first keep-alive: what fails before it has a status of its own."""
        task = asyncio.current_task()
        assert task is not None
        watch = Watch(STALL_SECONDS, task.cancel)
        try:
            await self._send_events(send, watch)
        except asyncio.CancelledError:
            if not watch.has_fired:
                raise
            self._metrics.stalled.inc()
            logger.warning("%s the client has read nothing for %g s: dropped", self._request_id, STALL_SECONDS)
        finally:
            watch.stop()

    async def _send_events(self, send: Send, watch: Watch) -> None:
        is_started, written = False, time.monotonic()

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal written
            watch.resume()
            await send({"type": "http.response.body", "body": data, "more_body": more})
            watch.pause()
            written = time.monotonic()

        try:
            async with contextlib.aclosing(self._chunks()) as source:
                async for choice, chunk in source:
                    if chunk.is_empty and time.monotonic() - written < KEEP_ALIVE_SECONDS:
                        continue
                    part = None if chunk.is_empty else await self._write(choice, chunk, is_streamed=True)
                    if not is_started:
                        is_started = True
                        waited = f"first-token;dur={1e3 * (time.perf_counter() - self._started):.2f}"
                        timing = [(b"server-timing", waited.encode())] if part else []
                        await send({"type": "http.response.start", "status": 200, "headers": [*_EVENT, *timing]})
                    data = self._part_event(part) if part else b""
                    if data or time.monotonic() - written >= KEEP_ALIVE_SECONDS:
                        await write(data or _KEEP_ALIVE)
            if data := self._last_events():
                await write(data)
        except Exception as error:
            if not is_started:
                raise
            if not isinstance(error, ApiError):
                logger.exception("%s failed", self._request_id)
                error = ApiError(500, "the gateway failed; its log says how", "internal_error")
            self._metrics.errors.labels(error.code).inc()
            await write(self._error_event(error.code, error.message, error.body()))
        await write(self._closing, more=False)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def _numbered(stream: AsyncGenerator[Chunk, None]) -> AsyncGenerator[tuple[int, Chunk], None]:
    async with contextlib.aclosing(stream):
        async for chunk in stream:
            yield 0, chunk
