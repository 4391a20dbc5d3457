"""uvicorn's HTTP protocol, which would wait for a request's head for ever, and keep it in memory whatever its size, before any key is asked for."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httptools
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 65536
HEAD_SECONDS = 30.0
"""From a connection's beginning, or a head's, until the head must be whole."""
LOOK_SECONDS, PROBE_SECONDS = 0.1, 2.0
"""How often it is looked whether a client that sends no more still reads, and how often it is sent something, by which its system tells."""
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""What may come before an answer any number of times, and means nothing to a client that waits for one."""
_CLOSED = 7
"""TCP's state of a connection that the other side has reset."""


class _Parser(httptools.HttpRequestParser):
    """Of a request that asks for another protocol as well (`Upgrade: h2c`, as Java's HttpClient does) a parser leaves the body to that protocol.
    None is spoken here: the request is read again without that header, and answered as one of HTTP/1.1.
    """

    def __init__(self, protocol: LimitedHeadProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        if hasattr(self, "set_dangerous_leniencies"):  # as uvicorn's own: what follows a request that closes the connection is no error of it
            self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: Any) -> None:
        parser, rest = self, memoryview(data)
        while True:
            try:
                super(_Parser, parser).feed_data(rest)
                return
            except httptools.HttpParserUpgrade as found:
                if not self._protocol.is_asking_for_more:
                    raise
                rest = rest[found.args[0] :]
            head = self._protocol.plain_head()
            self._protocol.parser = parser = _Parser(self._protocol)
            super(_Parser, parser).feed_data(head)


class LimitedHeadProtocol(HttpToolsProtocol):
    """Answers 400 to a head that goes on for longer, or to what is neither head nor body (trailers, extensions of chunks), and hangs up; tells all
    requests of a connection when it is lost, where uvicorn tells the newest alone, which may wait behind the one that is answered; and sends a stream
    to a client of HTTP/1.0 without the marks of chunks that it would take for text.

    A client that closes its own side of a connection gets its answers: what is written to one that has closed both is answered by a reset.
    """

    _is_in_head = False
    _num_other_bytes = 0
    """Of the head, or read since then without any of the body. What comes with a head's beginning, or with some of the body, is one read at most."""
    _timer: asyncio.TimerHandle | None = None
    _cycles: tuple[RequestResponseCycle, ...] = ()
    _looking: asyncio.TimerHandle | None = None
    _next_probe = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = _Parser(self)
        self._timer = self.loop.call_later(HEAD_SECONDS, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._looking is not None:
            self._looking.cancel()
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays: until all that was asked is answered."""
        waiting = [cycle for cycle in self._cycles if not cycle.response_complete]
        if not waiting or self._is_in_head or waiting[-1].more_body or not all(map(_can_wait, waiting)):
            return False
        waiting[-1].keep_alive = False
        self._looking = self._looking or self.loop.call_later(LOOK_SECONDS, self._look)
        return True

    def _look(self) -> None:
        """Ends the connection of a client that is gone."""
        self._looking = None
        first = next((cycle for cycle in self._cycles if not cycle.response_complete), None)
        if first is None or self.transport.is_closing():
            return
        own = self.transport.get_extra_info("socket")
        if own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED:
            self.transport.abort()
            return
        if not first.response_started and first.scope["http_version"] != "1.0" and self.loop.time() >= self._next_probe:
            self._next_probe = self.loop.time() + PROBE_SECONDS
            self.transport.write(_PROBE)
        self._looking = self.loop.call_later(LOOK_SECONDS, self._look)

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._num_other_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # trailers would be added to what the head had
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._num_other_bytes = 0
        super().on_body(body)

    @property
    def is_asking_for_more(self) -> bool:
        """Whether the request is one that another protocol was asked for with."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def plain_head(self) -> bytes:
        """The request's head, without that."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"%s %s HTTP/%s\r\n%s\r\n" % (self.parser.get_method(), self.url, version, b"".join(lines))

    def on_headers_complete(self) -> None:
        if self.is_asking_for_more:
            return
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()
        self._cycles = (*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle)
        if self.parser.get_http_version() == "1.0" and self.cycle.scope["method"] != "HEAD":
            _send_as_it_is(self.cycle)

    def on_message_complete(self) -> None:
        self._num_other_bytes = 0
        if not self.is_asking_for_more:
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._timer is None and all(cycle.response_complete for cycle in self._cycles):
            self._timer = self.loop.call_later(HEAD_SECONDS, self._expire)
        self._num_other_bytes += len(data)
        super().data_received(data)
        if self._num_other_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if self._is_in_head:
                self.send_400_response(f"The request's head is longer than {MAX_HEAD_BYTES} bytes.")
            elif self.cycle.response_started:
                self.transport.close()
            else:
                self.send_400_response(f"The request's trailers, or an extension of its chunks, are longer than {MAX_HEAD_BYTES} bytes.")

    def _expire(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._is_in_head:
            self.send_400_response(f"The request's head did not arrive within {HEAD_SECONDS:g} s.")
        else:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _can_wait(cycle: RequestResponseCycle) -> bool:
    """Clients of HTTP/1.0 would take a probe for the answer: what they ask that takes long ends with their side of the connection."""
    return cycle.scope["http_version"] != "1.0" or cycle.scope["method"] in ("GET", "HEAD")


def _send_as_it_is(cycle: RequestResponseCycle) -> None:
    """An answer without a length ends with its connection, as HTTP/1.0 has it."""
    send, has_length = cycle.send, False

    async def send_as_it_is(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)  # type: ignore[arg-type]

    cycle.send = send_as_it_is  # type: ignore[method-assign, assignment]
