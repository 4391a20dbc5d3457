"""Requests that Triton hands to the instance of another rank: they cross to rank 0, which answers them, and its responses cross back.

Rank 0 treats them as its own: `RelayedRequest` and `RelayedSender` are what Triton's request and response sender are to it. The other rank
keeps the way to the client, and says when the client is gone. Messages are a line of JSON and raw bytes, over a Unix socket in a folder that
only this user enters.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

logger = logging.getLogger(__name__)

Arrays = list[tuple[str, np.ndarray]]
"""Tensors by name: of numbers, or of bytes (dtype object)."""

CLOSE_SECONDS = 5.0
"""For the last messages to be taken."""
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def pack(head: dict[str, Any], arrays: Sequence[tuple[str, np.ndarray]] = ()) -> bytes:
    """One message."""
    described: list[list[Any]] = []
    parts: list[bytes] = []
    for name, array in arrays:
        if array.dtype == object:
            items = [value.encode() if isinstance(value, str) else bytes(value) for value in array.reshape(-1)]
            described.append([name, "bytes", list(array.shape), [len(item) for item in items]])
            parts += items
        else:
            described.append([name, array.dtype.str, list(array.shape), array.nbytes])
            parts.append(np.ascontiguousarray(array).tobytes())
    return b"".join([json.dumps({**head, "arrays": described}).encode(), b"\n", *parts])


def unpack(message: bytes) -> tuple[dict[str, Any], Arrays]:
    """What `pack` was given."""
    line, _, data = message.partition(b"\n")
    head = json.loads(line)
    arrays, begin = [], 0
    for name, kind, shape, size in head.pop("arrays"):
        if kind == "bytes":
            array = np.empty(len(size), dtype=object)
            for i, length in enumerate(size):
                array[i] = data[begin : begin + length]
                begin += length
        else:
            array = np.frombuffer(data, dtype=kind, count=size // np.dtype(kind).itemsize, offset=begin)
            begin += size
        arrays.append((name, array.reshape(shape)))
    return head, arrays


class RelayedTensor:
    """As Triton's."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class RelayedSender:
    """As Triton's response sender. `is_cancelled` is what the other rank has said of it."""

    def __init__(self, number: int, send: Callable[[bytes], None], forget: Callable[[int], object]) -> None:
        self._number, self._send, self._forget = number, send, forget
        self.is_gone = False

    def is_cancelled(self) -> bool:
        return self.is_gone

    def send(self, response: Any = None, flags: int = 0) -> None:
        head: dict[str, Any] = {"kind": "response", "number": self._number, "is_final": flags == FINAL, "has_response": response is not None}
        arrays: Arrays = []
        if response is not None:
            if response.has_error():
                error = response.error()
                head["error"] = [error.message(), error.code().name]  # by name: the code itself is a type of the server's
            else:
                arrays = [(t.name(), t.as_numpy()) for t in response.output_tensors()]
        self._send(pack(head, arrays))
        if head["is_final"]:
            self._forget(self._number)


class RelayedRequest:
    """As Triton's request."""

    def __init__(self, request_id: bytes, parameters: bytes, arrays: Arrays, sender: RelayedSender) -> None:
        self._id, self._parameters, self._sender = request_id, parameters, sender
        self._tensors = [RelayedTensor(name, array) for name, array in arrays]

    def request_id(self) -> str:
        return self._id.decode()  # which raises as Triton's does

    def parameters(self) -> str:
        return self._parameters.decode()

    def inputs(self) -> list[RelayedTensor]:
        return self._tensors

    def get_response_sender(self) -> RelayedSender:
        return self._sender


class RequestRelay:
    """Rank 0's end: one connection, and two threads, for each other rank."""

    def __init__(self, path: Path) -> None:
        """path: of the socket, in a folder of this user alone. Listens at once; requests wait until `start`."""
        path.unlink(missing_ok=True)
        self._listener = Listener(str(path), "AF_UNIX")
        self._take: Callable[[RelayedRequest], None] | None = None
        self._on_leave: Callable[[], None] = lambda: None
        self._can_take = threading.Event()
        self._is_closed = False
        self._lock, self._leaving = threading.Lock(), threading.Lock()
        self._lines: list[_Line] = []
        self._greeting: dict[int, bytes] = {}
        self._has_greeting = threading.Condition(self._lock)
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def greet(self, rank: int, spec: dict[str, Any]) -> None:
        """What a rank is told first, as soon as it has come."""
        with self._has_greeting:
            self._greeting[rank] = pack({"kind": "spec", "spec": spec})
            self._has_greeting.notify_all()

    def start(self, take: Callable[[RelayedRequest], None], on_leave: Callable[[], None]) -> None:
        """Requests are given to `take`, on threads of the relay; `on_leave` is called for each other rank's instance
        that is being ended, one after the other."""
        self._take, self._on_leave = take, on_leave
        self._can_take.set()

    def kill(self, rank: int) -> None:
        """Ends the process of a rank that hangs: its clients' connections end with the server, which is started anew once a process has died."""
        with self._lock:
            line = next((line for line in self._lines if line.rank == rank and not line.is_over), None)
        if line is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(line.pid, signal.SIGKILL)

    def close(self, why: str) -> None:
        """Tells the other ranks, after all that was sent before."""
        with self._has_greeting:
            self._is_closed = True
            lines = list(self._lines)
            self._has_greeting.notify_all()
        self._can_take.set()
        for line in lines:
            line.put(pack({"kind": "end", "why": why}))
            line.put(None)
        for line in lines:
            line.join()
        with contextlib.suppress(OSError):
            self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError):
                if self._is_closed:
                    return
                continue
            line = _Line(connection)
            with self._lock:
                self._lines.append(line)
            threading.Thread(target=self._read, args=(line,), name="relay reader", daemon=True).start()

    def _read(self, line: _Line) -> None:
        senders: dict[int, RelayedSender] = {}

        def forget(number: int) -> None:
            senders.pop(number, None)

        try:
            rank = line.rank = unpack(line.connection.recv_bytes())[0]["rank"]
            with self._has_greeting:
                self._has_greeting.wait_for(lambda: rank in self._greeting or self._is_closed)
                if (greeting := self._greeting.get(rank)) is not None:  # else it is told why by `close`
                    line.put(greeting)
            self._can_take.wait()
            while not self._is_closed:
                head, arrays = unpack(line.connection.recv_bytes())
                if head["kind"] == "leaving":
                    with self._leaving:
                        self._on_leave()
                elif head["kind"] == "cancelled":
                    if (sender := senders.get(head["number"])) is not None:
                        sender.is_gone = True
                else:
                    senders[head["number"]] = sender = RelayedSender(head["number"], line.put, forget)
                    assert self._take is not None
                    self._take(RelayedRequest(bytes.fromhex(head["id"]), bytes.fromhex(head["parameters"]), arrays, sender))
        except (OSError, EOFError):  # the rank is gone: what it waited for is of no use any more
            for sender in list(senders.values()):
                sender.is_gone = True
        finally:
            line.is_over = True
            if not self._is_closed:  # else `close` says what is the last
                line.put(None)


def _peer_of(connection: Connection[bytes, bytes]) -> int:
    """The process at the other end, as the kernel says."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        return int(struct.unpack("3i", own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0])


class _Line:
    """What goes to one rank, by a thread: one that does not read holds up nobody else."""

    def __init__(self, connection: Connection[bytes, bytes]) -> None:
        self.connection = connection
        self.rank = 0
        self.is_over = False
        self.pid = _peer_of(connection)
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="relay writer", daemon=True)
        self._thread.start()

    def put(self, message: bytes | None) -> None:
        """None: the last."""
        self._queue.put(message)

    def join(self) -> None:
        self._thread.join(CLOSE_SECONDS)

    def _write(self) -> None:
        try:
            while (message := self._queue.get()) is not None:
                self.connection.send_bytes(message)
        except OSError:  # it is gone, as its reader finds too
            pass
