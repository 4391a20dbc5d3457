"""Token ids to text, piece by piece: what a tokenizer's own decoder writes of all of them, for any ids and any split.

The library's DecodeStream is not used: it decodes a window of tokens again and again and compares, which raises for some
sequences of bytes (`<0x0A>`, `<0xE6>`, `,`) and writes others differently from `decode`. Here each of the library's
decoders is a stage that keeps what it cannot yet decide, so that text once given out is never taken back, and a token
costs the same however long its context is.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders

from backend.joiners import ByteFallback, ByteLevel, Ctc, Joiner, Metaspace, Spaced, Strip, Suffixed, WordPiece, strip_token

logger = logging.getLogger(__name__)

MAX_TOKEN_ID = 2**32 - 1
"""The library has no larger ones, and raises for negative ones."""

WRITTEN_AS = {"[THINK]": "<think>", "[/THINK]": "</think>"}
"""Special tokens that are text all the same, and how that is written: marks of what is thought (Mistral's Magistral, Ministral 3), as others write
theirs, so that clients tell thoughts from answers by one rule."""

Piece = str | int | bytes
"""One token as its decoder reads it: text; a byte (of byte fallback); or bytes (of a byte-level vocabulary)."""


@functools.cache
def byte_level_table() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for: GPT-2's table."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + n): b for n, b in enumerate(hidden)}


def decoder_stages(inner: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """A tokenizer's decoders in their order, as its file has them; empty for a tokenizer without any."""

    def flatten(stage: dict[str, Any]) -> list[dict[str, Any]]:
        return [s for part in stage["decoders"] for s in flatten(part)] if stage["type"] == "Sequence" else [stage]

    return [] if inner.decoder is None else flatten(json.loads(inner.decoder.__getstate__()))


def decode_whole(inner: tokenizers.Tokenizer, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
    """The library's `decode`, which skips ids outside the vocabulary; here those that it has no number for, too."""
    ids = [i for i in token_ids if 0 <= i <= MAX_TOKEN_ID]
    try:
        return inner.decode(ids, skip_special_tokens=skip_special_tokens)
    except BaseException as error:
        # Strip, with a `stop`, panics on a text shorter than what it strips, and a panic is no Exception.
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        logger.warning("the tokenizer's decoder failed on %d tokens: %s", len(ids), error)
        return ""


# -- stages that make text of tokens ------------------------------------------------------------------------------------


# -- a tokenizer's decoder ----------------------------------------------------------------------------------------------


class Decoding:
    """How a tokenizer's tokens become text. One for a tokenizer; safe from any thread."""

    def __init__(self, inner: tokenizers.Tokenizer, kept: Collection[str] = ()) -> None:
        """kept: special tokens that are text all the same."""
        self.inner = inner
        self.make_joiner: Callable[[], Joiner] = Joiner
        self.make_strip: Callable[[], Strip] | None = None
        self.is_streamed = True
        """False for decoders whose text is not certain before the last token: all of it comes at the end."""
        special = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
        self._special, self._written = special.difference(kept), {token: WRITTEN_AS[token] for token in special.intersection(WRITTEN_AS)}
        self._token_maps: list[Callable[[str], str]] = []
        self._to_piece: Callable[[str], Piece] = str
        self.pieces: dict[int, Piece | None] = {}
        """Of the tokens that came so far; None: it writes nothing."""
        stages = decoder_stages(inner)
        if inner.decoder is None:
            self.make_joiner = Spaced
            return
        while stages and (token_map := _token_map(stages[0])):
            self._token_maps.append(token_map)
            stages = stages[1:]
        is_joined = self._read_joiner(stages)
        stages = stages[1:] if is_joined else stages
        if not self._read_rest(stages, is_fused=self._to_piece is read_byte_level):
            self.is_streamed = False
            names = ", ".join(stage["type"] for stage in decoder_stages(inner))
            logger.warning("text comes at a completion's end only: what the decoders %s write is not certain before", names)

    def _read_joiner(self, stages: Sequence[dict[str, Any]]) -> bool:
        """Whether the first stage is one."""
        if not stages:
            return False
        stage = stages[0]
        match stage["type"]:
            case "ByteLevel":
                self._to_piece, self.make_joiner = read_byte_level, ByteLevel
            case "ByteFallback":
                self._to_piece, self.make_joiner = _read_byte_fallback, ByteFallback
            case "WordPiece":
                self.make_joiner = functools.partial(WordPiece, stage["prefix"], stage["cleanup"])
            case "Metaspace":
                is_prepended = stage.get("prepend_scheme", "always") != "never"
                self.make_joiner = functools.partial(Metaspace, stage["replacement"], is_prepended)
            case "BPEDecoder":
                self.make_joiner = functools.partial(Suffixed, stage["suffix"])
            case "CTC":
                names = ("pad_token", "word_delimiter_token", "cleanup")
                self.make_joiner = functools.partial(Ctc, *(stage[name] for name in names))
            case _:
                return False
        return True

    def _read_rest(self, stages: Sequence[dict[str, Any]], is_fused: bool) -> bool:
        """Whether all that follows keeps text certain: nothing but a Strip of the text as a whole."""
        for stage in stages:
            if stage["type"] == "Fuse":
                is_fused = True
            elif stage["type"] == "Strip" and is_fused and self.make_strip is None:
                self.make_strip = functools.partial(Strip, stage["content"], stage["start"], stage["stop"])
            else:
                return False
        return True

    def decode(self, token_ids: Iterable[int]) -> str:
        """All of a completion's tokens at once."""
        own = [i for i in token_ids if 0 <= i <= MAX_TOKEN_ID and self.inner.id_to_token(i) not in self._special]
        return decode_whole(self.inner, own, skip_special_tokens=False)

    def piece(self, token_id: int) -> Piece | None:
        """None: the token writes nothing, since it is special or unknown."""
        try:
            return self.pieces[token_id]
        except KeyError:
            pass
        token = self.inner.id_to_token(token_id) if 0 <= token_id <= MAX_TOKEN_ID else None
        if token is None:
            return None  # and is not kept: there is no end of unknown ids
        piece: Piece | None
        if token in self._written:
            piece = self._to_piece(self._written[token])
        elif token in self._special:
            piece = None
        else:
            for token_map in self._token_maps:
                token = token_map(token)
            piece = self._to_piece(token)
        self.pieces[token_id] = piece
        return piece


def _token_map(stage: dict[str, Any]) -> Callable[[str], str] | None:
    """What a stage does to each token alone, whatever stands beside it; None for one that does more."""
    if stage["type"] == "Strip":
        return lambda token: strip_token(token, stage["content"], stage["start"], stage["stop"])
    if stage["type"] == "Replace":
        ((kind, pattern),) = stage["pattern"].items()
        replace = decoders.Replace(tokenizers.Regex(pattern) if kind == "Regex" else pattern, stage["content"])
        return lambda token: replace.decode([token])
    return None


def read_byte_level(token: str) -> bytes:
    table = byte_level_table()
    try:
        return bytes([table[c] for c in token])
    except KeyError:  # an added token's text, written as it is
        return token.encode()


def _read_byte_fallback(token: str) -> str | int:
    value = byte_of(token)
    return token if value is None else value


def byte_of(token: str) -> int | None:
    """The byte that a token such as <0x0A> stands for; None for text."""
    if len(token) != 6 or not token.isascii() or not (token.startswith("<0x") and token.endswith(">")):
        return None
    digits = token[3:5].removeprefix("+")  # which the library takes for a number's sign
    return int(digits, 16) if digits and all(c in "0123456789abcdefABCDEF" for c in digits) else None


class Detokenizer:
    """One completion's tokens as text. Never raises, whatever the ids."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._joiner = decoding.make_joiner()
        # One step asks for the text of each running request: without a look-up too many.
        self._is_streamed, self._pieces, self._push = decoding.is_streamed, decoding.pieces, self._joiner.push
        self._strip = decoding.make_strip() if decoding.make_strip is not None else None
        self._token_ids: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that is certain with this token, whatever follows."""
        if not self._is_streamed:
            self._token_ids.append(token_id)
            return ""
        piece = self._pieces.get(token_id)
        if piece is None and (piece := self._decoding.piece(token_id)) is None:
            return ""
        text = self._push(piece)
        return text if self._strip is None else self._strip.push(text)

    def extend(self, token_ids: Sequence[int]) -> str:
        """The same of several tokens."""
        if len(token_ids) == 1:
            return self.push(token_ids[0])
        if not self._is_streamed or self._strip is not None:
            return "".join([self.push(token_id) for token_id in token_ids])
        known = self._pieces
        try:
            pieces = [piece for token_id in token_ids if (piece := known[token_id]) is not None]
        except KeyError:  # one that did not come before
            pieces = [piece for token_id in token_ids if (piece := self._decoding.piece(token_id)) is not None]
        return self._joiner.extend(pieces)

    @property
    def num_held(self) -> int:
        """Whole characters of tokens that were pushed, which are not certain."""
        return self._joiner.num_held - self._num_stripped

    @property
    def _num_stripped(self) -> int:
        """Of what the joiner holds, the characters that the text's beginning loses."""
        return 0 if self._strip is None else self._strip.count_start(self._joiner.begin(self._strip.num_left))

    def peek(self, limit: int) -> tuple[str, int]:
        """The last `limit` characters, or more, of what `flush` would write, and how many are before them.

        Nothing while a character is incomplete.
        """
        text, num_before = self._joiner.peek(limit)
        if self._strip is None or not text:
            return text, num_before
        num_stripped = self._num_stripped
        return self._strip.peek(text[max(num_stripped - num_before, 0) :]), max(num_before - num_stripped, 0)

    def flush(self) -> str:
        """The rest, when no token follows."""
        if self._token_ids:
            token_ids, self._token_ids = self._token_ids, []
            return self._decoding.decode(token_ids)
        text = self._joiner.flush()
        return text if self._strip is None else self._strip.push(text)
