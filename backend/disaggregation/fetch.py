"""A decode node's side: prompts to prefill nodes, and their pages from there while they are computed."""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial

from backend.core import Request
from backend.disaggregation.checks import check_done
from backend.disaggregation.choice import NodeChoice
from backend.disaggregation.node import JOIN_SECONDS, Node, RedisState
from backend.disaggregation.node_info import NodeInfo
from backend.disaggregation.node_transfer import NodeTransfer
from backend.disaggregation.reads import Fetch, PageReads
from backend.disaggregation.records import DEADLY, FALLBACKS, Job, Message, RecordError, write_job
from backend.disaggregation.transfer import PageAddress
from backend.engine import Engine
from backend.errors import EngineError, InternalError, TransferError

logger = logging.getLogger(__name__)

LEASE_MARGIN = 1.0
"""Seconds before the end of a prefill node's lease by which pages have to be here: two nodes know Redis's time to some milliseconds."""
MAX_JOB_LIMITS = 20
"""Times job_seconds after which a prompt that was taken is not waited for any more, though its node tells of others."""
POLL_SECONDS, IDLE_SECONDS = (0.00005, 0.0005), 0.05
"""Between two looks at reads under way, the fewest and the most, and at deadlines."""
MAX_STOPS = 4096
POLL_SHARE = 0.1
"""Of the time that a read has taken so far, for which nobody looks at it: so much later it is seen to be over."""


class PageFetcher:
    """`Fetcher` for an engine. Its thread writes jobs, reads pages and watches the time; the engine's thread never waits."""

    def __init__(self, engine: Engine, node: Node, transfer: NodeTransfer) -> None:
        self._engine, self._node = engine, node
        self.min_tokens = node.config.min_remote_tokens
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._fetches: dict[str, Fetch] = {}
        """By job; its own thread's."""
        self._jobs: dict[str, str] = {}
        """Jobs by request; the engine thread's."""
        self._choice = NodeChoice(engine.worker.store.fingerprint, engine.config.page_size, transfer.address[0].backend)
        self._unplaced: list[tuple[Request, str]] = []
        """Prompts, and nodes that have been asked for them, which the choice of the next one's does not know yet."""
        self._look_due = 0.0
        """time.monotonic() of the next look at deadlines."""
        self._stops: tuple[deque[tuple[str, str]], ...] = tuple(deque(maxlen=MAX_STOPS) for _ in range(2))
        """Nodes, and jobs that they were told to stop since the last heartbeat, and between that and the one before."""
        self._has_lost = False
        """What was written for other nodes may be lost since the last heartbeat, too."""
        self._heard: dict[str, float] = {}
        """When a node told last of what it computed of any prompt, in time.monotonic(): one that works through its queue is not late."""
        self.reads = PageReads(transfer, engine.worker.store.page_bytes, node.config.job_seconds)
        self._thread = threading.Thread(target=self._run, name="fetch", daemon=True)
        engine.hand_offs.use(self)

    # -- the engine's thread --------------------------------------------------------------------------------------------

    def wants(self, request: Request) -> bool:
        if len(request.prompt_token_ids) < self.min_tokens:
            return False
        if self._choice.fitting(self._node.state, request):
            return True
        self._engine.hand_offs.fallbacks[self._choice.why_none(self._node.state, request)] += 1
        return False

    def begin(self, request: Request, num_cached_pages: int) -> None:
        page_ids = request.page_ids[num_cached_pages:]
        fetch = Fetch(
            request,
            uuid.uuid4().hex,
            page_ids,
            num_cached_pages,
            self._engine.scheduler.pool.lease(page_ids),
            time.monotonic(),
            len(request.prompt_token_ids) - num_cached_pages * self._engine.config.page_size,
            self._engine.num_launched,
        )
        self._jobs[request.request_id] = fetch.job_id
        self._events.put(lambda: self._send(fetch))

    def stop(self, request: Request) -> None:
        job_id = self._jobs.pop(request.request_id, None)
        if job_id is not None:
            self._events.put(lambda: self._stop_job(job_id))

    # -- the node's thread ----------------------------------------------------------------------------------------------

    def on_heartbeat(self, state: RedisState) -> None:
        if not state.is_connected:  # which says nothing of the other nodes
            self.on_lost()
            return
        self._choice.tell_refused(self._node.describe(), state)
        self._events.put(lambda: self._take_heartbeat(list(state.peers.values())))

    def on_message(self, message: Message) -> None:
        self._events.put(lambda: self._take_message(message))

    def on_lost(self) -> None:
        """What was written for this node may be lost."""
        self._events.put(self._note_lost)

    # -- its own thread: a prompt's way ---------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """The engine is shut down: nothing reads or writes its pages after this."""
        self._events.put(None)
        if self._thread.is_alive():
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        is_open = True
        while is_open:
            try:
                event = self._events.get(timeout=self._pause())
            except queue.Empty:
                event = _nothing
            if event is None:
                is_open = False
                continue
            try:
                event()
                self._look()
            except Exception:
                logger.exception("prompts that other nodes compute")

    def _pause(self) -> float:
        """Seconds until something has to be looked at."""
        begun = max((f.reads[-1].begun for f in self._fetches.values() if f.reads and not f.is_over), default=0.0)
        if not begun:
            return IDLE_SECONDS
        least, most = POLL_SECONDS
        return min(most, max(least, POLL_SHARE * (time.monotonic() - begun)))

    def _send(self, fetch: Fetch) -> None:
        self._fetches[fetch.job_id] = fetch
        try:
            if len(self._node.state.peers) > 1:
                self._note_places()
            info = self._choice.choose(self._node.state, fetch.request, self._count_owed())
            if info is None:
                self._give_up(fetch, self._choice.why_none(self._node.state, fetch.request))
                return
            self._assign(fetch, info)
            fields = write_job(Job(fetch.job_id, self._node.node_id, fetch.request, fetch.first_page, self._engine.worker.store.fingerprint))
        except Exception:
            logger.exception("request %r: no other node could be asked", fetch.request.group_id)
            self._give_up(fetch, "internal")
            return
        self._node.post("jobs", info.node_id, fields, lambda: self._events.put(lambda: self._give_up(fetch, "redis")))
        self._unplaced.append((fetch.request, info.node_id))

    def _note_places(self) -> None:
        """Not as soon as a job is posted: the thread that writes it needs Python's lock then."""
        unplaced, self._unplaced = self._unplaced, []
        for request, node_id in unplaced:
            self._choice.note_place(request, node_id)

    def _count_owed(self) -> dict[str, int]:
        owed: dict[str, int] = {}
        for fetch in self._fetches.values():
            if not fetch.is_over:
                owed[fetch.node_id] = owed.get(fetch.node_id, 0) + fetch.tokens
        return owed

    def _assign(self, fetch: Fetch, info: NodeInfo) -> None:
        fetch.node_id, fetch.address = info.node_id, tuple(PageAddress.from_dict(own) for own in info.address)

    def _take_message(self, message: Message) -> None:
        now = time.monotonic()
        if message.kind != "taken":  # which says that the thread that takes jobs lives, not that any is computed
            self._heard[message.sender] = now
        self._choice.note_load(message.sender, message.time, message.load)
        fetch = self._fetches.get(message.job_id)
        if fetch is None or fetch.is_over:
            is_reader = fetch is not None and fetch.node_id == message.sender  # which is told once its reads are over
            # Of a prompt that nobody waits for any more, as whole queues are that a node takes over from a dead one.
            if message.kind in ("taken", "pages", "done") and not is_reader:
                self._tell_stop(message.sender, message.job_id)
            return
        if message.sender != fetch.node_id:
            if fetch.done is not None:  # the node that this one took the job over from was silent for a while, and has ended it: the rest lies there
                self._tell_stop(message.sender, message.job_id)
                return
            self._move(fetch, message.sender)
            if fetch.is_over:
                return
        fetch.told = now
        if message.kind == "failed":
            logger.warning("request %r: prefill node %s: %s", fetch.request.group_id, message.sender, message.text)
            if message.reason == DEADLY:
                self._fail(fetch, message.text)
            else:
                self._give_up(fetch, message.reason if message.reason in FALLBACKS else "failed")
        elif message.kind == "pages":
            self._read_pages(fetch, message)
        elif message.kind == "done":
            try:
                num_pages, worker = fetch.first_page + len(fetch.page_ids), self._engine.worker
                check_done(message, fetch.request, worker.model.vocab_size, num_pages, worker.store.page_bytes)
            except RecordError as error:
                logger.error("request %r: node %s: %s", fetch.request.group_id, message.sender, error)
                self._give_up(fetch, "internal")
                return
            assert message.hand_off is not None, "it was checked"
            fetch.done, fetch.hand_off = message, message.hand_off
            # Redis's clock may be set while the pages are read.
            fetch.lease_end = time.monotonic() + message.expires - LEASE_MARGIN - self._node.server_time() - self._node.state.lag
            fetch.wants_probs = bool(message.probs_pages)
            self._call(partial(self._engine.hand_offs.take_first, fetch.request, message.hand_off))
            self._read_pages(fetch, message)

    def _move(self, fetch: Fetch, node_id: str) -> None:
        """Another node has taken the job over; what was read of the first one's pages stays right."""
        info = self._node.state.peers.get(node_id)
        if info is None:
            self._give_up(fetch, "node_lost")
        else:
            logger.info("request %r: its prompt is computed by %s now, in place of %s", fetch.request.group_id, node_id, fetch.node_id)
            self._assign(fetch, info)

    def _read_pages(self, fetch: Fetch, message: Message) -> None:
        skip = fetch.first_page + fetch.num_asked - message.first_page
        if skip < 0:
            # Redis was out of memory, gave the stream up, or that node's connection broke.
            logger.warning("request %r: a message of node %s before page %d was lost", fetch.request.group_id, message.sender, message.first_page)
            self._give_up(fetch, "redis")
            return
        remote = message.page_ids[skip:][: len(fetch.page_ids) - fetch.num_asked]
        if not remote:
            return
        local = fetch.page_ids[fetch.num_asked : fetch.num_asked + len(remote)]
        try:
            self.reads.begin(fetch, local, remote)
        except TransferError as error:
            self._fail_transfer(fetch, error)
        fetch.num_asked += len(remote)

    def _fail_transfer(self, fetch: Fetch, error: TransferError) -> None:
        logger.warning("request %r: pages of node %s: %s", fetch.request.group_id, fetch.node_id, error)
        self._give_up(fetch, "transfer")

    # -- its own thread: what became of it --------------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        if is_due := now >= self._look_due:
            self._look_due = now + IDLE_SECONDS
            self._note_places()
        for fetch in list(self._fetches.values()):
            if not (is_due or fetch.reads or fetch.is_over or fetch.done is not None):
                continue  # nothing can have come of it
            try:
                if node_id := self.reads.look(fetch):
                    self._choice.note_good(node_id)
            except TransferError as error:
                self._fail_transfer(fetch, error)
            if fetch.is_over:
                if not fetch.reads:
                    self._forget(fetch)
            elif why := self._why_late(fetch, now):
                self._give_up(fetch, why)
            elif fetch.done is not None:
                self._go_on(fetch, fetch.done, now)
        if is_due or self._choice.has_hung:
            self._choice.note_hung({r.node_id for f in self._fetches.values() for r in f.reads if self.reads.hangs(r, now)})

    def _why_late(self, fetch: Fetch, now: float) -> str:
        """Empty: it is not."""
        if fetch.done is not None and time.monotonic() > fetch.lease_end:  # not `now`: reads may have ended since
            return "lease"
        limit, heard = self._node.config.job_seconds, fetch.begun
        if fetch.told:  # else it may be lost, though the node tells of others: none waits for longer there
            heard = max(heard, fetch.told, self._heard.get(fetch.node_id, 0.0))
        if any(self.reads.hangs(read, now) for read in fetch.reads) or now - heard >= limit or now - fetch.begun >= MAX_JOB_LIMITS * limit:
            return "transfer" if fetch.reads else "timeout"
        return ""

    def _go_on(self, fetch: Fetch, done: Message, now: float) -> None:
        """What is left to read, and the end."""
        if fetch.wants_probs:
            try:
                self.reads.begin_probs(fetch, done.probs_pages, now)
            except TransferError as error:
                self._fail_transfer(fetch, error)
        if fetch.is_over or fetch.reads or fetch.wants_probs or fetch.num_asked < len(fetch.page_ids):
            return
        fetch.is_over = True
        self._choice.note_good(fetch.node_id)  # also where all of its pages were here
        request, hand_off = fetch.request, fetch.hand_off
        assert hand_off is not None
        self._end(fetch, lambda: self._engine.hand_offs.take(request, hand_off))
        self._forget(fetch)

    def _give_up(self, fetch: Fetch, reason: str) -> None:
        """The engine computes the prompt itself. Reads under way go on into pages that are held for them."""
        if fetch.is_over:
            return
        fetch.is_over = True
        request = fetch.request
        self._choice.note_failed(fetch.node_id, reason)
        if reason != "failed":
            logger.warning("request %r: its prompt is computed here: %s (node %s)", request.group_id, reason, fetch.node_id or "none")
        self._tell_over(fetch)
        self._end(fetch, lambda: self._engine.hand_offs.give_up(request, reason))

    def _fail(self, fetch: Fetch, why: str) -> None:
        """Nor is the prompt to be computed here."""
        fetch.is_over = True
        self._tell_over(fetch)
        self._end(fetch, lambda: self._engine.hand_offs.fail(fetch.request, InternalError(why)))

    def _end(self, fetch: Fetch, action: Callable[[], None]) -> None:
        def on_engine() -> None:
            request_id = fetch.request.request_id
            if self._jobs.get(request_id) == fetch.job_id:  # else it has ended, and another one may have its id
                del self._jobs[request_id]
            action()

        self._call(on_engine)

    def _note_lost(self) -> None:
        self._has_lost = True
        for fetch in list(self._fetches.values()):
            self._give_up(fetch, "redis")

    def _tell_again(self) -> None:
        """What nodes were told to stop may be lost with the rest: they would compute it for nobody, and hold its pages until the lease is over."""
        recent, old = self._stops
        self._stops = deque(maxlen=MAX_STOPS), recent
        if not self._has_lost:
            return
        self._has_lost = False
        for node_id, job_id in (*old, *recent):  # also those of nodes whose next sign of life is yet to come
            self._tell_stop(node_id, job_id)

    def _take_heartbeat(self, infos: list[NodeInfo]) -> None:
        """Jobs of nodes that are gone: another one takes them over, if there is one."""
        alive = {info.node_id for info in infos}
        self._choice.note_alive(infos, self._node.server_time() + self._node.state.lag)
        self._heard = {node_id: heard for node_id, heard in self._heard.items() if node_id in alive}
        self._tell_again()
        self.reads.forget_dead(alive, {read.node_id for fetch in self._fetches.values() for read in fetch.reads})
        for fetch in list(self._fetches.values()):
            if fetch.node_id not in alive and not fetch.is_over and not self._choice.fitting(self._node.state, fetch.request):
                self._give_up(fetch, "node_lost")

    def _stop_job(self, job_id: str) -> None:
        fetch = self._fetches.get(job_id)
        if fetch is not None and not fetch.is_over:
            fetch.is_over = True
            self._tell_over(fetch)

    def _forget(self, fetch: Fetch) -> None:
        """Nothing is written into its pages any more."""
        self._fetches.pop(fetch.job_id, None)
        self._tell_over(fetch)
        lease = fetch.lease
        self._call(lambda: self._engine.scheduler.pool.end_lease(lease))

    def _tell_over(self, fetch: Fetch) -> None:
        """Once nothing is read any more: reads under way need the other node."""
        if fetch.node_id and not fetch.reads and not fetch.is_told:
            fetch.is_told = True
            self._tell_stop(fetch.node_id, fetch.job_id)

    def _tell_stop(self, node_id: str, job_id: str) -> None:
        self._stops[0].append((node_id, job_id))
        self._node.tell(node_id, Message("stop", job_id, self._node.node_id), is_urgent=False)

    def _call(self, action: Callable[[], object]) -> None:
        try:
            self._engine.call(action)
        except EngineError as error:
            logger.debug("%s", error)


def _nothing() -> None:
    pass
