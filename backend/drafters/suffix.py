"""Suffix decoding: what followed the request's last tokens, earlier in it or in other requests' answers, is proposed.

SuffixDecoding (Oliaro et al. 2024), on the index of `kernels.suffix`. As there, each open request has an index of its own tokens and all answers
share one; the one whose draft has the higher score (the sum of its tokens' estimated probabilities) drafts. Not as there, an answer is kept with
the last tokens of its prompt, so that it is found from its first token on where the prompt comes again. A draft is as long as the match times
`max_spec_factor`, and ends where its probability falls below `min_token_prob`.

Threads. One lock guards the indices and the books, and the engine's thread takes it as it comes. What takes long (a prompt of 128k tokens some 40 ms
on a slow processor, in Python for the books too) is cut into slices, which one background thread does, resting after each for as long as it took:
removals first, then prompts (in turns), then what waits for the shared index. Removal of a text cannot be cut, and an index that is dropped is freed
at once: so a long text is held in overlapping pieces, and each is a slice of work when it goes; a short one's index is freed by the thread whole,
without the lock. Calls of the compiled index let other threads run.

Answers are saved to a file every SAVE_SECONDS and at the end, by a second thread, which waits for the disk.

Memory: about 80 bytes per token in an index. The shared one keeps at most `max_cached_requests` answers and `max_cached_tokens` tokens, oldest
out first, beside the texts of a corpus (of the start, and of `add_corpus`), which stay and are not saved; the open requests' own are as long as
they are.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from backend.budget import NUM_SHARES, Chain, by_shares
from backend.core import Request
from backend.drafters import suffix_texts
from backend.drafters.answer_file import AnswerFile
from backend.drafters.corpus import CALL, MAX_TOKENS
from backend.drafters.suffix_texts import Cut, Text, Texts
from backend.errors import EngineError, RequestError
from kernels.suffix import SuffixIndex, Turn, take_turns

logger = logging.getLogger(__name__)

MAX_CACHED_TOKENS = 2**19
"""Of the shared index: about 45 MB."""
TOKENS_AHEAD = 2**20
"""While open requests have this many tokens in indices, the prompt of a new one, which may wait for long, goes in at its first lookup only."""
LEAD_TOKENS = 32
"""Of a prompt's end, kept before its answer: where the prompt comes again, the answer is found from its first token on."""
SAVE_SECONDS = 120.0
"""Between two times that answers are saved: a server that is killed loses no more than came since."""
NO_DRAFTS: tuple[list[int], Chain] = ([], ())


@dataclass(slots=True, eq=False)
class _Open:
    """An open request: all its tokens in an index of its own, its output in the shared one."""

    request: Request
    text: Text
    answer: Text | None = None
    num_reserved: int = 0
    is_queued: bool = False


class SuffixLookup:
    """Drafts as long as the match allows: none for a text without repetition, dozens of tokens in a copied one.

    `max_tree_depth`: longest match plus draft, tokens. `max_cached_requests`: answers in the shared index; -1: no limit but `max_cached_tokens`;
    0: no shared index. `cache_path`: file that the answers are saved to and that a later drafter with the same `fingerprint` (which names
    model and tokenizer) starts from; a file that cannot be used costs a warning.
    """

    name = "suffix"

    def __init__(
        self,
        *,
        max_tree_depth: int = 64,
        max_cached_requests: int = -1,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        cache_path: str | None = None,
        fingerprint: str = "",
        max_cached_tokens: int = MAX_CACHED_TOKENS,
        lead_tokens: int = LEAD_TOKENS,
        corpus: Sequence[array[int]] = (),
        max_corpus_tokens: int = MAX_TOKENS,
    ) -> None:
        """lead_tokens: of a prompt's end that its answer is kept with; corpus: texts that are searched as answers are, and stay; max_corpus_tokens:
        of these and of those that come later."""
        self.max_tree_depth = max_tree_depth
        self.max_cached_requests = max_cached_requests
        self.max_cached_tokens = max_cached_tokens
        self.lead_tokens = lead_tokens
        self.max_spec_factor = max_spec_factor
        self.min_token_prob = min_token_prob
        self.max_corpus_tokens = max_corpus_tokens
        self._is_sharing, self._num_corpus_tokens = max_cached_requests != 0, sum(map(len, corpus))
        self._file = AnswerFile(cache_path, fingerprint) if cache_path is not None and self._is_sharing else None
        self._num_saved = 0  # tokens of answers that the file has or had

        self._open: dict[Request, _Open] = {}
        self._num_reserved = 0  # tokens of the open requests that are in indices, or queued
        self._wake = threading.Condition(threading.Lock())
        self._texts = Texts(max_tree_depth, max_cached_requests, max_cached_tokens, self._wake.notify)
        self._shared = self._texts.index
        # The thread's work: these first, then removals, then requests that are behind, then what waits for the shared index.
        self._dropped: deque[SuffixIndex] = deque()
        self._behind: deque[_Open] = deque()
        self._is_closed = self._is_broken = False
        self._has_ended = threading.Event()
        if self._file is not None:
            self._texts.restore(self._file.read())
        self._texts.waiting.extendleft(Text(self._shared, token_ids) for token_ids in reversed(corpus))
        self._thread = threading.Thread(target=self._run, name="suffix", daemon=True)
        self._thread.start()
        self._saver = threading.Thread(target=self._save_at_times, name="suffix file", daemon=True)
        if self._file is not None:
            self._saver.start()

    @property
    def num_cached_requests(self) -> int:
        """Answers in the shared index, those of open requests too."""
        with self._wake:  # between an answer that comes and the oldest one that goes for it, there is one too many
            return len(self._texts.answers)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of those answers, with what they are kept with of their prompts."""
        with self._wake:
            return self._texts.num_cached_tokens

    @property
    def is_idle(self) -> bool:
        """Everything known is in the indices, and everything evicted is out of them."""
        with self._wake:
            return not self._has_work

    @property
    def _has_work(self) -> bool:
        return bool(self._dropped or self._texts.removals or self._behind or self._texts.waiting)

    def add_corpus(self, texts: Sequence[array[int]]) -> int:
        """Queues texts that stay, all or none -> tokens of all that have come. From any thread. Raises RequestError beyond max_corpus_tokens, and
        EngineError when closed."""
        count, queued = sum(map(len, texts)), [Text(self._shared, token_ids) for token_ids in texts]
        with self._wake:
            if self._is_closed:
                raise EngineError("the suffix cache is closed, or has failed: the server's log says which")
            if count > (room := self.max_corpus_tokens - self._num_corpus_tokens):
                raise RequestError(f"{CALL} has {count} tokens; there is room for {room} beside what is there: the limit is {self.max_corpus_tokens}")
            self._num_corpus_tokens += count
            self._texts.waiting.extend(queued)
            self._wake.notify()
            return self._num_corpus_tokens

    # -- the engine's thread ----------------------------------------------------------------------------------------

    def start(self, request: Request, is_soon: bool = True) -> None:
        """Queues the prompt, or has its first lookup do so; until it is in, the request gets no drafts of its own. No effect on an open request, or
        after `close`."""
        with self._wake:
            if self._is_closed or request in self._open:
                return
            self._open[request] = own = _Open(request, Text(None, request.token_ids))
            if is_soon and self._num_reserved < TOKENS_AHEAD:
                self._queue(own)

    def lookup(self, request: Request, drafts: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens to follow the request's tokens and `drafts`; while its tokens are on their way into its index, of other requests'
        answers alone."""
        return self.lookup_scored(request, drafts, count)[0]

    def lookup_scored(self, request: Request, drafts: Sequence[int], count: int) -> tuple[list[int], float]:
        """As `lookup`, with the score: how many of the tokens are expected to be right (0.0 to `count`)."""
        with self._wake:
            own = self._open.get(request)
            if own is None or count <= 0:
                return [], 0.0
            known = (own.text.index if self._bring_up(own) else None, self._all)
            indices = [index for index in known if index is not None]
            if not indices:
                return [], 0.0
            depth = self.max_tree_depth
            context = [*request.token_ids[-depth:], *drafts][-depth:]
            draft = indices[0].speculate(context, count, self.max_spec_factor, self.min_token_prob, *indices[1:])
        return draft.token_ids, draft.score

    def lookup_judged(self, requests: Sequence[Request], counts: Sequence[int]) -> list[tuple[list[int], Chain]]:
        """As `lookup` for each, with the evidence: the index's share of those that went on as the draft, and how long the match is."""
        found: list[tuple[list[int], Chain]] = [NO_DRAFTS] * len(requests)
        turns, numbers = list[Turn](), list[int]()
        with self._wake:
            shared = self._all
            for number, (request, count) in enumerate(zip(requests, counts)):
                own = self._open.get(request)
                if own is not None and count > 0 and (turn := self._turn_of(own, count, shared)) is not None:
                    turns.append(turn)
                    numbers.append(number)
            guesses = take_turns(turns, shared, self.max_spec_factor, self.min_token_prob, NUM_SHARES)
        for number, (token_ids, chances, match_len) in zip(numbers, guesses):
            if token_ids:
                found[number] = token_ids, by_shares(self.name, chances, match_len)
        return found

    def stop(self, request: Request) -> None:
        """Keeps the answer and drops the rest. No effect on a request that is not open."""
        with self._wake:
            own = self._open.pop(request, None)
            if own is None:
                return
            self._num_reserved -= own.num_reserved
            self._share(own, request.token_ids[max(own.text.num_inserted, len(request.prompt_token_ids)) :])
            if own.answer is not None and own.answer.num_inserted < len(own.answer.token_ids):
                self._texts.waiting.appendleft(own.answer)  # before what a file restores, which can be long
                self._wake.notify()
            if len(own.text.piece_ids) > 1:  # dropped as one, 128k tokens would take 80 ms
                self._texts.remove(own.text)
            elif own.text.index is not None:
                self._texts.free(own.text.piece_ids)
                self._dropped.append(own.text.index)
                self._wake.notify()

    def close(self) -> None:
        """Ends the thread and saves the answers, if there is a path. No effect when closed."""
        with self._wake:
            if self._is_closed:
                return
            self._is_closed = True
            self._wake.notify()
        self._has_ended.set()
        self._thread.join()
        if self._file is not None:
            self._saver.join()
            self._save()

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _queue(self, own: _Open) -> None:
        if not own.num_reserved:
            own.num_reserved = len(own.request.token_ids)
            self._num_reserved += own.num_reserved
        own.is_queued = True
        self._behind.append(own)
        self._wake.notify()

    @property
    def _all(self) -> SuffixIndex | None:
        """The index of what all requests look in, where there is anything to come."""
        return self._shared if self._is_sharing or self._num_corpus_tokens else None

    def _turn_of(self, own: _Open, count: int, shared: SuffixIndex | None) -> Turn | None:
        """What a request brings and asks; None: nothing is known to look in."""
        request, text, answer = own.request, own.text, own.answer
        start, missing = text.num_inserted, len(request.token_ids) - text.num_inserted
        if not own.is_queued and 0 < missing <= suffix_texts.SLICE_TOKENS and text.has_room and start >= len(request.prompt_token_ids):
            token_ids = request.token_ids[start:]
            if not self._is_sharing:
                text.note(missing)
                return Turn(text.index, text.piece_ids[-1], -1, token_ids, count)
            if answer is not None and answer.has_room and answer.is_in:
                text.note(missing)
                answer.note(missing)
                self._texts.book(answer, token_ids)
                return Turn(text.index, text.piece_ids[-1], -1 if answer.is_evicted else answer.piece_ids[-1], token_ids, count)
        if self._bring_up(own):
            return Turn(text.index, text.piece_ids[-1], -1, (), count)
        return Turn(None, 0, -1, request.token_ids[-self.max_tree_depth :], count) if shared is not None else None

    def _bring_up(self, own: _Open) -> bool:
        """Has what is missing of a request inserted -> whether its own index has all now."""
        missing = len(own.request.token_ids) - own.text.num_inserted
        if missing > suffix_texts.SLICE_TOKENS and not own.is_queued and not self._is_closed:
            self._queue(own)
        if missing > suffix_texts.SLICE_TOKENS or own.is_queued:
            return False
        if missing:
            self._take_in(own)
        return True

    def _take_in(self, own: _Open) -> None:
        """One slice of the request's tokens."""
        self._texts.insert_cut(own.text, self._cut_next(own))
        if own.answer is not None:
            self._texts.insert(own.answer)

    def _cut_next(self, own: _Open) -> Cut | None:
        """Books one slice of the request's tokens; those that are output are shared."""
        start = own.text.num_inserted
        cut = self._texts.cut(own.text)
        self._share(own, own.request.token_ids[max(start, len(own.request.prompt_token_ids)) : own.text.num_inserted])
        return cut

    def _share(self, own: _Open, token_ids: list[int]) -> None:
        """Books output of a request, which is to be inserted."""
        if not token_ids or not self._is_sharing:
            return
        if own.answer is None:
            own.answer = self._texts.begin_answer(own.request.prompt_token_ids[-self.lead_tokens :] if self.lead_tokens else ())
        if not own.answer.is_evicted:
            self._texts.book(own.answer, token_ids)

    def _work(self) -> SuffixIndex | None:
        """One slice of what waits -> what is to be let go. What nobody else looks in meanwhile takes no lock."""
        with self._wake:
            if self._dropped:
                return self._dropped.popleft()
            removal = self._texts.removals[0] if self._texts.removals else None
            if removal is not None and removal[0] is self._shared:
                removal[0].remove(removal[1])
                self._texts.end_removal()
                return None
            if removal is None and not self._behind:
                self._texts.insert_waiting()
                return None
            own = None if removal is not None else self._behind[0]
            cut = self._cut_next(own) if own is not None and self._open.get(own.request) is own else None
        if removal is not None:  # of a request that ended
            removal[0].remove(removal[1])
            with self._wake:
                self._texts.end_removal()
        elif own is not None:
            self._texts.insert_cut(own.text, cut)
            with self._wake:
                self._end_slice(own)
        return None

    def _end_slice(self, own: _Open) -> None:
        """Of a request that was first among those behind."""
        self._behind.popleft()
        if self._open.get(own.request) is not own:
            return  # it ended
        if own.answer is not None:
            self._texts.insert(own.answer)
        own.is_queued = own.text.num_inserted < len(own.request.token_ids)
        if own.is_queued:
            self._behind.append(own)

    # -- the background threads -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._is_closed or self._has_work):
                        self._wake.wait()
                    if self._is_closed:
                        return
                started = time.perf_counter()
                dropped = self._work()
                del dropped  # without the lock
                time.sleep(time.perf_counter() - started)  # lets go of the GIL and of the lock, so half of the time at least is the engine's
        except Exception:
            logger.exception("the suffix cache failed: it drafts nothing any more, and will not be saved")
            with self._wake:
                self._is_closed = self._is_broken = True
                self._open.clear()
                self._behind.clear()

    def _save_at_times(self) -> None:
        while not self._has_ended.wait(SAVE_SECONDS):
            self._save()

    def _save(self) -> None:
        """What came since the last time, with all that is kept."""
        assert self._file is not None
        with self._wake:
            if self._is_broken or self._texts.num_booked == self._num_saved:
                return
            num_shared, texts = self._texts.num_booked, list(self._texts.answers)
        # One by one and without the lock: the engine's thread wants it each step. Answers only ever grow.
        answers = [array("i", text.token_ids) for text in texts]
        try:
            if answers and self._file.save(answers, self.max_cached_tokens):
                self._num_saved = num_shared
        except Exception:  # it must not end the thread, which tries again
            logger.exception("the suffix cache is not saved")
