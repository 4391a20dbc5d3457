"""What the decoders of tokenizers do with pieces, one after the other: text that is given out is never taken back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"


class Joiner:
    """Plain text: every token is written as it is. Others override what differs."""

    def push(self, piece: Any) -> str:
        """The text that is certain now."""
        return piece

    def extend(self, pieces: Sequence[Any]) -> str:
        """The same of several."""
        return "".join([self.push(piece) for piece in pieces])

    def flush(self) -> str:
        """The rest, when no token follows."""
        return ""

    @property
    def num_held(self) -> int:
        """Whole characters that are not certain."""
        return 0

    def begin(self, limit: int) -> str:
        """The first `limit` of them."""
        return ""

    def peek(self, limit: int) -> tuple[str, int]:
        """The last `limit` characters, or more, of what `flush` would write, and how many are before them.

        Nothing while a character is incomplete.
        """
        return "", 0


class Spaced(Joiner):
    """No decoder at all: tokens are words."""

    _is_first = True

    def push(self, piece: str) -> str:
        if self._is_first:
            self._is_first = False
            return piece
        return " " + piece


class ByteLevel(Joiner):
    """Bytes of UTF-8; what is broken is replaced as soon as that is certain."""

    def __init__(self) -> None:
        self._decoder: Any = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: bytes) -> str:
        if not self._decoder.buffer:
            try:
                return piece.decode()  # without the incremental decoder, which is Python: every token comes by here
            except UnicodeDecodeError:
                pass
        return self._decoder.decode(piece)

    def extend(self, pieces: Sequence[bytes]) -> str:
        return self.push(b"".join(pieces))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class ByteFallback(Joiner):
    """Tokens of text, and runs of tokens that stand for a byte each.

    One bad byte spoils its whole run, every byte of which is replaced then: a run is not certain before it ends.
    """

    def __init__(self) -> None:
        self._start_run()

    def _start_run(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._characters: list[str] = []
        self._num_bytes = 0
        self._is_valid = True

    def push(self, piece: str | int) -> str:
        if isinstance(piece, str):
            return self.flush() + piece if self._num_bytes else piece
        self._num_bytes += 1
        if self._is_valid:
            try:
                if character := self._decoder.decode(bytes((piece,))):
                    self._characters.append(character)
            except UnicodeDecodeError:
                self._is_valid = False
        return ""

    def flush(self) -> str:
        if not self._num_bytes:
            return ""
        is_valid = self._is_valid and not self._decoder.getstate()[0]
        text = "".join(self._characters) if is_valid else BROKEN * self._num_bytes
        self._start_run()
        return text

    @property
    def num_held(self) -> int:
        return len(self._characters)

    def begin(self, limit: int) -> str:
        return "".join(self._characters[:limit])

    def peek(self, limit: int) -> tuple[str, int]:
        if not self._is_valid or self._decoder.getstate()[0]:
            return "", 0
        return "".join(self._characters[-limit:]), max(len(self._characters) - limit, 0)


class WordPiece(Joiner):
    """BERT's: words are apart unless a token begins with a prefix such as ##."""

    _CLEANED = {" .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't", " 'm": "'m", " do not": " don't"}
    _CLEANED |= {" 's": "'s", " 've": "'ve", " 're": "'re"}

    def __init__(self, prefix: str, cleanup: bool) -> None:
        self._prefix = prefix
        self._cleanup = cleanup
        self._is_first = True

    def push(self, piece: str) -> str:
        if self._is_first:
            self._is_first = False
        elif piece.startswith(self._prefix):
            piece = piece[len(self._prefix) :]
        else:
            piece = " " + piece
        return self.clean(piece) if self._cleanup else piece

    @classmethod
    def clean(cls, text: str) -> str:
        for found, instead in cls._CLEANED.items():
            text = text.replace(found, instead)
        return text


class Metaspace(Joiner):
    """SentencePiece's: a character such as ▁ is a space, and none at the start of the first token."""

    def __init__(self, replacement: str, is_prepended: bool) -> None:
        self._replacement = replacement
        self._is_dropped = is_prepended

    def push(self, piece: str) -> str:
        if self._is_dropped:
            self._is_dropped = False
            return piece.replace(self._replacement, "")
        return piece.replace(self._replacement, " ")


class Suffixed(Joiner):
    """BPE with a mark such as </w> at the ends of words: a space, except in the last token, so the latest one waits."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._latest = ""

    def push(self, piece: str) -> str:
        text, self._latest = self._latest.replace(self._suffix, " "), piece
        return text

    def flush(self) -> str:
        text, self._latest = self._latest.replace(self._suffix, ""), ""
        return text

    @property
    def num_held(self) -> int:
        return len(self.peek(0)[0])

    def begin(self, limit: int) -> str:
        return self.peek(0)[0][:limit]

    def peek(self, limit: int) -> tuple[str, int]:
        return self._latest.replace(self._suffix, ""), 0


class Ctc(Joiner):
    """Speech models': a token that repeats the one before it is not written."""

    def __init__(self, pad_token: str, word_delimiter: str, cleanup: bool) -> None:
        self._pad_token = pad_token
        self._word_delimiter = word_delimiter
        self._cleanup = cleanup
        self._latest: str | None = None

    def push(self, piece: str) -> str:
        if piece == self._latest:
            return ""
        self._latest = piece
        text = piece.replace(self._pad_token, "") if self._pad_token else piece
        return WordPiece.clean(text).replace(self._word_delimiter, " ") if self._cleanup else text


class Strip:
    """Drops up to `start` of a character where the text begins, and up to `stop` where it ends."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self.num_left = start
        self._stop = stop
        self._num_held = 0

    def push(self, text: str) -> str:
        if self.num_left and text:
            bare = text[self.count_start(text) :]
            self.num_left = 0 if bare else self.num_left - len(text)
            text = bare
        if not self._stop or not text:
            return text
        text = self._content * self._num_held + text
        self._num_held = min(self._stop, len(text) - len(text.rstrip(self._content)))
        return text[: len(text) - self._num_held]

    def count_start(self, text: str) -> int:
        """Characters at its beginning that are dropped, where it is what comes next."""
        return min(self.num_left, len(text) - len(text.lstrip(self._content)))

    def peek(self, text: str) -> str:
        """What the end would leave of a text."""
        num_cut = min(self._stop, len(text) - len(text.rstrip(self._content)))
        return text[: len(text) - num_cut]


def strip_token(token: str, content: str, start: int, stop: int) -> str:
    strip = Strip(content, start, stop)
    return strip.push(token)
