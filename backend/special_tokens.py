"""What the files beside a tokenizer say of special tokens, and of tokens that are added to its vocabulary: as transformers reads them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.errors import ModelError
from backend.model_files import is_named, read_json

SETTINGS, NAMES, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
LISTS = ("additional_special_tokens", "extra_special_tokens")
PUT_BOS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
"""Classes (`...Fast` too) that put the first token before a text by themselves where add_bos_token says so, whatever tokenizer.json has."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    content: str
    is_special: bool
    flags: dict[str, bool]
    """Of those that the tokenizers library has: lstrip, rstrip, single_word, normalized."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Of a folder."""

    settings: dict[str, Any]
    """tokenizer_config.json."""
    by_name: dict[str, str]
    """As templates know them: bos_token and so on."""
    listed: tuple[str, ...]
    """Those without names."""
    added: dict[int, AddedToken]
    """By id."""
    where: Path
    """The file that says which are added."""
    has_flags: bool
    """Of those it says more than their text, which comes before what the tokenizer's file says."""

    @property
    def contents(self) -> list[str]:
        """Of all that are special."""
        return list(dict.fromkeys((*self.by_name.values(), *self.listed)))

    @property
    def tokenizer_class(self) -> str:
        name = self.settings.get("tokenizer_class")
        return name.removesuffix("Fast") if isinstance(name, str) else ""

    @property
    def put_before(self) -> str | None:
        """The token that the tokenizer's class puts before a text, because its settings say so in words."""
        return self._put("bos")

    @property
    def put_behind(self) -> str | None:
        """Likewise, behind it."""
        return self._put("eos")

    def _put(self, name: str) -> str | None:
        is_put = self.settings.get(f"add_{name}_token") is True and self.tokenizer_class in PUT_BOS
        return self.by_name.get(f"{name}_token") if is_put else None


def read_special_tokens(directory: Path) -> SpecialTokens:
    """Raises ModelError for a file that is damaged."""
    path = directory / SETTINGS
    settings = read_json(path) if is_named(path) else {}
    values, is_old = dict(settings), "added_tokens_decoder" not in settings
    if is_old and is_named(names := directory / NAMES):  # files of before 2023 have them apart, and those count
        values |= read_json(names)
    by_name = {key: text for key, value in values.items() if key.endswith("_token") and (text := content_of(value)) is not None}
    listed: list[str] = []
    for key in LISTS:
        more = values.get(key)
        if isinstance(more, dict):
            by_name |= {name: text for name, value in more.items() if (text := content_of(value)) is not None}
        elif isinstance(more, list):
            listed += [text for value in more if (text := content_of(value)) is not None]
    if is_old and is_named(path := directory / ADDED):
        special = {*by_name.values(), *listed}
        found = [(number, {"content": content, "special": content in special}) for content, number in read_json(path).items()]
    else:
        path = directory / SETTINGS
        given = settings.get("added_tokens_decoder") or {}
        if not isinstance(given, dict):
            raise ModelError(f"{path}: added_tokens_decoder is {given!r:.80}; it must be an object")
        found = list(given.items())
    added = dict(sorted((_read_added(path, number, token) for number, token in found), key=lambda pair: pair[0]))
    for text in (*by_name.values(), *listed, *(token.content for token in added.values())):
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise ModelError(f"{directory}: the special token {text!r:.40} is no text: it has half a surrogate pair, which no tokenizer reads")
    return SpecialTokens(settings, by_name, tuple(listed), added, path, path.name == SETTINGS)


def content_of(token: Any) -> str | None:
    """A special token's text; None for a setting that is no token (`add_bos_token`)."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_added(path: Path, number: Any, token: Any) -> tuple[int, AddedToken]:
    content = token.get("content") if isinstance(token, dict) else None
    own = int(number) if isinstance(number, str) and number.isdecimal() and len(number) < 10 else number
    if isinstance(own, bool) or not isinstance(own, int) or not 0 <= own < 2**31 or not isinstance(content, str) or not content:
        raise ModelError(f"{path}: an added token is {number!r:.20}: {token!r:.80}; it must be an id, and a text as `content`")
    is_special = token.get("special") is True
    flags = {name: token.get(name) is True for name in ("lstrip", "rstrip", "single_word")}
    return own, AddedToken(content, is_special, {**flags, "normalized": token.get("normalized", not is_special) is True})
