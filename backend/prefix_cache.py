"""Which pages already hold the keys and values of a prompt's beginning.

Full pages are found by a hash chain: hash(page) = H(hash(previous page), tokens). After the last full page that matches,
one more page may agree for its first tokens only; those are taken by copying the page, so that its owner may go on writing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from backend.core import Request
from backend.pages import PagePool

ROOT = b"foretoken"
MAX_SIBLINGS_SEARCHED = 32


def chain_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    return _hash(previous, array("q", token_ids).tobytes())


def _hash(previous: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(previous + content, digest_size=16).digest()


def chain_hashes(token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """Of all full pages."""
    tokens = array("q", token_ids)
    content, width, found = tokens.tobytes(), page_size * tokens.itemsize, [ROOT]
    for begin in range(0, len(content) - width + 1, width):
        found.append(_hash(found[-1], content[begin : begin + width]))
    return found[1:]


@dataclass(slots=True)
class Match:
    """Cached beginning of a prompt. The pages are not held yet: the caller shares or copies them before anything else."""

    page_ids: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)
    copy_from: int = -1
    """A page whose first `num_copied` tokens match too, or -1."""
    num_copied: int = 0


@dataclass(slots=True)
class _Entry:
    parent: bytes
    token_ids: tuple[int, ...]
    hash: bytes | None
    """None: a page that was not full when it was registered."""


class PrefixCache:
    """Index of the pages worth finding again; the pool decides how long they live."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._entries: dict[int, _Entry] = {}
        self._by_hash: dict[bytes, int] = {}
        self._children: dict[bytes, OrderedDict[int, None]] = {}
        pool.on_evict = self._forget

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_hash

    def match(self, token_ids: Sequence[int], limit: int, known: list[bytes] | None = None) -> Match:
        """The longest cached beginning of `token_ids`, of at most `limit` tokens.

        known: chain hashes of leading pages of these tokens. Those that are computed here are added: who waits for pages is asked for each step.
        """
        size, found, start = self._pool.page_size, Match(), 0
        known = [] if known is None else known
        while start + size <= limit:
            number = len(found.page_ids)
            if number == len(known):
                known.append(chain_hash(known[-1] if known else ROOT, token_ids[start : start + size]))
            page = self._by_hash.get(known[number])
            if page is None:
                break
            found.page_ids.append(page)
            start += size
        found.page_hashes = known[: len(found.page_ids)]
        parent = found.page_hashes[-1] if found.page_hashes else ROOT
        # Less than a quarter of a page is cheaper to compute than to copy.
        best = max(1, size // 4) - 1
        following = token_ids[start : min(limit, start + size)]
        for count, page in enumerate(reversed(self._children.get(parent, ()))):
            if count == MAX_SIBLINGS_SEARCHED:
                break
            common = 0
            for ours, theirs in zip(following, self._entries[page].token_ids):
                if ours != theirs:
                    break
                common += 1
            if common > best:
                best, found.copy_from, found.num_copied = common, page, common
        return found

    def insert(self, page: int, parent: bytes, token_ids: Sequence[int], key: bytes | None = None) -> bytes | None:
        """Registers a page whose tokens are all computed; returns its chain hash when it is full. key: that hash, where it is known.

        A page with the same content may be known already: then that one stays and this one is not kept.
        """
        if key is None and len(token_ids) == self._pool.page_size:
            key = chain_hash(parent, token_ids)
        if page in self._entries:
            self._forget(page)
        is_new = key is None or key not in self._by_hash
        if is_new:
            if key is not None:
                self._by_hash[key] = page
            self._entries[page] = _Entry(parent, tuple(token_ids), key)
            self._children.setdefault(parent, OrderedDict())[page] = None
        self._pool.keep(page, is_new)
        return key

    def _forget(self, page: int) -> None:
        entry = self._entries.pop(page)
        if entry.hash is not None:
            del self._by_hash[entry.hash]
        siblings = self._children[entry.parent]
        del siblings[page]
        if not siblings:
            del self._children[entry.parent]

    def check(self) -> None:
        """Asserts that the three indexes agree. For tests."""
        assert {p for c in self._children.values() for p in c} == set(self._entries)
        assert all(self._entries[p].hash == h for h, p in self._by_hash.items())
        assert all(e.hash is None or self._by_hash[e.hash] == p for p, e in self._entries.items())


class RequestPages:
    """Pages of requests: those with known content can be found by other requests, and all go back."""

    def __init__(self, pool: PagePool, cache: PrefixCache | None) -> None:
        self._pool, self._cache = pool, cache
        self._postponed: list[Request] = []

    def postpone(self, request: Request) -> None:
        """Its prompt is registered by `catch_up`: its first token is not to wait for that."""
        self._postponed.append(request)

    def catch_up(self) -> None:
        """Before anybody looks for pages."""
        postponed, self._postponed = self._postponed, []
        for request in postponed:
            self.register_full(request)
            self.register_tail(request)

    def register_full(self, request: Request) -> None:
        """The pages that are full."""
        if self._cache is None or request in self._postponed:
            return
        size, known = self._pool.page_size, request.prompt_hashes
        while (len(request.page_hashes) + 1) * size <= request.num_computed_tokens:
            number = len(request.page_hashes)
            parent = request.page_hashes[-1] if number else ROOT
            token_ids = request.token_ids[number * size : (number + 1) * size]
            key = self._cache.insert(request.page_ids[number], parent, token_ids, known[number] if number < len(known) else None)
            assert key is not None
            request.page_hashes.append(key)

    def register_tail(self, request: Request) -> None:
        """The last page, filled in part, for requests that go on from the same tokens."""
        if self._cache is None or request in self._postponed:
            return
        start = len(request.page_hashes) * self._pool.page_size
        if start < request.num_computed_tokens:
            parent = request.page_hashes[-1] if request.page_hashes else ROOT
            page = request.page_ids[len(request.page_hashes)]
            self._cache.insert(page, parent, request.token_ids[start : request.num_computed_tokens])

    def release(self, request: Request) -> None:
        """All of them."""
        self.catch_up()
        self.register_tail(request)
        for page in reversed(request.page_ids):  # so that the end of a chain is given away before its beginning
            self._pool.release(page)
        request.page_ids = []
        request.page_hashes = []
