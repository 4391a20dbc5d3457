"""What the suffix drafter has in its indices: texts in pieces, and the answers that all requests share, the oldest of which go for new ones."""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kernels.suffix import SuffixIndex, make_index

SLICE_TOKENS = 256
"""What one call inserts."""
PIECE_TOKENS = 1024
"""What one call removes."""


@dataclass(slots=True, eq=False)
class Text:
    """A sequence in an index: a long one in pieces, each with the end of the one before at its start, so that matches cross the cuts."""

    index: SuffixIndex | None
    """None: one of its own is made when it begins to come in."""
    token_ids: list[int] | array[int]
    num_inserted: int = 0
    """Tokens that the index has; the others wait."""
    piece_ids: list[int] = field(default_factory=list)
    num_in_piece: int = 0
    """In the last piece."""
    is_evicted: bool = False

    @property
    def has_room(self) -> bool:
        """For one slice more in the last piece."""
        return self.num_in_piece < PIECE_TOKENS and bool(self.piece_ids) and not self.is_evicted

    @property
    def is_in(self) -> bool:
        """Nothing of it waits."""
        return self.num_inserted == len(self.token_ids)

    def note(self, count: int) -> None:
        """So many tokens more are in the last piece."""
        self.num_inserted += count
        self.num_in_piece += count


class Cut(NamedTuple):
    """What is to be inserted next of a text."""

    piece_id: int
    token_ids: Sequence[int]


class Texts:
    """The shared index with its answers, and the ids of all pieces. Every call is under the owner's lock, but `insert_cut` of a text that nobody
    looks in."""

    def __init__(self, depth: int, max_requests: int, max_tokens: int, on_work: Callable[[], None]) -> None:
        """depth: of a match with its draft; max_requests: answers that are kept, if above 0; max_tokens: of all of them; on_work: something waits."""
        self._depth, self._max_requests, self._max_tokens, self._on_work = depth, max_requests, max_tokens, on_work
        self.index = make_index(depth)
        """That is shared."""
        self.answers: deque[Text] = deque()
        """Oldest first."""
        self.num_cached_tokens = 0
        """Of the answers."""
        self.num_booked = 0
        """Tokens of answers that ever came."""
        self.waiting: deque[Text] = deque()
        """Texts for the shared index, in the order in which they come in."""
        self.removals: deque[tuple[SuffixIndex, int]] = deque()
        """Index, piece."""
        self._new_ids = itertools.count()
        self._free_ids: list[int] = []  # to use again: an index's ids are 32 bits

    def begin_answer(self, lead_ids: Sequence[int]) -> Text:
        """An answer, which is kept with the end of its prompt."""
        answer = Text(self.index, array("i", lead_ids))
        self.answers.append(answer)
        self.num_cached_tokens += len(lead_ids)
        return answer

    def book(self, answer: Text, token_ids: Sequence[int]) -> None:
        """Tokens of an answer that is kept, for which the oldest ones may have to go, and this one with them."""
        answer.token_ids.extend(token_ids)
        self.num_cached_tokens += len(token_ids)
        self.num_booked += len(token_ids)
        while self.num_cached_tokens > self._max_tokens or 0 < self._max_requests < len(self.answers):
            oldest = self.answers.popleft()
            oldest.is_evicted = True
            self.num_cached_tokens -= len(oldest.token_ids)
            self.remove(oldest)

    def restore(self, sequences: Sequence[array[int]]) -> None:
        """Books the answers of a file, as many of the newest as may stay, to come in oldest first."""
        if self._max_requests > 0:
            sequences = sequences[-self._max_requests :]
        for token_ids in reversed(sequences):
            if self.num_cached_tokens + len(token_ids) > self._max_tokens:
                break
            self.num_cached_tokens += len(token_ids)
            self.answers.appendleft(Text(self.index, token_ids))
        self.waiting.extend(self.answers)

    def insert(self, text: Text) -> None:
        """One slice of what waits, if there is any."""
        self.insert_cut(text, self.cut(text))

    @staticmethod
    def insert_cut(text: Text, cut: Cut | None) -> None:
        if cut is not None:
            assert text.index is not None
            text.index.extend(cut.piece_id, cut.token_ids)

    def cut(self, text: Text) -> Cut | None:
        """Books one slice of what waits as inserted, if there is any."""
        start = text.num_inserted
        token_ids = text.token_ids[start : start + SLICE_TOKENS]
        if text.is_evicted or not token_ids:
            return None
        if text.index is None:
            text.index = make_index(self._depth)
        text.num_inserted += len(token_ids)
        if not text.has_room:
            text.piece_ids.append(self._free_ids.pop() if self._free_ids else next(self._new_ids))
            token_ids = text.token_ids[max(0, start - self._depth) : text.num_inserted]
            text.num_in_piece = 0
        text.num_in_piece += len(token_ids)
        return Cut(text.piece_ids[-1], token_ids)

    def remove(self, text: Text) -> None:
        if text.index is not None and text.piece_ids:
            self.removals.extend((text.index, piece_id) for piece_id in text.piece_ids)
            self._on_work()

    def free(self, piece_ids: Sequence[int]) -> None:
        """Of an index that goes."""
        self._free_ids += piece_ids

    def end_removal(self) -> None:
        """The first one is done."""
        _, piece_id = self.removals.popleft()
        self._free_ids.append(piece_id)

    def insert_waiting(self) -> None:
        """A slice of the first text that waits for the shared index, if there is one."""
        if self.waiting:
            self.insert(self.waiting[0])
            if self.waiting[0].is_evicted or self.waiting[0].is_in:
                self.waiting.popleft()
