"""The decoupled `decode` model: requests from Triton go to the engine, its deltas go back as responses.

Three threads beside the server's own: the engine's, a sender (each send is a blocking round trip to the server) and a watcher
(which asks for keep-alives and cancellation checks of requests that send nothing, and publishes metrics).

Only the sender thread touches a request's response sender: the server crashed (segmentation fault in
TRITONBACKEND_ResponseFactoryIsCancelled, release 24.10) when `is_cancelled` ran beside the final `send`.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import math
import queue
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import triton_python_backend_utils as pb_utils

from backend.adapters.draft_io import BlsDraftService
from backend.adapters.metrics import MetricsPublisher
from backend.adapters.request_io import Answer, CancelCall, read_request
from backend.adapters.stub import check_interpreter, end_with_server, log_to_server, model_folder, read_parameters, resolve_model
from backend.config import EngineConfig
from backend.core import Delta
from backend.engine import Engine
from backend.errors import CapacityError, EngineError

logger = logging.getLogger(__name__)

DRAFTER_MODEL = "mtp_drafter"
DRAFTER_FOLDER = "../../mtp_drafter/1"
"""Relative to the version folder."""
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
KEEP_ALIVE_SECONDS = 1.5
"""A streamed request that has nothing to say for this long gets an empty response, so that a client can tell waiting from dead."""
DRAIN_FILE = "drain"
"""In the version folder. Whoever stops the server writes it: the seconds for which open requests may go on. New ones are refused; when
none is open the engine ends, what it keeps is saved, and the file is removed. A file, since the server itself refuses nobody until it stops,
does not wait for streams, and may never come to `finalize`: a stream that its client left at a bad moment holds the model (see finalize)."""
WATCH_SECONDS = 0.1
JOIN_SECONDS = 10.0
MAX_CHECKS_PER_WATCH = 64
"""Quiet requests whose cancellation is looked at each time, in turn; each look is a round trip."""


@dataclass(slots=True, eq=False)
class _Exchange:
    """One Triton request and the way back to its client."""

    key: str
    client_id: str
    sender: Any
    num_open: int
    is_streamed: bool = True
    answer: Answer = field(default_factory=Answer)
    last_sent: float = 0.0
    is_cancelled: bool = False
    is_due: bool = False
    """The sender is to look at it, and has not come to it yet."""


_News = tuple[_Exchange, Delta | None]
"""What to tell a client; None: look whether it is still there."""


class TritonPythonModel:
    """What the server loads."""

    def initialize(self, args: dict[str, str]) -> None:
        check_interpreter()
        end_with_server()
        log_to_server()
        values = read_parameters(args)
        values["model"] = resolve_model(values, args)
        if args["model_instance_kind"] == "GPU" and "device" not in values:
            values["device"] = f"cuda:{args['model_instance_device_id']}"
        config = EngineConfig.from_dict(values, f"{args['model_name']}: ")
        speculative = config.speculative_config
        service = BlsDraftService(DRAFTER_MODEL) if speculative.placement == "bls" else None
        if "mtp" in speculative.loaded_methods:
            drafter = str((model_folder(args) / (speculative.model or DRAFTER_FOLDER)).resolve())
            config = dataclasses.replace(config, speculative_config=dataclasses.replace(speculative, model=drafter))
        self._engine = Engine(config, draft_service=service)
        self._keys = itertools.count()
        self._exchanges: dict[str, _Exchange] = {}
        self._lock = threading.Lock()
        self._made: list[_News] = []  # by the engine's thread, in the step that runs
        self._outbox: queue.SimpleQueue[list[_News] | None] = queue.SimpleQueue()
        self._is_stopping = threading.Event()
        self._drain_file = model_folder(args) / DRAIN_FILE
        self._drain_end: float | None = None
        self._publisher = MetricsPublisher(self._engine, args["model_name"])
        self._publisher.publish()
        self._sender = threading.Thread(target=self._send_all, name="sender", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._sender.start()
        self._watcher.start()
        self._engine.after_deltas = self._hand_over
        # Full collections look at what came since alone: they come while requests run, and no step begins meanwhile (100 ms, measured).
        gc.freeze()
        self._engine.start()

    def _hand_over(self) -> None:
        """One wake-up of the sender for all that a step made."""
        if self._made:
            self._outbox.put(self._made)
            self._made = []

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
                self._cancel(call, client_id, sender)
                return
            prompt = call.prompt
            if call.is_chat:  # the template writes the special tokens itself
                prompt = self._engine.tokenizer.encode(self._engine.tokenizer.render_chat(prompt), add_special_tokens=False)
            key = f"{client_id}#{next(self._keys)}"  # clients may use an id twice
            exchange = _Exchange(key, client_id, sender, call.params.n, call.is_streamed, last_sent=time.monotonic())
            with self._lock:
                self._exchanges[key] = exchange
            self._engine.submit(
                prompt,
                call.params,
                lambda delta: self._made.append((exchange, delta)),
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

    def _cancel(self, call: CancelCall, client_id: str, sender: Any) -> None:
        """Ends every open request with that id; the answer's finish_reason is `cancelled` when there was one, else `stop`.

        The answer comes from the engine's thread, when they have ended: an unknown id asks whether that thread steps.
        """
        with self._lock:
            found = [e for e in self._exchanges.values() if e.client_id == call.target_id]
        count = sum(self._engine.cancel(e.key) for e in found)
        answer = Delta(call.target_id, finish_reason="cancelled" if count else "stop")
        exchange = _Exchange(f"{client_id}#{next(self._keys)}", client_id, sender, num_open=1)
        self._engine.call(lambda: self._made.append((exchange, answer)))

    # -- sender thread ----------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        """Sends what the engine made, one response per request and step; steps that piled up meanwhile go together."""
        is_open = True
        while is_open:
            groups = [self._outbox.get()]
            while not self._outbox.empty():
                groups.append(self._outbox.get())
            is_open = None not in groups
            merged: dict[tuple[str, int], tuple[_Exchange, Answer]] = {}
            for exchange, delta in itertools.chain.from_iterable(filter(None, groups)):
                if delta is None or delta.error is not None:
                    merged[f"{exchange.key}!", len(merged)] = (exchange, Answer([delta] if delta else []))
                else:
                    merged.setdefault((exchange.key, delta.index), (exchange, Answer()))[1].add(delta)
            for exchange, answer in merged.values():
                try:
                    self._send(exchange, answer)
                except Exception:
                    logger.exception("request %r: the response could not be sent", exchange.client_id)
                    self._engine.cancel(exchange.key)

    def _send(self, exchange: _Exchange, answer: Answer) -> None:
        """Sends one completion's news; with none: looks whether the client is still there, and tells it that the server is."""
        if exchange.num_open == 0:
            return  # its end was sent: the response sender is not to be touched any more
        now = time.monotonic()
        if not answer.deltas:
            exchange.is_due = False
            self._check_cancelled(exchange)
            if now - exchange.last_sent <= KEEP_ALIVE_SECONDS:
                return
            exchange.last_sent = now
            if exchange.is_streamed:
                exchange.sender.send(pb_utils.InferenceResponse(Answer([Delta(exchange.key)]).tensors()))
            return
        self._publisher.num_responses += 1
        (delta,) = answer.deltas
        if delta.error is not None:
            self._close(exchange)
            exchange.num_open = 0
            self._engine.cancel(exchange.key)  # its siblings, if it has any
            self._send_error(exchange.sender, exchange.client_id, delta.error)
            return
        if delta.is_final:
            exchange.num_open -= 1
        is_last = exchange.num_open == 0
        if is_last:
            self._close(exchange)
        else:
            self._check_cancelled(exchange)
        if not exchange.is_streamed:
            exchange.answer.add(delta)
            if not is_last:
                return
            answer = exchange.answer
        exchange.last_sent = now
        exchange.sender.send(pb_utils.InferenceResponse(answer.tensors()), flags=FINAL if is_last else 0)

    def _check_cancelled(self, exchange: _Exchange) -> None:
        if not exchange.is_cancelled and exchange.sender.is_cancelled():
            exchange.is_cancelled = True
            self._engine.cancel(exchange.key)

    def _close(self, exchange: _Exchange) -> None:
        with self._lock:
            self._exchanges.pop(exchange.key, None)

    def _send_error(self, sender: Any, client_id: str, error: Exception) -> None:
        if isinstance(error, CapacityError | EngineError):
            name = "UNAVAILABLE"
        elif isinstance(error, ValueError):
            name = "INVALID_ARG"
        else:
            name = "INTERNAL"
            logger.exception("request %r failed", client_id, exc_info=error)
        self._publisher.count_error(name)
        # gRPC streams carry the message alone, so it names the code too.
        message = f"[{name}] request {client_id!r:.100}: {error}"
        sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, name))), flags=FINAL)

    # -- watcher thread ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        turn = 0
        while not self._is_stopping.wait(WATCH_SECONDS):
            now = time.monotonic()
            with self._lock:
                quiet = [e for e in self._exchanges.values() if now - e.last_sent > WATCH_SECONDS and not e.is_cancelled and not e.is_due]
            due = [e for e in quiet if now - e.last_sent > KEEP_ALIVE_SECONDS] or quiet[turn : turn + MAX_CHECKS_PER_WATCH]
            if due:
                for exchange in due:  # once: a sender that is late must not get the same work again and again
                    exchange.is_due = True
                self._outbox.put([(e, None) for e in due])
            turn = turn + MAX_CHECKS_PER_WATCH if turn + MAX_CHECKS_PER_WATCH < len(quiet) else 0
            try:
                self._publisher.publish()
            except Exception:
                logger.exception("metrics could not be published")
            try:
                self._drain(now)
            except (OSError, ValueError, EngineError):
                logger.exception("%s", self._drain_file)

    def _drain(self, now: float) -> None:
        if not self._drain_file.exists():
            return
        if self._drain_end is None:
            seconds = float(self._drain_file.read_text())
            self._drain_end = now + seconds
            self._engine.refuse()
            logger.info("shutting down: no new requests; %d open ones have %g s", len(self._exchanges), seconds)
        elif not self._exchanges:
            self._shut_down()
            self._drain_file.unlink()
        elif now >= self._drain_end:
            error = EngineError("the server is shutting down, and the time for open requests is over")
            self._engine.call(lambda: self._engine.end_all(error))
            self._drain_end = math.inf

    def _shut_down(self) -> None:
        """Ends the engine, which saves what it keeps, and sends what it made last: requests that are still open get an error."""
        gc.unfreeze()  # the interpreter's end hung one time in five without (measured)
        self._engine.shutdown()
        self._outbox.put(None)
        self._sender.join(JOIN_SECONDS)
        self._is_stopping.set()

    def finalize(self) -> None:
        """Nothing calls the server after this.

        Not called while the server's gRPC front end holds a request whose stream was cancelled just as its answer ended (release 24.10:
        the front end then waits for an answer that it has had).
        """
        self._shut_down()
        self._watcher.join(JOIN_SECONDS)
