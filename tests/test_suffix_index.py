"""The index of suffix decoding: what is drafted, by an independent statement of it; the compiled one and its twin in Python; and what it forgets."""

from __future__ import annotations

import itertools
import random
import resource
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from kernels import suffix
from kernels.suffix import FEW, GRAMS, MOST, NO_DRAFT, CompiledIndex, PlainIndex, SuffixDraft, SuffixIndex, Turn, take_turns

HAS_LIBRARY = suffix._library() is not None
KINDS = [PlainIndex, pytest.param(CompiledIndex, marks=pytest.mark.skipif(not HAS_LIBRARY, reason="there is no C++ compiler"))]


class Statement:
    """All tokens in the order in which they came; every length of a match is looked at from the beginning."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.texts: dict[int, list[int]] = {}
        self.came: list[tuple[int, int]] = []

    def extend(self, text_id: int, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self.texts.setdefault(text_id, []).append(token)
            self.came.append((text_id, len(self.texts[text_id]) - 1))

    def remove(self, text_id: int) -> None:
        self.texts.pop(text_id, None)
        self.came = [(own, place) for own, place in self.came if own != text_id]

    def speculate(self, context: Sequence[int], most: int, factor: float, min_prob: float) -> SuffixDraft:
        drafts = []
        last: tuple[int, int, int] | None = None  # kind, places and most drafts of the last length that was looked at
        for match in range(min(len(context) - 1, self.depth), 0, -1):
            kind = max(number for number, size in enumerate(GRAMS) if size <= match)
            ends = [(self.texts[own], place + 1) for own, place in self.came if self._stands(own, place, context[-GRAMS[kind] :])][-MOST[kind] :]
            if kind == len(GRAMS) - 1 and self._is_enough(ends[-FEW:], context, most, factor):
                ends = ends[-FEW:]
            places = [(text, end) for text, end in ends if end >= match and text[end - match : end] == list(context[-match:])]
            room = self._room(match, most, factor)
            if not places or (last is not None and last[0] == kind and len(places) < 2 * last[1] and room <= last[2]):
                continue
            last = kind, len(places), room
            drafts.append(self._go_on(places, match, room, min_prob))
        return max((own for own in drafts if own.token_ids), key=lambda own: own.score, default=NO_DRAFT)

    def _room(self, match: int, most: int, factor: float) -> int:
        return min(int(min(match * factor + 1e-6, most)), self.depth - match)

    def _is_enough(self, ends: list[tuple[list[int], int]], context: Sequence[int], most: int, factor: float) -> bool:
        """They all go on alike, those that do, and one of these matches long enough for the longest draft."""
        going = [(text, end) for text, end in ends if end < len(text)]
        lengths = [
            max(size for size in range(min(len(context) - 1, self.depth, end) + 1) if text[end - size : end] == list(context[len(context) - size :]))
            for text, end in going
        ]
        return len({text[end] for text, end in going}) == 1 and any(self._room(size, most, factor) >= most for size in lengths)

    def _stands(self, text_id: int, place: int, gram: Sequence[int]) -> bool:
        return place + 1 >= len(gram) and self.texts[text_id][place + 1 - len(gram) : place + 1] == list(gram)

    @staticmethod
    def _go_on(places: list[tuple[list[int], int]], match: int, most: int, min_prob: float) -> SuffixDraft:
        tokens, probs, chance = list[int](), list[float](), np.float32(1)
        for _ in range(most):
            nexts = [text[end] for text, end in places if end < len(text)]
            if not nexts:
                break
            counts = Counter(nexts)
            top = max(counts.values())
            last = {token: number for number, token in enumerate(nexts)}  # the one that reached its number first
            token = min((own for own, number in counts.items() if number == top), key=lambda own: last[own])
            chance *= np.float32(top) / np.float32(len(places))
            if chance < np.float32(min_prob):
                break
            tokens.append(token)
            probs.append(float(chance))
            places = [(text, end + 1) for text, end in places if end < len(text) and text[end] == token]
        return SuffixDraft(tokens, probs, float(sum(map(np.float32, probs), np.float32(0))), match)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_statement(kind: type[PlainIndex] | type[CompiledIndex], seed: int) -> None:
    draw = random.Random(seed)
    depth, vocabulary = draw.choice([4, 8, 64]), range(draw.choice([1, 2, 5, 30]))
    index, stated, num_drafted = kind(depth), Statement(depth), 0
    for _ in range(90):
        action, texts = draw.random(), stated.texts
        if action < 0.4 or not texts:
            source = texts[draw.choice(list(texts))] if texts and draw.random() < 0.5 else draw.choices(vocabulary, k=40)
            begin, text_id = draw.randrange(len(source)), draw.choice([0, 1, 2, 3, -5, 2**31 - 1])
            tokens = source[begin : begin + draw.randint(1, 30)]
            index.extend(text_id, tokens)
            stated.extend(text_id, tokens)
        elif action < 0.5:
            text_id = draw.choice([*texts, 77])
            index.remove(text_id)
            stated.remove(text_id)
        else:
            text = texts[draw.choice(list(texts))]
            end = draw.randint(1, len(text))
            context = [*text[max(0, end - depth) : end], *draw.choices(vocabulary, k=draw.choice([0, 0, 1]))][-depth:]
            limits = draw.choice([1, 4, 20]), draw.choice([0.0, 0.5, 1.0, 3.0, 1e30]), draw.choice([0.0, 0.1, 0.5])
            found, expected = index.speculate(context, *limits), stated.speculate(context, *limits)
            assert found == expected
            num_drafted += len(found.token_ids)
        assert len(index) == len(texts)
    assert num_drafted


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_go_on_take_turns(kind: type[PlainIndex] | type[CompiledIndex]) -> None:
    """All of them go on before the first is searched for, each in its own index, the shared one, or both."""
    draw = random.Random(3)
    for has_shared, vocabulary in itertools.product((True, False), (2, 9)):
        shared, known = kind(8) if has_shared else None, Statement(8)
        owns, stated = [kind(8) for _ in range(5)], [Statement(8) for _ in range(5)]
        num_drafted, limits = 0, (1.5, 0.2)
        for step in range(40):
            turns = list[Turn]()
            for number in draw.sample(range(5), 4 if step else 5):
                tokens, most = draw.choices(range(vocabulary), k=draw.randint(0 if step else 9, 9)), draw.randint(1, 7)
                if not step or draw.random() < 0.8:
                    shared_id = draw.choice([-1, number]) if has_shared else -1
                    turns.append(Turn(owns[number], 77, shared_id, tokens, most))
                    stated[number].extend(77, tokens)
                    if shared_id >= 0:
                        known.extend(shared_id, tokens)
                elif has_shared:
                    turns.append(Turn(None, 0, -1, tokens, most))
            found = take_turns(turns, shared, *limits, 10)
            for turn, guess in zip(turns, found, strict=True):
                own = None if turn.own is None else stated[owns.index(turn.own)]  # type: ignore[arg-type]
                context = turn.token_ids if own is None else own.texts[77][-8:]
                drafts = [index.speculate(context, turn.most, *limits) for index in ((own,) if own else ()) + ((known,) if has_shared else ())]
                best = max(drafts, key=lambda draft: draft.score)
                assert (guess.token_ids, guess.match_len) == (best.token_ids, best.match_len)
                chances = [own / before for own, before in zip(best.probs, (1.0, *best.probs))]
                assert list(guess.chances) == [min(int(10 * chance), 10) for chance in chances]
                num_drafted += len(guess.token_ids)
        assert num_drafted > 100
    assert take_turns([], None, *limits, 10) == []


def fill(index: SuffixIndex, count: int, seed: int, text_id: int) -> list[int]:
    tokens = random.Random(seed).choices(range(2000), k=count)
    index.extend(text_id, tokens)
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_index_beside_is_taken_where_it_scores_higher(kind: type[PlainIndex] | type[CompiledIndex]) -> None:
    first, second = kind(8), kind(8)
    for own, text in ((first, [1, 2, 3, 4]), (second, [1, 2, 3, 5, 6])):
        own.extend(0, text)
    assert first.speculate([9, 2, 3], 4, 1.0, 0.1).token_ids == [4]
    assert first.speculate([9, 2, 3], 4, 1.0, 0.1, second).token_ids == [5, 6]
    assert first.speculate([9, 2, 3], 1, 1.0, 0.1, second).token_ids == [4], "the first one of two that score alike"
    assert first.speculate([9, 9, 9], 4, 1.0, 0.1, second) == NO_DRAFT


@pytest.mark.skipif(not HAS_LIBRARY, reason="there is no C++ compiler")
def test_what_is_removed_makes_room() -> None:
    """Texts that come and go for long take no more memory than those that are there: lists, hashes and numbers are used again."""
    index = CompiledIndex(64)
    kept = fill(index, 3000, 0, 0)
    for number in range(1, 30):
        fill(index, 3000, number, number)
        if number > 8:
            index.remove(number - 8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(30, 200):
        fill(index, 3000, number, number)
        index.remove(number - 8)
    assert len(index) == 9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16_000, "kB; half a million tokens went through"
    for place in range(100, 2900, 100):
        assert index.speculate(kept[place - 20 : place], 8, 1.0, 0.1).token_ids == kept[place : place + 8]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_and_next_to_nothing(kind: type[PlainIndex] | type[CompiledIndex]) -> None:
    index = kind(4)
    assert index.speculate([], 4, 1.0, 0.1) == index.speculate([1], 4, 1.0, 0.1) == index.speculate([1, 2], 4, 1.0, 0.1) == NO_DRAFT
    index.remove(3)
    index.extend(3, [])
    assert len(index) == 1
    index.extend(3, [7, 7, 7, 7])
    assert index.speculate([7, 7, 7], 4, 1.0, 0.0).token_ids == [7, 7]
    assert index.speculate([7, 7, 7], 0, 1.0, 0.0) == NO_DRAFT
    index.remove(3)
    assert not len(index) and index.speculate([7, 7, 7], 4, 1.0, 0.1) == NO_DRAFT


def test_without_a_compiler_the_twin_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as own:
        own.setattr(suffix, "_library", lambda: None)
        assert isinstance(suffix.make_index(8), PlainIndex)
    assert isinstance(suffix.make_index(8), CompiledIndex if HAS_LIBRARY else PlainIndex)
