"""Groups whose other ranks are threads of this process: they meet, follow plans and exchange as those of a server do, and start in no time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import backend.llm
from backend import follower
from backend.config import EngineConfig
from backend.engine import Engine
from backend.parallel.ring import PlanRing

PAUSE_SECONDS = 5e-4


class Ring(PlanRing):
    """Readers sleep at once: who looks again and again takes the time of the thread that is waited for."""

    def read(self, reader: int, check: Callable[[], None]) -> np.ndarray:
        while not self._has_news(int(self._numbers[1 + reader])):
            check()
            time.sleep(PAUSE_SECONDS)
        return super().read(reader, check)


def start_thread(rank: int, spec: dict[str, Any]) -> None:
    def run() -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 is gone, or says why it has no use for this one
            follower.run_rank(spec, lambda report: None, lambda why: None)

    threading.Thread(target=run, name=f"rank {rank}", daemon=True).start()


@contextlib.contextmanager
def as_threads() -> Iterator[None]:
    """Of engines that are made meanwhile."""

    def make_engine(config: EngineConfig) -> Engine:
        return Engine(config, greet=start_thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.llm, "Engine", make_engine)
        patch.setattr(follower, "PlanRing", Ring)
        yield
