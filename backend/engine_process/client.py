"""The engine's process, as the one that Triton has knows it. Imports nothing of the engine's."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from backend.engine_process.calls import CorpusCall, GenerateCall
from backend.engine_process.line import Line
from backend.engine_process.news import News, unpack
from backend.engine_process.setup import Setup
from backend.errors import ConfigError, EngineError, ModelError, RequestError
from backend.own_process import command

logger = logging.getLogger(__name__)

ASK_SECONDS = 20.0
SILENT_SECONDS = 2.0
"""After which a process that is asked ten times a second, and has said nothing, does not run."""
LOOK_SECONDS = 0.1
END_SECONDS = 15.0
"""For the process to end by itself."""
FAILURES = {kind.__name__: kind for kind in (ConfigError, ModelError, EngineError)}

OnNews = Callable[[list[News]], object]


def start_process(connection: Connection[bytes, bytes]) -> subprocess.Popen[bytes]:
    """The engine's process, at the other end of a pair that this process then forgets."""
    number = connection.fileno()
    arguments = str(number), str(os.getpid())
    process = subprocess.Popen([*command("backend.engine_process.main"), *arguments], stdin=subprocess.DEVNULL, pass_fds=[number])
    connection.close()
    return process


class EngineClient:
    """Starts the process. Safe from any thread once it is loaded."""

    def __init__(
        self,
        on_news: OnNews,
        on_lost: Callable[[str], object],
        *,
        greet: Callable[[int, dict[str, Any]], object] | None = None,
        kill: Callable[[int], object] | None = None,
        draft: Callable[[int, Any], object] | None = None,
    ) -> None:
        """on_news: told on the client's thread, which must not be kept; on_lost: told why nothing more comes, unless `close` was called.
        greet, kill: ranks that are other instances (`backend.group.Greeting`, `Group.on_silent`); draft: a call of the drafter's model, which
        `send_drafts` answers."""
        self._on_news, self._on_lost = on_news, on_lost
        self._handlers: dict[str, Callable[..., object]] = {"news": self._take_news, "log": _log, "answer": self._take_answer}
        for kind, handler in (("greet", greet), ("silent", kill), ("draft", draft)):
            if handler is not None:
                self._handlers[kind] = handler
        own, other = Pipe()
        self._line = Line(own)
        self._process = start_process(other)
        self._numbers = itertools.count()
        self._asked: dict[int, queue.SimpleQueue[tuple[Any, str]]] = {}
        self._is_closed = self._is_lost = False
        self._last_heard = time.monotonic()

    def load(self, setup: Setup, check: Callable[[], None] = lambda: None) -> int:
        """-> the context's length. check: called again and again; what it raises ends the process. Raises what that and the engine's loading
        raise, ModelError where its process ends."""
        self._line.send("load", setup)
        while True:
            while not self._line.has_news(LOOK_SECONDS):
                try:
                    check()
                except Exception:
                    self._process.kill()  # what it waits for will not come
                    self.close()
                    raise
            message = self._line.receive()
            if message is None:
                raise ModelError(f"the engine's process ended while it loaded ({self._status()}): its output says more")
            if message.kind == "ready":
                break
            if message.kind == "failed":
                self.close()
                kind, why = message.values
                raise FAILURES.get(kind, RuntimeError)(why)
            self._deal_with(message.kind, message.values)
        threading.Thread(target=self._read, name="engine line", daemon=True).start()
        return message.values[0]

    def submit(self, number: int, key: str, call: GenerateCall | CorpusCall, seconds: float | None) -> None:
        """number: by which its news come; key: the engine's name for it; seconds: until its deadline. Raises EngineError, RequestError."""
        try:
            self._send("submit", number, key, call, seconds)
        except RecursionError:  # half of what JSON's parser takes; nothing was sent
            raise RequestError("the request has JSON that is nested too deeply; some 400 levels are taken") from None

    def end(self, number: int, key: str) -> None:
        """Cancels a request. Its news come as ever."""
        self._line.send("end", number, key)

    def cancel(self, number: int, key: str, found: Sequence[tuple[int, str]], is_refusing: bool) -> None:
        """`EngineHost._on_cancel`. Raises EngineError."""
        self._send("cancel", number, key, list(found), is_refusing)

    def describe(self, number: int, key: str, sampling_defaults: dict[str, Any]) -> None:
        """Raises EngineError."""
        self._send("describe", number, key, sampling_defaults)

    def send_drafts(self, number: int, answer: Any) -> None:
        self._line.send("drafted", number, answer)

    def ask(self, what: str, *values: Any, seconds: float = ASK_SECONDS) -> Any:
        """What an `EngineHost._do_` returns. Raises EngineError where there is no answer, TimeoutError where there is none for so long."""
        number = next(self._numbers)
        answer: queue.SimpleQueue[tuple[Any, str]] = queue.SimpleQueue()
        self._asked[number] = answer
        try:
            self._send("ask", number, what, *values)
            if self._is_lost:  # it may have ended before it was asked
                raise EngineError("the engine's process has ended")
            value, error = answer.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"{what}: the engine's process has not answered for {seconds:g} s") from None
        finally:
            del self._asked[number]
        if error:
            raise EngineError(f"{what}: {error}")
        return value

    def is_alive(self) -> bool:
        """Whether it has said something lately: it is asked for its counts ten times a second."""
        return time.monotonic() - self._last_heard < SILENT_SECONDS

    def close(self) -> None:
        """Ends the process."""
        self._is_closed = True
        self._line.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, *message: Any) -> None:
        if not self._line.send(*message):
            raise EngineError("the engine's process has ended")

    def _read(self) -> None:
        while (message := self._line.receive()) is not None:
            self._last_heard = time.monotonic()
            self._deal_with(message.kind, message.values)
        self._is_lost = True
        for answer in list(self._asked.values()):
            answer.put((None, "the engine's process has ended"))
        if not self._is_closed:
            self._on_lost(f"the engine's process has ended ({self._status()})")

    def _deal_with(self, kind: str, values: tuple[Any, ...]) -> None:
        try:
            self._handlers[kind](*values)
        except Exception as error:
            logger.exception("a message %r of the engine's process could not be dealt with", kind)
            if kind == "news":  # somebody would wait for it for ever
                self._on_lost(f"what the engine's process said could not be read: {type(error).__name__}: {error}")

    def _take_news(self, packed: list[tuple[Any, ...]]) -> None:
        self._on_news(unpack(packed))

    def _take_answer(self, number: int, value: Any, error: str) -> None:
        with contextlib.suppress(KeyError):  # nobody waits any more
            self._asked[number].put((value, error))

    def _status(self) -> str:
        try:
            return f"status {self._process.wait(END_SECONDS)}"
        except subprocess.TimeoutExpired:
            return "it runs, and has closed its line"


def _log(level: int, text: str) -> None:
    logger.log(level, "%s", text)
