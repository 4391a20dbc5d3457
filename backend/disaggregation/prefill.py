"""A prefill node's work: jobs from Redis to the engine, and what comes of them to the decode nodes, which read the pages themselves."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from backend.disaggregation.checks import check_job
from backend.disaggregation.held_jobs import HeldJob, HeldJobs
from backend.disaggregation.inheritance import MAX_DEATHS, Inheritance
from backend.disaggregation.node import BLOCK_MS, GROUP, JOIN_SECONDS, RETRY_SECONDS, Node, as_pairs, time_of
from backend.disaggregation.node_transfer import NodeTransfer
from backend.disaggregation.records import DEADLY, Job, Message, RecordError, read_job, who_waits
from backend.disaggregation.slow_jobs import SlowJobs
from backend.disaggregation.telling import Telling
from backend.engine import Engine
from backend.errors import CapacityError, EngineError, RequestError

logger = logging.getLogger(__name__)

RESULTS = ("done", "stopped", "late", "fingerprint", "method", "full", "refused", "failed")
"""What becomes of a job."""
MAX_TAKEN = 16
"""Jobs that are taken at a time."""
NEW = b">"
"""For XREADGROUP: entries that nobody was given."""
BUSY_SECONDS = 0.02
YIELD_SECONDS = 0.001
"""For which the thread that takes jobs leaves others alone, before it says that it has."""
SERVE_SECONDS, IDLE_SECONDS = 0.0005, 0.5
"""Between two looks at others' reads, and for pages that others may read at all."""
MAX_STOPPED = 4096
"""Ids of jobs that were stopped before they were taken."""

Content = TypeVar("Content")


class PrefillService:
    """One thread reads jobs, one compiles the grammars of those that have one, which others are not to wait for, and one serves reads of pages while
    there are some, where they want that; the engine's thread does the rest."""

    def __init__(self, engine: Engine, node: Node, transfer: NodeTransfer) -> None:
        self._engine, self._node, self._transfer = engine, node, transfer
        self._stopped: deque[str] = deque(maxlen=MAX_STOPPED)
        self._telling = Telling(node)
        self.held = HeldJobs(engine, node, self._telling, self._acknowledge)
        self._inheritance = Inheritance(node, self._can_do, engine.config.max_batch_size, self._refuse_deadly)
        self._slow = SlowJobs(self._take_slow)
        self.queue_length = 0
        """Jobs that wait for room here."""
        self.queue_seconds = 0.0
        """Of jobs that wait, or were taken since the heartbeat before the last one: the greatest age."""
        self._taken_seconds = 0.0
        """The greatest age of those that were taken since the last heartbeat, when they were."""
        own = {"jobs": self._take_jobs} | ({"pages": self._serve} if transfer.is_served else {})
        self._threads = [self._slow.thread, *(threading.Thread(target=run, name=name, daemon=True) for name, run in own.items())]
        engine.hand_offs.sink = self.held

    @property
    def num_open(self) -> int:
        return len(self.held.jobs) + len(self._slow)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """After the node was."""
        self.held.has_offers.set()
        self._slow.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(BLOCK_MS / 1000 + JOIN_SECONDS)

    # -- the thread that serves pages ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._node.is_stopping:
            self.held.has_offers.clear()  # before the look, so that none is missed
            if not self.held.is_read:
                self.held.has_offers.wait(IDLE_SECONDS)
                continue
            try:
                self._transfer.serve(time.monotonic())
            except Exception:
                logger.exception("pages could not be served")
                self._node.wait(RETRY_SECONDS)
            time.sleep(SERVE_SECONDS)

    # -- the thread that takes jobs -----------------------------------------------------------------------------------

    def _take_jobs(self) -> None:
        import redis

        own, begin = self._node.node_id, b""
        while not self._node.is_stopping:
            if not self._has_room():
                self._node.wait(BUSY_SECONDS)
                continue
            try:
                if not begin:
                    self._make_group()
                    begin = b"0"  # those that were given out before, by an answer that may have been lost, or whose end Redis was not told
                stream = self._node.key("jobs", own)
                found = self._node.redis.xreadgroup(GROUP, own, {stream: begin}, count=max(1, min(MAX_TAKEN, self._engine.room)), block=BLOCK_MS)
                entries = [entry for _, entries in as_pairs(found) for entry in entries]
                if begin != NEW:
                    begin, known = entries[-1][0] if entries else NEW, self._known()
                    entries = [entry for entry in entries if entry[0] not in known]
                taken = [self._alone(self._take, *entry) for entry in entries]
                if any(taken):
                    self._node.wait(YIELD_SECONDS)  # the engine's thread needs Python's lock now
                for job in filter(None, taken):
                    self.held.tell(job, "taken", is_urgent=False)
                if not self._node.is_leaving:
                    self._inheritance.take()
            except redis.RedisError as error:  # the heartbeat says why; the group may be gone with everything else
                begin = b""
                self._node.clear_wrong_type(self._node.key("jobs", own), error)
                self._node.wait(RETRY_SECONDS)
            except Exception:
                logger.exception("jobs could not be taken")
                self._node.wait(RETRY_SECONDS)

    def _known(self) -> set[bytes]:
        """Entries of jobs that this node has."""
        return {own.entry_id for own in list(self.held.jobs.values())} | self._slow.entry_ids

    def _has_room(self) -> bool:
        return self._engine.room > len(self._slow)

    def _make_group(self) -> None:
        import redis

        try:
            self._node.redis.xgroup_create(self._node.key("jobs", self._node.node_id), GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def _can_do(self, fields: Mapping[bytes, bytes]) -> bool:
        try:
            return self._why_not(read_job(fields)) is None
        except RecordError:
            return False

    def _why_not(self, job: Job) -> tuple[str, str] | None:
        """A reason and its text, for a job that another node may be able to do."""
        own = self._engine.worker.store.fingerprint
        if job.fingerprint != own:
            return "fingerprint", f"pages of layout {job.fingerprint} there, {own} here"
        method, loaded = job.request.speculation.method, self._engine.config.speculative_config.loaded_methods
        if method not in loaded:
            return "method", f"method {method} is not loaded; loaded: {', '.join(sorted(loaded))}"
        return None

    def _take_slow(self, entry_id: bytes, job: Job) -> None:
        taken = self._alone(self._begin, entry_id, job)
        if taken is not None:
            self.held.tell(taken, "taken", is_urgent=False)

    def _alone(self, take: Callable[[bytes, Content], HeldJob | None], entry_id: bytes, content: Content) -> HeldJob | None:
        """Whatever is wrong with a job, those that came with it are taken."""
        try:
            return take(entry_id, content)
        except Exception:
            logger.exception("job %s could not be taken", entry_id)
            self._acknowledge(entry_id)
            return None

    def _take(self, entry_id: bytes, fields: Mapping[bytes, bytes]) -> HeldJob | None:
        """One job to the engine. None: it is answered here, or waits for its grammar."""
        try:
            job = read_job(fields or {})  # none: it was given out, and has gone from the stream since
        except RecordError as error:
            logger.warning("%s", error)
            if (waiting := who_waits(fields or {})) is not None:  # it would wait for as long as a job may take
                self.held.results["failed"] += 1
                self._telling.tell_failed(*waiting, "failed", str(error))
            self._acknowledge(entry_id)
            return None
        self._taken_seconds = max(self._taken_seconds, self._age_of(entry_id))
        if job.request.params.structured_outputs is None:
            return self._begin(entry_id, job)
        self._slow.put(entry_id, job)
        return None

    def _age_of(self, entry_id: bytes) -> float:
        return self._node.server_time() - time_of(entry_id)

    def _begin(self, entry_id: bytes, job: Job) -> HeldJob | None:
        """What is too late, or wrong, is answered here: None."""
        if self._was_stopped(job, entry_id):
            return None
        age, limit = self._age_of(entry_id), self._node.config.job_seconds
        if age > limit:  # whoever waits for it still hears of other prompts from here, and would go on waiting
            self._refuse(job, entry_id, "timeout", f"it waited for {age:.1f} s; the limit is {limit:g} s", "late")
            return None
        if job.job_id in self.held.jobs:
            self._acknowledge(entry_id)
            return None
        if (why := self._why_not(job)) is not None:
            self._refuse(job, entry_id, *why)
            return None
        try:
            check_job(job, self._engine.config.speculative_config, self._engine.worker.model.vocab_size, self._engine.config.page_size)
            job.request.grammar = self._engine.compile_grammar(job.request.params, job.state)
        except (RecordError, RequestError) as error:
            self._refuse(job, entry_id, "refused", str(error))
            return None
        if job.request.grammar is not None and self._was_stopped(job, entry_id):  # which took its time
            return None
        self.held.jobs[job.job_id] = taken = HeldJob(job, entry_id, job.num_cached_pages)
        try:
            self._engine.submit_requests([job.request], lambda delta: self.held.note_end(job.job_id, delta))
        except Exception as error:
            del self.held.jobs[job.job_id]
            reason = "full" if isinstance(error, CapacityError) else "refused"
            self._refuse(job, entry_id, reason, f"{type(error).__name__}: {error}")
            return None
        return taken

    def _was_stopped(self, job: Job, entry_id: bytes) -> bool:
        if job.job_id not in self._stopped:
            return False
        self.held.results["stopped"] += 1
        self._acknowledge(entry_id)
        return True

    def _refuse(self, job: Job, entry_id: bytes, reason: str, text: str, result: str = "") -> None:
        """result: what is counted here, where it is not the reason."""
        self.held.results[result or reason] += 1
        logger.warning("job %s of %s is refused: %s", job.job_id, job.sender, text)
        self._telling.tell_failed(job.sender, job.job_id, reason, text)
        self._acknowledge(entry_id)

    def _refuse_deadly(self, fields: Mapping[bytes, bytes], deaths: int) -> None:
        """A dead node's job, which is in no stream any more."""
        job = read_job(fields)
        text = f"{deaths} prefill nodes have died while they computed its prompt; the limit is {MAX_DEATHS}"
        self.held.results["failed"] += 1
        logger.error("job %s of %s is refused: %s", job.job_id, job.sender, text)
        self._telling.tell_failed(job.sender, job.job_id, DEADLY, text)

    def _acknowledge(self, entry_id: bytes) -> None:
        """If that fails, somebody may compute it once more, for nobody."""
        stream = self._node.key("jobs", self._node.node_id)

        def write(pipe: Any) -> None:
            pipe.xack(stream, GROUP, entry_id)
            pipe.xdel(stream, entry_id)

        self._node.write(write, is_urgent=False)

    # -- the node's threads ---------------------------------------------------------------------------------------------

    def on_message(self, message: Message) -> None:
        if message.kind == "stop":
            self._stopped.append(message.job_id)
            self._call(lambda: self.held.stop(message.job_id))

    def on_heartbeat(self) -> None:
        """Ends leases whose time is over, and looks at the queue."""
        import redis

        self.queue_length, oldest = 0, 0.0
        with contextlib.suppress(redis.RedisError):  # no stream yet, or the connection that the heartbeat will miss too
            if self._node.state.is_connected:
                self.queue_length, begun = count_waiting(self._node.redis, self._node.key("jobs", self._node.node_id))
                oldest = self._node.server_time() - begun if self.queue_length else 0.0
        self.queue_seconds, self._taken_seconds = max(0.0, oldest, self._taken_seconds), 0.0
        for job_id in self.held.overdue(time.monotonic()):
            self._call(lambda job_id=job_id: self.held.expire(job_id))  # type: ignore[misc]
        state = self._node.state
        if state.is_connected:
            self._telling.tell_again()
        if self.held.has_late and state.is_connected:
            self._call(lambda: self.held.forget_readers(state.peers.keys()))

    def _call(self, action: Any) -> None:
        try:
            self._engine.call(action)
        except EngineError as error:
            logger.debug("%s", error)


def count_waiting(client: Any, stream: str) -> tuple[int, float]:
    """Jobs of a stream that nobody has taken, and when the oldest of them was written, in the server's seconds. Raises redis.RedisError.

    The server's own count (`lag`) is unknown while an older job than one that is done is under way.
    """
    pipe = client.pipeline(transaction=False)  # one round trip: the next sign of life waits for it
    pipe.xinfo_groups(stream)
    pipe.xlen(stream)
    groups, length = pipe.execute()
    group = next((group for group in groups if group["name"] == GROUP.encode()), None)
    if group is None:
        return 0, 0.0
    waiting = max(0, length - group["pending"])  # those that were taken are there until they are done
    first = client.xrange(stream, min=b"(" + group["last-delivered-id"], count=1) if waiting else []
    return (waiting, time_of(first[0][0])) if first else (0, 0.0)
