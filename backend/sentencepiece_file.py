"""SentencePiece's `tokenizer.model` as a tokenizer.json: for folders that have no other tokenizer. No torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backend.errors import ModelError
from backend.model_files import check_regular
from backend.special_tokens import SpecialTokens, read_special_tokens
from backend.vocabularies import CONTROL, NORMAL, USER_DEFINED, Vocabulary, sentencepiece_tokenizer

FILE = "tokenizer.model"
NO_BOS = ("Ernie4_5_Tokenizer", "Ernie4_5Tokenizer")
"""Classes that put no token before a text unless they are told to."""
MAX_GAP = 4096
UNIGRAM, BPE = 1, 2
"""Kinds of models (TrainerSpec.ModelType): decoders of text have the second."""


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message of protocol buffers, by number. Raises ValueError, IndexError for what is none.

    Its own package is not used: the classes that `sentencepiece` has for it want a newer one than Triton's client allows.
    """
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("a number is too long")

    while place < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        size = varint() if kind == 2 else {1: 8, 5: 4}.get(kind, -1)
        if size < 0 or place + size > len(data):
            raise ValueError(f"field {number} of kind {kind} ends beyond its message")
        yield number, data[place : place + size]
        place += size


def _message(data: object) -> dict[int, int | bytes]:
    if not isinstance(data, bytes):
        raise ValueError("a message is a number")
    return dict(_fields(data))


def _text(data: object) -> str:
    return data.decode() if isinstance(data, bytes) else ""


def convert_sentencepiece(directory: Path) -> dict[str, Any]:
    """tokenizer.json of a folder's `tokenizer.model`, with the tokens that tokenizer_config.json adds.

    Raises ModelError for a file that is damaged or of another kind.
    """
    path = directory / FILE
    check_regular(path)
    tokens, kinds, scores = [], [], []
    trainer: dict[int, int | bytes] = {}
    rules: dict[int, int | bytes] = {}
    try:
        for number, value in _fields(path.read_bytes()):  # ModelProto, sentencepiece_model.proto
            if number == 1:
                piece = _message(value)
                tokens.append(_text(piece.get(1)))
                kinds.append(int(piece.get(3, NORMAL)))
                scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])  # type: ignore[arg-type]
            elif number == 2:
                trainer = _message(value)
            elif number == 3:
                rules = _message(value)
    except (ValueError, IndexError, TypeError, OSError, struct.error) as error:
        raise ModelError(f"{path} cannot be read as a SentencePiece model (truncated download?): {error}") from None
    if not tokens or trainer.get(3, UNIGRAM) != BPE:
        raise ModelError(f"{path} is no SentencePiece model of pairs (BPE); put the model's tokenizer.json into the folder")
    if rules.get(2) or rules.get(4, 1):
        what = f"rewrites texts before it cuts them ({_text(rules.get(1))}), which is not supported"
        raise ModelError(f"{path} {what}; put the model's tokenizer.json into the folder")
    if trainer.get(24):
        raise ModelError(f"{path} has spaces behind words (treat_whitespace_as_suffix), which is not supported; put the model's tokenizer.json there")
    special = read_special_tokens(directory)
    _add_tokens(special, tokens, kinds, scores)
    first = int(trainer.get(41, 1))  # bos_id; -1, for none, is a large number here
    is_put = special.settings.get("add_bos_token", special.tokenizer_class not in NO_BOS)
    return sentencepiece_tokenizer(
        Vocabulary(tokens, kinds, str(path)),
        scores,
        has_space_prefix=bool(rules.get(3, 1)) and special.settings.get("add_prefix_space", True) is not False,
        is_prefixed_once=special.settings.get("legacy") is False,  # as transformers calls it
        before=(first,) if is_put and first < len(tokens) else (),
        after=None,
    )


def _add_tokens(special: SpecialTokens, tokens: list[str], kinds: list[int], scores: list[float]) -> None:
    """Those that are added: of pieces that are there what they are, and behind them new ones. Raises ModelError for what contradicts the pieces.

    added_tokens.json, which slow tokenizers wrote, may leave ids out: no token has them.
    """
    for number, token in special.added.items():
        kind = CONTROL if token.is_special else USER_DEFINED
        if number > len(tokens) + (0 if special.has_flags else MAX_GAP):
            raise ModelError(f"{special.where}: the added token {token.content!r:.40} has id {number}; it must be the next id ({len(tokens)})")
        for unused in range(len(tokens), number):
            tokens.append(f"<|unused_id_{unused}|>")
            kinds.append(CONTROL)
            scores.append(0.0)
        if number == len(tokens):
            tokens.append(token.content)
            kinds.append(kind)
            scores.append(0.0)
        elif tokens[number] != token.content:
            raise ModelError(f"{special.where} makes token {number} {token.content!r:.40}; in {FILE} it is {tokens[number]!r:.40}")
        elif token.is_special and kinds[number] in (NORMAL, USER_DEFINED):
            kinds[number] = CONTROL
    contents = set(special.contents)
    for number, (token_text, kind) in enumerate(zip(tokens, kinds)):
        if kind in (NORMAL, USER_DEFINED) and token_text in contents:
            kinds[number] = CONTROL
