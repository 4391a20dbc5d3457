"""Beside deploy/load/locustfile.py: ends a load test once it has had answers enough. A time alone may bring none on a busy machine."""

from __future__ import annotations

import itertools
from typing import Any

import gevent
from locust import events
from locust.env import Environment

ENOUGH = 24
"""Right or wrong: each of a few prompts has its turn."""


@events.init.add_listener
def end_in_time(environment: Environment, **_: Any) -> None:
    numbers = itertools.count(1)

    @environment.events.request.add_listener
    def note(name: str, **_: Any) -> None:
        if name == "request" and next(numbers) == ENOUGH:
            gevent.spawn(environment.runner.quit)  # not in the user's own greenlet, which it ends
