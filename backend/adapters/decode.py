"""The decoupled `decode` model: requests from Triton go to the engine's process, its news come back as responses.

Threads beside the server's own: one that reads what the engine's process says, some that send (backend/adapters/responses.py: each send is a blocking
round trip to the server), a watcher (which asks for keep-alives and cancellation checks of requests that send nothing) and a keeper (which
publishes metrics, and sees to the end).
The engine is in a process of its own (backend/engine_process), since threads of one share Python's lock: at 128 requests its steps and the answers
to them held each other up for a fifth of the time (measured, two H200s).
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
import uuid
from typing import Any

from backend.adapters.draft_calls import DraftCaller
from backend.adapters.exchange import Exchange
from backend.adapters.instance_ranks import claim_instance, follow
from backend.adapters.metrics import MetricsPublisher
from backend.adapters.relay import RequestRelay
from backend.adapters.request_io import CancelCall, DescribeCall, InputLimits, read_id, read_request
from backend.adapters.responses import KEEP_ALIVE_SECONDS, Responses
from backend.adapters.stub import check_interpreter, drain_file, log_to_server, read_engine_config
from backend.config import EngineConfig
from backend.core import Delta
from backend.engine_process.calls import DRAFT_SECONDS, GenerateCall
from backend.engine_process.client import EngineClient
from backend.engine_process.news import News
from backend.engine_process.setup import Setup
from backend.errors import EngineError, describe_error
from backend.own_process import end_with_parent, has_begun
from backend.parallel.claims import Instances
from backend.precedence import take_short_turns
from backend.sampling_defaults import read_sampling_defaults

logger = logging.getLogger(__name__)

DRAFTER_MODEL = "mtp_drafter"
WATCH_SECONDS = 0.1
JOIN_SECONDS = 10.0
SHUT_DOWN_SECONDS = 60.0
"""For the engine to end, and to save what it keeps."""
LAST_SECONDS = 2.0
"""For open requests to be told that the engine's process has died."""
MAX_CHECKS_PER_WATCH = 64
"""Quiet requests whose cancellation is looked at each time, in turn; each look is a round trip."""


class TritonPythonModel:
    """What the server loads."""

    def initialize(self, args: dict[str, str]) -> None:
        check_interpreter()
        end_with_parent()
        log_to_server()
        config = read_engine_config(args)
        self._claim = claim_instance(args, config)
        self._check = Instances(self._claim, config.parallel_config.num_instances).check if self._claim is not None else lambda: None
        self._follower = follow(self._claim, self._check) if self._claim is not None and self._claim.rank else None
        if self._follower is not None:
            return
        self._relay = RequestRelay(self._claim.socket) if self._claim is not None else None
        try:
            self._load(args, config)
        except Exception as error:
            if self._relay is not None:
                self._relay.close(describe_error(error))
            raise
        if self._relay is not None:
            self._relay.start(self._take, self._shut_down)

    def _load(self, args: dict[str, str], config: EngineConfig) -> None:
        take_short_turns()
        self._numbers = itertools.count()
        self._exchanges: dict[int, Exchange] = {}
        """Every request whose final response was not sent, by its number."""
        self._lock = threading.Lock()
        self._is_stopping = threading.Event()
        self._is_refusing = False
        self._drain_file = drain_file(args)
        self._drain_end: float | None = None
        relay, drafter = self._relay, None
        if calls_drafter := config.speculative_config.placement == "bls":
            drafter = DraftCaller(DRAFTER_MODEL, DRAFT_SECONDS, lambda number, answer: self._engine.send_drafts(number, answer))
        self._engine = EngineClient(
            self._take_news,
            self._end_all,
            greet=relay.greet if relay is not None else None,
            kill=relay.kill if relay is not None else None,
            draft=drafter.put if drafter is not None else None,
        )
        self._publisher = MetricsPublisher(args["model_name"], lambda: self._engine.ask("counts"))
        self._responses = Responses(self._publisher, self._end_early, self._forget, self._engine.is_alive)
        self._responses.start()
        self._limits = InputLimits(self._engine.load(Setup(config, calls_drafter, relay is not None), self._check))
        self._sampling_defaults = read_sampling_defaults(config.model) if config.generation_config == "auto" else {}
        self._publisher.publish()
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for run, name in ((self._watch, "watcher"), (self._keep, "keeper"))]
        for thread in self._threads:
            thread.start()
        has_begun()

    def execute(self, requests: list[Any]) -> None:
        if self._follower is not None:
            self._follower.execute(requests)
            return
        for request in requests:
            self._take(request)

    def _take(self, request: Any) -> None:
        """Copies what the request holds, and passes it on."""
        number = next(self._numbers)
        exchange = Exchange(request.get_response_sender(), number, last_sent=time.monotonic())
        with self._lock:
            self._exchanges[number] = exchange
        try:
            exchange.client_id = read_id(request) or uuid.uuid4().hex
            exchange.key = f"{exchange.client_id}#{number}"  # clients may use an id twice
            call = read_request(request, self._limits, self._sampling_defaults)
            exchange.is_streamed = isinstance(call, GenerateCall) and call.is_streamed  # the others have one answer, and nothing before it
            if isinstance(call, CancelCall):
                self._cancel(call, exchange)
            elif self._is_refusing:
                raise EngineError("the server is shutting down: send the request to another, or again later")
            elif isinstance(call, DescribeCall):
                self._engine.describe(number, exchange.key, self._sampling_defaults)
            else:
                if isinstance(call, GenerateCall):
                    exchange.num_open = call.params.n
                self._engine.submit(number, exchange.key, call, call.timeout if isinstance(call, GenerateCall) else None)
                if exchange.is_cancelled:  # while it was read, when the engine's process did not know it
                    self._engine.end(number, exchange.key)
        except Exception as error:  # whatever it is, it belongs to this request only
            self._responses.put([(exchange, Delta(exchange.key, error=error))])

    def _cancel(self, call: CancelCall, exchange: Exchange) -> None:
        """Ends every open request with that id; the answer's finish_reason is `cancelled` when there was one, else `stop`."""
        with self._lock:
            found = [e for e in self._exchanges.values() if e.client_id == call.target_id and e is not exchange]
        self._engine.cancel(exchange.number, exchange.key, [(e.number, e.key) for e in found], self._is_refusing)

    def _end_early(self, exchange: Exchange) -> None:
        """Cancels a request, wherever it is."""
        exchange.is_cancelled = True
        self._engine.end(exchange.number, exchange.key)

    def _forget(self, exchange: Exchange) -> None:
        with self._lock:
            self._exchanges.pop(exchange.number, None)

    # -- the thread of the engine's process -------------------------------------------------------------------------------

    def _take_news(self, news: list[News]) -> None:
        known = self._exchanges
        made: list[tuple[Exchange, Delta | None]] = []
        for number, delta, waits_for in news:
            if (exchange := known.get(number)) is not None:
                if waits_for:
                    exchange.waits_for = [other for number in waits_for if (other := known.get(number)) is not None]
                    for other in exchange.waits_for:
                        other.is_awaited = True
                made.append((exchange, delta))
        if made:
            self._responses.put(made)

    def _end_all(self, why: str) -> None:
        """The engine's process has died: whoever waits hears of it, and this process ends as well, which the server and the supervisor see."""
        logger.error("%s", why)
        self._is_refusing = True
        with self._lock:
            found = list(self._exchanges.values())
        self._responses.put([(exchange, Delta(exchange.key, error=EngineError(why))) for exchange in found])
        self._responses.stop(LAST_SECONDS)
        if self._relay is not None:
            self._relay.close(why)
        os._exit(1)

    # -- watcher thread ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        turn = 0
        while not self._is_stopping.wait(WATCH_SECONDS):
            now = time.monotonic()
            with self._lock:
                exchanges = list(self._exchanges.values())
            quiet = [e for e in exchanges if now - e.last_sent > WATCH_SECONDS and not e.is_cancelled and not e.is_due]
            silent = [e for e in quiet if now - e.last_sent > KEEP_ALIVE_SECONDS] if self._engine.is_alive() else []
            due = silent or quiet[turn : turn + MAX_CHECKS_PER_WATCH]
            if due:
                for exchange in due:  # once: a sender that is late must not get the same work again and again
                    exchange.is_due = True
                self._responses.put([(e, None) for e in due])
            turn = turn + MAX_CHECKS_PER_WATCH if turn + MAX_CHECKS_PER_WATCH < len(quiet) else 0

    # -- keeper thread: which may wait for the engine's process -------------------------------------------------------------

    def _keep(self) -> None:
        while not self._is_stopping.wait(WATCH_SECONDS):
            try:
                self._publisher.publish()
            except Exception:
                logger.exception("metrics could not be published")
            try:
                self._drain(time.monotonic())
            except (OSError, ValueError, EngineError):  # TimeoutError is an OSError
                logger.exception("%s", self._drain_file)

    def _drain(self, now: float) -> None:
        if not self._drain_file.exists():
            return
        if self._drain_end is None:
            seconds = float(self._drain_file.read_text())
            self._drain_end = now + seconds
            self._is_refusing = True  # here, not in the engine: what is being tokenized was taken, and goes on
            self._engine.ask("leave")
            logger.info("shutting down: no new requests; %d open ones have %g s", len(self._exchanges), seconds)
        elif not self._exchanges and not self._has_jobs(now):
            self._shut_down()
            self._drain_file.unlink()
        elif now >= self._drain_end:
            self._engine.ask("end_all", "the server is shutting down, and the time for open requests is over")
            self._drain_end = math.inf

    def _has_jobs(self, now: float) -> bool:
        """Prompts of other nodes, which have as long as open requests have."""
        is_over = self._drain_end is None or math.isinf(self._drain_end) or now >= self._drain_end
        return not is_over and self._engine.ask("num_jobs") > 0

    def _shut_down(self) -> None:
        """Ends the engine, which saves what it keeps: requests that are still open get an error."""
        self._is_refusing = True
        self._engine.ask("shut_down", seconds=SHUT_DOWN_SECONDS)
        self._is_stopping.set()

    def finalize(self) -> None:
        """Sends what was made last. Nothing calls the server after this.

        Not called while the server's gRPC front end holds a request whose stream was cancelled just as its answer ended (release 24.10:
        the front end then waits for an answer that it has had).
        """
        if self._follower is not None:
            self._follower.finalize()
        else:
            try:
                self._shut_down()
            except (EngineError, TimeoutError):
                logger.exception("the engine could not be shut down")
            for thread in self._threads:
                thread.join(JOIN_SECONDS)
            self._responses.stop(JOIN_SECONDS)
            if self._relay is not None:
                self._relay.close("the server was shut down")
            self._engine.close()
        if self._claim is not None:
            self._claim.give_back()
