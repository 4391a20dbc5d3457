"""The HTTP client: generate_stream (server-sent events) and generate, of Triton's generate extension."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from client.headers import NO_HEADERS, Headers, check_headers
from client.loopback import SECURE_HTTP
from client.messages import (
    CUT_SECONDS,
    DEFAULT_HTTP_URL,
    INACTIVITY_SECONDS,
    Chunk,
    Completion,
    GenerateError,
    check_unicode,
    collect,
    prompt_values,
    read_error,
    read_event,
    say_silent,
    silence_limit,
)
from client.silence import SignsOfLife, sending_seconds
from client.tls import DEFAULT_TLS, Tls


class _Patient(socket.socket):
    """A connection from which nothing may come for `limit` seconds, and as many more as `seconds_left` then says of a silence of so many."""

    _limit: float
    _seconds_left: Callable[[float], float]

    def be_patient(self, limit: float, seconds_left: Callable[[float], float]) -> None:
        self.settimeout(limit)
        self._limit, self._seconds_left = limit, seconds_left

    def recv_into(self, *arguments: Any, **options: Any) -> int:
        began = time.monotonic()
        try:
            while True:
                try:
                    return super().recv_into(*arguments, **options)
                except TimeoutError:
                    if (left := self._seconds_left(time.monotonic() - began)) <= 0:
                        raise
                    self.settimeout(left)
        finally:
            if self.fileno() >= 0 and self.gettimeout() != self._limit:
                self.settimeout(self._limit)


class _PatientTls(_Patient, ssl.SSLSocket):
    """The same by TLS."""


class _TlsConnection(http.client.HTTPConnection):
    """Becomes one by TLS once it is connected."""

    default_port = http.client.HTTPS_PORT


class HttpClient:
    """Completes prompts over HTTP. Each request has a connection of its own; closing it cancels the request.

    url: HOST:PORT, or https://HOST:PORT, which a proxy before the server speaks: it has no TLS there of its own; either with a path, below which a
    proxy has the server. tls, headers: as Client's.
    """

    def __init__(
        self,
        url: str = DEFAULT_HTTP_URL,
        *,
        model: str = "decode",
        inactivity_timeout: float = INACTIVITY_SECONDS,
        tls: Tls = DEFAULT_TLS,
        headers: Headers = NO_HEADERS,
    ) -> None:
        self._headers = {"Content-Type": "application/json", **check_headers(headers)}
        tls.check_use([url])
        self._context, self._server_name = tls.context_of(url), tls.server_name
        if self._context is not None:
            self._context.sslsocket_class = _PatientTls
        self.address = url.removeprefix("http://").removeprefix(SECURE_HTTP).rstrip("/")
        self._host, slash, path = self.address.partition("/")
        self._prefix = slash + path
        try:
            http.client.HTTPConnection(self._host)  # which is not connected yet
        except http.client.InvalidURL as error:
            raise ValueError(f"url {url!r:.100} is no HOST:PORT, nor {SECURE_HTTP}HOST:PORT, either with a path or without: {error}") from None
        self.model = model
        self.inactivity_timeout = inactivity_timeout
        self._signs = SignsOfLife()

    def _post(self, verb: str, values: dict[str, Any], request_id: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        body = check_unicode("the request", json.dumps({**values, "id": request_id}, ensure_ascii=False))
        sending = sending_seconds(len(body), self.address)
        kind = http.client.HTTPConnection if self._context is None else _TlsConnection
        connection = kind(self._host, timeout=self.inactivity_timeout)
        try:
            connection.connect()
            limit = silence_limit(values, self.inactivity_timeout)
            connection.sock = own = self._make_patient(connection)
            own.be_patient(limit, lambda silence: sending + self._signs.seconds_left(self.model, silence, limit))
            own.settimeout(limit + sending)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # of Linux alone
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * CUT_SECONDS)
            connection.request("POST", f"{self._prefix}/v2/models/{self.model}/{verb}", body, self._headers)
            own.settimeout(limit)
            response = connection.getresponse()
            own.be_patient(limit, lambda silence: self._signs.seconds_left(self.model, silence, limit))
            if response.status != 200:
                raise read_error(request_id, self._message(response.read()))
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._failure(request_id, values, error, sending) from None
        except BaseException:
            connection.close()
            raise
        return connection, response

    def _make_patient(self, connection: http.client.HTTPConnection) -> _Patient:
        """Its socket, after the handshake if there is to be one. Raises OSError."""
        own = connection.sock
        if self._context is None:
            return _Patient(own.family, own.type, own.proto, fileno=own.detach())
        secure = self._context.wrap_socket(own, server_hostname=self._server_name or connection.host)
        assert isinstance(secure, _PatientTls)
        return secure

    def _failure(self, request_id: str, values: dict[str, Any], error: Exception, sending: float = 0.0) -> GenerateError:
        """sending: seconds that the request had to get there, beyond the limit."""
        if isinstance(error, TimeoutError) and error.errno is None:  # else the system's own: nothing went through
            return GenerateError(say_silent(request_id, silence_limit(values, self.inactivity_timeout), sending=sending), "TIMEOUT")
        return GenerateError(f"request {request_id!r}: {self.address}: {error}", "UNAVAILABLE")

    @staticmethod
    def _message(body: bytes) -> str:
        try:
            return json.loads(body.removeprefix(b"data: "))["error"]
        except (ValueError, KeyError, TypeError):
            return body.decode("utf-8", "replace")

    def generate(self, prompt: str | Sequence[int] | None = None, *, request_id: str = "", **parameters: Any) -> list[Completion]:
        """The n completions of a prompt, whole. Raises GenerateError."""
        return collect(self.stream(prompt, request_id=request_id, **parameters))

    def generate_once(self, prompt: str | Sequence[int] | None = None, *, request_id: str = "", **parameters: Any) -> dict[str, Any]:
        """The server's single JSON answer (`/generate` with stream false). Raises GenerateError."""
        values = {**prompt_values(prompt, parameters), "stream": False}
        request_id = request_id or uuid.uuid4().hex
        connection, response = self._post("generate", values, request_id)
        try:
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._failure(request_id, values, error) from None
        finally:
            connection.close()
        if "error" in answer:  # some come with status 200
            raise read_error(request_id, answer["error"])
        return answer

    def stream(self, prompt: str | Sequence[int] | None = None, *, request_id: str = "", **parameters: Any) -> Iterator[Chunk]:
        """Chunks as they come; leaving the loop hangs up, which cancels the request. Raises GenerateError."""
        values, request_id = prompt_values(prompt, parameters), request_id or uuid.uuid4().hex
        connection, response = self._post("generate_stream", values, request_id)
        is_finished = False
        try:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                event = json.loads(line[5:])
                self._signs.note(self.model)
                if "error" in event:
                    raise read_error(request_id, event["error"])
                for chunk in read_event(event):
                    if not chunk.is_empty:
                        is_finished = is_finished or chunk.finish_reason is not None
                        yield chunk
            if not is_finished:
                raise GenerateError(f"request {request_id!r}: {self.address}: the server ended the stream early", "UNAVAILABLE")
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(request_id, values, error) from None
        finally:
            connection.close()
