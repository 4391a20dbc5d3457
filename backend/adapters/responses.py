"""The threads that answer: one alone touches a request's response sender.

And never again once it has sent the request's final response: the server crashed (segmentation fault in
TRITONBACKEND_ResponseFactoryIsCancelled, release 24.10) when `is_cancelled` ran beside the final `send`. Everybody else puts what there is to
say into the outbox, refusals too.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import triton_python_backend_utils as pb_utils

from backend.adapters.answers import Answer, AnswerTensors
from backend.adapters.exchange import Exchange
from backend.adapters.metrics import MetricsPublisher
from backend.adapters.stub import error_code, refuse
from backend.core import Delta

logger = logging.getLogger(__name__)

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
KEEP_ALIVE_SECONDS = 1.5
"""A streamed request that has nothing to say for this long gets an empty response, so that a client can tell waiting from dead."""
NUM_THREADS = 4
"""That answer: of 128 streams 1.5 tokens come together with four, 3.4 with one, 1.9 with eight (measured, benchmarks/RESULTS.md)."""
LOOK_SECONDS = 0.05
"""Between looks whether the client of a request that sends is still there: each is a round trip to the server, of some 50 us."""

News = tuple[Exchange, Delta | None]
"""What to tell a client; None: look whether it is still there."""


class Responses:
    """Some threads, each for some of the requests: a send is a round trip to the server, of some 350 us where many answer at once (measured, H200's
    host), and what the others wait for it is seen in how many tokens come together."""

    def __init__(
        self,
        publisher: MetricsPublisher,
        end_early: Callable[[Exchange], object],
        forget: Callable[[Exchange], None],
        is_engine_alive: Callable[[], bool],
    ) -> None:
        """end_early: cancels a request, wherever it is; forget: its final response was sent; is_engine_alive: or streams are not told so."""
        self.threads = [ResponseThread(f"sender {i}", publisher, end_early, forget, is_engine_alive, self._wake) for i in range(NUM_THREADS)]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def put(self, news: list[News]) -> None:
        """From any thread; sent in the order in which they came, of each request."""
        if len(news) == 1:
            self._of(news[0][0]).put(news)
            return
        shares: dict[ResponseThread, list[News]] = {}
        for item in news:
            shares.setdefault(self._of(item[0]), []).append(item)
        for thread, share in shares.items():
            thread.put(share)

    def stop(self, timeout: float) -> None:
        """Sends what was put before, waiting so many seconds for it."""
        for thread in self.threads:
            thread.stop()
        end = time.monotonic() + timeout
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _of(self, exchange: Exchange) -> ResponseThread:
        return self.threads[exchange.number % NUM_THREADS]

    def _wake(self) -> None:
        """What waits for other requests' ends may have waited for long enough."""
        for thread in self.threads:
            thread.put([])


class ResponseThread:
    """One of them."""

    def __init__(
        self,
        name: str,
        publisher: MetricsPublisher,
        end_early: Callable[[Exchange], object],
        forget: Callable[[Exchange], None],
        is_engine_alive: Callable[[], bool],
        wake: Callable[[], object],
    ) -> None:
        self._publisher, self._end_early, self._forget, self._is_engine_alive, self._wake = publisher, end_early, forget, is_engine_alive, wake
        self._outbox: queue.SimpleQueue[list[News] | None] = queue.SimpleQueue()
        self._held: list[tuple[Exchange, Answer]] = []  # what waits for other requests' ends
        self._tensors = AnswerTensors()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, news: list[News]) -> None:
        self._outbox.put(news)

    def stop(self) -> None:
        self._outbox.put(None)

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        """Sends what the others made, one response per request and step; steps that piled up meanwhile go together."""
        is_open = True
        while is_open or self._held:  # whose ends another thread is sending, and tells of
            groups = [self._outbox.get()]
            while not self._outbox.empty():
                groups.append(self._outbox.get())
            is_open = is_open and None not in groups
            merged: dict[tuple[int, int], tuple[Exchange, Answer]] = {}
            for number, (exchange, delta) in enumerate(itertools.chain.from_iterable(filter(None, groups)), 1):
                if delta is None or delta.error is not None:
                    merged[id(exchange), -number] = (exchange, Answer([delta] if delta else []))
                elif (found := merged.get(key := (id(exchange), delta.index))) is None:
                    merged[key] = (exchange, Answer([delta]))
                else:
                    found[1].add(delta)
            for exchange, answer in merged.values():
                self._send_safely(exchange, answer)
            held, self._held = self._held, []
            for exchange, answer in held:
                self._send_safely(exchange, answer)

    def _send_safely(self, exchange: Exchange, answer: Answer) -> None:
        """Whatever goes wrong belongs to this request only, and ends it."""
        try:
            self._send(exchange, answer)
        except Exception as error:
            logger.exception("request %r: the response could not be sent", exchange.client_id)
            self._end_early(exchange)
            try:
                self._send_error(exchange, error)
            except Exception:
                logger.exception("request %r: nor could the error", exchange.client_id)
                self._close(exchange)

    def _send(self, exchange: Exchange, answer: Answer) -> None:
        """Sends one completion's news; with none: looks whether the client is still there, and tells it that the server is."""
        if exchange.is_closed:
            return  # its end was sent: the response sender is not to be touched any more
        now = time.monotonic()
        if not answer.deltas:
            exchange.is_due = False
            self._check_cancelled(exchange, now)
            if now - exchange.last_sent <= KEEP_ALIVE_SECONDS or not self._is_engine_alive():
                return
            exchange.last_sent = now
            if exchange.is_streamed:
                exchange.sender.send(pb_utils.InferenceResponse(self._tensors.of(Answer([Delta(exchange.key)]))))
            return
        if exchange.waits_for and not all(e.is_over for e in exchange.waits_for):
            self._held.append((exchange, answer))
            return
        self._publisher.count_response()
        (delta,) = answer.deltas
        if delta.error is not None:
            self._end_early(exchange)  # its siblings, if it has any
            self._send_error(exchange, delta.error)
            return
        if delta.is_final:
            exchange.num_open -= 1
        is_last = exchange.num_open == 0
        if not exchange.is_streamed:
            exchange.answer.add(delta)
            if not is_last:
                self._look(exchange, now)
                return
            answer = exchange.answer
        exchange.last_sent = now
        response = pb_utils.InferenceResponse(self._tensors.of(answer))
        if is_last:
            self._send_final(exchange, response)
        else:
            exchange.sender.send(response)
            self._look(exchange, now)

    def _look(self, exchange: Exchange, now: float) -> None:
        """Whether its client is still there, after its tokens were sent: they do not wait for that."""
        if now - exchange.last_look > LOOK_SECONDS:
            self._check_cancelled(exchange, now)

    def _check_cancelled(self, exchange: Exchange, now: float) -> None:
        exchange.last_look = now
        if not exchange.is_cancelled and exchange.sender.is_cancelled():
            self._end_early(exchange)

    def _send_error(self, exchange: Exchange, error: Exception) -> None:
        if exchange.is_closed:
            return
        name = error_code(error)
        if name == "INTERNAL" and error.__traceback__ is not None:  # the engine's process has told of its own
            logger.error("request %r failed", exchange.client_id, exc_info=error)
        self._publisher.count_error(name)
        self._send_final(exchange, refuse(exchange.client_id, error))

    def _send_final(self, exchange: Exchange, response: Any) -> None:
        exchange.is_closed = True
        try:
            exchange.sender.send(response, flags=FINAL)
        finally:  # nobody knows how far one came that could not be sent, and the server takes no other
            self._close(exchange)

    def _close(self, exchange: Exchange) -> None:
        exchange.is_closed = exchange.is_over = True
        self._forget(exchange)
        if exchange.is_awaited:
            self._wake()
