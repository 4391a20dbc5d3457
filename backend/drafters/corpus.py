"""Texts of the user's own for the suffix trees: of files, read and tokenized at start (`suffix_decoding_corpus`), and of calls."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from backend.errors import ConfigError, ModelError
from backend.model_files import check_regular

KEY = "speculative_config.suffix_decoding_corpus"
CALL = "suffix_corpus"
"""The input of a call."""
MAX_TOKENS = 2**20
"""Of files and calls together: about 360 MB of trees."""
MAX_BYTES = 64 * 2**20
"""Of a file."""

Encode = Callable[[str], list[int]]


def read_corpus(paths: Sequence[str], encode: Encode, vocab_size: int) -> list[array[int]]:
    """Token ids of each text. A .jsonl file has a text or a list of token ids in each line, plain or as `text` or `token_ids` of an object;
    any other file is one text. Raises ConfigError."""
    found: list[array[int]] = []
    total = 0
    for path in map(Path, paths):
        for where, content in _read(path):
            found.append(_read_ids(f"{KEY}: {where}", content, encode, vocab_size))
            total += len(found[-1])
            if total > MAX_TOKENS:
                raise ConfigError(f"{KEY}: with {where} the files have {total} tokens; the limit is {MAX_TOKENS}")
    return [token_ids for token_ids in found if token_ids]


def encode_corpus(contents: Sequence[object], encode: Encode, vocab_size: int) -> list[array[int]]:
    """Token ids of each text of a call; as in a line of a .jsonl file. Raises ConfigError."""
    found = [_read_ids(f"{CALL}: element {number}", content, encode, vocab_size) for number, content in enumerate(contents)]
    return [token_ids for token_ids in found if token_ids]


def _read(path: Path) -> list[tuple[str, object]]:
    """Where each text is, and what is there."""
    try:
        if (size := check_regular(path)) > MAX_BYTES:
            raise ConfigError(f"{KEY}: {path} has {size} bytes; the limit is {MAX_BYTES}")
        text = path.read_text("utf-8-sig")  # some editors begin with a mark of the byte order, which is no part of the text
    except (ModelError, OSError, ValueError) as error:
        raise ConfigError(f"{KEY}: {path} cannot be read: {error}") from None
    if path.suffix != ".jsonl":
        return [(str(path), text)]
    values: list[tuple[str, object]] = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would cut at U+2028 too, which texts in JSON may have as it is
        if line.strip():
            try:
                values.append((f"{path}:{number}", json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{KEY}: {path}:{number} is not valid JSON: {error}") from None
    return values


def _read_ids(where: str, content: object, encode: Encode, vocab_size: int) -> array[int]:
    if isinstance(content, dict):
        content = content.get("token_ids", content.get("text"))
    if isinstance(content, str):
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{where} is not valid Unicode: {error.object[error.start]!r} at {error.start}") from None
        # A token that was added after the model was made is never drafted.
        return array("i", [token_id for token_id in encode(content) if token_id < vocab_size])
    if not isinstance(content, list):
        raise ConfigError(f"{where} must be a text, a list of token ids, or an object with `text` or `token_ids`; got {content!r:.80}")
    bad = next((i for i in content if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size), None)
    if bad is not None:
        raise ConfigError(f"{where} has token {bad!r:.80}; the vocabulary has ids 0 to {vocab_size - 1}")
    return array("i", content)
