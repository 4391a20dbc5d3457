"""Which tokens followed the end of a context in texts, and how often: what suffix decoding drafts by.

SuffixDecoding (Oliaro et al. 2024): for each length of a match, the likeliest token after all places that match goes on the draft, then the
likeliest after those of them that went on so, while they are not too few; of all lengths the draft with the highest score, the sum of its tokens'
estimated probabilities, is taken, and of equal ones that of the longest match. The paper and arctic-inference keep suffix trees, whose nodes count.
Here each token is in lists of the places where its last 1, 2 and 4 tokens stood, and places are counted as they are looked up: of a match of 1, 2
or 3, and 4 tokens or more, the newest MOST alone, which tells more than older ones do; of the last the newest FEW where they all say the same, and
older ones could make the draft no longer. Of the lengths of a match the longest is looked at, and then those at which there are twice as many places.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kernels._load_cpu import find_library

GRAMS = (1, 2, 4)
MOST = (16, 32, 64)
FEW = 16
"""Of cpu/suffix_draft.h and cpu/suffix_index.h."""


class SuffixDraft(NamedTuple):
    token_ids: list[int]
    probs: list[float]
    """How likely each of them and all before it is to come."""
    score: float
    """Their sum."""
    match_len: int
    """Tokens at the context's end that stood before what is drafted."""


NO_DRAFT = SuffixDraft([], [], 0.0, 0)


class Turn(NamedTuple):
    """A text that goes on, and asks what may follow."""

    own: SuffixIndex | None
    """The index that has the text; None: it is in none, and `token_ids` is the context that the shared one is searched for."""
    text_id: int
    """There."""
    shared_id: int
    """In the shared index; -1: the tokens do not go there."""
    token_ids: Sequence[int]
    """That it goes on with."""
    most: int
    """Drafts; at least 1."""


class Guess(NamedTuple):
    """A draft, with what is to be told of how likely it is."""

    token_ids: list[int]
    chances: bytes
    """How likely each token is after those before it, in so many parts as were asked for, rounded down."""
    match_len: int


NO_GUESS = Guess([], b"", 0)


class SuffixIndex(Protocol):
    """Texts by numbers of 32 bits. One thread's at a time."""

    def extend(self, text_id: int, token_ids: Sequence[int]) -> None:
        """Appends to a text, which may be new."""
        ...

    def remove(self, text_id: int) -> None:
        """No effect where there is no such text."""
        ...

    def __len__(self) -> int:
        """Texts."""
        ...

    @property
    def room(self) -> int:
        """Tokens that memory was taken for. What is removed makes room for others."""
        ...

    def speculate(self, context: Sequence[int], most: int, factor: float, min_prob: float, beside: SuffixIndex | None = None) -> SuffixDraft:
        """At most `most` tokens, and `factor` for each one that matches, to follow a context, each with at least this probability. A match does not
        take the whole context. beside: another index of the same kind, whose draft is taken where it scores higher."""
        ...


def make_index(depth: int) -> SuffixIndex:
    """depth: tokens of a match and its draft together, at most."""
    return CompiledIndex(depth) if _library() is not None else PlainIndex(depth)


def take_turns(turns: Sequence[Turn], shared: SuffixIndex | None, factor: float, min_prob: float, parts: int) -> list[Guess]:
    """Appends the tokens of all turns, then searches for each: `SuffixIndex.speculate` on the end of the text, in its own index and beside that in
    the shared one. All indices are of one kind. parts: at most 255."""
    if not turns:
        return []
    take = _take_compiled if isinstance(turns[0].own if shared is None else shared, CompiledIndex) else _take_plain
    return take(turns, shared, factor, min_prob, parts)


def _take_plain(turns: Sequence[Turn], shared: SuffixIndex | None, factor: float, min_prob: float, parts: int) -> list[Guess]:
    for turn in turns:
        if turn.own is not None:
            turn.own.extend(turn.text_id, turn.token_ids)
        if turn.shared_id >= 0:
            assert shared is not None
            shared.extend(turn.shared_id, turn.token_ids)
    found = []
    for turn in turns:
        if turn.own is None:
            assert shared is not None
            draft = shared.speculate(turn.token_ids, turn.most, factor, min_prob)
        else:
            assert isinstance(turn.own, PlainIndex)
            draft = turn.own.speculate(turn.own.end_of(turn.text_id), turn.most, factor, min_prob, shared)
        chances = [own / before for own, before in zip(draft.probs, (1.0, *draft.probs))]
        found.append(Guess(draft.token_ids, bytes(min(int(parts * chance), parts) for chance in chances), draft.match_len))
    return found


class PlainIndex:
    """The twin in Python: some ten times as slow."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._texts: dict[int, list[int]] = {}
        self._places: dict[tuple[int, ...], dict[tuple[int, int], None]] = defaultdict(dict)

    def _grams(self, text: list[int], place: int) -> list[tuple[int, ...]]:
        return [tuple(text[place + 1 - size : place + 1]) for size in GRAMS if place + 1 >= size]

    def extend(self, text_id: int, token_ids: Sequence[int]) -> None:
        text = self._texts.setdefault(text_id, [])
        for token in token_ids:
            text.append(int(token))
            for gram in self._grams(text, len(text) - 1):
                self._places[gram][text_id, len(text) - 1] = None

    def remove(self, text_id: int) -> None:
        text = self._texts.pop(text_id, [])
        for place in range(len(text)):
            for gram in self._grams(text, place):
                own = self._places[gram]
                del own[text_id, place]
                if not own:
                    del self._places[gram]

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def room(self) -> int:
        return sum(map(len, self._texts.values()))

    def end_of(self, text_id: int) -> list[int]:
        """As much of a text as a context can have."""
        return self._texts[text_id][-self._depth :]

    def speculate(self, context: Sequence[int], most: int, factor: float, min_prob: float, beside: SuffixIndex | None = None) -> SuffixDraft:
        best, own = NO_DRAFT, [int(token) for token in context]
        limit = min(len(own) - 1, self._depth)
        for kind in reversed(range(len(GRAMS))):
            low, high = GRAMS[kind], min(limit, GRAMS[kind + 1] - 1 if kind + 1 < len(GRAMS) else limit)
            if high < low:
                continue
            newest = reversed(self._places.get(tuple(own[-low:]), {}))
            found = [(self._texts[t], place) for (t, place), _ in zip(newest, range(MOST[kind]))]
            matches = [self._match(own, text, place, limit) for text, place in found]
            if kind == len(GRAMS) - 1 and self._say_the_same(found[:FEW], matches, most, factor):
                found, matches = found[:FEW], matches[:FEW]
            num_before = most_before = 0
            for match in range(min(high, max(matches, default=0)), low - 1, -1):
                count = self._bound(match, most, factor)
                places = [(text, place + 1) for (text, place), size in zip(found, matches) if size >= match]
                if len(places) < 2 * num_before and count <= most_before:
                    continue
                num_before, most_before = len(places), count
                draft = self._follow(places, match, count, np.float32(min_prob))
                if draft.score > best.score:
                    best = draft
        other = beside.speculate(context, most, factor, min_prob) if beside is not None else NO_DRAFT
        return other if other.score > best.score else best

    def _bound(self, match: int, most: int, factor: float) -> int:
        """Drafts of a match."""
        return max(0, min(int(min(float(np.float32(match) * np.float32(factor) + np.float32(1e-6)), most)), self._depth - match))

    def _say_the_same(self, found: list[tuple[list[int], int]], matches: list[int], most: int, factor: float) -> bool:
        """Whether all places that go on do so alike, and one matches so long that the draft has all that is wanted."""
        going = [(text[place + 1], match) for (text, place), match in zip(found, matches) if place + 1 < len(text)]
        return len({token for token, _ in going}) == 1 and any(self._bound(match, most, factor) >= most for _, match in going)

    @staticmethod
    def _match(context: list[int], text: list[int], place: int, limit: int) -> int:
        size = 0
        while size < min(limit, place + 1) and text[place - size] == context[-1 - size]:
            size += 1
        return size

    @staticmethod
    def _follow(places: list[tuple[list[int], int]], match: int, most: int, min_prob: np.float32) -> SuffixDraft:
        token_ids, probs, prob, score = list[int](), list[float](), np.float32(1), np.float32(0)
        while len(token_ids) < most:
            counts: dict[int, int] = {}  # newest first: of equally frequent ones the last is the one that was so first
            for text, place in places:
                if place < len(text):
                    counts[text[place]] = counts.get(text[place], 0) + 1
            if not counts:
                break
            count = max(counts.values())
            token = [own for own, number in counts.items() if number == count][-1]
            prob *= np.float32(count) / np.float32(len(places))
            if prob < min_prob:
                break
            token_ids.append(token)
            probs.append(float(prob))
            score += prob
            places = [(text, place + 1) for text, place in places if place < len(text) and text[place] == token]
        return SuffixDraft(token_ids, probs, float(score), match)


class CompiledIndex:
    """cpu/suffix.cpp. Its calls let other threads run."""

    def __init__(self, depth: int) -> None:
        library = _library()
        assert library is not None, "make_index comes first"
        self._library, self._depth = library, depth
        self._score, self._match = ctypes.c_float(), ctypes.c_int32()
        self._index = library.foretoken_suffix_new(depth)
        self.check(0 if self._index else -1)
        self._make_room(16)  # for drafts

    def __del__(self) -> None:
        if getattr(self, "_index", None):
            self._library.foretoken_suffix_free(self._index)

    @staticmethod
    def check(status: int) -> int:
        if status < 0:
            raise MemoryError("texts for suffix decoding take more memory than there is")
        return status

    def _make_room(self, most: int) -> None:
        self._room, self._tokens, self._probs = most, (ctypes.c_int32 * most)(), (ctypes.c_float * most)()

    def extend(self, text_id: int, token_ids: Sequence[int]) -> None:
        self.check(self._library.foretoken_suffix_extend(self._index, text_id, array("i", token_ids).tobytes(), len(token_ids)))

    def remove(self, text_id: int) -> None:
        self.check(self._library.foretoken_suffix_remove(self._index, text_id))

    def __len__(self) -> int:
        return self._library.foretoken_suffix_count(self._index)

    @property
    def room(self) -> int:
        return self._library.foretoken_suffix_room(self._index)

    def speculate(self, context: Sequence[int], most: int, factor: float, min_prob: float, beside: SuffixIndex | None = None) -> SuffixDraft:
        if most > self._room:
            self._make_room(most)
        own, other = array("i", context).tobytes(), beside._index if isinstance(beside, CompiledIndex) else None
        score, match, tokens, probs = self._score, self._match, self._tokens, self._probs
        speculate = self._library.foretoken_suffix_speculate
        count = self.check(speculate(self._index, other, own, len(context), most, factor, min_prob, tokens, probs, score, match))
        return SuffixDraft(tokens[:count], probs[:count], score.value, match.value) if count else NO_DRAFT


def _take_compiled(turns: Sequence[Turn], shared: SuffixIndex | None, factor: float, min_prob: float, parts: int) -> list[Guess]:
    library, fields, words, stride = _library(), array("q"), array("i"), max([turn[4] for turn in turns])
    assert library is not None, "make_index comes first"
    for index, text_id, shared_id, token_ids, most in turns:
        words.extend(token_ids)
        fields.extend((0 if index is None else index._index, text_id, shared_id, len(token_ids), most))  # type: ignore[attr-defined]
    count = len(turns)
    heads, tokens, chances = (ctypes.c_int32 * (2 * count))(), (ctypes.c_int32 * (count * stride))(), ctypes.create_string_buffer(count * stride)
    own = shared._index if isinstance(shared, CompiledIndex) else None
    CompiledIndex.check(
        library.foretoken_suffix_take(fields.tobytes(), count, own, words.tobytes(), factor, min_prob, parts, stride, heads, tokens, chances)
    )
    sizes, all_chances, found = heads[:], chances.raw, list[Guess]()
    for number in range(count):
        size, begin = sizes[2 * number], number * stride
        end = begin + size
        found.append(Guess(tokens[begin:end], all_chances[begin:end], sizes[2 * number + 1]) if size else NO_GUESS)
    return found


@functools.cache
def _library() -> ctypes.CDLL | None:
    own = find_library()
    if own is not None:
        pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        ids, tokens, probs = ctypes.c_char_p, ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_float)
        for name, result, arguments in (
            ("new", pointer, [number]),
            ("free", None, [pointer]),
            ("extend", number, [pointer, number, ids, number]),
            ("remove", number, [pointer, number]),
            ("count", number, [pointer]),
            ("room", number, [pointer]),
            ("take", number, [ids, number, pointer, ids, real, real, number, number, tokens, tokens, ids]),
            ("speculate", number, [pointer, pointer, ids, number, number, real, real, tokens, probs, probs, tokens]),
        ):
            function = getattr(own, f"foretoken_suffix_{name}")
            function.restype, function.argtypes = result, arguments
    return own
