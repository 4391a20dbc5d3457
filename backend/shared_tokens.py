"""Tokens that two tokenizers have in common, by what they stand for: a draft model of another vocabulary drafts those. No torch.

Token-level intersection (Timor et al. 2025).
"""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from typing import Any

from backend.errors import ModelError
from backend.model_files import read_config, read_json

logger = logging.getLogger(__name__)

FEW = 100
"""Shared tokens below which next to nothing can be drafted."""
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Key = tuple[bool, bytes]
"""Whether it is a special token, and what it stands for."""


def read_shared_tokens(directory: str | Path, target_directory: str | Path) -> tuple[list[tuple[int, int]], int]:
    """Pairs (draft model's token id, target's) by the latter, and the draft model's id that stands for all others of the target's.

    Raises ModelError where there are none, or a folder has no tokenizer.
    """
    own, target = (_read_keys(Path(folder)) for folder in (directory, target_directory))
    pairs = sorted(((own[key], token_id) for key, token_id in target.items() if key in own), key=lambda pair: pair[1])
    if not pairs:
        raise ModelError(f"{directory}/tokenizer.json has no token of {target_directory}/tokenizer.json: nothing could be drafted")
    log = logger.warning if len(pairs) < FEW else logger.info
    log("%s/tokenizer.json: %d of its %d tokens are among the target's %d: those are drafted", directory, len(pairs), len(own), len(target))
    return pairs, _find_unknown(Path(directory))


def _find_unknown(directory: Path) -> int:
    """The id of what is in no vocabulary, else of a text's end."""
    model = read_json(directory / "tokenizer.json").get("model") or {}
    vocab, name = model.get("vocab"), model.get("unk_token")
    if isinstance(vocab, dict) and isinstance(found := vocab.get(name), int):
        return found
    if isinstance(found := model.get("unk_id"), int):
        return found
    end = read_config(directory).get("eos_token_id")
    first = end[0] if isinstance(end, list) and end else end
    return first if isinstance(first, int) else 0


def _read_keys(directory: Path) -> dict[Key, int]:
    """A tokenizer's ids by what the tokens stand for; of two that stand for the same, the lower one."""
    values = read_json(directory / "tokenizer.json")
    model = values.get("model")
    vocab: Any = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):
        vocab = {entry[0]: number for number, entry in enumerate(vocab) if isinstance(entry, list) and entry}
    if not isinstance(vocab, dict):
        raise ModelError(f"{directory / 'tokenizer.json'} has no vocabulary: it is no tokenizer of the tokenizers library")
    special = [token for token in values.get("added_tokens") or [] if isinstance(token, dict) and isinstance(token.get("id"), int)]
    texts = {str(token.get("content")) for token in special}
    found: dict[Key, int] = {(True, str(token.get("content")).encode()): token["id"] for token in special}
    is_bytes = _has_type(values.get("decoder"), "ByteLevel") or _has_type(values.get("pre_tokenizer"), "ByteLevel")
    for token, number in sorted(((t, i) for t, i in vocab.items() if isinstance(i, int)), key=lambda entry: entry[1]):
        if token not in texts:
            found.setdefault((False, _to_bytes(token, is_bytes)), number)
    return found


def _has_type(part: Any, name: str) -> bool:
    """Whether a tokenizer's part is of a type, or one of its own parts is."""
    if isinstance(part, dict):
        return part.get("type") == name or any(_has_type(own, name) for own in part.values())
    return isinstance(part, list) and any(_has_type(own, name) for own in part)


def _to_bytes(token: str, is_bytes: bool) -> bytes:
    if is_bytes:
        table = _byte_of_character()
        return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()
    if found := BYTE.fullmatch(token):
        return bytes.fromhex(found[1])
    return token.replace("\u2581", " ").encode()


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Byte-level tokenizers write printable bytes as themselves, and the others as characters from 256 on (Radford et al. 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [number for number in range(256) if number not in printable]
    return {chr(number): number for number in printable} | {chr(256 + i): number for i, number in enumerate(others)}
