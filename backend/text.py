"""Text in and out: tokenizer, chat template, and a stream that turns tokens into text and finds stop strings."""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from backend.chat_template import MAX_CHARACTERS, ChatTemplate
from backend.detokenizer import (
    MAX_TOKEN_ID,
    WRITTEN_AS,
    Decoding,
    Detokenizer,
    byte_of,
    decode_whole,
    decoder_stages,
    read_byte_level,
)
from backend.errors import InternalError, ModelError, RequestError
from backend.final_message import ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE, cut_at, mark_end, read_turn
from backend.model_files import TEMPLATES, check_regular, is_named, name_tokenizers, read_json
from backend.special_tokens import SpecialTokens, read_special_tokens
from backend.tools import CALL_TOKENS, ID_CHARACTERS, read_history, shorten_ids

logger = logging.getLogger(__name__)

_DEVELOPER = "developer"
"""What OpenAI's clients call the role that was system."""
_ASKS_FOR_NULL = re.compile(r"""\bcontent(?:['"]\])?\s+is\s+(?:not\s+)?none\b""")
"""Of a template: it tells calls from what is said by a content that is null, as DeepSeek's."""
_ARGUMENTS = r"""\w+(?:\.function|\[['"]function['"]\])?(?:\.arguments|\[['"]arguments['"]\])"""
_JOINS_ARGUMENTS = re.compile(rf"\+\s*{_ARGUMENTS}\s*(?:\+|-?\}}\}})|\{{\{{-?\s*{_ARGUMENTS}\s*\+")
"""Of a template: it joins the arguments of calls with text, which objects are not."""
_WRITES_ARGUMENTS = re.compile(rf"\{{\{{-?\s*{_ARGUMENTS}\s*-?\}}\}}")
_READS_ARGUMENTS = re.compile(r"""\barguments(?:['"]\])?\s*(?:\||\.|is\b)""")
"""Of a template that writes arguments alone: it makes text of objects (`| tojson`, `.items()`), or tells the two apart."""
_WANTS_SHORT_IDS = re.compile(rf"\bid\s*\|\s*length\s*(?:!=|<)\s*{ID_CHARACTERS}\b")
"""Of a template: it refuses other ids of calls, as Mistral's."""
GIVEN = ("messages", "tools")
"""What templates read, and the request itself gives them."""


class Tokenizer:
    """A Hugging Face tokenizer.json, with the chat template of tokenizer_config.json. Thread-safe."""

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory) / "tokenizer.json"
        if not is_named(path):
            raise ModelError(f"{path} is missing{name_tokenizers(path.parent)}")
        check_regular(path)
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} cannot be read: {error}") from None
        self.fingerprint = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        """Of the tokenizer's file: the same token ids mean the same text where it is the same."""
        self.inner.no_truncation()
        self.inner.no_padding()
        special = read_special_tokens(path.parent)
        if added := _add_tokens(self.inner, special, path):
            self.fingerprint = hashlib.blake2b(f"{self.fingerprint} {added}".encode(), digest_size=16).hexdigest()
        self._around = _read_around(self.inner, path)
        templates = _read_templates(Path(directory), special.settings)
        self._template = templates.get("default")
        self._tool_template = templates.get("tool_use", self._template)
        """Of chats with tools: some models have one of its own, as Hermes 2 Pro."""
        self._special = special.by_name

    @property
    def tokens(self) -> dict[int, str]:
        """All, by id: the vocabulary's, and those that are put around each text."""
        return self._around | {i: token for token, i in self.inner.get_vocab().items()}

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """max_tokens: the last ones of the text alone, and the special ones around it as ever, so many in all. Raises InternalError."""
        try:
            return self._encode(text, add_special_tokens, max_tokens)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # which is no Exception, and would end the thread that works for all requests
                raise
            raise InternalError(f"the tokenizer failed on a text of {len(text)} characters: {error}") from None

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int | None) -> list[int]:
        # As a batch of one it leaves Python's lock to others, and counts no offsets: half the time (measured).
        token_ids = self.inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if max_tokens is None or len(token_ids) <= max_tokens:
            return token_ids
        encoding = self.inner.encode_batch_fast([text], add_special_tokens=False)[0]
        num_special = self.inner.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
        encoding.truncate(max(max_tokens - num_special, 0), direction="left")
        return self.inner.post_process(encoding, add_special_tokens=add_special_tokens).ids[-max_tokens:]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids outside the vocabulary write nothing."""
        return decode_whole(self.inner, token_ids, skip_special_tokens)

    @functools.cached_property
    def decoding(self) -> Decoding:
        """How tokens become text, for any number of streams."""
        return Decoding(self.inner)

    @functools.cached_property
    def calling(self) -> Decoding:
        """The same, with the special tokens that calls of tools are made of."""
        return Decoding(self.inner, CALL_TOKENS) if CALL_TOKENS & set(self.special_ids) else self.decoding

    @functools.cached_property
    def exact(self) -> Decoding:
        """The same, with all special tokens."""
        return Decoding(self.inner, self.special_ids)

    @functools.cached_property
    def special_ids(self) -> dict[str, int]:
        """Of special tokens, by their text."""
        return {token.content: i for i, token in self.inner.get_added_tokens_decoder().items() if token.special}

    @functools.cached_property
    def mark_ids(self) -> dict[str, int]:
        """Of special tokens, and of added ones whose text is in `<>`, by their text: those that grammars (llguidance) take for no text."""
        added = self.inner.get_added_tokens_decoder().items()
        return {token.content: i for i, token in added if token.special or (token.content.startswith("<") and token.content.endswith(">"))}

    @functools.cached_property
    def thought_marks(self) -> dict[str, str]:
        """Of special tokens that mark what is thought and are written otherwise: how, by their text."""
        return {text: written for text, written in WRITTEN_AS.items() if text in self.special_ids}

    @property
    def end_id(self) -> int | None:
        """Of the token that its settings call eos_token."""
        text = self._special.get("eos_token")
        return None if text is None else self.inner.token_to_id(text)

    @property
    def template_variables(self) -> list[str]:
        """What requests may tell the chat template (`chat_template_kwargs`)."""
        return [] if self._template is None else [name for name in self._template.variables if name not in (*GIVEN, ADD_GENERATION_PROMPT)]

    @property
    def chat_template(self) -> str | None:
        return self._template.source if self._template is not None else None

    @property
    def tool_template(self) -> str | None:
        """The one that chats with tools are written by; None where it takes none."""
        return self._tool_template.source if self._tool_template is not None and self._tool_template.takes_tools else None

    @functools.cached_property
    def _special_tokens(self) -> dict[int, bytes]:
        added = self.inner.get_added_tokens_decoder().items()
        return {i: (WRITTEN_AS.get(token.content, token.content) if token.special else token.content).encode() for i, token in added}

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        return any(stage["type"] == "ByteLevel" for stage in decoder_stages(self.inner))

    def token_bytes(self, token_id: int) -> bytes:
        """What one token writes, which may be part of a character. Raises RequestError for an id outside the vocabulary."""
        if token_id in self._special_tokens:
            return self._special_tokens[token_id]
        token = self.inner.id_to_token(token_id) if 0 <= token_id <= MAX_TOKEN_ID else None
        if token is None:
            raise RequestError(f"token {token_id} is not in the vocabulary of {self.inner.get_vocab_size()} tokens")
        if self._is_byte_level:
            return read_byte_level(token)
        if (byte := byte_of(token)) is not None:
            return bytes((byte,))
        return token.replace("▁", " ").encode()

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        max_characters: int = MAX_CHARACTERS,
        own: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a list of {role, content}.

        Raises RequestError when there is no template or it refuses, CapacityError when too many wait for it.
        max_characters: of the messages, before they are rendered, and of the prompt; own: variables that the request brings (`chat_template_kwargs`).
        Among all variables may be ADD_GENERATION_PROMPT and CONTINUE_FINAL_MESSAGE; default: the first, unless the second is true.
        """
        template = self._template if variables.get("tools") is None else self._tool_template
        if template is None:
            raise RequestError("this model has no chat template: send text_input or input_ids")
        if taken := [name for name in own or () if name in GIVEN]:
            raise RequestError(f"chat_template_kwargs has {taken[0]!r}: {' and '.join(GIVEN)} are given by the request itself")
        brought = {**variables, **(own or {})}
        adds, continues = read_turn(brought)
        given = {**self._special, "tools": None, "documents": None, **brought, ADD_GENERATION_PROMPT: adds}
        given.pop(CONTINUE_FINAL_MESSAGE, None)
        found = read_history(messages, bool(_ASKS_FOR_NULL.search(template.source)), _wants_texts(template.source))
        if _WANTS_SHORT_IDS.search(template.source):
            found = shorten_ids(found)
        if _DEVELOPER not in template.source:  # a template leaves out what has a role that it does not know, or refuses it
            found = [{**message, "role": "system"} if message.get("role") == _DEVELOPER else message for message in found]
        end = ""
        if continues:
            found, end = mark_end(found)
        try:
            text = template.render(found, given, max_characters)
        except RequestError:
            if all(message["content"] is not None for message in found):
                raise
            # Some look into the content of calls before they ask whether it is null, as DeepSeek-R1-0528's.
            text = template.render([{**message, "content": message["content"] or ""} for message in found], given, max_characters)
        return cut_at(text, end) if continues else text

    def encode_bad_word(self, word: str) -> list[tuple[int, ...]]:
        """The token sequences that spell `word`, at the start of a word and inside one. Of spaces alone there are no others."""
        bare = word.lstrip(" ")  # and of nothing else: " " is not how a line break is spelt
        found = {tuple(self.encode(w, add_special_tokens=False)) for w in (word, " " + bare if bare else word)}
        return [ids for ids in sorted(found) if ids]


def _wants_texts(source: str) -> bool:
    """Whether a template takes the arguments of calls as JSON's text, as clients send them: objects would fail, or be written as Python's."""
    return bool(_JOINS_ARGUMENTS.search(source) or (_WRITES_ARGUMENTS.search(source) and not _READS_ARGUMENTS.search(source)))


def _add_tokens(inner: tokenizers.Tokenizer, special: SpecialTokens, path: Path) -> list[str]:
    """Makes of the tokenizer what its settings say and its own file does not; returns that.

    A token whose id is not the next one is left out, and it is said: nothing else could have that id.
    """
    held = {token.content: token for token in inner.get_added_tokens_decoder().values()}
    named, new, done = set(special.by_name.values()), [], []
    lacking = {number for number, token in special.added.items() if inner.token_to_id(token.content) is None}
    following = 1 + max(inner.get_vocab().values(), default=-1) if lacking else 0
    for number, token in special.added.items():
        old = held.get(token.content)
        if number in lacking and number != following:
            what = f"the added token {token.content!r:.40} has id {number}; {path.name} has no such token, and its next id is {following}"
            logger.warning("%s: %s: it is left out, and texts with it are read as any other text", special.where, what)
            continue
        following += number in lacking
        is_special = token.is_special or token.content in named or (old is not None and old.special)
        own = tokenizers.AddedToken(token.content, special=is_special, **token.flags)
        if old is None or (special.has_flags and repr(own) != repr(old)):
            held[token.content] = own
            new.append(own)
            done.append(f"{number}: {own!r}")
    inner.add_tokens(new)  # one that is there gets other flags
    for text in special.contents:
        old = held.get(text)
        if inner.token_to_id(text) is not None and (old is None or (text in named and not old.special)):
            inner.add_special_tokens([text])  # which has its id already
            done.append(text)
    ids = {token: inner.token_to_id(token) for token in (special.put_before, special.put_behind) if token is not None}
    first = special.put_before
    if first is not None and ids[first] is not None and ids[first] not in _read_around(inner, path):
        known = [(token, number) for token, number in ids.items() if number is not None]
        last = [token for token, _ in known if token == special.put_behind]
        # In place of the file's own rules, as transformers 4 has it: one set of rules behind another takes what the first has put for a text.
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single=[first, "$A", *last], pair=[first, "$A", *last, f"{first}:1", "$B:1", *(f"{token}:1" for token in last)], special_tokens=known
        )
        done.append(" ".join((f"{first} before texts", *(f"{token} behind them" for token in last))))
    return done


def _read_around(inner: tokenizers.Tokenizer, path: Path) -> dict[int, str]:
    """The tokens that are put around each text, by id. Raises ModelError where no text can be read: the library panics of some files' rules."""
    try:
        found = inner.encode("")
    except BaseException as error:
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        raise ModelError(f"{path} cannot be used: what it puts around a text fails: {error}") from None
    return dict(zip(found.ids, found.tokens))


def _read_templates(directory: Path, settings: dict[str, Any]) -> dict[str, ChatTemplate]:
    """A folder's chat templates by name; the one for all chats is `default`. Files of their own come first. Raises ModelError."""
    sources = settings.get("chat_template")
    if isinstance(sources, list):
        sources = {t["name"]: t.get("template") for t in sources if isinstance(t, dict) and isinstance(t.get("name"), str)}
    else:
        sources = {"default": sources}
    if is_named(separate := directory / "chat_template.jinja"):
        sources = {"default": separate, **{path.stem: path for path in sorted((directory / TEMPLATES).glob("*.jinja"))}}
    elif not sources.get("default") and is_named(processor := directory / "chat_template.json"):  # of models that read images too
        sources["default"] = read_json(processor).get("chat_template")
    found = {}
    for name in ("default", "tool_use"):
        source = sources.get(name)
        if isinstance(source, Path):
            check_regular(source)
            try:
                source = source.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"{source} cannot be read: {error}") from None
        if source is not None and not isinstance(source, str):
            raise ModelError(f"{directory}: the chat template must be text, got {source!r:.80}")
        if source:
            found[name] = ChatTemplate(source, str(directory))
    return found


class TextStream:
    """One completion's tokens as text, piece by piece: never half a character, never past a stop string.

    Text that may turn out to begin a stop string is held back until that is decided. What the detokenizer itself holds
    back, because the next token may change it, is looked through all the same: a stop string there ends the completion,
    and then no token follows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        may_call: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """may_call: tools, by special tokens that are text then."""
        decoding = tokenizer.exact if not skip_special_tokens else tokenizer.calling if may_call else tokenizer.decoding
        self._detokenizer = Detokenizer(decoding)
        self._is_streamed = decoding.is_streamed
        self._stop = tuple(stop)
        self.has_stop = bool(self._stop)
        """Some text ends the completion."""
        self._max_stop_len = max(map(len, self._stop), default=0)
        self._include_stop = include_stop
        self._held = ""
        self._num_exempt = 0  # characters that the detokenizer holds of tokens that might not stop

    def extend(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make certain, where there is no stop string."""
        return self._detokenizer.extend(token_ids)

    def append(self, token_id: int, may_stop: bool = True) -> tuple[str, bool]:
        """The text that this token makes certain, and whether a stop string ends the completion with it."""
        piece = self._detokenizer.push(token_id)
        if not self._stop:
            return piece, False
        if not may_stop:
            self._num_exempt = self._detokenizer.num_held
            text, self._held = self._held + piece, ""
            return text, False
        exempt = ""
        if piece and self._num_exempt:
            exempt, piece = piece[: self._num_exempt], piece[self._num_exempt :]
            self._num_exempt = 0
        text = self._held + piece
        held, num_before = self._detokenizer.peek(self._max_stop_len)
        probe = held[max(self._num_exempt - num_before, 0) :]
        if not num_before:
            probe = text + probe
        if any(stop in probe for stop in self._stop):
            whole = text + self._detokenizer.flush()
            self._held = ""
            return exempt + self._cut(whole, self._num_exempt), True
        keep = max(self._pending_length(text, stop) for stop in self._stop)
        cut = len(text) - keep
        self._held = text[cut:]
        return exempt + text[:cut], False

    def _cut(self, text: str, start: int) -> str:
        """The text up to the stop string that begins first from `start` on."""
        found = [(at, stop) for stop in self._stop if (at := text.find(stop, start)) >= 0]
        if not found:
            return text
        at, stop = min(found)
        return text[: at + len(stop)] if self._include_stop else text[:at]

    @staticmethod
    def _pending_length(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0

    def flush(self) -> str:
        """What is still held when the completion ends otherwise: held text, and the rest of a broken character."""
        text, self._held = self._held + self._detokenizer.flush(), ""
        return text if self._is_streamed else self._cut(text, 0)
