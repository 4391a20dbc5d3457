"""Texts of the user's own for the suffix trees: of files, read and tokenized at start (`suffix_decoding_corpus`), and of calls."""

from __future__ import annotations

import io
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
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

PIECE_CHARACTERS = 2**21
"""Of a text that are tokenized at a time, which takes 150 bytes for each: more than the limit of tokens would take gigabytes to be refused."""

Encode = Callable[[str], list[int]]


def read_corpus(paths: Sequence[str], encode: Encode, vocab_size: int) -> list[array[int]]:
    """Token ids of each text. A .jsonl file has a text or a list of token ids in each line, plain or as `text` or `token_ids` of an object;
    any other file is one text. Raises ConfigError."""
    found: list[array[int]] = []
    total = 0
    for path in map(Path, paths):
        for where, content in _read(path):
            if token_ids := _read_ids(f"{KEY}: {where}", content, encode, vocab_size):
                found.append(token_ids)
            total += len(token_ids)
            if total > MAX_TOKENS:
                raise ConfigError(f"{KEY}: with {where} the files have {total} tokens; the limit is {MAX_TOKENS}")
    return found


def encode_corpus(contents: Sequence[object], encode: Encode, vocab_size: int) -> list[array[int]]:
    """Token ids of each text of a call; as in a line of a .jsonl file. Raises ConfigError."""
    found = [_read_ids(f"{CALL}: element {number}", content, encode, vocab_size) for number, content in enumerate(contents)]
    return [token_ids for token_ids in found if token_ids]


def _read(path: Path) -> Iterator[tuple[str, object]]:
    """Where each text is, and what is there."""
    try:
        if (size := check_regular(path)) > MAX_BYTES:
            raise ConfigError(f"{KEY}: {path} has {size} bytes; the limit is {MAX_BYTES}")
        text = path.read_text("utf-8-sig")  # some editors begin with a mark of the byte order, which is no part of the text
    except (ModelError, OSError, ValueError) as error:
        raise ConfigError(f"{KEY}: {path} cannot be read: {error}") from None
    if path.suffix.lower() != ".jsonl":
        yield str(path), text
        return
    for number, line in enumerate(io.StringIO(text), 1):  # splitlines would cut at U+2028 too, which texts in JSON may have as it is
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{KEY}: {path}:{number} is not valid JSON: {error}") from None
            yield f"{path}:{number}", value


def _cut(text: str) -> Iterator[str]:
    """Pieces of it, after the end of a line where there is one."""
    begin = 0
    while begin < len(text):
        end = begin + PIECE_CHARACTERS
        if end < len(text):
            end = text.rfind("\n", begin, end) + 1 or end
        yield text[begin:end]
        begin = end


def _read_ids(where: str, content: object, encode: Encode, vocab_size: int) -> array[int]:
    given = content
    if isinstance(content, dict):
        content = content.get("token_ids", content.get("text"))
    if isinstance(content, str):
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{where} is not valid Unicode: {error.object[error.start]!r} at {error.start}") from None
        found = array("i")
        for piece in _cut(content):
            # A token that was added after the model was made is never drafted.
            found.extend(token_id for token_id in encode(piece) if token_id < vocab_size)
            if len(found) > MAX_TOKENS:
                raise ConfigError(f"{where} has more than {MAX_TOKENS} tokens, the limit of all texts together")
        return found
    if not isinstance(content, list):
        raise ConfigError(f"{where} must be a text, a list of token ids, or an object with `text` or `token_ids`; got {given!r:.80}")
    bad = next((i for i in content if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size), None)
    if bad is not None:
        raise ConfigError(f"{where} has token {bad!r:.80}; the vocabulary has ids 0 to {vocab_size - 1}")
    return array("i", content)
