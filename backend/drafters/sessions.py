"""Sessions of several engines with one drafter's weights, each with pages of its own: two engines number different tokens alike."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from backend.drafters.calls import DraftCall, DraftError, DraftReply, DraftService

logger = logging.getLogger(__name__)

MAX_SESSIONS = 16
DEFAULT_MEMORY = 8 * 2**30


@dataclass(frozen=True, slots=True)
class CallNumber:
    """Which call it is: of which session, the how manieth, and how many pages of which size the session has."""

    session: int
    count: int
    num_pages: int
    page_size: int


class SessionService(DraftService, Protocol):
    """A DraftService whose memory is of this process."""

    def count_bytes(self, num_pages: int, page_size: int) -> int:
        """Of a session's pages."""
        ...


@dataclass(slots=True)
class _Session:
    service: SessionService
    num_pages: int
    page_size: int
    num_bytes: int
    num_calls: int = 0


class DraftSessions:
    """Answers each session's calls from the session's own pages; the sessions used longest ago make room for new ones."""

    def __init__(self, make_service: Callable[[], SessionService], max_memory: int = DEFAULT_MEMORY) -> None:
        """make_service: a service without pages, over weights that all share. max_memory: bytes of all sessions' pages."""
        self._make_service = make_service
        self._max_memory = max_memory
        self._open: OrderedDict[int, _Session] = OrderedDict()

    def draft(self, call: DraftCall, number: CallNumber) -> DraftReply:
        """Raises DraftError when the session has to be opened again; whatever is raised, it is closed."""
        if number.count == 0:
            self._begin(number)
        session = self._open.get(number.session)
        if session is None or session.num_calls != number.count:
            self._open.pop(number.session, None)
            raise DraftError(f"call {number.count} of session {number.session:x} is not the one expected here: open a new session")
        if (session.num_pages, session.page_size) != (number.num_pages, number.page_size):  # by which the call's pages were checked
            del self._open[number.session]
            raise DraftError(
                f"call {number.count} of session {number.session:x} is for {number.num_pages} pages of {number.page_size} tokens; the session "
                f"has {session.num_pages} of {session.page_size}: open a new session"
            )
        self._open.move_to_end(number.session)
        session.num_calls += 1
        try:
            return session.service.draft(call)
        except Exception:
            del self._open[number.session]
            raise

    def _begin(self, number: CallNumber) -> None:
        self._open.pop(number.session, None)
        service = self._make_service()
        num_bytes = service.count_bytes(number.num_pages, number.page_size)
        if num_bytes > self._max_memory:
            raise DraftError(
                f"a session of {number.num_pages} pages of {number.page_size} tokens needs {num_bytes} bytes; "
                f"the limit is {self._max_memory}: raise the drafter's kv_cache_memory"
            )
        while len(self._open) >= MAX_SESSIONS or self._memory + num_bytes > self._max_memory:
            self._close_oldest(f"{self._memory} bytes of {self._max_memory} are in use")
        while True:
            try:
                service.open(number.num_pages, number.page_size)
                break
            except (MemoryError, OSError, torch.OutOfMemoryError):  # OSError: memory that is mapped
                if not self._open:
                    raise
                self._close_oldest("the device has no more memory")
        self._open[number.session] = _Session(service, number.num_pages, number.page_size, num_bytes)

    @property
    def _memory(self) -> int:
        return sum(session.num_bytes for session in self._open.values())

    def _close_oldest(self, why: str) -> None:
        """Its engine, if there still is one, opens a new session with its next call."""
        session, _ = self._open.popitem(last=False)
        logger.warning("session %x makes room for another: %d are open, and %s", session, len(self._open) + 1, why)
