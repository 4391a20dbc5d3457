"""Suffix decoding: what followed the request's last tokens, earlier in it or in other requests' answers, is proposed.

SuffixDecoding (Oliaro et al. 2024), on the suffix trees (C++) of arctic-inference, an optional package. As there, each open request has a tree
of its own tokens and all answers share one; the tree whose draft has the higher score (the sum of its tokens' estimated probabilities) drafts.
Not as there, an answer is kept with the last tokens of its prompt, so that it is found from its first token on where the prompt comes again.
A draft is as long as the match times `max_spec_factor`, and ends where its probability falls below `min_token_prob`.

`SuffixTree` is used and not arctic's `SuffixDecodingCache` around it, which takes a prompt in one call only, evicts on the caller's thread,
has no bound on tokens and cannot be saved.

Threads. No call of the library releases the GIL, so calls never overlap, and a long one (34 ms for a prompt of 32k tokens of code) would stop
the engine's thread whichever thread made it. Long work is therefore cut into slices, which one background thread does, resting after each for as
long as it took: removals first, then prompts (in turns), then what waits for the shared tree. One lock guards the trees and the books; it is held
for one slice, under a millisecond as a rule, so the engine's thread simply takes it. Removal cannot be cut, and a dropped tree is freed at once: so
a long text is held in overlapping pieces, and each is a slice of work when it goes, of about 1 ms (1 of 400: 14 ms).

Where the planner of drafts does not wait for these lookups (`HybridDrafter`), a request's prompt goes into its tree when that is wanted, and while
only samples are, to see what they would bring, the thread rests IDLE_REST times as long as it works: at ten thousand tokens a second and more it
would else take the GIL for half of the time, for nobody.

Answers are saved to a file every SAVE_SECONDS and at the end, by a second thread, which waits for the disk.

Memory: about 340 bytes per token in a tree. The shared tree keeps at most `max_cached_requests` answers and `max_cached_tokens` tokens, oldest
out first, beside the texts of a corpus (of the start, and of `add_corpus`), which stay and are not saved; the open requests' own trees are as
long as they are.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from backend.budget import Chain, by_probability
from backend.core import Request
from backend.drafters.answer_file import AnswerFile
from backend.drafters.corpus import CALL, MAX_TOKENS
from backend.drafters.suffix_texts import OpenText, SuffixText
from backend.errors import ConfigError, EngineError, RequestError

logger = logging.getLogger(__name__)

MAX_CACHED_TOKENS = 2**19
"""Of the shared tree: about 180 MB."""
TOKENS_AHEAD = 2**20
"""While open requests have this many tokens in trees, the prompt of a new one, which may wait for long, goes in at its first lookup only."""
LEAD_TOKENS = 32
"""Of a prompt's end, kept before its answer: where the prompt comes again, the answer is found from its first token on."""
SLICE_TOKENS = 256
"""What one call inserts."""
PIECE_TOKENS = 1024
"""What one call removes."""
IDLE_REST = 19.0
"""Times as long as it took the background thread rests after a slice of work that nobody waits for."""
SAVE_SECONDS = 120.0
"""Between two times that answers are saved: a server that is killed loses no more than came since."""


class SuffixLookup:
    """Drafts as long as the match allows: none for a text without repetition, dozens of tokens in a copied one.

    `max_tree_depth`: longest match plus draft, tokens. `max_cached_requests`: answers in the shared tree; -1: no limit but `max_cached_tokens`;
    0: no shared tree. `cache_path`: file that the answers are saved to and that a later drafter with the same `fingerprint` (which names
    model and tokenizer) starts from; a file that cannot be used costs a warning. Raises ConfigError where arctic-inference is not installed.
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
        try:
            from arctic_inference.suffix_decoding._C import SuffixTree
        except ImportError as error:
            raise ConfigError(
                f"speculative method suffix needs the package arctic-inference ({error}). With a C++ compiler, CMake and Python's headers, in the "
                "activated environment: pip install 'setuptools>=70.1' nanobind==2.9.2 && pip install --no-build-isolation 'arctic-inference<0.4'"
            ) from error
        self._new_tree = SuffixTree
        self._extend = SuffixTree.extend_ndarray
        self._speculate = SuffixTree.speculate_ndarray
        self.max_tree_depth = max_tree_depth
        self.max_cached_requests = max_cached_requests
        self.max_cached_tokens = max_cached_tokens
        self.lead_tokens = lead_tokens
        self.max_spec_factor = max_spec_factor
        self.min_token_prob = min_token_prob
        self.max_corpus_tokens = max_corpus_tokens
        self._is_sharing, self._num_corpus_tokens = max_cached_requests != 0, sum(map(len, corpus))
        self._file = AnswerFile(cache_path, fingerprint) if cache_path is not None and self._is_sharing else None
        self._num_shared = self._num_saved = 0  # tokens of answers that ever came here, and those that the file has or had

        self._open: dict[Request, OpenText] = {}
        self._num_reserved = 0  # tokens of the open requests that are in trees, or queued
        self._num_wanted = 0  # requests
        self._shared = SuffixTree(max_tree_depth)
        self._answers: deque[SuffixText] = deque()  # oldest first
        self._num_cached_tokens = 0
        self._new_ids = itertools.count()
        self._free_ids: list[int] = []  # to use again: a tree's ids are 32 bits

        self._removals: deque[tuple[Any, int]] = deque()  # tree, piece; the thread's work, in this order
        self._behind: deque[OpenText] = deque()
        self._unshared: deque[SuffixText] = deque()
        self._is_closed = self._is_broken = False
        self._wake = threading.Condition(threading.Lock())
        self._has_ended = threading.Event()
        if self._file is not None:
            self._restore(self._file.read())
        self._unshared.extendleft(SuffixText(self._shared, token_ids) for token_ids in reversed(corpus))
        self._thread = threading.Thread(target=self._run, name="suffix", daemon=True)
        self._thread.start()
        self._saver = threading.Thread(target=self._save_at_times, name="suffix file", daemon=True)
        if self._file is not None:
            self._saver.start()

    @property
    def num_cached_requests(self) -> int:
        """Answers in the shared tree, those of open requests too."""
        with self._wake:  # between an answer that comes and the oldest one that goes for it, there is one too many
            return len(self._answers)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of those answers, with what they are kept with of their prompts."""
        with self._wake:
            return self._num_cached_tokens

    @property
    def is_idle(self) -> bool:
        """Everything known is in the trees, and everything evicted is out of them."""
        with self._wake:
            return not (self._removals or self._behind or self._unshared)

    def add_corpus(self, texts: Sequence[array[int]]) -> int:
        """Queues texts that stay, all or none -> tokens of all that have come. From any thread. Raises RequestError beyond max_corpus_tokens, and
        EngineError when closed."""
        count, queued = sum(map(len, texts)), [SuffixText(self._shared, token_ids) for token_ids in texts]
        with self._wake:
            if self._is_closed:
                raise EngineError("the suffix cache is closed, or has failed: the server's log says which")
            if count > (room := self.max_corpus_tokens - self._num_corpus_tokens):
                raise RequestError(f"{CALL} has {count} tokens; there is room for {room} beside what is there: the limit is {self.max_corpus_tokens}")
            self._num_corpus_tokens += count
            self._unshared.extend(queued)
            self._wake.notify()
            return self._num_corpus_tokens

    # -- the engine's thread ----------------------------------------------------------------------------------------

    def start(self, request: Request, *, is_wanted: bool = True) -> None:
        """Queues the prompt, where it is wanted; until it is in, the request gets no drafts of its own tokens. No effect on an open request, or
        after `close`."""
        with self._wake:
            if self._is_closed or request in self._open:
                return
            self._open[request] = own = OpenText(request, SuffixText(self._new_tree(self.max_tree_depth), request.token_ids))
            if is_wanted:
                self._want(own)
                if self._num_reserved < TOKENS_AHEAD:
                    self._queue(own)

    def is_ready(self, request: Request) -> bool:
        own = self._open.get(request)
        return own is not None and not own.is_queued and len(request.token_ids) - own.text.num_inserted <= SLICE_TOKENS

    def prepare(self, request: Request, *, is_sample: bool = False) -> None:
        with self._wake:
            own = self._open.get(request)
            if own is None or self._is_closed:
                return
            if not is_sample:
                self._want(own)
            if not own.is_queued and len(request.token_ids) - own.text.num_inserted > SLICE_TOKENS:
                self._queue(own)

    def lookup(self, request: Request, drafts: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens to follow the request's tokens and `drafts`; while its tokens are on their way into its tree, of other requests'
        answers alone."""
        return self.lookup_scored(request, drafts, count)[0]

    def lookup_scored(self, request: Request, drafts: Sequence[int], count: int) -> tuple[list[int], float]:
        """As `lookup`, with the score: how many of the tokens are expected to be right (0.0 to `count`)."""
        draft = self._look_up(request, drafts, count)
        return (draft.token_ids, draft.score) if draft is not None else ([], 0.0)

    def lookup_judged(self, request: Request, drafts: Sequence[int], count: int) -> tuple[list[int], Chain]:
        """As `lookup`, with the evidence: the tree's share of those that went on as the draft, and how long the match is."""
        draft = self._look_up(request, drafts, count)
        if draft is None or not draft.token_ids:
            return [], ()
        chances = [own / before for own, before in zip(draft.probs, (1.0, *draft.probs))]
        return draft.token_ids, by_probability(self.name, chances, draft.match_len)

    def _look_up(self, request: Request, drafts: Sequence[int], count: int) -> Any:
        """The library's draft, or None."""
        with self._wake:
            own = self._open.get(request)
            if own is None or count <= 0:
                return None
            missing = len(request.token_ids) - own.text.num_inserted
            if missing > SLICE_TOKENS and not own.is_queued and not self._is_closed:
                self._want(own)
                self._queue(own)
            trees = [self._shared] if self._is_sharing or self._num_corpus_tokens else []
            if missing <= SLICE_TOKENS and not own.is_queued:
                if missing:
                    self._take_in(own)
                trees.insert(0, own.text.tree)
            depth = self.max_tree_depth
            context = np.array([*request.token_ids[-depth:], *drafts][-depth:], dtype=np.int32)
            limits = (count, self.max_spec_factor, 0.0, self.min_token_prob, False)
            return max((self._speculate(tree, context, *limits) for tree in trees), key=lambda draft: draft.score, default=None)

    def stop(self, request: Request) -> None:
        """Keeps the answer and drops the rest. No effect on a request that is not open."""
        with self._wake:
            own = self._open.pop(request, None)
            if own is None:
                return
            self._num_reserved -= own.num_reserved
            self._num_wanted -= own.is_wanted
            self._share(own, request.token_ids[max(own.text.num_inserted, len(request.prompt_token_ids)) :])
            if own.answer is not None and not own.answer.is_evicted and own.answer.num_inserted < len(own.answer.token_ids):
                self._unshared.appendleft(own.answer)  # before what a file restores, which can be long
                while self._unshared[-1].is_evicted:  # before it came in: the thread may be behind for long
                    self._unshared.pop()
                self._wake.notify()
            if len(own.text.piece_ids) > 1:  # dropped as one, 128k tokens would take 80 ms
                self._remove(own.text)
            else:
                self._free_ids += own.text.piece_ids

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

    def _want(self, own: OpenText) -> None:
        self._num_wanted += not own.is_wanted
        own.is_wanted = True

    def _queue(self, own: OpenText) -> None:
        if not own.num_reserved:
            own.num_reserved = len(own.request.token_ids)
            self._num_reserved += own.num_reserved
        own.is_queued = True
        self._behind.append(own)
        self._wake.notify()

    def _take_in(self, own: OpenText) -> None:
        """One slice of the request's tokens."""
        start = own.text.num_inserted
        self._insert(own.text)
        self._share(own, own.request.token_ids[max(start, len(own.request.prompt_token_ids)) : own.text.num_inserted])
        if own.answer is not None:
            self._insert(own.answer)

    def _share(self, own: OpenText, token_ids: list[int]) -> None:
        """Books output of a request; `_insert` brings it into the shared tree."""
        if not token_ids or not self._is_sharing:
            return
        if own.answer is None:
            own.answer = SuffixText(self._shared, array("i", own.request.prompt_token_ids[-self.lead_tokens :] if self.lead_tokens else ()))
            self._answers.append(own.answer)
            self._num_cached_tokens += len(own.answer.token_ids)
        if not own.answer.is_evicted:
            own.answer.token_ids.extend(token_ids)
            self._num_cached_tokens += len(token_ids)
            self._num_shared += len(token_ids)
            while self._num_cached_tokens > self.max_cached_tokens or 0 < self.max_cached_requests < len(self._answers):
                oldest = self._answers.popleft()
                oldest.is_evicted = True
                self._num_cached_tokens -= len(oldest.token_ids)
                self._remove(oldest)

    def _insert(self, text: SuffixText) -> None:
        """One slice of what waits, if there is any."""
        start = text.num_inserted
        token_ids = text.token_ids[start : start + SLICE_TOKENS]
        if text.is_evicted or not token_ids:
            return
        text.num_inserted += len(token_ids)
        if not text.piece_ids or text.num_in_piece >= PIECE_TOKENS:
            text.piece_ids.append(self._free_ids.pop() if self._free_ids else next(self._new_ids))
            token_ids = text.token_ids[max(0, start - self.max_tree_depth) : text.num_inserted]
            text.num_in_piece = 0
        text.num_in_piece += len(token_ids)
        self._extend(text.tree, text.piece_ids[-1], np.array(token_ids, dtype=np.int32))

    def _remove(self, text: SuffixText) -> None:
        self._removals.extend((text.tree, piece_id) for piece_id in text.piece_ids)
        self._wake.notify()

    def _work(self) -> None:
        """One slice of what waits."""
        if self._removals:
            tree, piece_id = self._removals.popleft()
            tree.remove(piece_id)
            self._free_ids.append(piece_id)
        elif self._behind:
            own = self._behind.popleft()
            if self._open.get(own.request) is not own:
                return  # ended
            self._take_in(own)
            own.is_queued = own.text.num_inserted < len(own.request.token_ids)
            if own.is_queued:
                self._behind.append(own)
        else:
            answer = self._unshared[0]
            self._insert(answer)
            if answer.is_evicted or answer.num_inserted == len(answer.token_ids):
                self._unshared.popleft()

    def _restore(self, sequences: Sequence[array[int]]) -> None:
        """Books the answers of a file, as many of the newest as may stay; the thread inserts them, oldest first."""
        if self.max_cached_requests > 0:
            sequences = sequences[-self.max_cached_requests :]
        for token_ids in reversed(sequences):
            if self._num_cached_tokens + len(token_ids) > self.max_cached_tokens:
                break
            self._num_cached_tokens += len(token_ids)
            self._answers.appendleft(SuffixText(self._shared, token_ids))
        self._unshared.extend(self._answers)

    # -- the background threads -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._is_closed or self._removals or self._behind or self._unshared):
                        self._wake.wait()
                    if self._is_closed:
                        return
                    started = time.perf_counter()
                    self._work()
                    rest = 1.0 if self._num_wanted or not self._open else IDLE_REST
                # Lets go of the GIL and of the lock, so half of the time at least is the engine's.
                time.sleep(rest * (time.perf_counter() - started))
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
            if self._is_broken or self._num_shared == self._num_saved:
                return
            num_shared, texts = self._num_shared, list(self._answers)
        # One by one and without the lock: the engine's thread wants it each step. Answers only ever grow.
        answers = [array("i", text.token_ids) for text in texts]
        try:
            if answers and self._file.save(answers, self.max_cached_tokens):
                self._num_saved = num_shared
        except Exception:  # it must not end the thread, which tries again
            logger.exception("the suffix cache is not saved")
