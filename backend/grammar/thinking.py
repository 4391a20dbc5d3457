"""What a model thinks before an answer of a given form: any text, up to the mark that ends it. The form begins after the mark, as vLLM has it.

Followed by the bytes of tokens, as `ThoughtCount` and clients follow it: few tokenizers lack a token for the mark, and then its last character may
come in one token with what follows. Such a token may have white space there, which belongs to the mark, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from backend.errors import RequestError
from backend.text import Tokenizer
from backend.thought import THINK, THOUGHT

FORM, MAY_THINK, OPENS = -1, -2, -3
"""Where a request is: in what has a form; at its beginning, which may be `<think>` or the form's; behind line breaks, so that `<think>` has to come.
From THINKING on: what is thought, with so many bytes of the mark."""
THINKING = 0
_END = THOUGHT.encode()


class Thoughts:
    """Of a vocabulary: what may come in what is thought, and where that takes a request."""

    def __init__(self, tokenizer: Tokenizer, num_words: int, vocab_size: int, end_ids: Collection[int]) -> None:
        """num_words: of a mask; vocab_size: tokens that the model knows.

        The end of text is not among what may be thought: it comes where the text is whole."""
        self._tokenizer, self._end_ids = tokenizer, frozenset(end_ids)
        vocabulary = {tokenizer.thought_marks.get(token, token): i for token, i in tokenizer.inner.get_vocab().items()}
        self.begin_id: int | None = None if vocabulary.get(THINK, vocab_size) >= vocab_size else vocabulary[THINK]
        """Models that begin to think by themselves have a token for that."""
        self._break_ids = {i for token, i in vocabulary.items() if token in ("\n", "\n\n", "\u010a", "\u010a\u010a", "<0x0A>")}
        """Which GLM writes before it; as they are, and as byte-level tokenizers and those with bytes for what they lack write them."""
        first, last = chr(_END[0]), chr(_END[-1])
        self._may_begin = {i for token, i in vocabulary.items() if first in token}
        """Tokens that may have the mark's beginning in them."""
        closing = [(i, self._bytes(i)) for token, i in vocabulary.items() if last in token]
        self._masks = np.full((len(_END), num_words), -1, dtype=np.int32)
        for num_held, mask in enumerate(self._masks):
            _clear(mask, self._end_ids)
            _clear(mask, [i for i, data in closing if _read(_END[:num_held] + data)[1]])
        self._opening = np.zeros((2, num_words), dtype=np.int32)
        if self.begin_id is not None:
            _set(self._opening[0], [self.begin_id])
            _set(self._opening[1], [self.begin_id, *self._break_ids])

    def follow(self, state: int, token_id: int) -> int | None:
        """The state after a token; None: it may not come. At a beginning that may be the form's: for those tokens alone that are not."""
        if state < THINKING:
            if token_id == self.begin_id:
                return THINKING
            return OPENS if state == MAY_THINK and token_id in self._break_ids else None
        if token_id in self._end_ids:
            return None
        if state == THINKING and token_id not in self._may_begin:  # as most tokens are
            return THINKING
        after, rest = _read(_END[:state] + self._bytes(token_id))
        return None if rest else after

    def mask(self, state: int) -> np.ndarray:
        """What may come [W] int32. At a beginning: beside what the form allows."""
        return self._masks[state] if state >= THINKING else self._opening[int(state == MAY_THINK)]

    def _bytes(self, token_id: int) -> bytes:
        try:
            return self._tokenizer.token_bytes(token_id)
        except RequestError:  # an id that writes nothing
            return b""


def _read(data: bytes) -> tuple[int, bytes]:
    """Of what is thought, the mark's held bytes first: the state after it, and what comes behind the mark, without white space around it."""
    _, mark, rest = data.partition(_END)
    if mark:
        return FORM, rest.strip()
    return next(count for count in range(min(len(_END) - 1, len(data)), -1, -1) if data.endswith(_END[:count])), b""


def _set(mask: np.ndarray, token_ids: Collection[int]) -> None:
    for token_id in token_ids:
        mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def _clear(mask: np.ndarray, token_ids: Collection[int]) -> None:
    for token_id in token_ids:
        mask.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)
