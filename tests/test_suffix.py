"""The suffix drafter, on the real library: what it drafts, what it keeps, what it saves, and its thread."""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import random
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from backend.core import Request
from backend.drafters import answer_file, suffix, suffix_texts
from backend.drafters.answer_file import AnswerFile
from backend.drafters.suffix import SuffixLookup
from backend.errors import EngineError, RequestError
from backend.sampling_params import SamplingParams
from kernels.suffix import NO_DRAFT, PlainIndex

ids = itertools.count()
Make = Callable[..., SuffixLookup]


def request_of(prompt: list[int], request_id: str | None = None) -> Request:
    return Request(request_id or f"request-{next(ids)}", prompt, SamplingParams())


@pytest.fixture
def make() -> Iterator[Make]:
    """Answers without their prompts' ends, as the paper keeps them, unless a test asks for these."""
    made: list[SuffixLookup] = []

    def make(**options) -> SuffixLookup:
        made.append(SuffixLookup(**{"lead_tokens": 0, **options}))
        return made[-1]

    yield make
    for drafter in made:
        drafter.close()


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread: a test calls `_work` for each slice."""
    monkeypatch.setattr(SuffixLookup, "_run", lambda self: None)


def settle(drafter: SuffixLookup) -> SuffixLookup:
    while not drafter.is_idle:
        assert drafter._thread.is_alive(), "work waits, and nobody does it"
        time.sleep(0.001)
    return drafter


def work_off(drafter: SuffixLookup) -> int:
    count = 0
    while not drafter.is_idle:
        drafter._work()
        count += 1
    return count


def answer(drafter: SuffixLookup, prompt: list[int], tokens: list[int], request_id: str | None = None) -> Request:
    """A request whose target emits `tokens`, one a step."""
    request = request_of(prompt, request_id)
    drafter.start(request)
    for token in tokens:
        drafter.lookup(request, [], 4)
        request.token_ids.append(token)
    drafter.stop(request)
    return request


def drafts_after(drafter: SuffixLookup, tokens: list[int], count: int = 16) -> list[int]:
    """What a new request gets that has emitted `tokens`."""
    request = request_of([0])
    request.token_ids += tokens
    drafter.start(request)
    drafts = settle(drafter).lookup(request, [], count)
    drafter.stop(request)
    settle(drafter)
    return drafts


def check_shared(drafter: SuffixLookup) -> None:
    """The shared index has all answers, and when they are out of it nothing."""
    index, answers = drafter._shared, [(list(a.token_ids), a.piece_ids) for a in drafter._texts.answers]
    for token_ids, _ in answers:
        for end in range(8, len(token_ids), 97):
            assert index.speculate([-1, *token_ids[end - 8 : end]], 4, 1.0, 0.0).token_ids
    for _, piece_ids in answers:
        for piece_id in piece_ids:
            index.remove(piece_id)
    assert not len(index)
    for token_ids, _ in answers:
        for end in range(8, len(token_ids), 97):
            assert index.speculate(token_ids[end - 8 : end], 4, 1.0, 0.0) == NO_DRAFT


PROMPT = list(range(1, 41))
ANSWER = random.Random(1).sample(range(100, 1000), 60)
"""No token twice: what it drafts is certain, and nothing else drafts it."""


# -- what it drafts -------------------------------------------------------------------------------------------------------------


def test_a_request_repeats_its_prompt(make: Make) -> None:
    drafter = make()
    request = request_of(PROMPT)
    drafter.start(request)
    settle(drafter)
    request.token_ids += [10, 11, 12]
    assert drafter.lookup(request, [], 16) == [13, 14, 15]  # as long as the match
    assert drafter.lookup(request, [], 2) == [13, 14]
    assert drafter.lookup(request, [], 0) == []
    assert drafter.lookup(request, (), 1) == [13]
    request.token_ids += [13, 14, 15, 16]
    assert drafter.lookup(request, [], 16) == [17, 18, 19, 20, 21, 22, 23]
    request.token_ids += [999]
    assert drafter.lookup(request, [], 16) == []


def test_drafts_of_another_drafter_are_the_end_of_the_pattern(make: Make) -> None:
    drafter = make()
    request = request_of(PROMPT)
    drafter.start(request)
    settle(drafter)
    request.token_ids += [10, 11]
    assert drafter.lookup(request, [12, 13, 14], 16) == [15, 16, 17, 18, 19]
    assert drafter.lookup(request, [30, 31], 16) == [32, 33]
    assert drafter.lookup(request, [30, 1000], 16) == []
    assert drafter.lookup(request, [], 16) == [12, 13]  # drafts are not taken for tokens
    assert request.token_ids == [*PROMPT, 10, 11]


def test_the_second_identical_request_drafts_the_first_answer(make: Make) -> None:
    drafter = make()
    first = answer(drafter, PROMPT, ANSWER)
    assert first.token_ids == PROMPT + ANSWER
    settle(drafter)
    second = request_of(PROMPT)
    drafter.start(second)
    settle(drafter)
    second.token_ids.append(ANSWER[0])
    steps = 0
    while second.num_output_tokens < len(ANSWER):
        drafts = drafter.lookup(second, [], 16)
        done = second.num_output_tokens
        assert drafts == ANSWER[done : done + len(drafts)]
        second.token_ids += ANSWER[done : done + len(drafts) + 1]
        steps += 1
    assert steps <= 8  # drafts of 1, 3, 7, 15, 16, ... tokens
    assert second.token_ids == first.token_ids


def test_an_open_request_drafts_for_others(make: Make) -> None:
    """The n completions of a prompt run together."""
    drafter = make()
    first, second = request_of(PROMPT), request_of(PROMPT)
    for request in (first, second):
        drafter.start(request)
    settle(drafter)
    first.token_ids += ANSWER[:20]
    drafter.lookup(first, [], 1)
    second.token_ids += ANSWER[:5]
    assert drafter.lookup(second, [], 16) == ANSWER[5:10]


def test_a_prompt_that_comes_again_is_drafted_from_its_end_on(make: Make) -> None:
    drafter = make(lead_tokens=8)
    answer(drafter, PROMPT, ANSWER)
    settle(drafter)
    assert drafter.num_cached_tokens == 8 + len(ANSWER)
    again, other = request_of(PROMPT), request_of([*PROMPT[:-1], 99])
    for request, expected in ((again, ANSWER[:8]), (other, [])):
        drafter.start(request)
        assert drafter.lookup(request, [], 16) == expected, "as long as the match, if any"
    settle(drafter)
    assert drafter.lookup(again, ANSWER[:1], 16) == ANSWER[1:10]
    short = request_of(PROMPT[-4:])
    drafter.start(short)
    assert settle(drafter).lookup(short, [], 16) == ANSWER[:3]


def test_others_answers_are_drafted_while_a_prompt_waits(make: Make, by_hand: None) -> None:
    drafter = make(lead_tokens=8)
    answer(drafter, PROMPT, ANSWER)
    work_off(drafter)
    long = request_of([*range(2000, 2000 + 3 * suffix_texts.SLICE_TOKENS), *PROMPT, ANSWER[0]])
    drafter.start(long)
    for _ in range(3):
        assert drafter.lookup(long, [], 4) == ANSWER[1:5]
        drafter._work()
    work_off(drafter)
    assert drafter.lookup(long, [], 4) == ANSWER[1:5]


def test_limits_on_drafts(make: Make) -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3]

    def drafts(**options) -> list[int]:
        drafter = make(**options)
        request = request_of(tokens)
        drafter.start(request)
        return settle(drafter).lookup(request, [4], 16)

    assert drafts() == [5, 6, 7, 8]  # the match 1, 2, 3, 4; after 5, 6, 7 there are two ways, of 1/2 each
    assert drafts(min_token_prob=0.6) == [5, 6, 7]
    assert drafts(max_spec_factor=0.5) == [5, 6]
    assert drafts(max_spec_factor=0.0) == []
    assert drafts(max_tree_depth=4) == [5, 6]  # match and draft together


def test_scores(make: Make) -> None:
    drafter = make()
    request = request_of(PROMPT)
    drafter.start(request)
    settle(drafter)
    request.token_ids += [10, 11]
    assert drafter.lookup_scored(request, [12, 13], 16) == ([14, 15, 16, 17], 4.0)
    assert drafter.lookup_scored(request, [12, 13], 3) == ([14, 15, 16], 3.0)
    assert drafter.lookup_scored(request, [], 16) == ([12, 13], 1.0)  # seen twice, once continued
    assert drafter.lookup_scored(request, [77], 16) == ([], 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_drafts_are_those_of_whole_texts(seed: int, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """In indices that get everything at once: slices, and who inserts, make no difference."""
    monkeypatch.setattr(suffix_texts, "SLICE_TOKENS", 7)
    rng = random.Random(seed)
    depth, factor, floor = rng.choice([4, 8, 64]), rng.choice([0.5, 1.0, 3.0]), rng.choice([0.0, 0.1, 0.4])
    drafter = make(max_tree_depth=depth, max_spec_factor=factor, min_token_prob=floor)
    shared, numbers = PlainIndex(depth), itertools.count()
    vocabulary = range(rng.choice([2, 4, 12]))
    open_requests: list[tuple[Request, PlainIndex, int]] = []
    num_drafts = 0
    for _ in range(60):
        if len(open_requests) < 3 and rng.random() < 0.3:
            request = request_of(rng.choices(vocabulary, k=rng.randint(1, 40)))
            open_requests.append((request, PlainIndex(depth), next(numbers)))
            drafter.start(request)
            open_requests[-1][1].extend(0, request.token_ids)
        elif open_requests and rng.random() < 0.1:
            drafter.stop(open_requests.pop(rng.randrange(len(open_requests)))[0])
        for request, own, number in open_requests:
            emitted = rng.choices(vocabulary, k=rng.randint(1, 5))
            request.token_ids += emitted
            for index, text_id in ((own, 0), (shared, number)):
                index.extend(text_id, emitted)
            settle(drafter).lookup(request, [], 1)  # as they have the new tokens of all before any drafts
        for request, own, _ in open_requests:
            drafts, count = rng.choices(vocabulary, k=rng.randint(0, 3)), rng.randint(1, 16)
            context = (request.token_ids + drafts)[-depth:]
            expected = own.speculate(context, count, factor, floor, shared)
            assert drafter.lookup_scored(request, drafts, count) == (expected.token_ids, expected.score)
            num_drafts += len(expected.token_ids)
    assert num_drafts
    assert drafter.num_cached_tokens == sum(len(a.token_ids) for a in drafter._texts.answers)


# -- requests that come and go --------------------------------------------------------------------------------------------------


def test_nothing_is_drafted_until_the_prompt_is_in(make: Make, by_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_texts, "SLICE_TOKENS", 16)
    drafter = make()
    request = request_of(PROMPT)
    drafter.start(request)
    request.token_ids += [10, 11, 12]
    assert not drafter.is_idle
    for _ in range(2):
        assert drafter.lookup(request, [], 16) == []
        drafter._work()
    assert drafter.lookup(request, [], 16) == []
    drafter._work()
    assert drafter.is_idle
    assert drafter.lookup(request, [], 16) == [13, 14, 15]


def test_a_prompt_that_is_not_asked_for_soon_goes_in_when_it_is(make: Make, by_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody waits for its drafts the thread would take the interpreter from the engine's for nothing. Answers are kept all the same."""
    monkeypatch.setattr(suffix_texts, "SLICE_TOKENS", 16)
    drafter = make()
    request, other = request_of(PROMPT), request_of(PROMPT)
    for own in (request, other):
        drafter.start(own, is_soon=False)
        own.token_ids += [10, 11, 12]
    assert drafter.is_idle
    assert drafter.lookup(request, [], 16) == [] and work_off(drafter) == 3
    assert drafter.lookup(request, [], 16) == [13, 14, 15]
    drafter.stop(other)
    assert work_off(drafter) == 1, "its answer: it has no index of its own"
    assert drafter.num_cached_tokens == 6


def test_a_long_backlog_goes_to_the_thread(make: Make, by_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_texts, "SLICE_TOKENS", 16)
    drafter = make()
    request = request_of([1, 2, 3])
    drafter.start(request)
    work_off(drafter)
    request.token_ids += ANSWER[:40] + ANSWER[5:8]
    assert drafter.lookup(request, [], 16) == []
    assert drafter.lookup(request, [], 16) == []
    assert work_off(drafter) == 3
    assert drafter.lookup(request, [], 16) == ANSWER[8:11]
    assert drafter.num_cached_tokens == 43


def test_prompts_take_turns(make: Make, by_hand: None) -> None:
    """A long one does not hold up the short ones behind it."""
    drafter = make()
    long, short = request_of(list(range(1, 10_000))), request_of(PROMPT)
    drafter.start(long)
    drafter.start(short)
    short.token_ids += [10, 11]
    drafter._work()
    drafter._work()
    assert drafter.lookup(short, [], 16) == [12, 13]
    assert drafter.lookup(long, [], 16) == []
    assert work_off(drafter) > 10


def test_a_waiting_prompt_goes_in_at_its_first_lookup(make: Make, by_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a long queue of long prompts would fill the memory before they run."""
    monkeypatch.setattr(suffix, "TOKENS_AHEAD", 100)
    prompt = list(range(1, 1000))
    drafter = make()
    first, second = request_of(prompt), request_of(prompt)
    drafter.start(first)
    drafter.start(second)
    work_off(drafter)
    assert drafter._open[second].text.num_inserted == 0
    second.token_ids += [10, 11]
    assert drafter.lookup(second, [], 16) == []
    work_off(drafter)
    assert drafter.lookup(second, [], 16) == [12, 13]
    drafter.stop(second)
    drafter.stop(first)
    assert drafter._num_reserved == 0
    assert work_off(drafter) == 2, "their indices are freed"
    third = request_of(prompt)
    drafter.start(third)
    assert work_off(drafter) == 4


def test_a_long_request_is_forgotten_in_slices(make: Make, by_hand: None) -> None:
    """To free the tree of one with 128k tokens takes longer than a step."""
    drafter = make()
    request = request_of(list(range(10_000)))
    drafter.start(request)
    work_off(drafter)
    tree = drafter._open[request].text.index
    assert len(tree) > 5
    pieces = len(tree)
    drafter.stop(request)
    assert (len(tree), work_off(drafter), len(tree)) == (pieces, pieces, 0)


@pytest.mark.parametrize("slices", [0, 1, 2])
def test_stop_before_insertion_ends(slices: int, make: Make, by_hand: None) -> None:
    drafter = make()
    request = request_of(list(range(2000, 3000)))
    drafter.start(request)
    for _ in range(slices):
        drafter._work()
    request.token_ids += ANSWER
    drafter.stop(request)
    drafter.stop(request)
    assert (drafter.num_cached_requests, drafter.num_cached_tokens) == (1, len(ANSWER))
    assert drafter.lookup(request, [], 16) == []
    work_off(drafter)
    assert not drafter._open
    assert not drafter._num_reserved
    other = request_of([0])
    drafter.start(other)
    work_off(drafter)
    other.token_ids += ANSWER[:4]
    assert drafter.lookup(other, [], 16) == ANSWER[4:8]  # the answer stays all the same


def test_stop_of_a_request_that_never_started(make: Make) -> None:
    drafter = make()
    request = request_of(PROMPT)
    assert drafter.lookup(request, [], 4) == []
    drafter.stop(request)
    drafter.start(request)
    drafter.stop(request)  # cancelled before any output
    assert drafter.num_cached_requests == 0
    settle(drafter)


def test_a_preempted_request_goes_on(make: Make) -> None:
    drafter = make()
    request = request_of(PROMPT)
    drafter.start(request)
    settle(drafter)
    request.token_ids += ANSWER[:10]
    drafter.lookup(request, [], 4)
    drafter.start(request)
    request.token_ids += ANSWER[:3]
    assert settle(drafter).lookup(request, [], 4) == ANSWER[3:6]
    drafter.stop(request)
    assert (drafter.num_cached_requests, drafter.num_cached_tokens) == (1, 13)


def test_request_ids_come_again(make: Make) -> None:
    """A client may send the same id for every request it makes."""
    drafter = make()
    answer(drafter, PROMPT, ANSWER[:20], "id")
    answer(drafter, PROMPT, ANSWER[30:50], "id")
    assert drafter.num_cached_requests == 2
    assert drafts_after(drafter, ANSWER[:4]) == ANSWER[4:8]
    assert drafts_after(drafter, ANSWER[30:34]) == ANSWER[34:38]


# -- bounds ---------------------------------------------------------------------------------------------------------------------


def test_at_most_so_many_requests_stay(make: Make) -> None:
    drafter = make(max_cached_requests=2)
    answers = [list(range(start, start + 20)) for start in range(100, 1100, 100)]
    for tokens in answers:
        answer(drafter, PROMPT, tokens)
        assert drafter.num_cached_requests <= 2
    settle(drafter)
    assert (drafter.num_cached_requests, drafter.num_cached_tokens, len(drafter._shared)) == (2, 40, 2)
    kept = [bool(drafts_after(make_copy(drafter, make), tokens[:5])) for tokens in answers]
    assert kept == [False] * 8 + [True] * 2


def make_copy(drafter: SuffixLookup, make: Make) -> SuffixLookup:
    """One with the same answers and more room: asking takes a place too."""
    copy = make()
    for kept in drafter._texts.answers:
        answer(copy, [0], kept.token_ids.tolist())
    return copy


def test_at_most_so_many_tokens_stay(make: Make) -> None:
    drafter = make(max_cached_tokens=100)
    for start in range(100, 1100, 100):
        answer(drafter, PROMPT, list(range(start, start + 40)))
        assert drafter.num_cached_tokens <= 100
    settle(drafter)
    assert (drafter.num_cached_requests, drafter.num_cached_tokens, len(drafter._shared)) == (2, 80, 2)
    assert drafts_after(drafter, list(range(1000, 1005))) == list(range(1005, 1010))
    assert drafts_after(drafter, list(range(100, 105))) == []


def test_an_answer_longer_than_the_bound(make: Make) -> None:
    drafter = make(max_cached_tokens=50)
    request = request_of(PROMPT)
    drafter.start(request)
    settle(drafter)
    for token in ANSWER:
        request.token_ids.append(token)
        drafter.lookup(request, [], 4)
        assert drafter.num_cached_tokens <= 50
    settle(drafter)
    assert (drafter.num_cached_requests, drafter.num_cached_tokens, len(drafter._shared)) == (0, 0, 0)
    request.token_ids += ANSWER[:3]
    assert drafter.lookup(request, [], 4) == ANSWER[3:6]  # of its own tree
    drafter.stop(request)
    assert drafter.num_cached_tokens == 0


def test_evicted_memory_comes_back(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_texts, "PIECE_TOKENS", 300)
    drafter = make(max_cached_tokens=5000)
    rng = random.Random(0)
    sizes = []
    for _ in range(12):
        for _ in range(4):
            request = request_of([0])
            drafter.start(request)
            request.token_ids += rng.choices(range(500), k=1500)
            drafter.stop(request)
        settle(drafter)
        sizes.append(drafter._shared.room)
        assert len(drafter._shared) == 3 * 5
    assert max(sizes[6:]) < 1.2 * max(sizes[:6])
    assert next(drafter._texts._new_ids) <= 50  # ids are used again
    check_shared(drafter)


@pytest.mark.parametrize("max_cached_requests", [-1, 0])
def test_texts_that_come_later_are_searched_and_stay(max_cached_requests: int, make: Make) -> None:
    drafter = make(max_cached_requests=max_cached_requests, max_corpus_tokens=100, max_cached_tokens=20, corpus=[array("i", range(500, 520))])
    assert drafts_after(settle(drafter), [1, 2, 3], 4) == []
    assert drafter.add_corpus([array("i", range(1, 31)), array("i", range(100, 140))]) == 90
    for start in range(1000, 1100, 20):
        answer(settle(drafter), [], list(range(start, start + 20)))
    assert drafts_after(drafter, [1, 2, 3], 3) == [4, 5, 6] and drafts_after(drafter, [110, 111, 112], 2) == [113, 114]
    with pytest.raises(RequestError, match="suffix_corpus has 11 tokens; there is room for 10 beside what is there: the limit is 100"):
        drafter.add_corpus([array("i", [7, 8, 9]), array("i", range(200, 208))])
    assert drafts_after(settle(drafter), [200, 201, 202], 2) == [], "all or none"
    assert drafter.add_corpus([array("i", range(200, 210))]) == 100
    drafter.close()
    with pytest.raises(EngineError, match="the suffix cache is closed"):
        drafter.add_corpus([array("i", [1])])


def test_texts_that_come_later_go_in_by_slices(make: Make, by_hand: None) -> None:
    """Behind the prompts of requests."""
    drafter = make()
    drafter.add_corpus([array("i", range(10 * suffix_texts.SLICE_TOKENS))])
    request = request_of([1, 2, 3, 1, 2])
    drafter.start(request)
    drafter._work()
    assert drafter.lookup(request, (), 1) == [3]
    assert work_off(drafter) == 10


def test_no_shared_tree(make: Make, tmp_path: Path) -> None:
    drafter = make(max_cached_requests=0, cache_path=str(tmp_path / "cache"))
    answer(drafter, PROMPT, ANSWER)
    assert (drafter.num_cached_requests, drafter.num_cached_tokens) == (0, 0)
    assert drafts_after(drafter, ANSWER[:5]) == []
    assert drafts_after(drafter, [1, 2, 3, 4, 1, 2]) == [3, 4]
    assert next(drafter._texts._new_ids) == 1  # one id after the other
    drafter.close()
    assert not list(tmp_path.iterdir())


def test_matches_cross_the_pieces_of_a_long_answer(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_texts, "PIECE_TOKENS", 300)
    tokens = random.Random(2).sample(range(10_000), 2000)
    drafter = make()
    answer(drafter, PROMPT, tokens)
    settle(drafter)
    assert len(drafter._shared) > 5
    for place in range(20, 1900, 7):
        assert drafts_after(drafter, tokens[place - 10 : place], 8)[:5] == tokens[place : place + 5]


def test_many_are_asked_for_at_once(make: Make, by_hand: None) -> None:
    """Each gets what it would get alone: those whose tokens are in, on their way, or none; answers that are kept, that go, and that nobody keeps."""
    rng = random.Random(5)
    for options in ({}, {"max_cached_requests": 3}, {"max_cached_tokens": 120}, {"max_cached_requests": 0}):
        together, alone = make(**options), make(**options)
        requests = [request_of(rng.choices(range(6), k=rng.choice([1, 20, 300, 700]))) for _ in range(12)]
        num_drafts = 0
        for drafter in (together, alone):
            for request in requests:
                drafter.start(request)
        for step in range(40):
            for drafter in (together, alone):
                for _ in range(4):
                    drafter._work()
            counts, own = [rng.choice([0, 3, 9]) for _ in requests], [rng.choice([True, True, False]) for _ in requests]
            asked = [(request, count) for request, count, is_asked in zip(requests, counts, own) if is_asked]
            found = together.lookup_judged([request for request, _ in asked], [count for _, count in asked])
            for request, count in asked:  # as they have the new tokens of all before any drafts
                alone.lookup(request, [], min(count, 1))
            for (request, count), (drafts, chain) in zip(asked, found):
                assert (drafts, len(chain)) == (alone.lookup(request, [], count), len(drafts))
                num_drafts += len(drafts)
            for request in requests:
                request.token_ids += rng.choices(range(6), k=rng.choice([0, 1, 5, 30]))
            if step % 8 == 7:
                for drafter in (together, alone):
                    drafter.stop(requests[step % 5])
            assert (together.num_cached_requests, together.num_cached_tokens) == (alone.num_cached_requests, alone.num_cached_tokens)
        assert num_drafts > 200
        assert together.lookup_judged([], []) == []


# -- the file -------------------------------------------------------------------------------------------------------------------


def test_saved_answers_come_back(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "made" / "cache"
    rng = random.Random(3)
    texts = [rng.choices(range(30), k=rng.randint(1, 700)) for _ in range(20)]
    questions = [text[i : i + 6] for text in texts for i in range(0, len(text), 50)]

    def ask(drafter: SuffixLookup) -> list[tuple[list[int], float]]:
        request = request_of([99])
        drafter.start(request)
        settle(drafter)
        return [drafter.lookup_scored(request, question, 16) for question in questions]

    first = make(cache_path=str(path), fingerprint="model")
    for text in texts:
        answer(first, PROMPT, text)
        settle(first)  # one after the other, as the file restores them: of equally likely drafts the first one seen is taken
    expected = ask(first)
    assert sum(len(tokens) for tokens, _ in expected) > 100
    counts = (first.num_cached_requests, first.num_cached_tokens)
    first.close()
    assert {p.name for p in path.parent.iterdir()} == {"cache", "cache.lock"}
    assert path.stat().st_mode & 0o077 == 0, "clients' texts are for the server's user"

    caplog.clear()
    second = make(cache_path=str(path), fingerprint="model")
    assert not caplog.records
    assert (second.num_cached_requests, second.num_cached_tokens) == counts
    assert ask(second) == expected
    second.close()

    third = make(cache_path=str(path), fingerprint="model")
    third.close()  # before all is in
    assert ask(make(cache_path=str(path), fingerprint="model")) == expected


@pytest.mark.parametrize("options", [{"max_cached_requests": 2}, {"max_cached_tokens": 45}])
def test_the_newest_saved_answers_come_back_and_are_the_oldest_then(options: dict[str, int], make: Make, tmp_path: Path) -> None:
    path = str(tmp_path / "cache")
    answers = [list(range(start, start + 20)) for start in (100, 200, 300, 400)]
    first = make(cache_path=path)
    for tokens in answers[:3]:
        answer(first, PROMPT, tokens)
    first.close()
    second = make(cache_path=path, **options)
    assert [a.token_ids.tolist() for a in second._texts.answers] == answers[1:3]
    answer(second, PROMPT, answers[3])
    assert [a.token_ids.tolist() for a in second._texts.answers] == answers[2:4]
    assert len(settle(second)._shared) == 2


def test_an_open_request_is_saved_too(make: Make, tmp_path: Path) -> None:
    path = str(tmp_path / "cache")
    first = make(cache_path=path)
    request = request_of([0])
    first.start(request)
    settle(first)
    request.token_ids += ANSWER
    first.lookup(request, [], 4)
    first.close()
    assert drafts_after(make(cache_path=path), ANSWER[:5]) == ANSWER[5:10]


def save(path: Path, **changes: object) -> None:
    content: dict[str, object] = {
        "version": np.array(answer_file.FILE_VERSION),
        "fingerprint": np.array("model"),
        "lengths": np.array([2, 3]),
        "token_ids": np.arange(5, dtype=np.int32),
    }
    with path.open("wb") as file:
        np.savez(file, **{k: v for k, v in (content | changes).items() if v is not None})  # type: ignore[arg-type]


def truncate(path: Path) -> None:
    save(path)
    path.write_bytes(path.read_bytes()[:-200])


def flip(path: Path) -> None:
    save(path, token_ids=np.zeros(5, dtype=np.int32))
    content = bytearray(path.read_bytes())
    content[content.rindex(bytes(20)) + 3] = 7
    path.write_bytes(content)


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "no archive": lambda path: path.write_bytes(b"weights of a model"),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": truncate,
    "a bit flipped": flip,
    "another array": lambda path: np.save(path.open("wb"), np.arange(3)),
    "pickled": lambda path: save(path, token_ids=np.array([print], dtype=object)),
    "no lengths": lambda path: save(path, lengths=None),
    "lengths that do not add up": lambda path: save(path, lengths=np.array([2, 4])),
    "a negative length": lambda path: save(path, lengths=np.array([6, -1])),
    "a length of zero": lambda path: save(path, lengths=np.array([5, 0])),
    "a negative token": lambda path: save(path, token_ids=-np.arange(5, dtype=np.int32)),
    "other integers": lambda path: save(path, token_ids=np.arange(5)),
    "a table": lambda path: save(path, lengths=np.array([[2, 3]])),
}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """All that was logged, but for what merely tells: whether that is heard depends on what ran before."""
    records = [r for r in caplog.records if r.levelno > logging.INFO]
    assert all(r.levelno == logging.WARNING for r in records)
    return [r.getMessage() for r in records]


def test_a_file_whose_directory_is_damaged_is_replaced(tmp_path: Path) -> None:
    """One place further than it is, and members begin before the file does: to go there is an error of the system's, as of a disk that fails, which
    the file was not written for again, however long the server ran."""
    path = tmp_path / "cache"
    file = AnswerFile(str(path), "model")
    assert file.save([array("i", [1, 2, 3])], 100)
    content = bytearray(path.read_bytes())
    place = content.rindex(b"PK\x05\x06") + 16
    content[place : place + 4] = (int.from_bytes(content[place : place + 4], "little") + 1).to_bytes(4, "little")
    path.write_bytes(content)
    file = AnswerFile(str(path), "model")
    assert file.read() == []
    assert file.save([array("i", [4, 5])], 100)
    assert AnswerFile(str(path), "model").read() == [array("i", [4, 5])]


def test_the_file_that_the_damaged_ones_are_made_from(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "cache")
    drafter = make(cache_path=str(tmp_path / "cache"), fingerprint="model")
    assert (drafter.num_cached_requests, drafter.num_cached_tokens) == (2, 5)
    assert not caplog.records


@pytest.mark.parametrize("damage", UNREADABLE)
def test_an_unreadable_file(damage: str, make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cache"
    UNREADABLE[damage](path)
    before = path.read_bytes()
    drafter = make(cache_path=str(path), fingerprint="model")
    (message,) = warnings(caplog)
    assert str(path) in message
    assert drafter.num_cached_requests == 0
    answer(drafter, PROMPT, ANSWER)
    drafter.close()
    assert (tmp_path / "cache.unreadable").read_bytes() == before  # the path may have named something else by mistake
    assert drafts_after(make(cache_path=str(path), fingerprint="model"), ANSWER[:5]) == ANSWER[5:10]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fingerprint": np.array("another")}, "'another'"),
        ({"version": np.array(answer_file.FILE_VERSION + 1)}, f"version {answer_file.FILE_VERSION + 1}"),
    ],
)
def test_a_foreign_file(changes: dict[str, object], reason: str, make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cache"
    save(path, **changes)
    before = path.read_bytes()
    unused = make(cache_path=str(path), fingerprint="model")
    unused.close()
    assert path.read_bytes() == before  # nothing to put in its place
    drafter = make(cache_path=str(path), fingerprint="model")
    assert len(caplog.records) == 2
    assert all(str(path) in message and reason in message for message in warnings(caplog))
    assert drafter.num_cached_requests == 0
    answer(drafter, PROMPT, ANSWER)
    drafter.close()
    assert make(cache_path=str(path), fingerprint="model").num_cached_requests == 1
    assert len(caplog.records) == 2


def test_no_file_yet(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make(cache_path=str(tmp_path / "cache"))
    (record,) = caplog.records
    assert record.levelno == logging.INFO, "every first start comes here: nothing is wrong"
    assert str(tmp_path / "cache") in record.message


def test_a_folder_in_the_way(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cache"
    path.mkdir()
    drafter = make(cache_path=str(path))
    assert f"the suffix cache cannot be saved to {path}: it is a folder" in warnings(caplog), "said at the start"
    answer(drafter, PROMPT, ANSWER)
    drafter.close()
    assert len(warnings(caplog)) == 3
    assert all(str(path) in message for message in warnings(caplog))
    assert {p.name for p in tmp_path.iterdir()} == {"cache", "cache.lock"}


def test_a_pipe_in_the_way(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for it, and it stays: /dev/null would too, where others need it."""
    path = tmp_path / "cache"
    os.mkfifo(path)
    other_end = os.open(path, os.O_RDWR)
    os.write(other_end, b"no cache")
    drafter = make(cache_path=str(path))
    assert f"the suffix cache cannot be saved to {path}: it is no regular file" in warnings(caplog)
    answer(drafter, PROMPT, ANSWER)
    drafter.close()
    assert path.is_fifo() and {p.name for p in tmp_path.iterdir()} == {"cache", "cache.lock"}
    assert warnings(caplog)[-1] == f"the suffix cache is not saved to {path}: it is no regular file"
    os.close(other_end)


def test_a_path_that_is_none(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    drafter = make(cache_path="cache\0")
    answer(drafter, PROMPT, ANSWER)
    drafter.close()
    assert warnings(caplog)[-1].endswith("embedded null byte")


def test_a_file_for_a_folder(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "more" / "cache"
    make(cache_path=str(path))
    assert f"the suffix cache cannot be saved to {path}: {tmp_path / 'file'} is no folder" in warnings(caplog)


# -- a file while its servers run ------------------------------------------------------------------------------------------------


def answers_in(path: Path) -> list[list[int]]:
    return [a.tolist() for a in answer_file._read(str(path), "model")]


def test_answers_are_saved_while_the_server_runs(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is killed has lost what came since."""
    monkeypatch.setattr(suffix, "SAVE_SECONDS", 0.05)
    path = tmp_path / "cache"
    drafter = make(cache_path=str(path), fingerprint="model")
    answer(drafter, PROMPT, ANSWER)
    wait_for(path.is_file)
    saved = path.stat().st_mtime_ns
    time.sleep(0.3)
    assert path.stat().st_mtime_ns == saved, "nothing came, and nothing is written"
    assert drafts_after(make(cache_path=str(path), fingerprint="model"), ANSWER[:5]) == ANSWER[5:10]
    other = list(range(500, 520))
    answer(drafter, PROMPT, other)
    wait_for(lambda: other in answers_in(path))


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    ending = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ending, "it did not come about"
        time.sleep(0.01)


def texts(begin: int, count: int) -> list[list[int]]:
    return [list(range(begin + 100 * i, begin + 100 * i + 20)) for i in range(count)]


def test_servers_with_one_file_keep_each_others_answers(make: Make, tmp_path: Path) -> None:
    """The last one to save used to replace those of the others."""
    path = tmp_path / "cache"
    known, of_first, of_second = texts(1000, 2), texts(5000, 3), texts(9000, 2)
    before = make(cache_path=str(path), fingerprint="model")
    for tokens in known:
        answer(before, PROMPT, tokens)
    before.close()
    first, second = (make(cache_path=str(path), fingerprint="model") for _ in range(2))
    for drafter, own in ((first, of_first), (second, of_second)):
        for tokens in own:
            answer(drafter, PROMPT, tokens)
    first._save()
    second._save()
    assert sorted(answers_in(path)) == sorted([*known, *of_first, *of_second])
    late = texts(20000, 1)[0]
    answer(first, PROMPT, late)
    first.close()
    second.close()
    assert sorted(answers_in(path)) == sorted([*known, *of_first, *of_second, late])
    assert make(cache_path=str(path), fingerprint="model").num_cached_requests == 8


def test_what_a_server_drops_leaves_the_file_and_others_stay(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    small, other = make(cache_path=str(path), fingerprint="model", max_cached_requests=2), make(cache_path=str(path), fingerprint="model")
    (kept,) = texts(9000, 1)
    answer(other, PROMPT, kept)
    other._save()
    own = texts(1000, 4)
    for tokens in own:
        answer(small, PROMPT, tokens)
        small._save()
    assert sorted(answers_in(path)) == sorted([*own[2:], kept])


@pytest.mark.parametrize(("max_tokens", "expected"), [(1000, [1, 2, 3, 11, 12]), (60, [2, 3, 12]), (20, [3]), (45, [3, 12])])
def test_the_newest_answers_of_all_share_the_room(max_tokens: int, expected: list[int]) -> None:
    """No server's fill the file alone."""
    own, others = ([array("i", [n] * 20) for n in numbers] for numbers in ((1, 2, 3), (11, 12)))
    merged = answer_file._merge(own, others, max_tokens)
    assert sorted(a[0] for a in merged) == expected
    assert merged[-1][0] == 3, "the newest come last"


def test_a_lock_that_is_held(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By a server that was stopped just then: this one goes on, and saves later."""
    monkeypatch.setattr(answer_file, "LOCK_SECONDS", 0.1)
    path = tmp_path / "cache"
    drafter = make(cache_path=str(path), fingerprint="model")
    answer(drafter, PROMPT, ANSWER)
    with open(f"{path}.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        drafter._save()
        (message,) = warnings(caplog)
        assert f"not saved to {path}: another server has held its lock ({path}.lock) for 0.1 s" in message and not path.exists()
    drafter.close()
    assert answers_in(path) == [ANSWER]


def test_a_server_of_another_model_with_the_same_file(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither replaces the other's answers again and again."""
    path = tmp_path / "cache"
    first, second = make(cache_path=str(path), fingerprint="model"), make(cache_path=str(path), fingerprint="another")
    for drafter in (first, second):
        answer(drafter, PROMPT, ANSWER)
    first.close()
    second.close()
    (message,) = warnings(caplog)
    assert "another server writes there, give each model a suffix_decoding_cache_path of its own" in message and str(path) in message
    assert answers_in(path) == [ANSWER]


SAVING = """
import sys
import time
from backend.core import Request, SamplingParams
from backend.drafters import suffix
suffix.SAVE_SECONDS = 0.02
path, number = sys.argv[1], int(sys.argv[2])
drafter = suffix.SuffixLookup(cache_path=path, fingerprint="model", max_cached_tokens=4000, lead_tokens=0)
for i in range(10**9):
    request = Request(str(i), [1, 2], SamplingParams())
    drafter.start(request)
    request.token_ids += [number] * (1 + i % 50)
    drafter.stop(request)
    if i < 300:  # as many as are read: a full pipe would be the end of the saving
        print(i, flush=True)
    time.sleep(1e-3)  # or one of two has filled the file before the other one comes to it
"""


def test_servers_that_are_killed_while_they_save_leave_a_sound_file(root: Path, tmp_path: Path) -> None:
    path, rng = tmp_path / "cache", random.Random(0)
    for _ in range(2):
        processes = [
            subprocess.Popen([sys.executable, "-c", SAVING, str(path), str(number)], cwd=root, stdout=subprocess.PIPE, text=True)
            for number in (101, 102)
        ]
        for process in processes:
            assert process.stdout is not None
            for _ in range(rng.randint(20, 300)):
                assert process.stdout.readline()
        wait_for(lambda: path.is_file() and {token for tokens in answers_in(path) for token in tokens} == {101, 102})
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
        assert {token for tokens in answers_in(path) for token in tokens} <= {101, 102} and answers_in(path)


# -- the thread -----------------------------------------------------------------------------------------------------------------


def test_calls_while_the_thread_works(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Several engines at once, harder than the one there is: no wrong draft, nothing lost, sound trees."""
    monkeypatch.setattr(suffix_texts, "SLICE_TOKENS", 32)
    monkeypatch.setattr(suffix_texts, "PIECE_TOKENS", 200)
    drafter = make(max_cached_tokens=3000, max_cached_requests=40, cache_path=str(tmp_path / "cache"))
    caplog.clear()
    cycle, errors, num_drafts = 50, [], [0] * 4

    def follows(token: int) -> int:
        """Each of the texts counts, in a range of its own: a draft is right or it mixes two texts."""
        return token - cycle + 1 if token % cycle == cycle - 1 else token + 1

    def emit(request: Request, count: int) -> None:
        for _ in range(count):
            request.token_ids.append(follows(request.token_ids[-1]))

    def engine(number: int) -> None:
        rng = random.Random(number)
        running: list[Request] = []
        try:
            for round_number in itertools.count():
                if round_number >= 150 and num_drafts[number] > 500:
                    break
                time.sleep(0.001)  # a step
                if len(running) < 6:
                    request = request_of([rng.randrange(20) * cycle + rng.randrange(cycle)])
                    emit(request, rng.choice([1, 30, 400]))
                    request.prompt_token_ids = list(request.token_ids)
                    running.append(request)
                    drafter.start(request)
                found = drafter.lookup_judged(running, [8] * len(running))
                for request, (drafts, _) in zip(running, found):
                    if round_number % 2:
                        drafts = drafter.lookup(request, [], 8)
                    last = request.token_ids[-1]
                    for token in drafts:
                        assert token == follows(last)
                        last = token
                    num_drafts[number] += len(drafts)
                    emit(request, rng.choices([1, 3, 40], [10, 5, 1])[0])
                    assert drafter.num_cached_requests <= 40
                if rng.random() < 0.2:
                    drafter.stop(running.pop(rng.randrange(len(running))))
            for request in running:
                drafter.stop(request)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=engine, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors
    settle(drafter)
    assert not drafter._open
    assert drafter._num_reserved == 0
    assert drafter.num_cached_tokens == sum(len(a.token_ids) for a in drafter._texts.answers) <= 3000
    assert all(a.num_inserted == len(a.token_ids) for a in drafter._texts.answers)
    assert len(drafter._shared) == sum(len(a.piece_ids) for a in drafter._texts.answers)
    check_shared(drafter)
    assert not caplog.records


def test_close(make: Make, tmp_path: Path) -> None:
    drafter = make(cache_path=str(tmp_path / "cache"))
    request = request_of(list(range(100_000)))
    drafter.start(request)
    drafter.close()
    assert not drafter._thread.is_alive()
    assert not list(tmp_path.iterdir())  # no answer, no file
    drafter.close()
    request.token_ids += [5, 6, 7]
    assert drafter.lookup(request, [], 4) == []
    drafter.stop(request)
    other = request_of(PROMPT)
    drafter.start(other)
    assert drafter.lookup(other, [], 4) == []
    drafter.stop(other)


def test_a_failure_of_the_thread_costs_drafts_only(make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    drafter = make()
    answer(drafter, PROMPT, ANSWER)
    running = request_of(PROMPT)
    drafter.start(running)
    settle(drafter)

    def fail(self: SuffixLookup) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(SuffixLookup, "_work", fail)
    drafter.start(request_of(PROMPT))
    drafter._thread.join()
    assert "no more" in caplog.text
    running.token_ids += [10, 11]
    assert drafter.lookup(running, [], 4) == []
    drafter.stop(running)
    drafter.close()
