"""Jobs that a prefill node has taken, and the pages that it holds for who reads them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from backend.core import Delta, HandOff, Request
from backend.disaggregation.node import Node
from backend.disaggregation.records import Job, probs_to_pages
from backend.disaggregation.telling import Telling
from backend.engine import Engine
from backend.errors import RequestError

logger = logging.getLogger(__name__)

LATE_SECONDS = 1000.0
"""For which reads are served after their lease: a cut connection is given up by TCP within that time."""


@dataclass(slots=True)
class HeldJob:
    """A job whose pages are held here."""

    job: Job
    entry_id: bytes
    num_told: int
    """Leading pages of the prompt that the decode node has, or knows of."""
    leases: list[int] = field(default_factory=list)
    end: float = 0.0
    """time.monotonic() at which its pages are given to others, once it is done."""


class HeldJobs:
    """What the engine tells of (its `sink`), said to the decode nodes. The engine's thread does all of it; others look, and add jobs."""

    def __init__(self, engine: Engine, node: Node, telling: Telling, acknowledge: Callable[[bytes], None]) -> None:
        """acknowledge: of an entry of the queue that nobody is to compute any more."""
        self._engine, self._node, self._telling, self._acknowledge = engine, node, telling, acknowledge
        self.jobs: dict[str, HeldJob] = {}
        """By job id."""
        self._late: dict[str, tuple[str, float]] = {}
        """Jobs whose pages went to others before their decode node said that it reads no more: which one, and until when it is believed to. Without
        being served its reads would not end, and its own pages not come back."""
        self.results: Counter[str] = Counter()
        """Jobs by what became of them: done, or why they failed."""
        self.num_expired_leases = 0
        self.has_offers = threading.Event()
        """Set when pages are offered."""

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that are to be computed."""
        return sum(max(0, len(r.prompt_token_ids) - r.num_computed_tokens) for r in self._engine.scheduler.open_requests())

    @property
    def is_read(self) -> bool:
        """Whether somebody may read pages, in time or late."""
        return bool(self._late) or any(own.leases for own in list(self.jobs.values()))

    @property
    def has_late(self) -> bool:
        return bool(self._late)

    def overdue(self, now: float) -> list[str]:
        """Jobs whose leases are over."""
        return [job_id for job_id, own in list(self.jobs.items()) if own.end and now >= own.end]

    def progress(self, request: Request, num_tokens: int) -> None:
        """Tells of the full pages of so many leading tokens."""
        if (own := self.jobs.get(request.request_id)) is None:
            return
        first, page_ids = self._offer(own, request, num_tokens // self._engine.config.page_size)
        if page_ids:
            self.tell(own, "pages", first_page=first, page_ids=page_ids)

    def _offer(self, own: HeldJob, request: Request, num_pages: int) -> tuple[int, list[int]]:
        """Holds some more pages, whatever becomes of the request -> number within the prompt of the first of them, and which."""
        first, page_ids = own.num_told, request.page_ids[own.num_told : num_pages]
        if page_ids:
            own.leases.append(self._engine.scheduler.pool.lease(page_ids))
            own.num_told += len(page_ids)
            self.has_offers.set()
        return first, page_ids

    def done(self, request: Request, hand_off: HandOff) -> None:
        """Tells of the last pages and of what goes on from there; they are held until they are read, or the lease is over."""
        if (own := self.jobs.get(request.request_id)) is None:
            return
        first, page_ids = self._offer(own, request, self._engine.scheduler.pool.pages_for(len(request.prompt_token_ids) + 1))
        pages, shape = self._put_probs(own, hand_off)
        if shape is None:  # without what they were drawn from the drafts cannot be verified
            hand_off.outcome.next_drafts, hand_off.sources, shape = [], [], (0, 0)
        seconds = self._node.config.lease_seconds
        own.end, expires = time.monotonic() + seconds, self._node.server_time() + seconds
        last: dict[str, Any] = {"first_page": first, "page_ids": page_ids, "probs_pages": pages, "probs_shape": shape}
        self.tell(own, "done", hand_off=hand_off, expires=expires, **last)
        self.results["done"] += 1

    def tell(self, own: HeldJob, kind: str, *, is_urgent: bool = True, **values: Any) -> None:
        """values: of `Message`. Any thread's."""
        self._telling.tell(own.job, kind, self.num_tokens, is_urgent=is_urgent, **values)

    def _put_probs(self, own: HeldJob, hand_off: HandOff) -> tuple[list[int], tuple[int, int] | None]:
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

    def note_end(self, job_id: str, delta: Delta) -> None:
        """The engine is through with a request. What it computed is held until it is read."""
        if not delta.is_final or (own := self.jobs.get(job_id)) is None:
            return
        self._acknowledge(own.entry_id)
        if own.end:
            return
        why = f"{type(delta.error).__name__}: {delta.error}" if delta.error is not None else f"it ended with {delta.finish_reason}"
        reason = "refused" if isinstance(delta.error, RequestError) else "failed"
        self.results[reason] += 1
        self._telling.tell_failed(own.job.sender, job_id, reason, why)
        self._release(job_id)

    def _release(self, job_id: str) -> None:
        if (own := self.jobs.pop(job_id, None)) is not None:
            for lease in own.leases:
                self._engine.scheduler.pool.end_lease(lease)

    def stop(self, job_id: str) -> None:
        """Nobody reads its pages any more."""
        self._engine.cancel(job_id)
        own = self.jobs.get(job_id)
        if own is not None and not own.end:  # once the engine tells of the end nothing is known of it here
            self.results["stopped"] += 1
            self._acknowledge(own.entry_id)
        self._release(job_id)
        self._late.pop(job_id, None)

    def expire(self, job_id: str) -> None:
        """Once of each job: several signs of life may ask for it during one step, and the pages may have been read in the end."""
        if (own := self.jobs.get(job_id)) is not None:
            logger.warning("job %s: its pages were not read within %g s", job_id, self._node.config.lease_seconds)
            self.num_expired_leases += 1
            self._late[job_id] = own.job.sender, time.monotonic() + LATE_SECONDS
            self._release(job_id)

    def forget_readers(self, alive: Set[str]) -> None:
        """Those that are late and gone. alive: nodes."""
        now = time.monotonic()
        self._late = {job_id: (sender, end) for job_id, (sender, end) in self._late.items() if sender in alive and now < end}
