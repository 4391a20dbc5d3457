"""Which request has which slot of the device's state, and what the device does not know yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from backend.core import Request
from kernels.step import LOOKUP_LIMIT, NUM_FIELDS, PREFIX_GROUP, PREFIX_LEN, SLOT


@dataclass(slots=True, eq=False)
class Slot:
    """One request's place in the device's state."""

    number: int
    num_pages: int = 0
    """Leading page ids that the device has."""
    draft_sources: list[str] = field(default_factory=list)
    """Who made each of the drafts that the device holds for the next step; it may hold fewer."""
    has_tokens: bool = False
    """The device has all tokens of the request, and adds those that it emits."""
    is_followed: bool = False
    """The device has the drafts to verify next, and its drafter has seen all tokens before them."""
    extras: int = 0
    """What each of its steps does besides, as bits of `Extras`: those of all requests are put together in each step, and flags take long to."""


MIN_SHARERS, MIN_SHARED_TOKENS, MANY_SHARED_TOKENS = 4, 8192, 200_000
"""Below these many requests, and tokens that they read in all, it costs more than it brings to read a prefix that requests share once. MANY: with
so many queries that a prefix is read again for every few of their rows (kernels.attention.PREFIX_ROWS)."""


class Slots:
    """Hands out slots 0 .. count - 1."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._slots: dict[str, Slot] = {}

    def get(self, request: Request) -> Slot | None:
        return self._slots.get(request.request_id)

    def take(self, request: Request) -> Slot:
        """The request's slot, a new one when it has none. At most as many requests run as there are slots."""
        slot = self._slots.get(request.request_id)
        if slot is None:
            slot = self._slots[request.request_id] = Slot(self._free.pop())
        return slot

    def release(self, request: Request) -> None:
        slot = self._slots.pop(request.request_id, None)
        if slot is not None:
            self._free.append(slot.number)


class Updates:
    """What one step's launch tells the device, as one array: the rows' fields, then pairs (index, value) for each target."""

    def __init__(self, num_rows: int, dummy_slot: int) -> None:
        self.fields = np.zeros((NUM_FIELDS, num_rows), dtype=np.int32)
        self.fields[SLOT] = dummy_slot
        self.fields[LOOKUP_LIMIT] = self.fields[PREFIX_GROUP] = -1
        self.pages: list[int] = []
        self.drafts: list[int] = []
        self.num_drafts: list[int] = []

    def put_rows(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Fields SLOT to LOOKUP_LIMIT of the first rows."""
        self.fields[: LOOKUP_LIMIT + 1, : len(rows)] = np.array(rows, dtype=np.int32).T

    def put_prefixes(self, requests: Sequence[Request], page_size: int, min_tokens: int) -> bool:
        """Which requests begin with the same pages; whether enough of them share enough, min_tokens in all, for their keys to be read once."""
        by_page: dict[int, list[int]] = {}
        for b, request in enumerate(requests):
            by_page.setdefault(request.page_ids[0], []).append(b)
        has_any = False
        for members in by_page.values():
            if len(members) < MIN_SHARERS:
                continue
            pages = [requests[b].page_ids for b in members]
            most = min(requests[b].num_computed_tokens for b in members) // page_size
            first = pages[0]
            common = next((i for i in range(most) if any(own[i] != first[i] for own in pages)), most)
            if len(members) * common * page_size >= min_tokens:
                self.fields[PREFIX_GROUP, members] = members[0]
                self.fields[PREFIX_LEN, members] = common * page_size
                has_any = True
        return has_any

    def put_pages(self, slot: Slot, page_ids: Sequence[int], table_width: int) -> None:
        """The pages that the device's table lacks."""
        if len(page_ids) > slot.num_pages:
            begin = slot.number * table_width
            for number in range(slot.num_pages, len(page_ids)):
                self.pages += (begin + number, page_ids[number])
        slot.num_pages = len(page_ids)

    def put_drafts(self, slot: Slot, token_ids: Sequence[int], max_drafts: int) -> None:
        begin = slot.number * max_drafts
        for number, token_id in enumerate(token_ids):
            self.drafts += (begin + number, token_id)
        self.num_drafts += (slot.number, len(token_ids))

    def as_array(self) -> np.ndarray:
        return np.concatenate([self.fields.ravel(), np.array([*self.pages, *self.drafts, *self.num_drafts], dtype=np.int32)])
