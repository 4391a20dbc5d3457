"""KV memory by page: who holds which page, and what a drafter has seen of it. Integers only; the tensors belong to the KV store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class PagePool:
    """Reference-counted pages. A page is free, held (count > 0), or cached: held by nobody and still worth keeping.

    Cached pages are given out again, least recently released first, once no free page is left; `on_evict` is told.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_evict: Callable[[int], None] = lambda page: None
        self._free = list(range(num_pages - 1, -1, -1))
        self._counts = [0] * num_pages
        self._keep = bytearray(num_pages)  # 1: goes to the cache, not to the free list, when released
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._leases: dict[int, list[int]] = {}
        self._num_leases = 0

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could give: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages held once each, or None (and nothing changes) when fewer are available."""
        if count > self.num_available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._keep[page] = 0
                self.on_evict(page)
            self._counts[page] = 1
            pages.append(page)
        return pages

    def can_take(self, page_ids: Sequence[int], count: int) -> bool:
        """Whether there would be `count` pages to allocate once these, held or cached, had one holder more."""
        return count <= self.num_available and count + sum(not self._counts[page] for page in page_ids) <= self.num_available

    def share(self, page: int) -> None:
        """One more holder of a held or cached page."""
        if self._counts[page] == 0:
            del self._cached[page]
        self._counts[page] += 1

    def release(self, page: int) -> None:
        """One holder fewer; the last one leaves the page free or cached."""
        assert self._counts[page] > 0, f"page {page} is released and nobody holds it"
        self._counts[page] -= 1
        if self._counts[page] == 0:
            if self._keep[page]:
                self._cached[page] = None
            else:
                self._free.append(page)

    def lease(self, page_ids: Sequence[int]) -> int:
        """Holds pages apart from any request's life, for a transfer; the lease's number. `end_lease` gives them back."""
        for page in page_ids:
            self.share(page)
        self._num_leases += 1
        self._leases[self._num_leases] = list(page_ids)
        return self._num_leases

    def end_lease(self, number: int) -> None:
        """Raises KeyError for a lease that has ended."""
        for page in reversed(self._leases.pop(number)):
            self.release(page)

    def keep(self, page: int, is_worth: bool = True) -> None:
        """Whether the content of a held page is worth keeping after its last holder left."""
        assert self._counts[page] > 0, f"page {page} is not held"
        self._keep[page] = is_worth

    def check(self, holders: dict[int, int]) -> None:
        """Asserts that the counts are exactly `holders` and the leases, and that no page is lost. For tests and for idle moments."""
        holders = dict(holders)
        for leased in self._leases.values():
            for page in leased:
                holders[page] = holders.get(page, 0) + 1
        for page, count in enumerate(self._counts):
            assert count == holders.get(page, 0), f"page {page} counts {count} holders and has {holders.get(page, 0)}"
        idle = sorted([*self._free, *self._cached])
        expected = [page for page, count in enumerate(self._counts) if count == 0]
        assert idle == expected, f"{len(idle)} idle pages are listed, {len(expected)} exist"


class SeenPages:
    """How many leading tokens of each page a model drafter's memory is right for: what another request left there may be had again."""

    def __init__(self, num_pages: int, page_size: int, *, is_complete: bool = False) -> None:
        """is_complete: the target's own steps fill the drafter's memory."""
        self._page_size, self._is_complete = page_size, is_complete
        self._seen = [0] * num_pages

    def reset(self, page_ids: Sequence[int]) -> None:
        """Pages that changed hands."""
        for page in page_ids:
            self._seen[page] = 0

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Pages (source, target, leading tokens) were copied, drafter's memory included. All sources are read before any target is written."""
        known = [min(self._seen[source], count) for source, _, count in copies]
        for (_, target, _), count in zip(copies, known):
            self._seen[target] = count

    def forget_all(self) -> None:
        self._seen = [0] * len(self._seen)

    def count(self, page_ids: Sequence[int], limit: int) -> int:
        """Leading tokens of a request with these pages that the drafter has seen; at most `limit`."""
        if self._is_complete:
            return min(len(page_ids) * self._page_size, limit)
        seen = 0
        for page in page_ids:
            seen += self._seen[page]
            if self._seen[page] < self._page_size or seen >= limit:
                break
        return min(seen, limit)

    def note(self, page_ids: Sequence[int], begin: int, end: int) -> None:
        """The drafter has now seen tokens begin to end of a request, and all before them. Tokens past its pages are left out."""
        size = self._page_size
        for number in range(begin // size, min(-(-end // size), len(page_ids))):
            page, count = page_ids[number], min(size, end - number * size)
            if count > self._seen[page]:
                self._seen[page] = count
