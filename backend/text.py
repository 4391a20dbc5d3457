"""Text in and out: tokenizer, chat template, and a stream that turns tokens into text and finds stop strings."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers
from tokenizers.decoders import DecodeStream

from backend.errors import ModelError, RequestError
from backend.model_files import read_json


class Tokenizer:
    """A Hugging Face tokenizer.json, with the chat template of tokenizer_config.json. Thread-safe."""

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path} is missing")
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} cannot be read: {error}") from None
        self.fingerprint = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        """Of the tokenizer's file: the same token ids mean the same text where it is the same."""
        self.inner.no_truncation()
        self.inner.no_padding()
        config = Path(directory) / "tokenizer_config.json"
        settings = read_json(config) if config.is_file() else {}
        self._template = self._compile(Path(directory), settings)
        self._special = {k: self._content(settings.get(k)) for k in ("bos_token", "eos_token", "pad_token", "unk_token")}

    @staticmethod
    def _content(token: Any) -> str:
        return token.get("content", "") if isinstance(token, dict) else token or ""

    @staticmethod
    def _compile(directory: Path, settings: dict[str, Any]) -> jinja2.Template | None:
        separate = directory / "chat_template.jinja"
        source = separate.read_text("utf-8") if separate.is_file() else settings.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = next((t["template"] for t in source if t.get("name") == "default"), None)
        if not source:
            return None
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = raise_exception
        try:
            return environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"{directory}: the chat template is not valid: {error}") from None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.inner.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @functools.cached_property
    def _special_tokens(self) -> dict[int, bytes]:
        return {i: token.content.encode() for i, token in self.inner.get_added_tokens_decoder().items()}

    @functools.cached_property
    def _byte_of(self) -> dict[str, int] | None:
        """Which byte each character of a byte-level vocabulary stands for (GPT-2's table); None for a vocabulary of text."""
        if self.inner.decoder is None or b"ByteLevel" not in self.inner.decoder.__getstate__():
            return None
        shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        hidden = [b for b in range(256) if b not in shown]
        return {chr(b): b for b in shown} | {chr(256 + n): b for n, b in enumerate(hidden)}

    def token_bytes(self, token_id: int) -> bytes:
        """What one token writes, which may be part of a character. Raises RequestError for an id outside the vocabulary."""
        if token_id in self._special_tokens:
            return self._special_tokens[token_id]
        token = self.inner.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            raise RequestError(f"token {token_id} is not in the vocabulary of {self.inner.get_vocab_size()} tokens")
        if self._byte_of is not None:
            return bytes(self._byte_of[c] for c in token)
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def render_chat(self, messages: Sequence[dict[str, Any]], **variables: Any) -> str:
        """The prompt for a list of {role, content}. Raises RequestError when there is no template or it refuses."""
        if self._template is None:
            raise RequestError("this model has no chat template: send text_input or input_ids")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special, **variables)
        except Exception as error:  # a template may fail in any way, and it came with the weights
            raise RequestError(f"the chat template refused the messages: {error}") from None

    def encode_bad_word(self, word: str) -> list[tuple[int, ...]]:
        """The token sequences that spell `word`, at the start of a word and inside one."""
        found = {tuple(self.encode(w, add_special_tokens=False)) for w in (word, " " + word.lstrip())}
        return [ids for ids in sorted(found) if ids]


class TextStream:
    """One completion's tokens as text, piece by piece: never half a character, never past a stop string.

    Text that may turn out to begin a stop string is held back until that is decided.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._token_ids: list[int] = []
        self._decoded = 0  # characters that left the decoder
        self._held = ""
        self._is_pending = False  # the decoder holds part of a character

    def append(self, token_id: int, may_stop: bool = True) -> tuple[str, bool]:
        """The text that this token completes, and whether a stop string ends the completion with it."""
        self._token_ids.append(token_id)
        piece = self._decoder.step(self._tokenizer.inner, token_id)
        self._is_pending = piece is None
        if not piece:
            return "", False
        self._decoded += len(piece)
        return self._release(piece, may_stop)

    def _release(self, piece: str, may_stop: bool) -> tuple[str, bool]:
        if not self._stop:
            return piece, False
        text = self._held + piece
        if may_stop:
            found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
            if found:
                at, stop = min(found)
                self._held = ""
                return text[: at + len(stop)] if self._include_stop else text[:at], True
            keep = max(self._pending_length(text, stop) for stop in self._stop)
        else:
            keep = 0
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], False

    @staticmethod
    def _pending_length(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0

    def flush(self) -> str:
        """What is still held when the completion ends otherwise: held text, and the rest of a broken character."""
        text, self._held = self._held, ""
        if self._is_pending and self._token_ids:
            text += self._tokenizer.decode(self._token_ids)[self._decoded :]
            self._is_pending = False
        return text
