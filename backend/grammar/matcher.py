"""One request's place in its grammar. The engine's thread alone has it, once the request is there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from backend.errors import RequestError
from backend.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer


class Vocabulary:
    """The model's tokens as grammars see them, and the threads that compute masks."""

    def __init__(self, tokenizer: LLTokenizer, executor: LLExecutor, vocab_size: int, end_ids: Collection[int]) -> None:
        """vocab_size: of the model's scores; end_ids: that end a text."""
        self.tokenizer, self.executor, self.vocab_size, self.end_ids = tokenizer, executor, vocab_size, frozenset(end_ids)
        self.num_words = -(-vocab_size // 32)
        """Of a mask as the step takes it."""
        self.num_own_words = -(-tokenizer.vocab_size // 32)
        """Of a mask as it is computed: the tokenizer may know tokens that the model does not."""


class Matcher:
    """Follows the tokens that a request emits, and looks ahead over drafts."""

    def __init__(self, inner: LLMatcher, vocabulary: Vocabulary, asked: StructuredOutputs, ignores_end: bool = False) -> None:
        """asked: what the grammar was compiled from; ignores_end: the text goes on while the grammar lets it."""
        self.inner, self.vocabulary, self.asked, self.ignores_end = inner, vocabulary, asked, ignores_end
        self.is_complete = False
        """Nothing may follow."""

    def copy(self, ignores_end: bool = False) -> Matcher:
        """One at the same place."""
        return Matcher(self.inner.deep_copy(), self.vocabulary, self.asked, ignores_end)

    def after(self, token_ids: Sequence[int]) -> Matcher | None:
        """One that has taken these in too; None: the text has ended with them, or the grammar does not allow them."""
        own = self.copy(self.ignores_end)
        try:
            own.advance(token_ids)
        except RequestError:
            return None
        return None if own.is_complete else own

    def allows(self, token_id: int) -> bool:
        """Whether `advance` would take it."""
        return self.inner.is_accepting() if token_id in self.vocabulary.end_ids else self.inner.validate_tokens([token_id]) == 1

    def advance(self, token_ids: Sequence[int]) -> int:
        """Takes in what was emitted -> how many of these tokens count: none does after the text's end.

        Raises RequestError for a token that the grammar does not allow here: a step emits one only where nothing that it allows could be chosen.
        """
        for count, token_id in enumerate(token_ids, 1):
            is_end = token_id in self.vocabulary.end_ids
            if not (self.inner.is_accepting() if is_end else self.inner.consume_token(token_id)):
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

    def look_ahead(self, token_ids: Sequence[int], limit: int, wants_forced: bool = True) -> tuple[int, list[int]]:
        """How many leading tokens the grammar allows here, and those that it forces after them, as the tokenizer writes them; `limit`: of both."""
        inner, end_ids = self.inner, self.vocabulary.end_ids
        end = next((place for place, token_id in enumerate(token_ids) if token_id in end_ids), None)
        known = list(token_ids if end is None else token_ids[:end])
        count = inner.validate_tokens(known) if known else 0
        if end is not None and count == end and not self.ignores_end and inner.validate_tokens([*known, token_ids[end]]) > end:
            return end + 1, []
        if count >= limit or not wants_forced:
            return count, []
        if count and not inner.consume_tokens(known[:count]):
            return 0, []
        forced = inner.compute_ff_tokens()
        if count:
            inner.rollback(count)
        usable = next((i for i, t in enumerate(forced) if t in end_ids or t >= self.vocabulary.vocab_size), len(forced))
        return count, forced[: min(usable, limit - count)]
