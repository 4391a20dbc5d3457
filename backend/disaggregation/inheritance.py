"""Jobs of prefill nodes that died: another node's own from then on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from backend.disaggregation.node import Node, RedisState

logger = logging.getLogger(__name__)

MAX_TAKEN = 16
"""Jobs that are looked at at a time."""


class Inheritance:
    """Of one prefill node. One thread's."""

    def __init__(self, node: Node, can_do: Callable[[Mapping[bytes, bytes]], bool]) -> None:
        """can_do: whether this node can do a job, by its record."""
        self._node, self._can_do = node, can_do
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
                pipe.multi()
                for entry_id, fields in taken:
                    pipe.xadd(self._node.key("jobs", self._node.node_id), fields)
                    pipe.xdel(stream, entry_id)
                pipe.execute()
            self._passed[dead] = entries[-1][0]
            if taken:
                logger.warning("%d jobs of node %s, which is dead, go on here", len(taken), dead)
