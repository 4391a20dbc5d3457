"""Requests whose prompts another node computes: they hold pages for what is to come, and wait outside the queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backend.core import Request
from backend.pages import PagePool
from backend.prefix_cache import Match, PrefixCache


class Fetches:
    """Used by the scheduler alone, which knows the queue."""

    def __init__(self, pool: PagePool, prefix_cache: PrefixCache | None, count_pages: Callable[[Request], int]) -> None:
        """count_pages: that a request's prompt takes."""
        self._pool, self._prefix_cache, self._count_pages = pool, prefix_cache, count_pages
        self._requests: dict[str, Request] = {}
        self._parked: dict[str, list[Request]] = {}
        """By group: completions whose prompt is being fetched for another one of them."""
        self.min_tokens = 1
        """Prompts that lack fewer tokens than these are computed here."""
        self.count_usable: Callable[[Request, Sequence[int]], int] = lambda request, page_ids: len(page_ids)
        """Leading pages, of those that the prefix cache has of a prompt, that hold all that a request needs of them."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def start(self, request: Request, sources: Sequence[int]) -> bool:
        """Gives a request pages for its whole prompt, the rest of which another node is to fill. False: there are not enough.

        A prompt that is cached but for little is not remote any more, and gets none. sources: pages that the coming step copies from, for which the
        other node does not wait: nobody gets these.
        """
        for page in sources:
            self._pool.share(page)
        is_started = self._start(request)
        for page in sources:
            self._pool.release(page)
        return is_started

    def _start(self, request: Request) -> bool:
        size, num_tokens = self._pool.page_size, len(request.token_ids)
        match = Match()
        if self._prefix_cache is not None:
            match = self._prefix_cache.match(request.token_ids, num_tokens - 1, request.prompt_hashes)
        usable = self.count_usable(request, match.page_ids)
        if num_tokens - usable * size < self.min_tokens:
            request.is_remote = False
            return True
        count = self._count_pages(request) - usable
        if not self._pool.can_take(match.page_ids[:usable], count):
            return False
        for page in match.page_ids[:usable]:
            self._pool.share(page)
        pages = self._pool.allocate(count)
        assert pages is not None
        request.page_ids, request.page_hashes = match.page_ids[:usable] + pages, match.page_hashes[:usable]
        request.num_computed_tokens = usable * size
        self._requests[request.request_id] = request
        return True

    def park(self, request: Request) -> bool:
        """Keeps a completion of a prompt that is being fetched for another one: it finds the pages in the cache once they are here.
        False: it is none."""
        is_alone = self._prefix_cache is None or request.params.n == 1
        if is_alone or not any(r.group_id == request.group_id for r in self._requests.values()):
            return False
        self._parked.setdefault(request.group_id, []).append(request)
        return True

    def end(self, request: Request) -> list[Request]:
        """Its prompt is not fetched any more, if it was -> those that were kept for it, which are to be queued again."""
        if self._requests.pop(request.request_id, None) is None:
            return []
        return self._parked.pop(request.group_id, [])
