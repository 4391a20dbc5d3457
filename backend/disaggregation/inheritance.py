"""Jobs of prefill nodes that died: another node's own from then on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from backend.disaggregation.node import GROUP, Node, RedisState

logger = logging.getLogger(__name__)

MAX_TAKEN = 16
"""Jobs that are looked at at a time."""
MAX_DEATHS = 3
"""Nodes that may die with a job before it is believed to be why."""
DEATHS = b"deaths"
"""Field of a job's entry: nodes that have died while they may have computed it."""


class Inheritance:
    """Of one prefill node. One thread's."""

    def __init__(
        self, node: Node, can_do: Callable[[Mapping[bytes, bytes]], bool], max_running: int, refuse: Callable[[Mapping[bytes, bytes], int], None]
    ) -> None:
        """can_do: whether this node can do a job, by its record; max_running: jobs that a node computes at once; refuse: told of one that nobody is
        to compute any more, and how many nodes have died with it."""
        self._node, self._can_do, self._max_running, self._refuse = node, can_do, max_running, refuse
        self._passed: dict[str, bytes] = {}
        """Of dead nodes the last one of the jobs that were looked at, and left to others."""
        self._state: RedisState | None = None
        """By which was looked last."""

    def take(self) -> None:
        """Moves such jobs to this node's own stream, once for each sign of life. What is wrong with one's stream keeps nobody from the others'.

        Raises redis.RedisError where there is no server."""
        import redis

        state = self._node.state
        if state is self._state:
            return
        self._state, dead = state, state.dead
        self._passed = {node_id: entry_id for node_id, entry_id in self._passed.items() if node_id in dead}
        for node_id in dead:
            try:
                self._take_of(node_id)
            except redis.WatchError:
                logger.debug("another node has taken jobs of node %s meanwhile", node_id)
            except redis.ResponseError as error:
                logger.debug("jobs of node %s: %s", node_id, error)
                self._node.clear_wrong_type(self._node.key("jobs", node_id), error)

    def _take_of(self, dead: str) -> None:
        """Those that it had taken, and those that it had not, as far as this node can do them: others are left to nodes that can, or to their
        end (scheduler_ttl)."""
        client, stream = self._node.redis, self._node.key("jobs", dead)
        if client.exists(self._node.key("node", dead)):
            return  # it was silent for a while, and has come back since
        while True:
            with client.pipeline() as pipe:
                pipe.watch(stream)  # nothing is moved that somebody else has moved by then
                entries = pipe.xrange(stream, min=b"(" + self._passed[dead] if dead in self._passed else "-", count=MAX_TAKEN)
                if not entries:
                    if not pipe.xlen(stream):
                        pipe.multi()  # or a job comes that was written for it while others took it to live
                        self._node.bury(dead, pipe)
                        pipe.execute()
                    return
                taken = [(entry_id, fields) for entry_id, fields in entries if self._can_do(fields)]
                running, refused = self._find_running(pipe, stream), []
                pipe.multi()
                for entry_id, fields in taken:
                    deaths = _count_deaths(fields) + (entry_id in running)
                    if deaths < MAX_DEATHS:
                        pipe.xadd(self._node.key("jobs", self._node.node_id), {**fields, DEATHS: b"%d" % deaths})
                    else:
                        refused.append((fields, deaths))
                    pipe.xdel(stream, entry_id)
                pipe.execute()
            for fields, deaths in refused:
                self._refuse(fields, deaths)
            self._passed[dead] = entries[-1][0]
            if taken:
                logger.warning("%d jobs of node %s, which is dead, go on here", len(taken), dead)

    def _find_running(self, pipe: Any, stream: bytes | str) -> set[bytes]:
        """Entries of jobs that the dead node may have computed when it died: the oldest of those that it had taken and not done. Others, which waited
        behind them, are not why it died."""
        import redis

        try:
            return {pending["message_id"] for pending in pipe.xpending_range(stream, GROUP, "-", "+", self._max_running)}
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            return set()  # it had taken none


def _count_deaths(fields: Mapping[bytes, bytes]) -> int:
    text = fields.get(DEATHS, b"0")
    return int(text) if text.isdigit() and len(text) < 10 else 0
