"""uvicorn's HTTP protocol with a limit on a request's head, which it would keep in memory whatever its size, and before any key is asked for."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65536


class LimitedHeadProtocol(HttpToolsProtocol):
    """Answers 400 to a head that goes on for longer, and hangs up."""

    _is_in_head = False
    _num_head_bytes = 0

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data) if self._is_in_head else 0  # what came with the head's beginning is one read at most
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's head is longer than {MAX_HEAD_BYTES} bytes.")
