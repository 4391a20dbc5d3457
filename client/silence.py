"""How long a server that sends nothing is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

BUSY_SECONDS = 60.0
"""For which a stream may have nothing from a model that sends to the same client's other streams. A server gives its signs of life one after the
other: of 1,000 requests that came at once the last ones had theirs after 4.4 s, of 2,000 after 16 (two cores, measured)."""


class SignsOfLife:
    """When each model last sent anything to a client. Safe from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}

    def note(self, model: str) -> None:
        """The model has sent something, to whichever stream."""
        self._last[model] = self._clock()

    def seconds_left(self, model: str, silence: float, limit: float) -> float:
        """Until a stream that has had nothing for `silence` seconds is given up: `limit` seconds after the model last sent anything to anybody, and
        BUSY_SECONDS (or `limit`, if that is longer) after it sent something to this stream at the latest. Not above 0: now."""
        now = self._clock()
        since = now - silence
        heard = max(since, self._last.get(model, since))
        return min(heard + limit, since + max(limit, BUSY_SECONDS)) - now
