"""SentencePiece's `tokenizer.model` as a tokenizer.json: for folders that have no other tokenizer. No torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backend.errors import ModelError
from backend.model_files import check_regular, read_json
from backend.vocabularies import CONTROL, NORMAL, USER_DEFINED, Vocabulary, sentencepiece_tokenizer

FILE = "tokenizer.model"
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
    settings = read_json(directory / "tokenizer_config.json") if (directory / "tokenizer_config.json").is_file() else {}
    _add_tokens(path, settings, tokens, kinds, scores)
    first = int(trainer.get(41, 1))  # bos_id; -1, for none, is a large number here
    return sentencepiece_tokenizer(
        Vocabulary(tokens, kinds, str(path)),
        scores,
        has_space_prefix=bool(rules.get(3, 1)) and settings.get("add_prefix_space", True) is not False,
        before=(first,) if settings.get("add_bos_token", True) and first < len(tokens) else (),
        after=None,
    )


def _add_tokens(path: Path, settings: dict[str, Any], tokens: list[str], kinds: list[int], scores: list[float]) -> None:
    """Those of `added_tokens_decoder`: of pieces that are there what they are, and behind them new ones. Raises ModelError for a gap."""
    added = settings.get("added_tokens_decoder") or {}
    if not isinstance(added, dict):
        raise ModelError(f"{path.with_name('tokenizer_config.json')}: added_tokens_decoder is {added!r:.80}; it must be an object")
    for key, token in sorted(added.items(), key=lambda item: int(item[0]) if item[0].isdigit() else -1):
        if not key.isdigit() or not isinstance(token, dict) or not isinstance(token.get("content"), str) or int(key) > len(tokens):
            what = f"added_tokens_decoder has {key!r:.20}: {token!r:.80}; it must be the next id ({len(tokens)}) or that of a piece, and an object"
            raise ModelError(f"{path.with_name('tokenizer_config.json')}: {what} with `content`")
        number, kind = int(key), CONTROL if token.get("special") else USER_DEFINED
        if number == len(tokens):
            tokens.append(token["content"])
            kinds.append(kind)
            scores.append(0.0)
        elif tokens[number] != token["content"]:
            where = path.with_name("tokenizer_config.json")
            raise ModelError(f"{where}: added_tokens_decoder makes token {number} {token['content']!r:.40}; in {FILE} it is {tokens[number]!r:.40}")
        elif token.get("special") and kinds[number] in (NORMAL, USER_DEFINED):
            kinds[number] = CONTROL
