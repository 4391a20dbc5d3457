"""What happened: counts by kind and outcome, disturbances, and faults."""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

ANSWER_SECONDS = 30.0
"""Within which every request is answered, or its connection closed."""
GRACE_SECONDS = 2.0
"""After a disturbance for clients to find the way again."""
MAX_SHOWN = 1500
"""Characters of a request or a message."""


class WrongAnswer(Exception):
    """Never allowed."""


class Hung(Exception):
    """Nor is this."""


class Lost(Exception):
    """An error, or a closed connection: allowed while something is disturbed."""


def shorten(value: object, limit: int = MAX_SHOWN) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else f"{text[: limit // 2]} ... ({len(text)} characters) ... {text[-limit // 2 :]}"


@dataclass
class Exchange:
    """One client's visit. It notes what it sends, for a fault to show."""

    name: str
    kind: str
    started: float = field(default_factory=time.monotonic)
    sent: list[object] = field(default_factory=list)
    num_requests: int = 0
    outcome: str = "answered"

    def note(self, request: object, count: int = 1) -> None:
        self.sent.append(request)
        self.num_requests += count

    @property
    def deadline(self) -> float:
        return self.started + ANSWER_SECONDS


@dataclass
class Disturbance:
    what: str
    started: float = field(default_factory=time.monotonic)
    ended: float = math.inf


class Book:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.num_requests = 0
        self.faults: list[str] = []
        self.disturbances: list[Disturbance] = []
        self.longest = 0.0
        self.recoveries: dict[str, list[float]] = {}

    def add_fault(self, text: str) -> None:
        with self._lock:
            self.faults.append(text)
        print(f"\nFAULT {time.strftime('%H:%M:%S')} {text}\n", flush=True)

    def begin(self, what: str) -> Disturbance:
        with self._lock:
            self.disturbances.append(Disturbance(what))
            return self.disturbances[-1]

    def end(self, disturbance: Disturbance, seconds: float) -> None:
        """seconds: from the end of what was done to it until all answered again."""
        with self._lock:
            disturbance.ended = time.monotonic() + GRACE_SECONDS
            self.recoveries.setdefault(disturbance.what, []).append(seconds)

    def disturbance_of(self, started: float) -> str | None:
        """What was going on at some time from then on."""
        with self._lock:
            return next((d.what for d in self.disturbances if d.ended >= started), None)

    def close(self, exchange: Exchange, error: BaseException | None) -> None:
        """Counts an exchange that is over, and judges how it ended."""
        seconds = time.monotonic() - exchange.started
        outcome = exchange.outcome if error is None else "fault"
        if isinstance(error, Lost) and self.disturbance_of(exchange.started):
            outcome = "lost"
        with self._lock:
            self.counts[exchange.kind, outcome] += 1
            self.num_requests += exchange.num_requests
            self.longest = max(self.longest, seconds)
        if outcome != "fault":
            return
        known = isinstance(error, (WrongAnswer, Hung, Lost))
        reason = f"{type(error).__name__}: {error}" if known else "".join(traceback.format_exception(error))
        beside = self.disturbance_of(exchange.started)
        sent = "\n".join(f"  sent {shorten(each)}" for each in exchange.sent)
        self.add_fault(
            f"{exchange.kind} {exchange.name} after {seconds:.1f} s{f', while: {beside}' if beside else ''}: {shorten(reason, 3000)}\n{sent}"
        )

    def line(self) -> str:
        with self._lock:
            outcomes: Counter[str] = Counter()
            for (_, outcome), count in self.counts.items():
                outcomes[outcome] += count
            shown = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            return f"{self.num_requests} requests, {shown}; {len(self.disturbances)} disturbances, {len(self.faults)} faults"

    def table(self) -> str:
        """By kind of client, and by kind of disturbance."""
        with self._lock:
            outcomes = sorted({outcome for _, outcome in self.counts})
            lines = [" ".join([f"{'exchanges':24}", *(f"{o:>10}" for o in outcomes)])]
            for kind in sorted({kind for kind, _ in self.counts}):
                lines.append(" ".join([f"{kind:24}", *(f"{self.counts[kind, o]:10}" for o in outcomes)]))
            lines.append(f"longest exchange: {self.longest:.1f} s, slow readers and idle connections included")
            for what, seconds in sorted(self.recoveries.items()):
                lines.append(f"{what}: {len(seconds)} times, all well again after {max(seconds):.1f} s at most")
            return "\n".join(lines)
