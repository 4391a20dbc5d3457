"""The asyncio client, over gRPC streaming."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from client.headers import NO_HEADERS, AddHeaders, Headers
from client.messages import (
    CANCEL_SECONDS,
    CHANNEL_OPTIONS,
    DEFAULT_GRPC_URL,
    INACTIVITY_SECONDS,
    LATE_SECONDS,
    Chunk,
    Completion,
    GenerateError,
    check_unicode,
    collect,
    count_bytes,
    make_inputs,
    name_request,
    prompt_values,
    read_error,
    read_result,
    say_silent,
    silence_limit,
)
from client.silence import BUSY_SECONDS, SignsOfLife, Watch, listening_time, sending_seconds
from client.tls import DEFAULT_TLS, Tls

if TYPE_CHECKING:
    from typing_extensions import Self


END_SECONDS = 1.0
"""For streams whose answer is whole to end before `close` cuts them off."""


class AsyncClient:
    """Completes prompts on a running server; all streams share one connection, which is of the event loop of the first request.

    url, tls, headers: as Client's. After `close` its requests, those under way too, raise GenerateError; in another event loop, RuntimeError.
    """

    def __init__(
        self,
        url: str = DEFAULT_GRPC_URL,
        *,
        model: str = "decode",
        inactivity_timeout: float = INACTIVITY_SECONDS,
        tls: Tls = DEFAULT_TLS,
        headers: Headers = NO_HEADERS,
    ) -> None:
        self.url = url
        self._add_headers = AddHeaders(headers)
        self._channel = tls.channel_arguments(url, CHANNEL_OPTIONS)
        self.model = model
        self.inactivity_timeout = inactivity_timeout
        self._connection: triton_aio.InferenceServerClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The connection's."""
        self._is_closed = False
        self._endings: set[asyncio.Task[None]] = set()
        self._signs = SignsOfLife(listening_time)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._is_closed = True
        if self._connection is None or self._loop is None or self._loop.is_closed():
            return
        self._check_loop()
        if self._endings:
            await asyncio.wait(self._endings, timeout=END_SECONDS)
        await self._connection.close()

    def _connect(self, whose: str) -> triton_aio.InferenceServerClient:
        """The connection. whose: what it is for. Not made by `__init__`: clients are made before there is a loop, too."""
        if self._is_closed:
            raise GenerateError(f"{whose}: the client is closed", "UNAVAILABLE")
        if self._connection is None:
            self._loop = asyncio.get_running_loop()
            self._connection = triton_aio.InferenceServerClient(**self._channel)
            self._connection.register_plugin(self._add_headers)
        self._check_loop()
        return self._connection

    def _check_loop(self) -> None:
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError("an AsyncClient is of the event loop of its first request: in another loop, make another client")

    def _check_not_closed(self, whose: str) -> None:
        """Of what was cancelled: by `close`, which gRPC tells in the same way as that the task was."""
        if self._is_closed and not _is_task_cancelled():
            raise GenerateError(f"{whose}: the client was closed before the answer was whole", "UNAVAILABLE") from None

    async def generate(self, prompt: str | Sequence[int] | None = None, *, request_id: str = "", **parameters: Any) -> list[Completion]:
        """The n completions of a prompt (text or token ids), whole. Raises GenerateError."""
        return collect([chunk async for chunk in self.stream(prompt, request_id=request_id, **parameters)])

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        request_id: str = "",
        model: str | None = None,
        keep_alives: bool = False,
        **parameters: Any,
    ) -> AsyncGenerator[Chunk, None]:
        """As `Client.stream`. Cancelling the task, or closing the iterator, cancels the request on the server.

        keep_alives: also yields the empty chunks with which a server that lives breaks a silence, every 1.5 seconds.
        """
        values = prompt_values(prompt, parameters)
        check_unicode("request_id", request_id)
        inputs, limit = make_inputs(values), silence_limit(values, self.inactivity_timeout)
        sending = sending_seconds(count_bytes(values), self.url)
        return self._stream(inputs, request_id or uuid.uuid4().hex, model or self.model, limit, keep_alives, sending=sending)

    async def _stream(
        self,
        inputs: list[Any],
        request_id: str,
        model: str,
        limit: float,
        keep_alives: bool = False,
        is_patient: bool = True,
        *,
        sending: float = 0.0,
    ) -> AsyncGenerator[Chunk, None]:
        """is_patient: a server that sends to other streams is given more time; sending: seconds beyond the limit until the first response."""

        def seconds_left(silence: float) -> float:
            return sending + (self._signs.seconds_left(model, silence, limit) if is_patient else limit - silence)

        connection, is_done = self._connect(f"request {request_id!r}"), asyncio.Event()

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": model, "inputs": inputs, "request_id": request_id}
            await is_done.wait()  # the stream stays open until the answer is whole

        responses = connection.stream_infer(requests())
        watch = Watch(limit, responses.cancel, seconds_left)
        try:
            while not is_done.is_set():
                try:
                    watch.resume()
                    result, error = await anext(responses)
                    watch.pause()
                except StopAsyncIteration:
                    raise GenerateError(f"request {request_id!r}: the server ended the stream early", "UNAVAILABLE") from None
                except asyncio.CancelledError:
                    if not watch.has_fired:
                        self._check_not_closed(f"request {request_id!r}")
                        raise
                    raise GenerateError(say_silent(request_id, limit, watch.silence, sending), "TIMEOUT") from None
                sending = 0.0
                if error is not None:
                    is_done.set()
                    raise read_error(request_id, error)
                self._signs.note(model)
                chunks, is_last = read_result(result)
                if is_last:
                    is_done.set()
                for chunk in chunks:
                    if keep_alives or not chunk.is_empty:
                        yield chunk
        except (InferenceServerException, grpc.RpcError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
            raise GenerateError(name_request(request_id, reason), "UNAVAILABLE") from None
        finally:
            watch.stop()
            if is_done.is_set():
                ending = asyncio.create_task(_read_to_end(responses))
                self._endings.add(ending)
                ending.add_done_callback(self._endings.discard)
            else:
                responses.cancel()
                is_done.set()
                if model != "decode":
                    await asyncio.shield(self._cancel(request_id, CANCEL_SECONDS if watch.has_fired else None))

    async def infer(self, model: str, **values: Any) -> dict[str, list[Any]]:
        """The outputs of a model that gives one response, by name; text as bytes. Raises GenerateError."""
        limit, inputs = self.inactivity_timeout, make_inputs(values)
        sending = sending_seconds(count_bytes(values), self.url)
        call = asyncio.ensure_future(self._connect(model).infer(model, inputs, client_timeout=max(limit, BUSY_SECONDS) + sending + LATE_SECONDS))
        watch = Watch(limit, call.cancel, lambda silence: sending + self._signs.seconds_left(model, silence, limit))
        watch.resume()
        try:
            result = await call
        except InferenceServerException as error:
            raise read_error("", error) from None
        except asyncio.CancelledError:
            if not watch.has_fired:
                self._check_not_closed(model)
                raise
            raise GenerateError(f"{model}: no answer within {watch.silence:.0f} s (inactivity_timeout {limit:g} s)", "TIMEOUT") from None
        finally:
            watch.stop()
        self._signs.note(model)
        return {output.name: result.as_numpy(output.name).tolist() for output in result.get_response().outputs}

    async def describe(self, limit: float | None = None) -> dict[str, Any]:
        """What the decode model says of itself: context, methods, load. limit: seconds to wait for it. Raises GenerateError."""
        chunks = self._ask({"describe": True}, limit)
        return json.loads("".join([chunk.text async for chunk in chunks]))

    async def add_suffix_corpus(self, corpus: Sequence[str | Sequence[int]], *, request_id: str = "") -> dict[str, int]:
        """Texts or lists of token ids that the method suffix is to search from now on: num_texts and num_tokens of them, num_all_tokens with
        those that were there, and max_tokens of all. Raises GenerateError."""
        if isinstance(corpus, (str, bytes, Mapping)):  # of which a list would be one of letters, or of keys
            raise GenerateError(f"suffix_corpus must be a list of texts or of lists of token ids, got {corpus!r:.80}", "INVALID_ARG")
        chunks = self.stream(request_id=request_id, model="decode", stream=False, suffix_corpus=list(corpus))
        return json.loads("".join([chunk.text async for chunk in chunks]))

    async def cancel(self, request_id: str) -> bool:
        """Ends a request by id. False when none with that id is open."""
        return await self._cancel(request_id)

    def _ask(self, values: dict[str, Any], limit: float | None) -> AsyncGenerator[Chunk, None]:
        """Something of the decode model that is no generation. limit: seconds after which it has failed; None: a busy server may take longer."""
        return self._stream(make_inputs(values), uuid.uuid4().hex, "decode", limit or self.inactivity_timeout, is_patient=limit is None)

    async def _cancel(self, request_id: str, limit: float | None = None) -> bool:
        try:
            chunks = self._ask({"cancel": request_id}, limit)
            return [c.finish_reason async for c in chunks] == ["cancelled"]
        except GenerateError:
            return False


def _is_task_cancelled() -> bool:
    """Whether the task that runs is asked to end; Python before 3.11 does not tell."""
    return getattr(asyncio.current_task(), "cancelling", lambda: 0)() > 0


async def _read_to_end(responses: AsyncIterator[Any]) -> None:
    """Of a stream whose answer is whole. Dropping it would cancel it, and then the server (release 24.10) may hold the request for ever."""
    with contextlib.suppress(InferenceServerException, grpc.RpcError, asyncio.CancelledError):
        async for _ in responses:
            pass
