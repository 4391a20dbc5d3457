"""A prefill node's work: jobs from Redis to the engine, and what comes of them to the decode nodes, which read the pages themselves."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from backend.core import Delta, HandOff, Request
from backend.disaggregation.checks import check_job
from backend.disaggregation.inheritance import Inheritance
from backend.disaggregation.node import BLOCK_MS, JOIN_SECONDS, RETRY_SECONDS, Node, as_pairs, time_of
from backend.disaggregation.node_transfer import NodeTransfer
from backend.disaggregation.records import Job, Message, RecordError, probs_to_pages, read_job
from backend.disaggregation.slow_jobs import SlowJobs
from backend.disaggregation.telling import Telling
from backend.engine import Engine
from backend.errors import CapacityError, EngineError, RequestError

logger = logging.getLogger(__name__)

GROUP = "prefill"
"""The consumer group of every stream of jobs. Others take what is in it once the node is dead."""
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
LATE_SECONDS = 1000.0
"""For which reads are served after their lease: a cut connection is given up by TCP within that time."""
MAX_STOPPED = 4096
"""Ids of jobs that were stopped before they were taken."""

Content = TypeVar("Content")


@dataclass(slots=True)
class _Open:
    """A job whose pages are held here."""

    job: Job
    entry_id: bytes
    num_told: int
    """Leading pages of the prompt that the decode node has, or knows of."""
    leases: list[int] = field(default_factory=list)
    end: float = 0.0
    """time.monotonic() at which its pages are given to others, once it is done."""


class PrefillService:
    """One thread reads jobs, one compiles the grammars of those that have one, which others are not to wait for, and one serves reads of pages while
    there are some, where they want that; the engine's thread does the rest."""

    def __init__(self, engine: Engine, node: Node, transfer: NodeTransfer) -> None:
        self._engine, self._node, self._transfer = engine, node, transfer
        self._open: dict[str, _Open] = {}
        """By job id; the engine thread's."""
        self._late: dict[str, tuple[str, float]] = {}
        """Jobs whose pages went to others before their decode node said that it reads no more: which one, and until when it is believed to. Without
        being served its reads would not end, and its own pages not come back. The engine thread's."""
        self._stopped: deque[str] = deque(maxlen=MAX_STOPPED)
        self._telling = Telling(node)
        self._inheritance = Inheritance(node, self._can_do)
        self._slow = SlowJobs(self._take_slow)
        self.results: Counter[str] = Counter()
        """Jobs by what became of them: done, or why they failed."""
        self.num_expired_leases = 0
        self.queue_length = 0
        """Jobs that wait for room here."""
        self.queue_seconds = 0.0
        """Of jobs that wait, or were taken since the heartbeat before the last one: the greatest age."""
        self._taken_seconds = 0.0
        """The greatest age of those that were taken since the last heartbeat, when they were."""
        own = {"jobs": self._take_jobs} | ({"pages": self._serve} if transfer.is_served else {})
        self._threads = [self._slow.thread, *(threading.Thread(target=run, name=name, daemon=True) for name, run in own.items())]
        self._has_offers = threading.Event()
        engine.hand_offs.sink = self

    @property
    def num_open(self) -> int:
        return len(self._open) + len(self._slow)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that are to be computed."""
        return sum(max(0, len(r.prompt_token_ids) - r.num_computed_tokens) for r in self._engine.scheduler.open_requests())

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """After the node was."""
        self._has_offers.set()
        self._slow.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(BLOCK_MS / 1000 + JOIN_SECONDS)

    # -- the thread that serves pages ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._node.is_stopping:
            self._has_offers.clear()  # before the look, so that none is missed
            if not self._late and not any(own.leases for own in list(self._open.values())):
                self._has_offers.wait(IDLE_SECONDS)
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
                    self._tell(job, "taken", is_urgent=False)
                if not self._node.is_leaving:
                    self._inheritance.take()
            except redis.RedisError as error:  # the heartbeat says why; the group may be gone with everything else
                begin = b""
                self._node.clear_wrong_type("jobs", error)
                self._node.wait(RETRY_SECONDS)
            except Exception:
                logger.exception("jobs could not be taken")
                self._node.wait(RETRY_SECONDS)

    def _known(self) -> set[bytes]:
        """Entries of jobs that this node has."""
        return {own.entry_id for own in list(self._open.values())} | self._slow.entry_ids

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
            self._tell(taken, "taken", is_urgent=False)

    def _alone(self, take: Callable[[bytes, Content], _Open | None], entry_id: bytes, content: Content) -> _Open | None:
        """Whatever is wrong with a job, those that came with it are taken."""
        try:
            return take(entry_id, content)
        except Exception:
            logger.exception("job %s could not be taken", entry_id)
            self._acknowledge(entry_id)
            return None

    def _take(self, entry_id: bytes, fields: Mapping[bytes, bytes]) -> _Open | None:
        """One job to the engine. None: it is answered here, or waits for its grammar."""
        try:
            job = read_job(fields or {})  # none: it was given out, and has gone from the stream since
        except RecordError as error:
            logger.warning("%s", error)
            self._acknowledge(entry_id)
            return None
        self._taken_seconds = max(self._taken_seconds, self._age_of(entry_id))
        if job.request.params.structured_outputs is None:
            return self._begin(entry_id, job)
        self._slow.put(entry_id, job)
        return None

    def _age_of(self, entry_id: bytes) -> float:
        return self._node.server_time() - time_of(entry_id)

    def _begin(self, entry_id: bytes, job: Job) -> _Open | None:
        """What is too late, or wrong, is answered here: None."""
        if self._was_stopped(job, entry_id):
            return None
        age, limit = self._age_of(entry_id), self._node.config.job_seconds
        if age > limit:  # whoever waits for it still hears of other prompts from here, and would go on waiting
            self._refuse(job, entry_id, "timeout", f"it waited for {age:.1f} s; the limit is {limit:g} s", "late")
            return None
        if job.job_id in self._open:
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
        self._open[job.job_id] = taken = _Open(job, entry_id, job.num_cached_pages)
        try:
            self._engine.submit_requests([job.request], lambda delta: self._note_end(job.job_id, delta))
        except Exception as error:
            del self._open[job.job_id]
            reason = "full" if isinstance(error, CapacityError) else "refused"
            self._refuse(job, entry_id, reason, f"{type(error).__name__}: {error}")
            return None
        return taken

    def _was_stopped(self, job: Job, entry_id: bytes) -> bool:
        if job.job_id not in self._stopped:
            return False
        self.results["stopped"] += 1
        self._acknowledge(entry_id)
        return True

    def _refuse(self, job: Job, entry_id: bytes, reason: str, text: str, result: str = "") -> None:
        """result: what is counted here, where it is not the reason."""
        self.results[result or reason] += 1
        logger.warning("job %s of %s is refused: %s", job.job_id, job.sender, text)
        self._telling.tell_failed(job.sender, job.job_id, reason, text)
        self._acknowledge(entry_id)

    def _acknowledge(self, entry_id: bytes) -> None:
        """If that fails, somebody may compute it once more, for nobody."""
        stream = self._node.key("jobs", self._node.node_id)

        def write(pipe: Any) -> None:
            pipe.xack(stream, GROUP, entry_id)
            pipe.xdel(stream, entry_id)

        self._node.write(write, is_urgent=False)

    # -- the engine's thread --------------------------------------------------------------------------------------------

    def progress(self, request: Request, num_tokens: int) -> None:
        """Tells of the full pages of so many leading tokens."""
        if (own := self._open.get(request.request_id)) is None:
            return
        first, page_ids = self._offer(own, request, num_tokens // self._engine.config.page_size)
        if page_ids:
            self._tell(own, "pages", first_page=first, page_ids=page_ids)

    def _offer(self, own: _Open, request: Request, num_pages: int) -> tuple[int, list[int]]:
        """Holds some more pages, whatever becomes of the request -> number within the prompt of the first of them, and which."""
        first, page_ids = own.num_told, request.page_ids[own.num_told : num_pages]
        if page_ids:
            own.leases.append(self._engine.scheduler.pool.lease(page_ids))
            own.num_told += len(page_ids)
            self._has_offers.set()
        return first, page_ids

    def done(self, request: Request, hand_off: HandOff) -> None:
        if (own := self._open.get(request.request_id)) is None:
            return
        first, page_ids = self._offer(own, request, self._engine.scheduler.pool.pages_for(len(request.prompt_token_ids) + 1))
        pages, shape = self._put_probs(own, hand_off)
        if shape is None:  # without what they were drawn from the drafts cannot be verified
            hand_off.outcome.next_drafts, hand_off.sources, shape = [], [], (0, 0)
        seconds = self._node.config.lease_seconds
        own.end, expires = time.monotonic() + seconds, self._node.server_time() + seconds
        last: dict[str, Any] = {"first_page": first, "page_ids": page_ids, "probs_pages": pages, "probs_shape": shape}
        self._tell(own, "done", hand_off=hand_off, expires=expires, **last)
        self.results["done"] += 1

    def _tell(self, own: _Open, kind: str, *, is_urgent: bool = True, **values: Any) -> None:
        self._telling.tell(own.job, kind, self.num_tokens, is_urgent=is_urgent, **values)

    def _put_probs(self, own: _Open, hand_off: HandOff) -> tuple[list[int], tuple[int, int] | None]:
        """What drafts were drawn from, in pages of their own; None: there is no room."""
        probs = hand_off.draft_probs
        if probs is None or not len(probs):
            return [], (0, 0)
        store, pool = self._engine.worker.store, self._engine.scheduler.pool
        content = probs_to_pages(probs, store.page_bytes)
        pages = pool.allocate(len(content))
        if pages is None:
            return [], None
        store.import_pages(pages, content, store.fingerprint)
        if store.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        own.leases.append(pool.lease(pages))
        for page in pages:
            pool.release(page)
        return pages, (probs.shape[0], probs.shape[1])

    def _note_end(self, job_id: str, delta: Delta) -> None:
        """The engine is through with a request. What it computed is held until it is read."""
        if not delta.is_final or (own := self._open.get(job_id)) is None:
            return
        self._acknowledge(own.entry_id)
        if own.end:
            return
        why = f"{type(delta.error).__name__}: {delta.error}" if delta.error is not None else f"it ended with {delta.finish_reason}"
        self.results["failed"] += 1
        self._telling.tell_failed(own.job.sender, job_id, "failed", why)
        self._release(job_id)

    def _release(self, job_id: str) -> None:
        if (own := self._open.pop(job_id, None)) is not None:
            for lease in own.leases:
                self._engine.scheduler.pool.end_lease(lease)

    def _stop_job(self, job_id: str) -> None:
        self._engine.cancel(job_id)
        own = self._open.get(job_id)
        if own is not None and not own.end:  # once the engine tells of the end nothing is known of it here
            self.results["stopped"] += 1
            self._acknowledge(own.entry_id)
        self._release(job_id)
        self._late.pop(job_id, None)

    def _expire(self, job_id: str) -> None:
        """Once of each job: several signs of life may ask for it during one step, and the pages may have been read in the end."""
        if (own := self._open.get(job_id)) is not None:
            logger.warning("job %s: its pages were not read within %g s", job_id, self._node.config.lease_seconds)
            self.num_expired_leases += 1
            self._late[job_id] = own.job.sender, time.monotonic() + LATE_SECONDS
            self._release(job_id)

    def _forget_readers(self, alive: Set[str]) -> None:
        now = time.monotonic()
        self._late = {job_id: (sender, end) for job_id, (sender, end) in self._late.items() if sender in alive and now < end}

    # -- the node's threads ---------------------------------------------------------------------------------------------

    def on_message(self, message: Message) -> None:
        if message.kind == "stop":
            self._stopped.append(message.job_id)
            self._call(lambda: self._stop_job(message.job_id))

    def on_heartbeat(self) -> None:
        """Ends leases whose time is over, and looks at the queue."""
        import redis

        self.queue_length, oldest = 0, 0.0
        with contextlib.suppress(redis.RedisError):  # no stream yet, or the connection that the heartbeat will miss too
            if self._node.state.is_connected:
                self.queue_length, begun = count_waiting(self._node.redis, self._node.key("jobs", self._node.node_id))
                oldest = self._node.server_time() - begun if self.queue_length else 0.0
        self.queue_seconds, self._taken_seconds = max(0.0, oldest, self._taken_seconds), 0.0
        now = time.monotonic()
        late = [job_id for job_id, own in list(self._open.items()) if own.end and now >= own.end]
        for job_id in late:
            self._call(lambda job_id=job_id: self._expire(job_id))  # type: ignore[misc]
        state = self._node.state
        if state.is_connected:
            self._telling.tell_again()
        if self._late and state.is_connected:
            self._call(lambda: self._forget_readers(state.peers.keys()))

    def _call(self, action: Any) -> None:
        try:
            self._engine.call(action)
        except EngineError as error:
            logger.debug("%s", error)


def count_waiting(client: Any, stream: str) -> tuple[int, float]:
    """Jobs of a stream that nobody has taken, and when the oldest of them was written, in the server's seconds. Raises redis.RedisError.

    The server's own count (`lag`) is unknown while an older job than one that is done is under way.
    """
    group = next((group for group in client.xinfo_groups(stream) if group["name"] == GROUP.encode()), None)
    if group is None:
        return 0, 0.0
    waiting = max(0, client.xlen(stream) - group["pending"])  # those that were taken are there until they are done
    first = client.xrange(stream, min=b"(" + group["last-delivered-id"], count=1) if waiting else []
    return (waiting, time_of(first[0][0])) if first else (0, 0.0)
