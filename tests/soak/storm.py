"""The clients, many at once."""

from __future__ import annotations

import random
import sys
import threading
import time
import traceback
from collections.abc import Callable

from tests.soak.book import ANSWER_SECONDS, Book, Exchange
from tests.soak.grpc_clients import SLOW_SECONDS, GrpcClients
from tests.soak.http_clients import HttpClients
from tests.soak.questions import Question
from tests.soak.system import System

STUCK_SECONDS = SLOW_SECONDS + ANSWER_SECONDS
PAUSE_SECONDS = 0.3
"""After an exchange that a disturbance ended: a server that is away is not asked thousands of times a second."""


class Worker:
    """One exchange after the other, each made from the seed and its name alone."""

    def __init__(self, number: int, seed: int, system: System, questions: list[Question], book: Book) -> None:
        self._number, self._seed, self._book = number, seed, book
        self._count = 0
        self._grpc = GrpcClients(system.server.grpc, questions)
        kinds = self._grpc.kinds | HttpClients(system.server.http, system.gateway, questions).kinds
        self._kinds = {name: act for name, (act, _) in kinds.items()}
        self._weights = [weight for _, weight in kinds.values()]
        self.exchange: Exchange | None = None
        """Under way."""

    def exchange_once(self, name: str) -> None:
        rng = random.Random(f"{self._seed}/{name}")
        (kind,) = rng.choices(list(self._kinds), self._weights)
        self.exchange, error = Exchange(name, kind), None
        try:
            self._kinds[kind](rng, self.exchange)
        except Exception as raised:
            error = raised
        self._book.close(self.exchange, error)
        self.exchange = None
        if error is not None:
            time.sleep(PAUSE_SECONDS)

    def run_until(self, is_over: threading.Event) -> None:
        while not is_over.is_set():
            self._count += 1
            self.exchange_once(f"{self._number}/{self._count}")

    def close(self) -> None:
        self._grpc.close()


def rage(workers: list[Worker], book: Book, seconds: float, report_seconds: float, look: Callable[[], None]) -> None:
    """All workers at once for so long; look: called before each line of progress. Then those under way are let end; one that does not is a fault."""
    is_over = threading.Event()
    threads = [threading.Thread(target=w.run_until, args=(is_over,), daemon=True) for w in workers]
    for thread in threads:
        thread.start()
    ending = time.monotonic() + seconds
    while (left := ending - time.monotonic()) > 0:
        time.sleep(min(left, report_seconds))
        look()
        print(f"[soak] {time.strftime('%H:%M:%S')} {book.line()}", flush=True)
    is_over.set()
    ending = time.monotonic() + STUCK_SECONDS
    for thread, worker in zip(threads, workers):
        thread.join(max(0.0, ending - time.monotonic()))
        if thread.is_alive() and (exchange := worker.exchange) is not None:
            frame = sys._current_frames().get(thread.ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame else ""
            book.add_fault(f"{exchange.kind} {exchange.name} never ended: {exchange.sent}\n{stack}")
