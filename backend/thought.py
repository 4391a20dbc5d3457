"""What of an answer is thought: its beginning, up to `</think>`."""

from __future__ import annotations

from backend.errors import RequestError
from backend.text import Tokenizer

THINK, THOUGHT = "<think>", "</think>"
"""A prompt that ends with the first has opened what the model thinks (DeepSeek R1, QwQ, Qwen3's thinking models)."""
_THINK, _THOUGHT = THINK.encode(), THOUGHT.encode()


class ThoughtCount:
    """Counts the tokens of a completion that belong to what is thought, the marks around it among them. Clients tell text apart by the same rules."""

    def __init__(self, tokenizer: Tokenizer, begins_thinking: bool) -> None:
        """begins_thinking: the prompt ends with the mark that opens it; else the answer may begin with that mark."""
        self._tokenizer, self._is_thought = tokenizer, begins_thinking
        self._is_begun = False
        self._held = b""
        self._count = 0
        self.is_over = False

    @property
    def num_tokens(self) -> int:
        """So far."""
        return self._count if self._is_thought else 0

    def push(self, token_id: int) -> None:
        """The next token. By its bytes: text may be held back. Not after the end."""
        self._count += 1
        try:
            self._held += self._tokenizer.token_bytes(token_id)
        except RequestError:  # an id that writes nothing
            return
        if not self._is_begun:
            bare = self._held.lstrip()
            if _THINK.startswith(bare) and bare != _THINK:
                return
            self._is_begun = True
            if bare.startswith(_THINK):  # where the prompt has the mark too, some models write it again
                self._is_thought, self._held = True, bare[len(_THINK) :]
        self.is_over = not self._is_thought or _THOUGHT in self._held
        self._held = self._held[1 - len(_THOUGHT) :]
