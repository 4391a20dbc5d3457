"""One request's place in its grammar. The engine's thread alone has it, once the request is there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from backend.errors import RequestError
from backend.grammar.thinking import FORM, MAY_THINK, OPENS, THINKING, Thoughts
from backend.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from backend.text import Tokenizer


class Vocabulary:
    """The model's tokens as grammars see them, and the threads that compute masks."""

    def __init__(self, tokenizer: LLTokenizer, executor: LLExecutor, own: Tokenizer, vocab_size: int, end_ids: Collection[int]) -> None:
        """own: the tokenizer as the model has it; vocab_size: of the model's scores; end_ids: that end a text."""
        self.tokenizer, self.executor, self.vocab_size, self.end_ids = tokenizer, executor, vocab_size, frozenset(end_ids)
        self.num_words = -(-vocab_size // 32)
        """Of a mask as the step takes it."""
        self.num_own_words = -(-tokenizer.vocab_size // 32)
        """Of a mask as it is computed: the tokenizer may know tokens that the model does not."""
        self.thoughts = Thoughts(own, self.num_own_words, vocab_size, self.end_ids)
        self.marks = frozenset(own.mark_ids.values()) - self.end_ids
        """Tokens that grammars take where they name them alone, not for the text that they write: special ones, and those whose text is in `<>`."""
        others = np.full(32 * self.num_own_words, True)
        others[list(self.marks)] = False
        self.others = np.packbits(others, bitorder="little").view(np.int32)
        """A mask of all others."""


class Matcher:
    """Follows the tokens that a request emits, and looks ahead over drafts."""

    def __init__(
        self, inner: LLMatcher, vocabulary: Vocabulary, asked: StructuredOutputs, forbidden_ends: frozenset[int] = frozenset(), state: int = FORM
    ) -> None:
        """asked: what the grammar was compiled from; forbidden_ends: ends of text that are not chosen where anything else may be; state: of
        `thinking`. Before the form `inner` is at its beginning."""
        self.inner, self.vocabulary, self.asked, self.forbidden_ends, self.state = inner, vocabulary, asked, forbidden_ends, state
        self.is_complete = False
        """Nothing may follow."""

    def copy(self, ignores_end: bool = False, state: int | None = None) -> Matcher:
        """One at the same place, or in another state before the form. ignores_end: the text goes on while the grammar lets it."""
        if state is None or (state == MAY_THINK and self.vocabulary.thoughts.begin_id is None):
            state = self.state
        forbidden = self.vocabulary.end_ids if ignores_end else self.forbidden_ends
        return Matcher(self.inner.deep_copy(), self.vocabulary, self.asked, forbidden, state)

    def after(self, token_ids: Sequence[int]) -> Matcher | None:
        """One that has taken these in too; None: the text has ended with them, or the grammar does not allow them."""
        own = self.copy()
        try:
            own.advance(token_ids)
        except RequestError:
            return None
        return None if own.is_complete else own

    def allows(self, token_id: int) -> bool:
        """Whether `advance` would take it."""
        if self.state != FORM:
            states, begin = self.trace([token_id])
            return begin is not None or len(states) > 1
        return self._form_allows(token_id)

    def _form_allows(self, token_id: int) -> bool:
        return self.inner.is_accepting() if token_id in self.vocabulary.end_ids else self.inner.validate_tokens([token_id]) == 1

    def trace(self, token_ids: Sequence[int]) -> tuple[list[int], int | None]:
        """The states before the form: before each token that is allowed there, and after the last one; and the number of the form's first token.

        None: they do not come so far, or one of them is not allowed.
        """
        states: list[int] = []
        state, follow = self.state, self.vocabulary.thoughts.follow
        for number, token_id in enumerate(token_ids):
            if state == FORM:
                return states, number
            states.append(state)
            after = follow(state, token_id)
            if state == MAY_THINK and after != THINKING and self._form_allows(token_id):
                return states, number
            if after is None:
                return states, None
            state = after
        return (states, len(token_ids)) if state == FORM else ([*states, state], None)

    def _think(self, token_id: int) -> bool:
        """Takes in a token before the form. False: it is the form's first one, or is not allowed."""
        states, begin = self.trace([token_id])
        if begin is not None:
            self.state = FORM
        elif len(states) > 1:
            self.state = states[1]
        return begin != 0 and (begin == 1 or len(states) > 1)

    def advance(self, token_ids: Sequence[int]) -> int:
        """Takes in what was emitted -> how many of these tokens count: none does after the text's end.

        Raises RequestError for a token that the grammar does not allow here: a step emits one only where nothing that it allows could be chosen.
        """
        for count, token_id in enumerate(token_ids, 1):
            if self.state != FORM and self._think(token_id):
                continue
            is_end = token_id in self.vocabulary.end_ids
            if self.state != FORM or not (self.inner.is_accepting() if is_end else self.inner.consume_token(token_id)):
                raise RequestError(
                    f"structured_outputs: after {count - 1} more tokens no token was both allowed by the grammar and possible: bad_words, "
                    f"min_tokens or another parameter may forbid all that it allows, or it has become too complex{self._reason()}"
                )
            if is_end or self.inner.is_stopped():
                self.is_complete = True
                return count
        return len(token_ids)

    def _reason(self) -> str:
        lines = self.inner.get_error().splitlines()
        return f" ({lines[0]:.200})" if lines else ""

    def find_piece(self, token_ids: Collection[int]) -> int | None:
        """Where the mask has nothing but these marks: what else begins the text that is forced here. None: one of them is named here.

        The tokenizer writes such a text with the mark in it, which makes the mask; the grammar does not take that for the text.
        """
        if any(self.inner.validate_tokens([token_id]) for token_id in token_ids):
            return None
        text = self.inner.compute_ff_bytes().decode(errors="ignore")  # whose last character may be there in part
        return next(iter(self.vocabulary.tokenizer.greedy_tokenize(text)), None)

    def look_ahead(self, token_ids: Sequence[int], limit: int, wants_forced: bool = True) -> tuple[int, list[int]]:
        """How many leading tokens the grammar allows here, and those that it forces after them, as the tokenizer writes them; `limit`: of both."""
        if self.state == FORM:
            return self._look_ahead(token_ids, limit, wants_forced)
        states, begin = self.trace(token_ids)
        if begin is None:
            count, begin_id = len(states) - 1, self.vocabulary.thoughts.begin_id
            return count, [begin_id] if states[-1] == OPENS and begin_id is not None and wants_forced and count < limit else []
        count, forced = self._look_ahead(token_ids[begin:], limit - begin, wants_forced)
        return begin + count, forced

    def _look_ahead(self, token_ids: Sequence[int], limit: int, wants_forced: bool) -> tuple[int, list[int]]:
        """Of the form."""
        inner, end_ids = self.inner, self.vocabulary.end_ids
        end = next((place for place, token_id in enumerate(token_ids) if token_id in end_ids), None)
        known = list(token_ids if end is None else token_ids[:end])
        count = inner.validate_tokens(known) if known else 0
        if end is not None and count == end and token_ids[end] not in self.forbidden_ends and inner.validate_tokens([*known, token_ids[end]]) > end:
            return end + 1, []
        if count >= limit or not wants_forced:
            return count, []
        place = inner.deep_copy() if count else inner  # to be taken back, tokens that a grammar names by their ids are too long
        if count and not place.consume_tokens(known[:count]):
            return 0, []
        forced = place.compute_ff_tokens()
        if not self.vocabulary.marks.isdisjoint(forced):
            forced = forced[: inner.validate_tokens([*known[:count], *forced]) - count]
        usable = next((i for i, t in enumerate(forced) if t in end_ids or t >= self.vocabulary.vocab_size), len(forced))
        return count, forced[: min(usable, limit - count)]
