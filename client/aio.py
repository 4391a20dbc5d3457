"""The asyncio client, over gRPC streaming."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from client.messages import (
    DEFAULT_GRPC_URL,
    INACTIVITY_SECONDS,
    Chunk,
    Completion,
    GenerateError,
    collect,
    make_inputs,
    prompt_values,
    read_error,
    read_result,
)

if TYPE_CHECKING:
    from typing_extensions import Self


CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),  # gRPC's own limit is two minutes: a server that is back would be refused as long
]


class AsyncClient:
    """Completes prompts on a running server; all streams share one connection."""

    def __init__(self, url: str = DEFAULT_GRPC_URL, *, model: str = "decode", inactivity_timeout: float = INACTIVITY_SECONDS) -> None:
        self.model = model
        self.inactivity_timeout = inactivity_timeout
        self._connection = triton_aio.InferenceServerClient(url, channel_args=CHANNEL)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connection.close()

    async def generate(self, prompt: str | Sequence[int] | None = None, *, request_id: str = "", **parameters: Any) -> list[Completion]:
        """The n completions of a prompt (text or token ids), whole. Raises GenerateError."""
        return collect([chunk async for chunk in self.stream(prompt, request_id=request_id, **parameters)])

    async def stream(
        self, prompt: str | Sequence[int] | None = None, *, request_id: str = "", model: str | None = None, **parameters: Any
    ) -> AsyncGenerator[Chunk, None]:
        """As `Client.stream`. Cancelling the task, or closing the iterator, cancels the request on the server."""
        request_id, model = request_id or uuid.uuid4().hex, model or self.model
        inputs = make_inputs(prompt_values(prompt, parameters))
        is_done = asyncio.Event()

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": model, "inputs": inputs, "request_id": request_id}
            await is_done.wait()  # the stream stays open until the answer is whole

        responses = self._connection.stream_infer(requests())
        watch = Watch(self.inactivity_timeout, responses.cancel)
        try:
            while not is_done.is_set():
                watch.begin()
                try:
                    result, error = await anext(responses)
                except StopAsyncIteration:
                    raise GenerateError(f"request {request_id!r}: the server ended the stream early", "UNAVAILABLE") from None
                except asyncio.CancelledError:
                    if not watch.has_fired:
                        raise
                    raise GenerateError(f"request {request_id!r}: the server sent nothing for {self.inactivity_timeout:g} s", "TIMEOUT") from None
                watch.end()
                if error is not None:
                    raise read_error(str(error))
                chunk, is_last = read_result(result)
                if is_last:
                    is_done.set()
                if chunk.token_ids or chunk.text or chunk.finish_reason:
                    yield chunk
        except (InferenceServerException, grpc.RpcError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
            raise GenerateError(f"request {request_id!r}: {reason}", "UNAVAILABLE") from None
        finally:
            watch.stop()
            if not is_done.is_set():
                responses.cancel()
                is_done.set()
                if model != "decode":
                    await asyncio.shield(self.cancel(request_id))

    async def infer(self, model: str, **values: Any) -> dict[str, list[Any]]:
        """The outputs of a model that gives one response, by name; text as bytes. Raises GenerateError."""
        try:
            result = await self._connection.infer(model, make_inputs(values), client_timeout=self.inactivity_timeout)
        except InferenceServerException as error:
            raise GenerateError(error.message(), _CODES.get(error.status() or "", "INTERNAL")) from None
        return {output.name: result.as_numpy(output.name).tolist() for output in result.get_response().outputs}

    async def cancel(self, request_id: str) -> bool:
        """Ends a request by id. False when none with that id is open."""
        try:
            return [c.finish_reason async for c in self.stream(model="decode", cancel=request_id)] == ["cancelled"]
        except GenerateError:
            return False


_CODES = {"StatusCode.INVALID_ARGUMENT": "INVALID_ARG", "StatusCode.UNAVAILABLE": "UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED": "TIMEOUT"}
"""gRPC's status of a call that is no stream."""


class Watch:
    """Calls `act` when a wait, from `begin` to `end`, takes longer than `seconds`. One timer for all: a timeout for each costs a task each."""

    def __init__(self, seconds: float, act: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._act = act
        self.has_fired = False
        self._began: float | None = None
        self._timer = self._loop.call_later(seconds, self._check)

    def begin(self) -> None:
        self._began = self._loop.time()

    def end(self) -> None:
        self._began = None

    def _check(self) -> None:
        left = self._seconds if self._began is None else self._began + self._seconds - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            self.has_fired = True
            self._act()

    def stop(self) -> None:
        self._timer.cancel()
