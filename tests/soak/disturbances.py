"""Kills and stops processes, or tells them to end, one at a time, and waits until all is well again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import psutil

from tests.soak.book import Book, Disturbance
from tests.soak.system import HANG_SECONDS, KINDS, System

RECOVERY_SECONDS = 60.0
SETTLE_SECONDS = 3.0
END_SECONDS = 60.0
"""For the gateway and the supervisor to end in order: longer than they give open requests."""
STARTED_HERE = ("gateway", "supervisor")
"""Nobody else watches them or starts them again."""
WAYS = ("killed", "stopped", "told to end")


def deal(rng: random.Random) -> Iterator[tuple[str, str]]:
    """All kinds in turn, in an order of chance."""
    while True:
        hand = [(way, victim) for way in WAYS for victim in KINDS]
        rng.shuffle(hand)
        yield from hand


class Disturber(threading.Thread):
    """Every `seconds`, about, until it is told to stop."""

    def __init__(self, system: System, book: Book, deck: Iterator[tuple[str, str]], rng: random.Random, seconds: float) -> None:
        super().__init__(name="disturber", daemon=True)
        self._system, self._book, self._deck, self._rng, self._seconds = system, book, deck, rng, seconds
        self._is_over = threading.Event()

    def stop(self) -> None:
        """At once, but for a disturbance under way, which is seen to its end."""
        self._is_over.set()
        self.join()

    def run(self) -> None:
        while not self._is_over.wait(self._rng.uniform(0.5, 1.5) * self._seconds):
            self._disturb(*next(self._deck))

    def _disturb(self, way: str, victim: str) -> None:
        hang = victim not in STARTED_HERE and self._rng.random() < 0.4
        seconds = HANG_SECONDS + 5 if hang else self._rng.uniform(0.5, 6)
        pid = self._system.processes().get(victim)
        if pid is None:
            self._book.add_fault(f"no process of {victim}, though nothing is disturbed")
            return
        what = f"{victim} {way}" if way != "stopped" else f"{victim} stopped {'until it is taken for hung' if hang else 'for a while'}"
        disturbance = self._book.begin(what)
        with contextlib.suppress(ProcessLookupError):
            if way == "stopped":
                self._stop_for(pid, seconds)
            else:
                os.kill(pid, signal.SIGKILL if way == "killed" else signal.SIGTERM)
        if victim in STARTED_HERE and way != "stopped":
            self._start_again(victim, way)
        elif victim == "tritonserver" and way != "stopped":  # its models' processes need not heed it
            self._await_end(pid, what)
        self._recover(disturbance)

    def _start_again(self, victim: str, way: str) -> None:
        """As whoever runs it would, as soon as it has ended."""
        process = self._system.gateway_process if victim == "gateway" else self._system.server.process
        try:
            status = process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._book.add_fault(f"the {victim} has not ended {END_SECONDS:g} s after it was {way}")
            process.kill()
            status = process.wait()
        if status and way == "told to end":
            self._book.add_fault(f"the {victim} was told to end, and did with status {status}")
        if victim == "gateway":
            self._system.start_gateway()
        else:
            self._system.start_server()

    def _await_end(self, pid: int, what: str) -> None:
        """Told to end, tritonserver answers for seconds more as if all were well."""
        end = time.monotonic() + END_SECONDS
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                if time.monotonic() > end:
                    self._book.add_fault(f"{what}, and after {END_SECONDS:g} s it has not ended")
                    return
                time.sleep(0.1)

    @staticmethod
    def _stop_for(pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    def _stays_well(self) -> bool:
        """tritonserver may crash a second after a model's process was killed, when all looks well again."""
        ending = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < ending:
            if not self._system.is_well():
                return False
            time.sleep(0.1)
        return True

    def _recover(self, disturbance: Disturbance) -> None:
        started = time.monotonic()
        # What has died must be missed first: in its first tenths of a second all may look well.
        time.sleep(1.0)
        while not (self._system.wait_until_well(RECOVERY_SECONDS) and self._stays_well()):
            if (seconds := time.monotonic() - started) > RECOVERY_SECONDS:
                self._book.add_fault(f"{disturbance.what}: not well {seconds:.0f} s later: {self._system.health()}")
                if self._is_over.is_set():
                    break
        self._book.end(disturbance, time.monotonic() - started)


@contextlib.contextmanager
def disturbed(system: System, book: Book, deck: Iterator[tuple[str, str]], rng: random.Random, seconds: float) -> Iterator[None]:
    disturber = Disturber(system, book, deck, rng, seconds)
    disturber.start()
    try:
        yield
    finally:
        disturber.stop()
