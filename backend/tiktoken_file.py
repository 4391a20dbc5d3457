"""tiktoken's files (a token in base64 and its rank on each line) as a tokenizer.json: for folders that have no other tokenizer. No torch.

The file has no merges: a token's are all pairs that make it, in the order of its rank, since tiktoken joins the pair of the lowest rank (as
transformers' TikTokenConverter reads them). Nor does it say how text is cut before, or which special tokens come behind: that is the family's, by
`tokenizer_class`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.errors import ModelError
from backend.model_files import check_regular, read_config, read_json
from backend.vocabularies import CONTROL, NORMAL, USER_DEFINED, Vocabulary, byte_level_tokenizer

NAMES = ("tiktoken.model", "tokenizer.model")
SUFFIX = ".tiktoken"
MAX_TOKEN_BYTES = 1024
_RESERVED = "<|reserved_token_{}|>"
"""Kimi's name for ids behind the ranks that tokenizer_config.json does not name."""


@dataclass(frozen=True, slots=True)
class _Family:
    pre: str
    """A key of `vocabularies.PRE_TOKENIZERS`."""
    special: tuple[str, ...] = ()
    """Tokens behind the ranks, where tokenizer_config.json has no added_tokens_decoder."""
    before: tuple[str, ...] = ()
    """Put before a text."""


_QWEN = _Family("qwen2", ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))))
_LLAMA3 = _Family(
    "llama3",
    (
        "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>",
        "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
        *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
    ),
    ("<|begin_of_text|>",),
)  # fmt: skip
_GLM4 = _Family("glm4", before=("[gMASK]", "<sop>"))
_KIMI = _Family("kimi-k2")
FAMILIES = {"QWenTokenizer": _QWEN, "ChatGLM4Tokenizer": _GLM4, "TikTokenTokenizer": _KIMI}
"""By `tokenizer_class`. Llama 3's folders name a class of any vocabulary: they are told by their first special token, and their number of ranks."""
LLAMA3_RANKS = 128_000


def find_tiktoken(folder: Path) -> Path | None:
    """A folder's file of ranks, by its name and first line."""
    for path in (*sorted(folder.glob(f"*{SUFFIX}")), *(folder / name for name in NAMES)):
        if path.is_file():
            with path.open("rb") as file:
                if _read_line(file.readline(2 * MAX_TOKEN_BYTES)) is not None:
                    return path
    return None


def _read_line(line: bytes) -> tuple[bytes, int] | None:
    """A token and its rank; None for what is none."""
    token, _, rank = line.strip().partition(b" ")
    if not token or not rank.isdigit() or len(rank) > 9:
        return None
    try:
        return base64.b64decode(token, validate=True), int(rank)
    except binascii.Error:
        return None


def read_ranks(path: Path) -> list[bytes]:
    """Tokens by rank. Raises ModelError for a file that is damaged."""
    check_regular(path)
    found: dict[int, bytes] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        read = _read_line(line)
        if read is None or not 0 < len(read[0]) <= MAX_TOKEN_BYTES:
            raise ModelError(f"{path}: line {number} is no token in base64 and its rank: {line[:60]!r} (truncated download?)")
        if read[1] in found:
            raise ModelError(f"{path}: line {number} has rank {read[1]}, and so has a line before")
        found[read[1]] = read[0]
    tokens = [found[rank] for rank in sorted(found)]
    if sorted(found) != list(range(len(found))):
        lacking = next(rank for rank in range(len(found)) if rank not in found)
        raise ModelError(f"{path}: no line has rank {lacking}, and others have higher ones (truncated download?)")
    if lacking_bytes := set(range(256)) - {token[0] for token in tokens if len(token) == 1}:
        raise ModelError(f"{path}: no token is the byte {min(lacking_bytes)}: a vocabulary has all 256")
    return tokens


def convert_tiktoken(path: Path) -> dict[str, Any]:
    """tokenizer.json of a file of ranks, with what tokenizer_config.json and config.json beside it say of its family.

    Raises ModelError for a file that is damaged, and for a family that is not known: nothing says how its text is cut.
    """
    settings_path = path.with_name("tokenizer_config.json")
    settings = read_json(settings_path) if settings_path.is_file() else {}
    ranks = read_ranks(path)
    added = settings.get("added_tokens_decoder") or {}
    if not isinstance(added, dict):
        raise ModelError(f"{settings_path}: added_tokens_decoder is {added!r:.80}; it must be an object")
    family = _find_family(path, settings, added, len(ranks))
    tokens, kinds = [_write(token) for token in ranks], [NORMAL] * len(ranks)
    specials = _read_added(settings_path, added, len(ranks)) or dict(enumerate(((name, True) for name in family.special), len(ranks)))
    for number in range(len(ranks), max(specials, default=-1) + 1):
        content, is_special = specials.get(number, (_RESERVED.format(number), True))
        tokens.append(content)
        kinds.append(CONTROL if is_special else USER_DEFINED)
    vocabulary = Vocabulary(tokens, kinds, str(path))
    ids = vocabulary.ids()
    before = () if settings.get("add_bos_token") is False else tuple(ids[name] for name in family.before if name in ids)
    made = byte_level_tokenizer(vocabulary, _merges_of(ranks), family.pre, before=before, after=None)
    made["model"]["ignore_merges"] = True  # what is a token as a whole is not cut
    return made


def _find_family(path: Path, settings: Mapping[str, Any], added: Mapping[str, Any], num_ranks: int) -> _Family:
    name = settings.get("tokenizer_class")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    contents = [token.get("content") for token in added.values() if isinstance(token, dict)]
    is_llama = read_config(path.parent).get("model_type") == "llama" and num_ranks == LLAMA3_RANKS and not added
    if _LLAMA3.special[0] in contents or is_llama:
        return _LLAMA3
    raise ModelError(
        f"{path} does not say how text is cut before its ranks are looked up, and tokenizer_class {name!r:.60} in tokenizer_config.json is not known "
        f"(known: {', '.join(FAMILIES)}, and Llama 3's); put the model's tokenizer.json into the folder"
    )


def _read_added(where: Path, added: Mapping[str, Any], first: int) -> dict[int, tuple[str, bool]]:
    """By id: text, and whether it is special."""
    found = {}
    for key, token in added.items():
        content = token.get("content") if isinstance(token, dict) else None
        if not key.isdigit() or not isinstance(content, str) or not content or not first <= int(key) < 2 * first + 4096:
            what = f"it must be an id behind the {first} ranks, and an object with `content`"
            raise ModelError(f"{where}: added_tokens_decoder has {key!r:.20}: {token!r:.80}; {what}")
        found[int(key)] = content, bool(token.get("special"))
    return found


def _byte_characters() -> list[str]:
    """GPT-2's character of each byte: itself where it is printable Latin-1, else the next one behind."""
    own = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in own else next(others)) for byte in range(256)]


_CHARACTERS = _byte_characters()


def _write(token: bytes) -> str:
    return "".join(_CHARACTERS[byte] for byte in token)


def _merges_of(ranks: list[bytes]) -> list[str]:
    """`left right`, those of the first ranks first; of one token, by the ranks of the two."""
    by_token = {token: rank for rank, token in enumerate(ranks)}
    merges = []
    for token in ranks:
        ways = [(token[:cut], token[cut:]) for cut in range(1, len(token)) if token[:cut] in by_token and token[cut:] in by_token]
        ways.sort(key=lambda way: (by_token[way[0]], by_token[way[1]]))
        merges += [f"{_write(left)} {_write(right)}" for left, right in ways]
    return merges
