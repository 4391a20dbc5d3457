"""A host whose ranks all follow: rank 0 is another host's. Starts its ranks, and knows whether they compute."""

from __future__ import annotations

import logging
import socket
import subprocess
import threading
import time

from backend.config import EngineConfig
from backend.errors import ConfigError, EngineError, ModelError
from backend.parallel.lines import HANG_SECONDS, LOADING_HANG_SECONDS
from backend.rank_hello import describe_rank
from backend.rank_processes import MEET_SECONDS, read_reports, start_rank

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
HANG_LIMIT, LOADING_HANG_LIMIT = 2 * HANG_SECONDS, 2 * LOADING_HANG_SECONDS
"""Rank 0 looks too, and is the first to know."""
CONNECT_SECONDS = 1.0


class FollowingHost:
    """`failure` says what has ended it; then all of its ranks are ended, and it is of no use any more."""

    def __init__(self, config: EngineConfig) -> None:
        """Waits until its ranks have met the others, and have loaded their parts. Raises ConfigError, ModelError."""
        parallel = config.parallel_config
        if not parallel.node_rank:
            raise ConfigError("parallel_config.node_rank 0: the first host's server loads the standalone repository")
        self.master = "{}:{}".format(*parallel.meeting_place)
        self.failure = ""
        self._has_changed = threading.Condition()
        self._ready: set[int] = set()
        self._children: dict[int, subprocess.Popen[str]] = {}
        self._is_closed = False
        await_master(*parallel.meeting_place)
        ranks = range(parallel.first_rank, parallel.first_rank + parallel.host_size)
        self._heard = dict.fromkeys(ranks, time.monotonic())
        try:
            for rank in ranks:
                self._children[rank] = start_rank(describe_rank(config, rank, parallel.meeting_place, None, reports=True))
                threading.Thread(target=self._listen, args=(rank,), name=f"rank {rank}", daemon=True).start()
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()
            with self._has_changed:
                self._has_changed.wait_for(lambda: self.failure or len(self._ready) == len(ranks))
            if self.failure:
                raise ModelError(self.failure)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raises EngineError where its ranks do not compute any more."""
        if self.failure:
            raise EngineError(self.failure)

    def close(self) -> None:
        self._is_closed = True
        for child in self._children.values():
            child.kill()
            child.wait()

    def _listen(self, rank: int) -> None:
        """What a rank reports, line by line, until it ends."""
        child, why = self._children[rank], ""
        for report in read_reports(child):
            self._heard[rank] = time.monotonic()
            why = report.get("error", why)
            if report == {"ready": True}:
                with self._has_changed:
                    self._ready.add(rank)
                    self._has_changed.notify_all()
        self._fail(f"rank {rank} has ended: {why or f'exit status {child.wait()}'}")

    def _watch(self) -> None:
        while not self._is_closed and not self.failure:
            limit = HANG_LIMIT if len(self._ready) == len(self._heard) else LOADING_HANG_LIMIT
            for rank, heard in list(self._heard.items()):
                if (silent := time.monotonic() - heard) > limit:
                    self._fail(f"rank {rank} hangs: no sign of life for {silent:.1f} s")
            time.sleep(LOOK_SECONDS)

    def _fail(self, why: str) -> None:
        with self._has_changed:
            if self.failure or self._is_closed:
                return
            self.failure = why
            self._has_changed.notify_all()
        logger.error("the ranks of this host are ended: %s", why)
        for child in self._children.values():
            child.kill()


def await_master(host: str, port: int) -> None:
    """Raises ModelError when the first host does not come in time."""
    end = time.monotonic() + MEET_SECONDS
    while True:
        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise ModelError(f"parallel_config.master {host}:{port}: no rank 0 within {MEET_SECONDS:.0f} s: {error}") from None
        time.sleep(LOOK_SECONDS)
