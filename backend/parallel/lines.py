"""Connections between rank 0 and the others: signs of life, orders that are no plans, and for ranks on other hosts the plans too.

Every rank opens a line for orders to rank 0; one of another host, which cannot see rank 0's memory, a second one for plans. A message is its
length and its bytes: JSON on the first kind, int32 words on the second.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from backend.errors import EngineError

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.25
HANG_SECONDS = 3.5
"""Without a sign of life after which a rank is taken for gone: clients are to know within 5 s."""
LOADING_HANG_SECONDS = 60.0
"""The same while ranks load: a call into a library may keep all of Python waiting while it reads from a slow disk."""
MASTER_HANG_SECONDS = 15.0
"""And rank 0 whose process runs (see `Orders`): it answers them, and has a server's work to do beside."""
LAG_SECONDS = 0.5
"""Whoever was kept from looking for longer does not blame others for the time."""
SILENT = "no sign of life"
"""What begins the reason why a rank is lost that has not ended."""
HELLO_SECONDS, WELCOME_SECONDS = 10.0, 60.0
MAX_MESSAGE_BYTES, MAX_HELLO_BYTES = 2**28, 1024
MAX_GREETED, ACCEPT_SECONDS = 64, 0.1
"""Connections that have not said yet whose they are: more wait. And between two tries where none can be taken."""
ORDERS, PLANS = "orders", "plans"

Order = dict[str, Any]

WELCOME, TAKEN = {"do": "welcome"}, {"do": "go"}
"""What rank 0 says first on a line for orders: this process is the rank, or another one is."""


class Line:
    """One connection. Any thread may send; one receives. Both raise ConnectionError when the other side is gone."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._lock = connection, threading.Lock()
        self._news = select.poll()  # unlike select() for any file descriptor
        self._news.register(connection, select.POLLIN)
        self._room = select.poll()
        self._room.register(connection, select.POLLOUT)
        self._received = bytearray()

    def send(self, content: bytes) -> None:
        with self._lock:
            self._write(content)

    def _write(self, content: bytes) -> None:
        """With the lock held."""
        try:
            self._connection.sendall(struct.pack("<I", len(content)) + content)
        except OSError as error:
            raise ConnectionError(str(error)) from None

    def send_order(self, order: Order) -> None:
        self.send(json.dumps(order).encode())

    def offer(self, order: Order) -> None:
        """Sends a short order, or nothing where that would wait: for the other side to read, or for another thread's message."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._room.poll(0):
                self._write(json.dumps(order).encode())
        finally:
            self._lock.release()

    def receive(self, timeout: float | None = None, limit: int = MAX_MESSAGE_BYTES) -> bytes | None:
        """The next message; None: there was none for `timeout` seconds. limit: of its bytes."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            if len(self._received) >= 4:
                (size,) = struct.unpack_from("<I", self._received)
                if size > limit:
                    raise ConnectionError(f"a message of {size} bytes; the limit is {limit}")
                if len(self._received) >= 4 + size:
                    content = bytes(self._received[4 : 4 + size])
                    del self._received[: 4 + size]
                    return content
            try:
                if not self._news.poll(None if end is None else max(0.0, end - time.monotonic()) * 1000):
                    return None
                part = self._connection.recv(2**16)
            except (OSError, ValueError) as error:
                raise ConnectionError(str(error)) from None
            if not part:
                raise ConnectionError("the connection has ended")
            self._received += part

    def receive_order(self, timeout: float | None = None, limit: int = MAX_MESSAGE_BYTES) -> Order | None:
        content = self.receive(timeout, limit)
        if content is None:
            return None
        try:
            order = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ConnectionError(f"no message: {error}") from None
        if not isinstance(order, dict):
            raise ConnectionError("no message")
        return order

    @property
    def own_address(self) -> str:
        return str(self._connection.getsockname()[0])

    def close(self) -> None:
        """From any thread: whoever waits for the other side waits no longer."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class RankTakenError(ConnectionError):
    """Another process is this rank."""


def connect(host: str, port: int, rank: int, kind: str) -> Line:
    """A rank's line to rank 0; the one for orders first, which says whether the process is that rank. Raises RankTakenError, ConnectionError."""
    try:
        connection = socket.create_connection((host, port), timeout=HELLO_SECONDS)
        connection.settimeout(None)
    except OSError as error:
        raise ConnectionError(f"{host}:{port}: {error}") from None
    line = Line(connection)
    line.send_order({"rank": rank, "kind": kind})
    if kind == ORDERS and (answer := line.receive_order(WELCOME_SECONDS)) != WELCOME:
        line.close()
        raise RankTakenError(f"rank {rank} is there already") if answer == TAKEN else ConnectionError(f"{host}:{port}: no answer of rank 0")
    return line


def listen(host: str, port: int) -> socket.socket:
    """At this address alone, of either family. port: 0 takes any. Raises OSError."""
    return socket.create_server((host, port), family=socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0])


class Switchboard:
    """Rank 0's ends. A thread for each rank's orders, and one that says that rank 0 lives and looks who else does."""

    def __init__(self, host: str, size: int, on_lost: Callable[[], None]) -> None:
        """host: address to listen on; on_lost: some rank is gone, see `lost`. Raises OSError."""
        self._size, self._on_lost = size, on_lost
        self._listener = listen(host, 0)
        self._is_listening = True
        self._greeted = threading.Semaphore(MAX_GREETED)
        self.address: str = self._listener.getsockname()[0]
        """That the name of the host stands for here: another host may have another one for it."""
        self.port: int = self._listener.getsockname()[1]
        self._lines: dict[tuple[int, str], Line] = {}
        self._has_changed = threading.Condition()
        self._heard = dict.fromkeys(range(1, size), time.monotonic())
        self._hang_seconds = LOADING_HANG_SECONDS
        self._is_closed = False
        self.lost: dict[int, str] = {}
        """Ranks that are gone, and why."""
        self.num_done: dict[int, int] = {}
        """Steps that ranks of other hosts have computed."""
        self.on_reply: Callable[[int, Order], None] = lambda rank, order: None
        """What a rank answers to orders of others than this. Called by threads of their own."""
        for run in (self._accept, self._beat):
            threading.Thread(target=run, name=f"ranks{run.__name__}", daemon=True).start()

    def wait_for(self, rank: int, kind: str, seconds: float) -> bool:
        """Whether a rank's line is there within so long."""
        with self._has_changed:
            return self._has_changed.wait_for(lambda: (rank, kind) in self._lines, seconds)

    def rest(self) -> None:
        """All ranks have loaded, and nobody is looked after until `watch`: offline there may be minutes between two calls."""
        self._hang_seconds = math.inf

    def watch(self) -> None:
        """From now on a rank that shows no sign of life is soon gone."""
        self._heard = dict.fromkeys(range(1, self._size), time.monotonic())
        for rank in range(1, self._size):
            self.order(rank, {"do": "watch"})
        self._hang_seconds = HANG_SECONDS

    def order(self, rank: int, order: Order) -> None:
        """Raises EngineError where the rank is gone."""
        self._send(rank, ORDERS, json.dumps(order).encode())

    def fail(self, why: str) -> None:
        """Tells the ranks that are there why rank 0 ends."""
        for rank, kind in list(self._lines):
            if kind == ORDERS:
                with contextlib.suppress(EngineError):
                    self.order(rank, {"do": "fail", "why": why})

    def send_words(self, rank: int, words: np.ndarray) -> None:
        """To a rank of another host. Raises EngineError where it is gone."""
        self._send(rank, PLANS, words.astype("<i4").tobytes())

    def _send(self, rank: int, kind: str, content: bytes) -> None:
        line = self._lines.get((rank, kind))
        try:
            if line is None:
                raise ConnectionError("it has no connection")
            line.send(content)
        except ConnectionError as error:
            self.lose(rank, str(error))
            raise EngineError(f"rank {rank} of {self._size} is gone: {self.lost.get(rank, error)}") from None

    def lose(self, rank: int, why: str) -> None:
        """A rank is gone: nobody waits for it any more."""
        if self._is_closed or rank in self.lost:
            return
        self.lost[rank] = why
        for kind in (ORDERS, PLANS):
            if (line := self._lines.get((rank, kind))) is not None:
                line.close()
        self._on_lost()

    def stop_listening(self) -> None:
        """Every rank is there: whoever else comes is no rank."""
        self._is_listening = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        self._is_closed = True
        self.stop_listening()
        for line in list(self._lines.values()):
            line.close()

    # -- its threads --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while self._is_listening:
            self._greeted.acquire()
            try:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._greet, args=(connection,), name="rank", daemon=True).start()
            except (OSError, RuntimeError) as error:  # as many files or threads as there may be, or the end
                self._greeted.release()
                if self._is_listening:
                    logger.warning("a connection could not be taken: %s", error)
                    time.sleep(ACCEPT_SECONDS)

    def _greet(self, connection: socket.socket) -> None:
        line = Line(connection)
        try:
            hello = line.receive_order(HELLO_SECONDS, MAX_HELLO_BYTES) or {}
            rank, kind = hello.get("rank"), hello.get("kind")
            if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank < self._size or kind not in (ORDERS, PLANS):
                raise ConnectionError(f"{hello} is no rank of {self._size}")
        except ConnectionError as error:
            logger.warning("a connection that is none of a rank: %s", error)
            line.close()
            return
        finally:
            self._greeted.release()
        with self._has_changed:
            is_taken = (rank, kind) in self._lines
            if kind == ORDERS:
                with contextlib.suppress(ConnectionError):  # it is gone, as whoever reads finds
                    line.send_order(TAKEN if is_taken else WELCOME)
            if is_taken:
                logger.warning("rank %d of %d is there already", rank, self._size)
                line.close()
                return
            self._heard[rank] = time.monotonic()
            self._lines[rank, kind] = line
            self._has_changed.notify_all()
        if kind == ORDERS:
            self._listen(rank, line)

    def _listen(self, rank: int, line: Line) -> None:
        try:
            while True:
                order = line.receive_order()
                assert order is not None
                self._heard[rank] = time.monotonic()
                if "done" in order:
                    self.num_done[rank] = int(order["done"])
                elif "beat" not in order:
                    self.on_reply(rank, order)
        except ConnectionError as error:
            self.lose(rank, str(error))
        except Exception as error:
            logger.exception("rank %d", rank)
            self.lose(rank, f"{type(error).__name__}: {error}")

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._is_closed:
            last, lag = time.monotonic(), time.monotonic() - last - BEAT_SECONDS
            if lag > LAG_SECONDS:
                for rank in self._heard:
                    self._heard[rank] += lag
            for rank in range(1, self._size):
                line = self._lines.get((rank, ORDERS))
                if line is None or rank in self.lost:
                    continue
                with contextlib.suppress(ConnectionError):
                    line.offer({"do": "beat"})  # one that hangs reads nothing, and may have no room for it
                if (silent := time.monotonic() - self._heard[rank]) > self._hang_seconds:
                    self.lose(rank, f"{SILENT} for {silent:.1f} s")
            time.sleep(BEAT_SECONDS)


class Orders(threading.Thread):
    """A rank's end of its line: obeys, says that it lives, and ends the process when rank 0 is gone, whatever that waits for."""

    def __init__(self, line: Line, silence: Callable[[float], float], on_lost: Callable[[str], None]) -> None:
        """silence: seconds until a time for which rank 0's process has shown no sign of life by what needs no lock of Python's."""
        super().__init__(name="orders", daemon=True)
        self._line, self._silence, self._on_lost = line, silence, on_lost
        self._handlers: dict[str, Callable[[Order], None]] = {"beat": lambda order: None, "watch": self._watch, "fail": self._note_failure}
        self._early: list[Order] = []
        """That nobody can obey yet."""
        self._is_ending = False
        self._failure = ""
        """What rank 0 has said of its end."""
        self.poll: Callable[[], float] = lambda: BEAT_SECONDS
        """Looks at what is under way; seconds until it wants to again."""
        self._heard = time.monotonic()
        self._is_loading, self._is_watching = True, False

    def handle(self, handlers: Mapping[str, Callable[[Order], None]]) -> None:
        """By an order's `do`."""
        self._handlers.update(handlers)

    def rest(self) -> None:
        """As rank 0 does (`Switchboard.rest`)."""
        self._is_loading = False

    def end(self) -> None:
        """Rank 0 has said that it ends: that its connection ends too is no fault."""
        self._is_ending = True

    def reply(self, order: Order) -> None:
        with contextlib.suppress(ConnectionError):
            self._line.send_order(order)

    def run(self) -> None:
        due = 0.0
        try:
            while True:
                now = time.monotonic()
                if now >= due:
                    due = now + BEAT_SECONDS
                    self._line.send_order({"beat": 1})
                order = self._line.receive_order(min(self.poll(), BEAT_SECONDS))
                if order is not None:
                    self._early.append(order)
                    self._heard = time.monotonic()
                    self._obey()
                    if self._failure:
                        raise ConnectionError(self._failure)
                else:
                    silent = now - self._heard  # until then nothing had come, however late this thread runs
                    if self._is_gone(now, silent):
                        raise ConnectionError(f"{SILENT} for {silent:.1f} s")
        except ConnectionError as error:
            if not self._is_ending:
                self._on_lost(f"rank 0: {error}")

    def _is_gone(self, now: float, silent: float) -> bool:
        if self._is_watching:
            return silent > MASTER_HANG_SECONDS or min(silent, self._silence(now)) > HANG_SECONDS
        return self._is_loading and silent > LOADING_HANG_SECONDS

    def _watch(self, order: Order) -> None:
        self._is_watching = True

    def _note_failure(self, order: Order) -> None:
        self._failure = str(order["why"])

    def _obey(self) -> None:
        early, self._early = self._early, []
        for order in early:
            handler = self._handlers.get(str(order.get("do")))
            if handler is None:
                self._early.append(order)
                continue
            try:
                handler(order)
            except Exception:
                logger.exception("order %s", order.get("do"))
