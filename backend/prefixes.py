"""Which requests of a step begin with the same pages, so that the keys there are read once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from backend.core import Request

MIN_SHARERS, MIN_SHARED_TOKENS, MANY_SHARED_TOKENS = 4, 8192, 200_000
"""Below these many requests, and tokens that they read in all, it costs more than it brings. MANY: with so many queries that a prefix is read
again for every few of their rows (kernels.attention.PREFIX_ROWS)."""
MAX_PREFIX_ROWS = 16
"""Queries x heads that share a KV head, of one request, up to which the first limit holds."""


def find_shared(requests: Sequence[Request], page_size: int, num_queries: int, heads: tuple[int, int]) -> list[tuple[list[int], int]]:
    """(rows, tokens that they share) of each group. heads: of queries, and of keys and values."""
    has_few_rows = num_queries * heads[0] // heads[1] <= MAX_PREFIX_ROWS
    min_tokens = MIN_SHARED_TOKENS if has_few_rows else MANY_SHARED_TOKENS
    by_page: dict[int, list[int]] = {}
    for b, request in enumerate(requests):
        by_page.setdefault(request.page_ids[0], []).append(b)
    groups = []
    for members in by_page.values():
        if len(members) < MIN_SHARERS:
            continue
        pages = [requests[b].page_ids for b in members]
        most = min(requests[b].num_computed_tokens for b in members) // page_size
        first = pages[0]
        common = next((i for i in range(most) if any(own[i] != first[i] for own in pages)), most)
        if len(members) * common * page_size >= min_tokens:
            groups.append((members, common * page_size))
    return groups
