"""A rank other than 0 as an instance of `decode`: it has rank 0's plans run, and passes on to rank 0 the requests that Triton gives it.

Two threads beside the server's own: one has the rank, which is a process of its own, the other owns the ways back to clients (see
`backend.adapters.responses`: one thread alone touches a response sender).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from backend.adapters.relay import FINAL, pack, unpack
from backend.adapters.stub import refuse
from backend.errors import EngineError, ModelError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
MAX_LOOKS = 64
"""Requests whose cancellation is looked at each time, in turn; each look is a round trip to the server."""
JOIN_SECONDS = 15.0

RunRank = Callable[[dict[str, Any], Callable[[dict[str, Any]], None], Callable[[str], None]], None]
"""`backend.rank_processes.follow_in_process`, or `backend.follower.run_rank`."""


def _bytes_of(read: Callable[[], str]) -> bytes:
    """What Triton has as a text, which need not be one."""
    try:
        return read().encode()
    except UnicodeDecodeError as error:
        return error.object


@dataclass(slots=True, eq=False)
class _Open:
    """A request that rank 0 has."""

    sender: Any
    name: str
    is_cancelled: bool = False
    """Rank 0 was told."""


class RankInstance:
    """What the server's calls mean to such an instance."""

    def __init__(self, rank: int, socket: Path, run: RunRank, meet_seconds: float, check: Callable[[], None] = lambda: None) -> None:
        """Meets rank 0, and is ready when rank 0's plans can be run. check: raises where another instance is gone. Raises ModelError."""
        self._rank, self._run = rank, run
        self._numbers = itertools.count()
        self._open: dict[int, _Open] = {}
        self._lock, self._send_lock = threading.Lock(), threading.Lock()
        self._is_stopping, self._is_ready = threading.Event(), threading.Event()
        self._failure: Exception | None = None
        self._lost = ""
        self._turn = 0
        end = time.monotonic() + meet_seconds
        self._connection = self._connect(socket, end, check)
        spec = self._read_spec(end, check)
        self._thread = threading.Thread(target=self._be_rank, args=(spec,), name=f"rank {rank}", daemon=True)
        self._relay = threading.Thread(target=self._pass_back, name="sender", daemon=True)
        self._thread.start()
        while not self._is_ready.wait(LOOK_SECONDS):
            if self._failure is not None:
                raise ModelError(f"rank {rank}: {self._failure}") from self._failure
            if not self._thread.is_alive():
                raise ModelError(f"rank {rank}: rank 0 has ended")
            check()
        self._relay.start()

    def _connect(self, socket: Path, end: float, check: Callable[[], None]) -> Connection[bytes, bytes]:
        while True:
            try:
                connection = Client(str(socket), "AF_UNIX")
                connection.send_bytes(pack({"rank": self._rank}))
                return connection
            except OSError as error:  # rank 0 has not come to it yet
                if time.monotonic() > end:
                    raise ModelError(f"rank {self._rank}: rank 0 did not come to {socket}: {error}") from None
            check()
            time.sleep(0.05)

    def _read_spec(self, end: float, check: Callable[[], None]) -> dict[str, Any]:
        try:
            while not self._connection.poll(LOOK_SECONDS):
                if time.monotonic() > end:
                    raise ModelError(f"rank {self._rank}: rank 0 has not said what to load")
                check()
            head, _ = unpack(self._connection.recv_bytes())
        except (OSError, EOFError):
            raise ModelError(f"rank {self._rank}: rank 0 has ended") from None
        if head["kind"] == "end":
            raise ModelError(f"rank {self._rank}: rank 0 has ended: {head['why']}")
        return head["spec"]

    def _be_rank(self, spec: dict[str, Any]) -> None:
        def note(report: dict[str, Any]) -> None:
            if report.get("ready"):
                self._is_ready.set()

        try:
            self._run(spec, note, self._note_lost)
        except Exception as error:
            self._failure = error
            logger.exception("rank %d has ended", self._rank)

    def _note_lost(self, why: str) -> None:
        self._lost = f"rank {self._rank} cannot go on: {why}"

    # -- the server's thread ------------------------------------------------------------------------------------------

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._pass_on(request)

    def _pass_on(self, request: Any) -> None:
        sender = request.get_response_sender()
        request_id, parameters = (_bytes_of(read) for read in (request.request_id, request.parameters))
        arrays = [(tensor.name(), tensor.as_numpy()) for tensor in request.inputs()]
        number = next(self._numbers)
        with self._lock:
            self._open[number] = _Open(sender, request_id.decode("utf-8", "backslashreplace"))
        self._tell(pack({"kind": "request", "number": number, "id": request_id.hex(), "parameters": parameters.hex()}, arrays))

    def finalize(self) -> None:
        """Rank 0 cannot go on without this rank: it is told to end first."""
        self._tell(pack({"kind": "leaving"}))
        self._thread.join(JOIN_SECONDS)
        self._is_stopping.set()
        self._relay.join(JOIN_SECONDS)
        self._connection.close()

    def _tell(self, message: bytes) -> None:
        try:
            with self._send_lock:
                self._connection.send_bytes(message)
        except OSError:  # rank 0 has ended: the other thread finds that too, and ends what is open
            pass

    # -- the thread of the response senders -----------------------------------------------------------------------------

    def _pass_back(self) -> None:
        why = ""
        while not self._is_stopping.is_set() or self._open:
            if not why:
                why = self._read()
            else:
                self._refuse_all(why)
                self._is_stopping.wait(LOOK_SECONDS)

    def _read(self) -> str:
        """What has come -> why nothing will any more."""
        if self._lost:
            return self._lost
        try:
            begin = time.monotonic()
            while time.monotonic() < begin + LOOK_SECONDS and self._connection.poll(LOOK_SECONDS):
                head, arrays = unpack(self._connection.recv_bytes())
                if head["kind"] == "end":
                    return head["why"]
                self._answer(head, arrays)
        except (OSError, EOFError):
            return "rank 0 has ended"
        self._look_for_clients()
        return ""

    def _answer(self, head: dict[str, Any], arrays: list[tuple[str, np.ndarray]]) -> None:
        with self._lock:
            request = self._open.pop(head["number"], None) if head["is_final"] else self._open.get(head["number"])
        if request is None:
            return  # it could not be told before
        response = None
        if "error" in head:
            message, code = head["error"]
            response = pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code)))
        elif head["has_response"]:
            response = pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays])
        self._send(head["number"], request, response, head["is_final"])

    def _send(self, number: int, request: _Open, response: Any, is_final: bool) -> None:
        try:
            flags = FINAL if is_final else 0
            request.sender.send(response, flags=flags) if response is not None else request.sender.send(flags=flags)
        except Exception:
            logger.exception("request %r: the response could not be sent", request.name)
            with self._lock:
                self._open.pop(number, None)
            self._tell(pack({"kind": "cancelled", "number": number}))

    def _look_for_clients(self) -> None:
        with self._lock:
            items = [item for item in self._open.items() if not item[1].is_cancelled]
        for number, request in items[self._turn : self._turn + MAX_LOOKS]:
            if request.sender.is_cancelled():
                request.is_cancelled = True
                self._tell(pack({"kind": "cancelled", "number": number}))
        self._turn = self._turn + MAX_LOOKS if self._turn + MAX_LOOKS < len(items) else 0

    def _refuse_all(self, why: str) -> None:
        with self._lock:
            found, self._open = self._open, {}
        for number, request in found.items():
            self._send(number, request, refuse(request.name, EngineError(why)), is_final=True)
