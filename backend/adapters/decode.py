"""The decoupled `decode` model: requests from Triton go to the engine, its deltas go back as responses.

Three threads beside the server's own: the engine's, a sender (each send is a blocking round trip to the server) and a watcher
(cancellation of requests that send nothing, keep-alive, metrics).
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import triton_python_backend_utils as pb_utils

from backend.adapters.metrics import MetricsPublisher
from backend.adapters.request_io import Answer, CancelCall, GenerateCall, read_request
from backend.adapters.stub import check_interpreter, log_to_server, read_parameters, resolve_model
from backend.config import EngineConfig
from backend.core import Delta
from backend.engine import Engine
from backend.errors import CapacityError, EngineError

logger = logging.getLogger(__name__)

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
KEEP_ALIVE_SECONDS = 2.0
"""A streamed request that has nothing to say for this long gets an empty response, so that a client can tell waiting from dead."""
WATCH_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class _Exchange:
    """One Triton request and the way back to its client."""

    key: str
    client_id: str
    sender: Any
    call: GenerateCall
    num_open: int
    answer: Answer = field(default_factory=Answer)
    last_sent: float = 0.0
    is_cancelled: bool = False


class TritonPythonModel:
    """What the server loads."""

    def initialize(self, args: dict[str, str]) -> None:
        check_interpreter()
        log_to_server()
        values = read_parameters(args)
        values["model"] = resolve_model(values, args)
        if args["model_instance_kind"] == "GPU" and "device" not in values:
            values["device"] = f"cuda:{args['model_instance_device_id']}"
        # Torch's threads spin between operations; without a core of their own, server and client halve the engine's speed.
        values.setdefault("num_threads", max(1, len(os.sched_getaffinity(0)) - 1))
        self._engine = Engine(EngineConfig.from_dict(values, f"{args['model_name']}: "))
        self._keys = itertools.count()
        self._exchanges: dict[str, _Exchange] = {}
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[tuple[_Exchange, Delta | None] | None] = queue.SimpleQueue()
        self._is_stopping = threading.Event()
        self._publisher = MetricsPublisher(self._engine, args["model_name"])
        self._publisher.publish()
        self._threads = [threading.Thread(target=f, name=n, daemon=True) for n, f in (("sender", self._send_all), ("watcher", self._watch))]
        for thread in self._threads:
            thread.start()
        self._engine.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._take(request)

    def _take(self, request: Any) -> None:
        sender = request.get_response_sender()
        client_id = request.request_id() or uuid.uuid4().hex
        exchange = None
        try:
            call = read_request(request)
            if isinstance(call, CancelCall):
                self._cancel(call.target_id, sender)
                return
            prompt = call.prompt
            if call.is_chat:  # the template writes the special tokens itself
                prompt = self._engine.tokenizer.encode(self._engine.tokenizer.render_chat(prompt), add_special_tokens=False)
            key = f"{client_id}#{next(self._keys)}"  # clients may use an id twice
            exchange = _Exchange(key, client_id, sender, call, call.params.n, last_sent=time.monotonic())
            with self._lock:
                self._exchanges[key] = exchange
            self._engine.submit(
                prompt,
                call.params,
                lambda delta: self._outbox.put((exchange, delta)),
                request_id=key,
                speculative=call.speculative,
                priority=call.priority,
                timeout=call.timeout,
            )
        except Exception as error:  # whatever it is, it belongs to this request only
            if exchange is not None:
                with self._lock:
                    self._exchanges.pop(exchange.key, None)
            self._send_error(sender, client_id, error)

    def _cancel(self, target_id: str, sender: Any) -> None:
        """Ends every open request with that id; the answer says how many there were."""
        with self._lock:
            found = [e for e in self._exchanges.values() if e.client_id == target_id]
        count = sum(self._engine.cancel(e.key) for e in found)
        answer = Answer([Delta(target_id, text="", finish_reason="cancelled" if count else "stop")])
        sender.send(pb_utils.InferenceResponse(answer.tensors()), flags=FINAL)

    # -- sender thread ----------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        while (item := self._outbox.get()) is not None:
            exchange, delta = item
            try:
                self._send(exchange, delta)
            except Exception:
                logger.exception("request %r: the response could not be sent", exchange.client_id)
                self._engine.cancel(exchange.key)

    def _send(self, exchange: _Exchange, delta: Delta | None) -> None:
        if exchange.num_open == 0:
            return  # a sibling's error, or a keep-alive that came late
        if delta is None:
            keep_alive = Answer([Delta(exchange.key, call_index) for call_index in range(1)])
            exchange.sender.send(pb_utils.InferenceResponse(keep_alive.tensors()))
            return
        if delta.error is not None:
            self._close(exchange)
            exchange.num_open = 0
            self._send_error(exchange.sender, exchange.client_id, delta.error)
            return
        if delta.is_final:
            exchange.num_open -= 1
        is_last = exchange.num_open == 0
        if is_last:
            self._close(exchange)
        elif not exchange.is_cancelled and exchange.sender.is_cancelled():
            exchange.is_cancelled = True
            self._engine.cancel(exchange.key)
        flags = FINAL if is_last else 0
        if exchange.call.is_streamed:
            exchange.last_sent = time.monotonic()
            exchange.sender.send(pb_utils.InferenceResponse(Answer([delta]).tensors()), flags=flags)
            return
        exchange.answer.add(delta)
        if is_last:
            exchange.sender.send(pb_utils.InferenceResponse(exchange.answer.tensors()), flags=flags)

    def _close(self, exchange: _Exchange) -> None:
        with self._lock:
            self._exchanges.pop(exchange.key, None)

    @staticmethod
    def _send_error(sender: Any, client_id: str, error: Exception) -> None:
        codes = pb_utils.TritonError
        if isinstance(error, CapacityError | EngineError):
            code = codes.UNAVAILABLE
        elif isinstance(error, ValueError):
            code = codes.INVALID_ARG
        else:
            code = codes.INTERNAL
            logger.exception("request %r failed", client_id, exc_info=error)
        message = str(error)
        if not message.startswith("request "):
            message = f"request {client_id!r:.100}: {message}"
        sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code)), flags=FINAL)

    # -- watcher thread ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_stopping.wait(WATCH_SECONDS):
            now = time.monotonic()
            with self._lock:
                quiet = [e for e in self._exchanges.values() if now - e.last_sent > WATCH_SECONDS and not e.is_cancelled]
            for exchange in quiet:
                try:
                    if exchange.sender.is_cancelled():
                        exchange.is_cancelled = True
                        self._engine.cancel(exchange.key)
                    elif exchange.call.is_streamed and now - exchange.last_sent > KEEP_ALIVE_SECONDS:
                        exchange.last_sent = now
                        self._outbox.put((exchange, None))
                except Exception:
                    logger.exception("request %r: its state could not be read", exchange.client_id)
            self._publisher.publish()

    def finalize(self) -> None:
        """Ends the engine; requests that are still open get an error."""
        self._engine.shutdown()
        self._is_stopping.set()
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(10)
