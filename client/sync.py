"""The synchronous client, over gRPC streaming."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import tritonclient.grpc as triton_grpc
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
from client.silence import SignsOfLife, sending_seconds
from client.tls import DEFAULT_TLS, Tls

if TYPE_CHECKING:
    from typing_extensions import Self


class Client:
    """Completes prompts on a running server. Thread-safe: each stream has a connection of its own, kept for the next.

    url: HOST:PORT, or grpcs://HOST:PORT for TLS. model: `decode` (cancellation reaches it at once) or the ensemble `generate`.
    tls: certificates; headers: sent with every request, such as the key of restricted interfaces. Raises ValueError for those that cannot be used.
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
        self._idle: list[triton_grpc.InferenceServerClient] = []
        self._is_closed = False
        self._lock = threading.Lock()
        self._signs = SignsOfLife()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Connections that are in use are closed when they no longer are."""
        with self._lock:
            idle, self._idle, self._is_closed = self._idle, [], True
        for connection in idle:
            connection.close()

    def _take(self) -> triton_grpc.InferenceServerClient:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            connection = triton_grpc.InferenceServerClient(**self._channel)
            connection.register_plugin(self._add_headers)
            return connection

    def _give(self, connection: triton_grpc.InferenceServerClient) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def is_ready(self, model: str | None = None) -> bool:
        """Whether the server answers and the model is loaded."""
        connection = self._take()
        try:
            limit = self.inactivity_timeout
            return connection.is_server_ready(client_timeout=limit) and connection.is_model_ready(model or self.model, client_timeout=limit)
        except InferenceServerException:
            return False
        finally:
            self._give(connection)

    def generate(self, prompt: str | Sequence[int] | None = None, *, request_id: str = "", **parameters: Any) -> list[Completion]:
        """The n completions of a prompt (text or token ids), whole. Raises GenerateError."""
        return collect(self.stream(prompt, request_id=request_id, **parameters))

    def stream(
        self, prompt: str | Sequence[int] | None = None, *, request_id: str = "", model: str | None = None, **parameters: Any
    ) -> Generator[Chunk, None, None]:
        """Chunks as they come; leaving the loop (or closing the iterator) cancels the request on the server.

        parameters: the decode model's inputs by name. Raises GenerateError with the server's message, or when nothing came
        for `inactivity_timeout` seconds, to this stream and to all others of this client.
        """
        values = prompt_values(prompt, parameters)
        check_unicode("request_id", request_id)
        inputs, limit = make_inputs(values), silence_limit(values, self.inactivity_timeout)
        sending = sending_seconds(count_bytes(values), self.url)
        return self._stream(inputs, request_id or uuid.uuid4().hex, model or self.model, limit, sending)

    def _stream(
        self, inputs: list[triton_grpc.InferInput], request_id: str, model: str, limit: float, sending: float = 0.0, *, is_patient: bool = True
    ) -> Generator[Chunk, None, None]:
        """sending: seconds beyond the limit until the first response; is_patient: a server that sends to other streams is given more time."""

        def seconds_left(silence: float) -> float:
            return sending + (self._signs.seconds_left(model, silence, limit) if is_patient else limit - silence)

        received: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        connection = self._take()
        is_done = is_answered = is_silent = False
        try:
            connection.start_stream(lambda result, error: received.put((result, error)))
            connection.async_stream_infer(model, inputs, request_id=request_id, enable_empty_final_response=True)
            while not is_done:
                asked = time.monotonic()
                try:
                    result, error = get_in_time(received, limit, seconds_left)
                except queue.Empty:
                    is_silent = True
                    raise GenerateError(say_silent(request_id, limit, time.monotonic() - asked, sending), "TIMEOUT") from None
                sending = 0.0
                if error is not None:
                    is_done = True
                    raise read_error(request_id, error)
                self._signs.note(model)
                chunks, is_done = read_result(result)
                is_answered = is_answered or any(c.finish_reason is not None for c in chunks)
                if is_done and not is_answered:
                    raise GenerateError(f"request {request_id!r}: the server ended the stream without an answer")
                for chunk in chunks:
                    if not chunk.is_empty:
                        yield chunk
        except InferenceServerException as error:
            with contextlib.suppress(queue.Empty):  # which tells why the stream is closed
                error = received.get_nowait()[1] or error
            raise GenerateError(name_request(request_id, error), "UNAVAILABLE") from None
        finally:
            try:
                connection.stop_stream(cancel_requests=not is_done)
                self._give(connection)
            except InferenceServerException:
                connection.close()
            if not is_done and model != "decode":
                self._cancel(request_id, CANCEL_SECONDS if is_silent else None)  # an ensemble keeps cancellation to itself

    def cancel(self, request_id: str) -> bool:
        """Ends a request by id. False when none with that id is open."""
        return self._cancel(request_id)

    def _cancel(self, request_id: str, limit: float | None = None) -> bool:
        try:
            inputs = make_inputs({"cancel": request_id})
            chunks = self._stream(inputs, uuid.uuid4().hex, "decode", limit or self.inactivity_timeout, is_patient=limit is None)
            return [c.finish_reason for c in chunks] == ["cancelled"]
        except GenerateError:
            return False


def get_in_time(received: queue.SimpleQueue[Any], limit: float, seconds_left: Callable[[float], float]) -> Any:
    """What comes next. Raises queue.Empty when nothing does for `limit` seconds and as many more as `seconds_left` then says of a silence of so
    many, as far as this process ran to see it."""
    began, wait = time.monotonic(), limit
    while True:
        asked = time.monotonic()
        try:
            return received.get(timeout=wait)
        except queue.Empty:
            now = time.monotonic()
            if now - asked >= wait + LATE_SECONDS:
                began, wait = now, limit
            elif (wait := seconds_left(now - began)) <= 0:
                raise
