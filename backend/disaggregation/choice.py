"""Which prefill node computes a prompt: those that can, and of them the one that will be done first."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence, Set
from typing import NamedTuple

from backend.core import Request
from backend.disaggregation.node import RedisState
from backend.disaggregation.node_info import NodeInfo
from backend.disaggregation.records import VERSION
from backend.prefix_cache import chain_hashes

logger = logging.getLogger(__name__)

MAX_PREFIXES = 65536
"""Pages of prompts of which it is remembered which node has them."""
NODE_FAULTS, REQUEST_FAULTS = ("transfer", "lease", "timeout"), ("failed", "internal")
"""Fall-backs after which a node rests; after the latter, which may be the request's own fault, when several come one after the other. One that fails
has little to do, and would be chosen before those that do not."""
MAX_DOUBTS = 3
REST_SECONDS, MAX_REST_SECONDS = 5.0, 320.0
"""The first time, and at most: twice as long each time that it fails again before anything has come from it."""


class Rest(NamedTuple):
    """Of a node that is asked for nothing."""

    seconds: float
    end: float
    """time.monotonic()"""
    reason: str


class NodeChoice:
    """What a decode node knows of prefill nodes. `fitting` and `why_none` are safe from any thread, the rest is one thread's."""

    def __init__(self, fingerprint: str, page_size: int, transfer_backend: str) -> None:
        """fingerprint: of this node's pages; transfer_backend: what moves them."""
        self._fingerprint, self._page_size, self._transfer_backend = fingerprint, page_size, transfer_backend
        self._places: OrderedDict[bytes, str] = OrderedDict()
        """Nodes by the chain hash of a prompt's page that they have computed."""
        self._loads: dict[str, tuple[float, int]] = {}
        """Of nodes: prompt tokens that they had to compute, and when they said so."""
        self._refused: set[tuple[str, int, str]] = set()
        self._hung: frozenset[str] = frozenset()
        self._doubts: Counter[str] = Counter()
        """Requests' faults, of nodes that nothing has come from since."""
        self._rests: dict[str, Rest] = {}
        """Of nodes that have failed, and that nothing has come from since: also of those whose rest is over."""

    def _can_exchange(self, info: NodeInfo) -> bool:
        return (info.version, info.fingerprint, info.transfer_backend) == (VERSION, self._fingerprint, self._transfer_backend)

    @property
    def has_hung(self) -> bool:
        return bool(self._hung)

    def note_hung(self, node_ids: Set[str]) -> None:
        """Nodes whose pages do not come, though they were told of: nobody asks them until those reads have ended."""
        for node_id in node_ids - self._hung:
            logger.warning("prefill node %s: pages that are read from there do not come; it is asked for nothing until they have", node_id)
        if node_ids != self._hung:
            self._hung = frozenset(node_ids)

    def note_failed(self, node_id: str, reason: str) -> None:
        """A prompt was computed here, as fall-backs are counted. Those that were asked for before the node rested say no more than the first one."""
        now, last = time.monotonic(), self._rests.get(node_id)
        if reason not in NODE_FAULTS + REQUEST_FAULTS or not node_id or (last is not None and now < last.end):
            return
        if reason in REQUEST_FAULTS:
            self._doubts[node_id] += 1
            if self._doubts[node_id] < MAX_DOUBTS:
                return
        seconds = REST_SECONDS if last is None else min(2 * last.seconds, MAX_REST_SECONDS)
        self._rests = {**self._rests, node_id: Rest(seconds, now + seconds, reason)}
        logger.warning("prefill node %s: %s: it is asked for nothing for %g s", node_id, reason, seconds)

    def note_good(self, node_id: str) -> None:
        """Pages have come from there."""
        self._doubts.pop(node_id, None)
        if node_id in self._rests:
            self._rests = {other: rest for other, rest in self._rests.items() if other != node_id}

    def _rests_now(self, node_id: str) -> bool:
        rest = self._rests.get(node_id)
        return rest is not None and time.monotonic() < rest.end

    def fitting(self, state: RedisState, request: Request) -> list[NodeInfo]:
        """Those that could compute a prompt now."""
        method, length = request.speculation.method, len(request.prompt_token_ids)
        working = [info for info in _working(state) if info.node_id not in self._hung and not self._rests_now(info.node_id)]
        return [i for i in working if self._can_exchange(i) and method in i.methods and length < i.max_model_len]

    def why_none(self, state: RedisState, request: Request) -> str:
        """Why there is no such node, as fall-backs are counted."""
        if not state.is_connected:
            return "redis"
        working = _working(state)
        if not working:
            return "no_node"
        fitting = [info for info in working if self._can_exchange(info)]
        if not fitting:
            return "fingerprint"
        fitting = [info for info in fitting if request.speculation.method in info.methods]
        if not fitting:
            return "method"
        fitting = [info for info in fitting if len(request.prompt_token_ids) < info.max_model_len]
        if not fitting:
            return "too_long"
        rests = self._rests
        return next((rests[info.node_id].reason for info in fitting if info.node_id in rests), "transfer")

    def tell_refused(self, me: NodeInfo, state: RedisState) -> None:
        """Says once of each node why it is of no use."""
        for info in _working(state):
            key = (info.node_id, info.version, info.fingerprint)
            if key not in self._refused and (why := me.differences(info)):
                self._refused.add(key)
                logger.error("prefill node %s cannot work for this one: %s", info.node_id, why)

    def note_load(self, node_id: str, at: float, load: int) -> None:
        """Prompt tokens that a node had to compute at the Redis server's second `at`."""
        if at > self._loads.get(node_id, (0.0, 0))[0]:
            self._loads[node_id] = at, load

    def note_alive(self, infos: Sequence[NodeInfo], now: float) -> None:
        """After a heartbeat: the others are forgotten, and loads of what is yet to come at the Redis server's second `now`, at the latest: its clock
        was set back, and nothing newer would count until then."""
        alive = {info.node_id for info in infos}
        self._loads = {node_id: load for node_id, load in self._loads.items() if node_id in alive and load[0] <= now}
        self._rests = {node_id: rest for node_id, rest in self._rests.items() if node_id in alive}
        self._doubts = Counter({node_id: count for node_id, count in self._doubts.items() if node_id in alive})
        for info in infos:
            self.note_load(info.node_id, info.time, info.load)

    def choose(self, state: RedisState, request: Request, owed: dict[str, int]) -> NodeInfo | None:
        """Where the least is to be computed before this prompt is done: what waits there, and what the node lacks of it.

        owed: tokens of this node's own prompts there, which may be in the load that the other one told, or not yet.
        """
        fitting, tokens, size = self.fitting(state, request), request.prompt_token_ids, self._page_size
        if len(fitting) <= 1:
            return fitting[0] if fitting else None
        hashes = self._hashes_of(request)

        def cost(info: NodeInfo) -> tuple[int, str]:
            known = next((n for n in range(len(hashes), 0, -1) if self._places.get(hashes[n - 1]) == info.node_id), 0)
            load = self._loads.get(info.node_id, (0.0, 0))[1]
            return max(load, owed.get(info.node_id, 0)) + len(tokens) - known * size, info.node_id

        return min(fitting, key=cost)

    def note_place(self, request: Request, node_id: str) -> None:
        """Of a prompt that a node computes."""
        for key in self._hashes_of(request):
            self._places[key] = node_id
            self._places.move_to_end(key)
        while len(self._places) > MAX_PREFIXES:
            self._places.popitem(last=False)

    def _hashes_of(self, request: Request) -> list[bytes]:
        """The engine registers the pages by them, once they are here."""
        if len(request.prompt_hashes) < len(request.prompt_token_ids) // self._page_size:
            request.prompt_hashes = chain_hashes(request.prompt_token_ids, self._page_size)
        return request.prompt_hashes


def _working(state: RedisState) -> list[NodeInfo]:
    """Nodes that take prompts of others."""
    return [info for info in state.peers.values() if info.role != "decode" and not info.is_leaving]
