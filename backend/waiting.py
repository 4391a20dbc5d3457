"""Requests that wait for room: the first one by priority, then by arrival."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping

from backend.core import Request
from backend.pages import PagePool
from backend.prefix_cache import PrefixCache

MAX_ENDED = 64
"""Requests that ended while they waited, and are in the queue still, beside twice those that are open."""


class WaitingQueue:
    """A request that ended stays in it until it comes up, or there are many such."""

    def __init__(self, open_requests: Mapping[str, Request], pool: PagePool, prefix_cache: PrefixCache | None) -> None:
        """open_requests: by id; its owner's, which come and go."""
        self._open_requests, self._pool, self._prefix_cache = open_requests, pool, prefix_cache
        self._heap: list[tuple[int, int, Request]] = []
        self._lack: tuple[Request, int, bytes] | None = None
        """Who was refused pages last, how many there were, and the hash of the first page that was not found: until there are more, that page is, or
        another request was given some, nothing else comes of asking again."""

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __iter__(self) -> Iterator[Request]:
        """In no order but that the first one is."""
        return (request for *_, request in self._heap)

    def push(self, requests: Iterable[Request]) -> None:
        for request in requests:
            heapq.heappush(self._heap, (request.priority, request.arrival, request))

    def first(self) -> Request | None:
        """Of those that are open."""
        while self._heap and not self._is_waiting(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        """The first one, which was looked at."""
        return heapq.heappop(self._heap)[2]

    def _is_waiting(self, request: Request) -> bool:
        return self._open_requests.get(request.request_id) is request

    def note_ended(self) -> None:
        """Some request has ended: others in front of it may wait for long."""
        if len(self._heap) > 2 * len(self._open_requests) + MAX_ENDED:
            self._heap = [entry for entry in self._heap if self._is_waiting(entry[2])]
            heapq.heapify(self._heap)

    # -- pages that are not there -------------------------------------------------------------------------------------

    def note_lack(self, request: Request) -> None:
        """It was refused pages."""
        cache = self._prefix_cache
        key = b"" if cache is None else next((key for key in request.prompt_hashes if key not in cache), b"")
        self._lack = request, self._pool.num_available, key

    def note_given(self) -> None:
        """Some request was given pages."""
        self._lack = None

    def lacks_pages(self, request: Request) -> bool:
        """For certain, without a look at each page of its prompt."""
        if self._lack is None or self._lack[0] is not request or self._pool.num_available > self._lack[1]:
            return False
        return self._prefix_cache is None or self._lack[2] not in self._prefix_cache
