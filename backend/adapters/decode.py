"""The decoupled `decode` model: requests from Triton go to the engine, its deltas go back as responses.

Threads beside the server's own: the engine's, two that tokenize (backend/adapters/intake_workers.py), a sender (backend/adapters/responses.py:
each send is a blocking round trip to the server) and a watcher (which asks for keep-alives and cancellation checks of requests that send
nothing, ends those whose deadline is over before they were tokenized, and publishes metrics).
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import threading
import time
import uuid
from typing import Any

from backend.adapters.description import describe
from backend.adapters.draft_io import BlsDraftService
from backend.adapters.exchange import Exchange
from backend.adapters.instance_ranks import claim_instance, follow
from backend.adapters.intake_workers import LONG_CHARACTERS, IntakeWorkers
from backend.adapters.metrics import MetricsPublisher
from backend.adapters.relay import RequestRelay
from backend.adapters.request_io import (
    CancelCall,
    CorpusCall,
    DescribeCall,
    InputLimits,
    is_first,
    read_corpus_call,
    read_id,
    read_messages,
    read_request,
)
from backend.adapters.responses import KEEP_ALIVE_SECONDS, News, ResponseThread
from backend.adapters.stub import (
    check_interpreter,
    describe_error,
    drain_file,
    end_with_server,
    log_to_server,
    read_engine_config,
)
from backend.config import EngineConfig
from backend.core import Delta, FinishReason, SpeculationStats
from backend.disaggregation.service import Disaggregation
from backend.engine import Engine
from backend.errors import EngineError
from backend.own_process import has_begun
from backend.precedence import take_short_turns
from backend.sampling_defaults import read_sampling_defaults

logger = logging.getLogger(__name__)

DRAFTER_MODEL = "mtp_drafter"
WATCH_SECONDS = 0.1
JOIN_SECONDS = 10.0
LEAST_SECONDS = 1e-6
"""What is given to a request whose deadline is over when it gets to the engine: which ends it at once, as it ends all that are late."""
MAX_CHECKS_PER_WATCH = 64
"""Quiet requests whose cancellation is looked at each time, in turn; each look is a round trip."""


class TritonPythonModel:
    """What the server loads."""

    def initialize(self, args: dict[str, str]) -> None:
        check_interpreter()
        end_with_server()
        log_to_server()
        config = read_engine_config(args)
        self._claim = claim_instance(args, config)
        self._follower = follow(self._claim) if self._claim is not None and self._claim.rank else None
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
        service = BlsDraftService(DRAFTER_MODEL) if config.speculative_config.placement == "bls" else None
        self._engine = Engine(config, draft_service=service, greet=self._relay.greet if self._relay is not None else None)
        if self._relay is not None and self._engine.group is not None:
            self._engine.group.on_silent = self._relay.kill
        self._nodes = Disaggregation(self._engine) if config.disaggregation.is_on else None
        self._limits = InputLimits(self._engine.scheduler.max_model_len)
        self._sampling_defaults = read_sampling_defaults(config.model) if config.generation_config == "auto" else {}
        self._keys = itertools.count()
        self._exchanges: set[Exchange] = set()
        """Every request whose final response was not sent."""
        self._lock = threading.Lock()
        self._made: list[News] = []  # by the engine's thread, in the step that runs
        self._is_stopping = threading.Event()
        self._is_refusing = False
        self._intake = IntakeWorkers(self._submit, config.max_batch_size + config.max_waiting)
        self._drain_file = drain_file(args)
        self._drain_end: float | None = None
        self._publisher = MetricsPublisher(self._engine, args["model_name"], self._nodes)
        self._publisher.publish()
        give_way = self._engine.precedence.give_way
        self._responses = ResponseThread(self._publisher, self._engine.cancel, self._end_early, self._forget, give_way)
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._responses.start()
        self._watcher.start()
        self._engine.after_deltas = self._hand_over
        has_begun()
        self._engine.start()
        if self._nodes is not None:
            self._nodes.start()

    def _hand_over(self) -> None:
        """One wake-up of the sender for all that a step made."""
        made, self._made = self._made, []
        is_lone = len(made) == len(self._exchanges) == 1  # others would wait for the launch (3% of their tokens, measured)
        if is_lone and self._engine.has_steps_under_way and any(delta is not None and is_first(delta) for _, delta in made):
            self._responses.put_first(made)
        elif made:
            self._responses.put(made)

    def execute(self, requests: list[Any]) -> None:
        if self._follower is not None:
            self._follower.execute(requests)
            return
        for request in requests:
            self._take(request)

    def _take(self, request: Any) -> None:
        """Copies what the request holds, and queues it to be tokenized."""
        self._engine.precedence.give_way()
        now = time.monotonic()
        exchange = Exchange(request.get_response_sender(), last_sent=now)
        with self._lock:
            self._exchanges.add(exchange)
        try:
            exchange.client_id = read_id(request) or uuid.uuid4().hex
            exchange.key = f"{exchange.client_id}#{next(self._keys)}"  # clients may use an id twice
            call = read_request(request, self._limits, self._sampling_defaults)
            if isinstance(call, CancelCall):
                self._cancel(call, exchange)
                return
            if self._is_refusing:
                raise EngineError("the server is shutting down: send the request to another, or again later")
            if isinstance(call, DescribeCall):
                self._describe(exchange)
                return
            exchange.call = call
            if isinstance(call, CorpusCall):
                exchange.is_streamed = False
                self._intake.put(exchange, LONG_CHARACTERS + 1)
                return
            exchange.is_streamed = call.is_streamed
            exchange.num_completions = exchange.num_open = call.params.n
            if call.timeout is not None:
                exchange.deadline = now + call.timeout
            is_slow = call.params.structured_outputs is not None or call.tools is not None  # a grammar may have to be compiled
            self._intake.put(exchange, LONG_CHARACTERS + 1 if is_slow else len(call.prompt))
        except Exception as error:  # whatever it is, it belongs to this request only
            self._refuse(exchange, error)

    def _refuse(self, exchange: Exchange, error: Exception) -> None:
        self._responses.put([(exchange, Delta(exchange.key, error=error))])

    def _end(self, exchange: Exchange, reason: FinishReason) -> None:
        """Ends a request that the engine never had."""
        deltas = [Delta(exchange.key, i, finish_reason=reason, stats=SpeculationStats()) for i in range(exchange.num_completions)]
        self._publisher.count_end(reason, len(deltas))
        self._responses.put([(exchange, delta) for delta in deltas])

    def _cancel(self, call: CancelCall, exchange: Exchange) -> None:
        """Ends every open request with that id; the answer's finish_reason is `cancelled` when there was one, else `stop`.

        The answer comes from the engine's thread, and after those of the requests that it ended: an unknown id asks whether that thread steps.
        While new requests are refused that has an error: whoever asks whether this model serves must not hear that it does.
        """
        exchange.is_streamed = False  # one answer, and nothing before it
        with self._lock:
            found = [e for e in self._exchanges if e.client_id == call.target_id and e is not exchange]
        exchange.waits_for = [e for e in found if self._end_early(e)]
        answer = Delta(call.target_id, finish_reason="cancelled" if exchange.waits_for else "stop")
        if not exchange.waits_for and self._is_refusing:
            answer = Delta(call.target_id, error=EngineError("the server is shutting down"))
        self._engine.call(lambda: self._made.append((exchange, answer)))

    def _describe(self, exchange: Exchange) -> None:
        exchange.is_streamed = False

        def answer() -> None:
            text = describe(self._engine, self._sampling_defaults)
            self._made.append((exchange, Delta(exchange.key, text=text, finish_reason="stop", stats=SpeculationStats())))

        self._engine.call(answer)

    def _end_early(self, exchange: Exchange) -> bool:
        """Cancels a request, wherever it is. False when its end is on its way already."""
        exchange.is_cancelled = True  # before the engine is asked: see _submit
        if self._intake.withdraw(exchange):
            self._end(exchange, "cancelled")
            return True
        return self._engine.cancel(exchange.key) or (exchange.call is not None and not exchange.is_submitted)

    def _forget(self, exchange: Exchange) -> None:
        with self._lock:
            self._exchanges.discard(exchange)

    # -- intake threads ---------------------------------------------------------------------------------------------

    def _submit(self, exchange: Exchange) -> None:
        """Tokenizes a request and gives it to the engine."""
        self._engine.precedence.give_way()
        call = exchange.call
        assert call is not None
        if isinstance(call, CorpusCall):
            self._add_corpus(exchange, call)
            return
        try:
            self._engine.submit(
                read_messages(call.prompt) if call.is_chat else call.prompt,
                call.params,
                lambda delta: self._made.append((exchange, delta)),
                request_id=exchange.key,
                speculative=call.speculative,
                tools=call.tools,
                template_variables=call.template_variables,
                truncation=call.truncation,
                priority=call.priority,
                timeout=None if exchange.deadline is None else max(exchange.deadline - time.monotonic(), LEAST_SECONDS),
                is_length_default=call.is_length_default,
            )
        except Exception as error:  # whatever it is, it belongs to this request only
            self._refuse(exchange, error)
        exchange.is_submitted = True
        exchange.call = None  # the prompt may be megabytes
        if exchange.is_cancelled:  # while it was tokenized, when the engine did not know it
            self._engine.cancel(exchange.key)

    def _add_corpus(self, exchange: Exchange, call: CorpusCall) -> None:
        """Tokenizes texts and gives them to the suffix cache, whose own thread takes them in: no step waits for them."""
        try:
            added = self._engine.drafters.add_corpus(read_corpus_call(call.text))
            answer = Delta(exchange.key, text=json.dumps(added._asdict()), finish_reason="stop", stats=SpeculationStats())
        except Exception as error:  # whatever it is, it belongs to this request only
            answer = Delta(exchange.key, error=error)
        exchange.is_submitted, exchange.call = True, None
        self._responses.put([(exchange, answer)])

    # -- watcher thread ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        turn = 0
        while not self._is_stopping.wait(WATCH_SECONDS):
            now = time.monotonic()
            with self._lock:
                exchanges = list(self._exchanges)
            for exchange in exchanges:
                if exchange.deadline is not None and now >= exchange.deadline and self._intake.withdraw(exchange):
                    self._end(exchange, "timeout")
            quiet = [e for e in exchanges if now - e.last_sent > WATCH_SECONDS and not e.is_cancelled and not e.is_due]
            due = [e for e in quiet if now - e.last_sent > KEEP_ALIVE_SECONDS] or quiet[turn : turn + MAX_CHECKS_PER_WATCH]
            if due:
                for exchange in due:  # once: a sender that is late must not get the same work again and again
                    exchange.is_due = True
                self._responses.put([(e, None) for e in due])
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
            self._is_refusing = True  # here, not in the engine: what is being tokenized was taken, and goes on
            if self._nodes is not None:
                self._nodes.leave()
            logger.info("shutting down: no new requests; %d open ones have %g s", len(self._exchanges), seconds)
        elif not self._exchanges and not self._has_jobs(now):
            self._shut_down()
            self._drain_file.unlink()
        elif now >= self._drain_end:
            error = EngineError("the server is shutting down, and the time for open requests is over")
            self._engine.refuse()  # what is being tokenized
            for exchange in self._intake.withdraw_all():
                self._refuse(exchange, error)
            self._engine.call(lambda: self._engine.end_all(error))
            self._drain_end = math.inf

    def _has_jobs(self, now: float) -> bool:
        """Prompts of other nodes, which have as long as open requests have."""
        is_over = self._drain_end is None or math.isinf(self._drain_end) or now >= self._drain_end
        return self._nodes is not None and self._nodes.num_jobs > 0 and not is_over

    def _shut_down(self) -> None:
        """Ends the engine, which saves what it keeps: requests that are still open get an error."""
        self._is_refusing = True
        if self._nodes is not None:
            self._nodes.stop()
        self._engine.shutdown()
        if self._nodes is not None:
            self._nodes.close()
        for exchange in self._intake.withdraw_all():
            self._refuse(exchange, EngineError("the server was shut down"))
        self._intake.stop(JOIN_SECONDS)
        self._is_stopping.set()

    def finalize(self) -> None:
        """Sends what was made last. Nothing calls the server after this.

        Not called while the server's gRPC front end holds a request whose stream was cancelled just as its answer ended (release 24.10:
        the front end then waits for an answer that it has had).
        """
        if self._follower is not None:
            self._follower.finalize()
        else:
            self._shut_down()
            self._watcher.join(JOIN_SECONDS)
            self._responses.stop(JOIN_SECONDS)
            if self._relay is not None:
                self._relay.close("the server was shut down")
        if self._claim is not None:
            self._claim.give_back()
