"""How long a server that sends nothing is waited for, by a client that may be busy itself."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable

from client.loopback import is_loopback

BUSY_SECONDS = 60.0
"""For which a stream may have nothing from a model that sends to the same client's other streams. A server gives its signs of life one after the
other: of 1,000 requests that came at once the last ones had theirs after 4.4 s, of 2,000 after 16 (two cores, measured)."""
LEAST_RATE = 10_000
"""Bytes a second of the slowest network on which a request is waited for until it can have reached its server, which then shows signs of life."""
TICK_SECONDS = 0.1
LONGEST_TICK = 1.5 * TICK_SECONDS


def sending_seconds(num_bytes: int, address: str) -> float:
    """For which a server may be silent beyond any limit, because a request of so many bytes is on its way to it."""
    return 0.0 if is_loopback(address) else num_bytes / LEAST_RATE


class SignsOfLife:
    """When each model last sent anything to a client. As safe from threads as its clock."""

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


class _ListeningClock:
    """Seconds in which an event loop came to its turns in time.

    It all but stands still while the loop is busy: what has come meanwhile is not read yet, and is not missing (2,300 requests at once kept a
    gateway busy for 3 s of the 4 after which it took the server for dead, and all of them had an error).
    """

    def __init__(self) -> None:
        self._counted = 0.0
        self._ticked = -LONGEST_TICK
        """The loop's time."""
        self._num_users = 0
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """It goes on only while somebody looks."""
        if not self._num_users:
            loop = asyncio.get_running_loop()
            self._counted, self._ticked = self._counted + LONGEST_TICK, loop.time()
            self._timer = loop.call_later(TICK_SECONDS, self._tick, loop)
        self._num_users += 1

    def close(self) -> None:
        self._num_users -= 1
        if not self._num_users and self._timer is not None:
            self._timer.cancel()
            self._timer = None  # which has the loop, and the loop this clock

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        self._counted += min(now - self._ticked, LONGEST_TICK)
        self._ticked = now
        self._timer = loop.call_later(TICK_SECONDS, self._tick, loop)

    def time(self) -> float:
        return self._counted + min(asyncio.get_running_loop().time() - self._ticked, LONGEST_TICK)


_clocks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _ListeningClock] = weakref.WeakKeyDictionary()


def _listening_clock() -> _ListeningClock:
    """Of the loop that runs."""
    loop = asyncio.get_running_loop()
    if (clock := _clocks.get(loop)) is None:
        clock = _clocks[loop] = _ListeningClock()
    return clock


def listening_time() -> float:
    """Seconds in which the loop that runs was not busy, while a Watch of it was open."""
    return _listening_clock().time()


class Watch:
    """Calls `act` after `seconds` between a `resume` and its `pause` in which the loop was not busy.

    One timer a stream: a timeout for every response costs a task each.
    """

    def __init__(self, seconds: float, act: Callable[[], object], seconds_left: Callable[[float], float] | None = None) -> None:
        """seconds_left: of a silence that has lasted so many seconds, how many more it may; asked when it has lasted `seconds`."""
        self._loop = asyncio.get_running_loop()
        self._clock = _listening_clock()
        self._clock.open()
        self._seconds = seconds
        self._act = act
        self._seconds_left = seconds_left or (lambda silence: seconds - silence)
        self.has_fired = False
        self.silence = 0.0
        """Seconds since the last `resume`, when it fired."""
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(seconds, self._check)

    def resume(self) -> None:
        self._since = self._clock.time()

    def pause(self) -> None:
        """While whoever reads the stream is busy, silence is not the server's."""
        self._since = None

    def _check(self) -> None:
        self.silence = 0.0 if self._since is None else self._clock.time() - self._since
        if (left := self._seconds - self.silence) <= 0:
            left = self._seconds_left(self.silence)
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            self.has_fired = True
            self._act()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._clock.close()
