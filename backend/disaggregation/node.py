"""A node among others, in Redis: its own entry, the others' entries, its inbox, and what it writes to theirs.

Keys, all under the topic: `nodes` (a set of ids), `node:ID` (what the node says of itself, gone three heartbeats after the last one),
`jobs:ID` and `inbox:ID` (streams). Redis may be slow, restart, or lose everything: whoever waits for somebody has a time limit of its own.
"""

from __future__ import annotations

import asyncio  # noqa: F401 - does without `ssl` where there is none, and so must be loaded before names_for_ssl
import contextlib
import json
import logging
import os
import queue
import secrets
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from backend.disaggregation.node_info import NodeInfo, read_info
from backend.disaggregation.records import Fields, Message, RecordError, read_message, write_message
from backend.disaggregation_config import DisaggregationConfig, read_password
from backend.errors import ConfigError

logger = logging.getLogger(__name__)

CONNECT_SECONDS, ANSWER_SECONDS = 1.0, 2.0
BLOCK_MS = 500
LEAST_VERSION = (6, 2)
"""Of Redis: older ones cannot have streams cut, nor read on from one entry, by number."""
GROUP = "prefill"
"""The consumer group of every stream of jobs. Others take what is in it once the node is dead."""
MAX_STREAM_ENTRIES = {"jobs": 4096, "inbox": 65536}
"""Beyond these the oldest go: of a node that reads nothing any more."""
HEARTBEATS = 3
"""Missing ones after which a node is taken for dead."""
RETRY_SECONDS = 0.5
JOIN_SECONDS = 5.0
BATCH = 64
PATIENCE_SECONDS = 0.01
"""For which what is in no hurry waits to be sent: with what is, or once the threads that somebody waits for have had Python's lock."""


def connect(config: DisaggregationConfig) -> Any:
    """A client of the Redis server; it connects when it is used. Raises ConfigError when the library or the password is missing."""
    try:
        with names_for_ssl():
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
    except ImportError as error:
        raise ConfigError(f"disaggregation.scheduler_name redis: its client library cannot be loaded ({error}): pip install redis") from error
    password: Any = read_password(config)
    if password is not None:  # its bytes: of the environment the server's stub reads no more than ASCII as text
        password = password.encode("utf-8", "surrogateescape")
    return redis.Redis(
        host=config.scheduler_host,
        port=config.scheduler_port,
        db=config.scheduler_db,
        password=password,
        socket_connect_timeout=CONNECT_SECONDS,
        socket_timeout=ANSWER_SECONDS + BLOCK_MS / 1000,
        retry=Retry(NoBackoff(), 0),
    )


@contextlib.contextmanager
def names_for_ssl() -> Iterator[None]:
    """The client library names classes of `ssl` as it is imported, even where that module cannot be: in the server's stub, whose Python may be
    linked to an older library than the modules beside it. Connections here are not encrypted, so any class will do, errors among them."""
    try:
        import ssl  # noqa: F401
    except ImportError:
        stand_in = types.ModuleType("ssl")
        stand_in.__getattr__ = lambda name: type(name, (Exception,), {})  # type: ignore[method-assign]
        sys.modules["ssl"] = stand_in
        try:
            yield
        finally:
            del sys.modules["ssl"]
    else:
        yield


def make_node_id(name: str | None) -> str:
    """Unlike any other's, also where two nodes were given one name: who is asked for pages of one must not read the other's."""
    return f"{name or f'{socket.gethostname()}-{os.getpid()}'}-{secrets.token_hex(4)}"


@dataclass(slots=True)
class _Outgoing:
    write: Callable[[Any], object]
    """To a pipeline."""
    on_failure: Callable[[], None] | None = None
    is_urgent: bool = True


@dataclass(slots=True)
class RedisState:
    """What the heartbeat saw last."""

    peers: dict[str, NodeInfo] = field(default_factory=dict)
    """Nodes that live, this one left out."""
    dead: list[str] = field(default_factory=list)
    """Ids of nodes that are not, and that nobody has cleaned up after."""
    is_connected: bool = False
    clock: float = 0.0
    """The server's seconds minus this process's monotonic ones, at least."""
    lag: float = 0.0
    """By which that may be more: the answer took so long."""


class Node:
    """Threads: heartbeat, inbox, outbox. What they call must not block."""

    def __init__(
        self,
        config: DisaggregationConfig,
        describe: Callable[[str], NodeInfo],
        on_message: Callable[[Message], None],
        on_lost: Callable[[], None] = lambda: None,
        on_heartbeat: Callable[[RedisState], None] = lambda state: None,
    ) -> None:
        """describe: this node's entry, by its id; on_lost: the connection broke, or the server has forgotten this node, and
        messages may have been lost; on_heartbeat: after each round. Raises ConfigError."""
        self.config = config
        self.node_id = make_node_id(config.node_id)
        self.redis = connect(config)
        self.state = RedisState()
        self._describe, self._on_message, self._on_lost, self._on_heartbeat = describe, on_message, on_lost, on_heartbeat
        self._outgoing: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._is_stopping = threading.Event()
        self._was_connected: bool | None = None
        self._has_joined = False
        self.is_leaving = False
        self._threads = [threading.Thread(target=run, name=run.__name__.strip("_"), daemon=True) for run in (self._beat, self._receive, self._send)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def key(self, kind: str, node_id: str = "") -> str:
        return f"{self.config.scheduler_topic}:{kind}" + (f":{node_id}" if node_id else "")

    def describe(self) -> NodeInfo:
        return self._describe(self.node_id)

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleeps; True: the node stops."""
        return self._is_stopping.wait(seconds)

    def server_time(self) -> float:
        """Of the Redis server, by what the last heartbeat said; seconds. It may be later by `state.lag`, and is not earlier."""
        return time.monotonic() + self.state.clock

    # -- to others ----------------------------------------------------------------------------------------------------

    def post(self, kind: str, node_id: str, fields: Fields, on_failure: Callable[[], None] | None = None, *, is_urgent: bool = True) -> None:
        """Appends to a node's stream (`jobs` or `inbox`)."""
        stream = self.key(kind, node_id)

        def write(pipe: Any) -> None:
            pipe.xadd(stream, fields, maxlen=MAX_STREAM_ENTRIES[kind], approximate=True)
            pipe.expire(stream, self.config.scheduler_ttl)
            if kind == "jobs":  # the node may have died and been buried since it was chosen: so others find the job, and take it over
                pipe.sadd(self.key("nodes"), node_id)

        self.write(write, on_failure, is_urgent=is_urgent)

    def write(self, write: Callable[[Any], object], on_failure: Callable[[], None] | None = None, *, is_urgent: bool = True) -> None:
        """Has a pipeline filled and sent by a thread of its own, in the order of calls. is_urgent: without delay."""
        self._outgoing.put(_Outgoing(write, on_failure, is_urgent))

    def tell(self, node_id: str, message: Message, on_failure: Callable[[], None] | None = None, *, is_urgent: bool = True) -> None:
        self.post("inbox", node_id, write_message(message), on_failure, is_urgent=is_urgent)

    def _send(self) -> None:
        is_open = True
        while is_open:
            items = self._take_outgoing()
            is_open = None not in items
            self._write_all([item for item in items if item is not None])

    def _take_outgoing(self) -> list[_Outgoing | None]:
        """What is to be written, in one exchange; None comes last."""
        items = [self._outgoing.get()]
        end = time.monotonic() + PATIENCE_SECONDS
        with contextlib.suppress(queue.Empty):
            while (last := items[-1]) is not None and len(items) < BATCH:
                end = 0.0 if last.is_urgent else end
                items.append(self._outgoing.get(timeout=max(0.0, end - time.monotonic())))
        return items

    def _write_all(self, items: list[_Outgoing]) -> None:
        """An answer that is an error is its item's; where there is none it is everybody's."""
        import redis

        errors: list[Exception | None] = [None] * len(items)
        try:
            pipe, ends = self.redis.pipeline(transaction=False), [0]
            for item in items:
                item.write(pipe)
                ends.append(len(pipe))
            answers = pipe.execute(raise_on_error=False)
            for number, (begin, end) in enumerate(zip(ends, ends[1:])):
                errors[number] = next((answer for answer in answers[begin:end] if isinstance(answer, Exception)), None)
        except Exception as error:
            errors = [error] * len(items)
            if not isinstance(error, redis.RedisError):
                logger.exception("writing to Redis")
        for item, failed in zip(items, errors, strict=True):
            if failed is not None:
                self._note(failed)
                if item.on_failure is not None:
                    item.on_failure()

    # -- from others --------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        import redis

        last, num_read = b"0-0", 0
        inbox = self.key("inbox", self.node_id)
        while not self._is_stopping.is_set():
            try:
                found = self.redis.xread({inbox: last}, count=BATCH, block=BLOCK_MS)
            except Exception as error:
                self._note(error)
                if not isinstance(error, redis.RedisError):
                    logger.exception("reading from Redis")
                self._on_lost()
                last, num_read = b"0-0", 0  # another server's clock, of which its numbers are, may be behind
                self.clear_wrong_type(inbox, error)
                self._is_stopping.wait(RETRY_SECONDS)
                continue
            for _, entries in as_pairs(found):
                for entry_id, fields in entries:
                    last = entry_id
                    self._read(fields)
                    num_read += 1
            if num_read and (not found or num_read >= BATCH):  # whoever waits for the next one is not to wait for this
                self._forget_read(inbox, last)
                num_read = 0

    def _read(self, fields: Mapping[bytes, bytes]) -> None:
        try:
            message = read_message(fields)
        except RecordError as error:
            logger.warning("%s", error)
            return
        try:
            self._on_message(message)
        except Exception:
            logger.exception("message %s of job %s", message.kind, message.job_id)

    def _forget_read(self, inbox: str, last: bytes) -> None:
        import redis

        try:
            self.redis.xtrim(inbox, minid=last, approximate=True)
        except redis.RedisError as error:
            self._note(error)

    def clear_wrong_type(self, key: str, error: Exception) -> None:
        """Removes a key where its type was the error: what somebody has put in the place of a stream, or of the set of nodes, would keep messages, or
        nodes, from each other for good."""
        import redis

        if isinstance(error, redis.ResponseError) and "WRONGTYPE" in str(error):
            logger.error("Redis: %s is of a type that nodes do not use there, and is removed", key)
            with contextlib.suppress(redis.RedisError):
                self.redis.delete(key)

    # -- signs of life --------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        import redis

        while not self._is_stopping.is_set():
            begun = time.monotonic()
            try:
                self._exchange()
            except Exception as error:
                self._note(error)
                if not isinstance(error, redis.RedisError):
                    logger.exception("heartbeat")
                self.clear_wrong_type(self.key("nodes"), error)
            try:
                self._on_heartbeat(self.state)
            except Exception:
                logger.exception("heartbeat")
            # From the last one's beginning: where Redis is far away or slow, its answers would else take three signs of life the time of two.
            self._is_stopping.wait(max(0.0, self.config.heartbeat_seconds - (time.monotonic() - begun)))

    def _check_version(self) -> None:
        """Raises redis.RedisError where the server is too old. One that does not tell is believed to be new enough."""
        import redis

        try:
            told = str(self.redis.info("server").get("redis_version", ""))
        except redis.ResponseError:
            return
        found = tuple(int(part) for part in told.split(".")[:2] if part.isdecimal())
        if len(found) == 2 and found < LEAST_VERSION:
            raise redis.RedisError(f"version {told} is too old; {'.'.join(map(str, LEAST_VERSION))} or newer is needed")

    def _exchange(self) -> None:
        if self._was_connected is not True:
            self._check_version()
        own = self.describe()
        pipe = self.redis.pipeline(transaction=False)
        pipe.set(self.key("node", self.node_id), json.dumps({f: getattr(own, f) for f in own.__slots__}), px=self._life_ms)
        pipe.sadd(self.key("nodes"), self.node_id)
        pipe.smembers(self.key("nodes"))
        pipe.time()
        asked = time.monotonic()
        _, is_new, members, (seconds, micros) = pipe.execute()
        answered = time.monotonic()
        if is_new and self._has_joined:
            logger.warning("Redis has forgotten node %s: prompts under way are computed by each node itself", self.node_id)
            self._on_lost()
        self._has_joined = True
        ids = sorted({m.decode("utf-8", "replace") for m in members} - {self.node_id})
        values = self.redis.mget([self.key("node", i) for i in ids]) if ids else []
        peers, dead = {}, []
        for node_id, value in zip(ids, values):
            info = read_info(node_id, value) if value is not None else None
            if info is not None:
                peers[node_id] = info
            elif value is None:
                dead.append(node_id)
        self.state = RedisState(peers, dead, True, seconds + micros / 1e6 - answered, answered - asked)
        if self._was_connected is not True:
            logger.info("node %s (%s) is in Redis %s:%d", self.node_id, own.role, self.config.scheduler_host, self.config.scheduler_port)
        self._was_connected = True

    @property
    def _life_ms(self) -> int:
        return int(self.config.heartbeat_seconds * 1000 * HEARTBEATS) + 1

    def bury(self, node_id: str, pipe: Any) -> None:
        """Nothing of a dead node is left to do. pipe: what this is written to."""
        pipe.srem(self.key("nodes"), node_id)
        pipe.delete(self.key("jobs", node_id), self.key("inbox", node_id))

    def _note(self, error: Exception) -> None:
        """The server cannot be used."""
        self.state = RedisState(clock=self.state.clock, lag=self.state.lag)
        if self._was_connected is not False and not self._is_stopping.is_set():
            where = f"{self.config.scheduler_host}:{self.config.scheduler_port}"
            logger.warning("Redis %s: %s: prompts are computed by each node itself until it is back", where, error)
        self._was_connected = False

    def stop(self) -> None:
        """Leaves, so that others know at once."""
        self._is_stopping.set()
        self._outgoing.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(JOIN_SECONDS)
        try:
            self.redis.delete(self.key("node", self.node_id), self.key("inbox", self.node_id))
        except Exception as error:  # it is forgotten by itself soon
            logger.debug("leaving: %s", error)


def as_pairs(found: Any) -> list[tuple[bytes, list[tuple[bytes, Mapping[bytes, bytes]]]]]:
    """XREAD's answer, which is a list or, by newer protocols, a mapping whose values are lists of lists."""
    if isinstance(found, Mapping):
        return [(stream, [entry for part in parts for entry in part]) for stream, parts in found.items()]
    return list(found or [])


def time_of(entry_id: bytes) -> float:
    """The server's seconds at which a stream's entry was written."""
    return int(entry_id.partition(b"-")[0]) / 1000
