"""The engine's counts on the server's metrics port."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import triton_python_backend_utils as pb_utils

from backend.engine_process.count import Count

PREFIX = "foretoken_"
ERROR_CODES = ("INVALID_ARG", "UNAVAILABLE", "INTERNAL")
PAUSE_SECONDS = 1e-4
"""After each call into the server, which keeps Python's lock: some tens in a row would hold up the thread that answers."""


class MetricsPublisher:
    """Adds what changed since the last call of `publish`. Does nothing when the server runs without metrics."""

    def __init__(self, model: str, ask: Callable[[], Iterable[Count]]) -> None:
        """ask: for the engine's counts that changed since it was last asked."""
        self._model, self._ask = model, ask
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        self._published: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._num_responses = 0
        self._is_on = True
        self._errors = Counter(dict.fromkeys(ERROR_CODES, 0))
        self._lock = threading.Lock()

    def count_error(self, code: str) -> None:
        """One request was answered with an error; code: one of ERROR_CODES. May be called from any thread."""
        with self._lock:
            self._errors[code] += 1

    def count_response(self) -> None:
        """One was sent with news of the engine's. May be called from any thread."""
        with self._lock:
            self._num_responses += 1

    def publish(self) -> None:
        # Asked for in any case: it shows that the engine's process lives, which looks at deadlines of what waits there when it is asked.
        counts = [*self._ask(), Count("responses_total", "Responses sent with news of a completion", self._num_responses)]
        if not self._is_on:
            return
        for code in ERROR_CODES:
            counts.append(Count("request_errors_total", "Requests answered with an error, by its kind", self._errors[code], (("code", code),)))
        try:
            for count in counts:
                self._publish(count)
        except pb_utils.TritonModelException as error:
            self._is_on = False
            pb_utils.Logger.log_warn(f"{self._model}: metrics are off: {error}")

    def _publish(self, count: Count) -> None:
        key = count.name, count.labels
        metric = self._metrics.get(key)
        if metric is None:
            metric = self._metrics[key] = self._create(count)
        if count.is_gauge:
            metric.set(count.value)
        elif (more := count.value - self._published.get(key, 0.0)) > 0:
            metric.increment(more)
        else:
            return
        self._published[key] = count.value
        time.sleep(PAUSE_SECONDS)

    def _create(self, count: Count) -> Any:
        if count.name not in self._families:
            kind = pb_utils.MetricFamily.GAUGE if count.is_gauge else pb_utils.MetricFamily.COUNTER
            self._families[count.name] = pb_utils.MetricFamily(name=PREFIX + count.name, description=count.text, kind=kind)
        return self._families[count.name].Metric(labels={"model": self._model, **dict(count.labels)})
