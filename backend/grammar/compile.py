"""What a request asks for -> a grammar at its beginning. Safe from any thread; never called on the engine's, where a server runs it."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

from backend.errors import RequestError
from backend.grammar.endless import is_endless
from backend.grammar.matcher import Matcher, Vocabulary
from backend.grammar.proving import Prover, build, load_vocabulary, shorten
from backend.grammar.schema_places import find_place
from backend.grammar.thinking import FORM
from backend.limited_process import Lost
from backend.schema_numbers import settle_numbers
from backend.structured_outputs import StructuredOutputs, write_ranges
from backend.text import Tokenizer

logger = logging.getLogger(__name__)

MAX_CACHED, MAX_CACHED_CHARACTERS = 256, 4_000_000
"""Grammars that are kept, and characters of what was asked; the least used goes first."""

PLACE_SECONDS = 1.0
"""How long it is looked for where in a schema the fault is: its parts are compiled one by one."""

Key = tuple[str, str, bool, "str | None", bool]
WHITESPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,40}"
"""Between the parts of JSON: any indentation, and not any amount: small models go on with it to the limit of the answer."""

_GBNF_RULE = re.compile(r"^\s*[\w.-]+\s*::=", re.M)


class Grammars:
    """Compiles for one model, and keeps what it compiled."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_ids = tokenizer, vocab_size, end_ids
        self._loaded: tuple[Vocabulary, Prover] | None = None
        self._compiled: OrderedDict[Key, Matcher | str] = OrderedDict()
        """Of what the compiler breaks on, what was said of it: it is not tried again."""
        self._num_characters = 0
        self._lock = threading.Lock()
        self._loading = threading.Lock()

    def compile(self, asked: StructuredOutputs, ignores_end: bool = False, state: int = FORM) -> Matcher:
        """A matcher of the request's own. state: of `thinking`, before the form.

        Raises RequestError for what is no grammar, cannot be enforced, or allows no text; it says where."""
        key = (asked.form, asked.text, asked.disable_any_whitespace, asked.whitespace_pattern, asked.is_lenient)
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
        made = self._compile(asked) if found is None else found
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = made
                self._num_characters += len(asked.text)
            while len(self._compiled) > MAX_CACHED or self._num_characters > MAX_CACHED_CHARACTERS:
                (_, text, *_), _ = self._compiled.popitem(last=False)
                self._num_characters -= len(text)
        if isinstance(made, str):
            raise RequestError(made)
        return made.copy(ignores_end, state)

    def _compile(self, asked: StructuredOutputs) -> Matcher | str:
        vocabulary, prover = self._load()
        name = f"structured_outputs.{asked.form}"
        try:
            grammar = self._write_tokens(asked.allowed_token_ids) if asked.allowed_token_ids else _write_grammar(asked)
            prover.prove(grammar)
            inner = build(vocabulary.tokenizer, grammar, vocabulary.end_ids)
            forbidden = vocabulary.end_ids.difference(asked.allowed_token_ids) if asked.allowed_token_ids else frozenset()
            return Matcher(inner, vocabulary, asked, forbidden)
        except Lost as error:
            return f"{name}: it is nested too deeply, too large, or has a number that is, for its compiler ({error})"
        except RequestError:
            raise
        except ValueError as error:
            raise RequestError(f"{name}: {self._find_fault(asked, shorten(error), prover)}") from None

    def _write_tokens(self, token_ids: Sequence[int]) -> str:
        """Any number of these; what ends a text is `Matcher`'s. Raises RequestError."""
        if token_ids[-1] >= self._vocab_size:
            raise RequestError(f"structured_outputs.allowed_token_ids has {token_ids[-1]}; the model's tokens are 0 to {self._vocab_size - 1}")
        own = [token_id for token_id in token_ids if token_id not in self._end_ids]
        if not own:
            raise RequestError(f"structured_outputs.allowed_token_ids has nothing but ends of text ({write_ranges(token_ids):.80})")
        return f"start: <[{write_ranges(own)}]>*"

    def _find_fault(self, asked: StructuredOutputs, fault: str, prover: Prover) -> str:
        """What the compiler said, with the place in the schema that it does not say."""
        schema = read_schema(asked) if asked.form == "json" else None
        if not isinstance(schema, dict):
            return fault
        end = time.monotonic() + PLACE_SECONDS

        def check(part: dict[str, Any]) -> str | None:
            if time.monotonic() > end:
                return None
            try:
                prover.prove(_write_schema(part, asked))
            except (Lost, RequestError):  # which say nothing of the schema
                return None
            except ValueError as error:
                return shorten(error)
            return None

        place, fault = find_place(schema, fault, check)
        return f"at {place:.200}: {fault}" if place else fault

    def load(self) -> None:
        """Reads the vocabulary, which takes up to a second and holds Python's lock: before requests come. The first one does it else."""
        try:
            self._load()
        except RequestError as error:
            logger.warning("requests that ask for a form of their answers will be refused: %s", error)

    def _load(self) -> tuple[Vocabulary, Prover]:
        with self._loading:
            if self._loaded is None:
                try:
                    import llguidance
                except ImportError as error:
                    raise RequestError(f"structured_outputs: this server has no llguidance: {error}") from None
                size, text = max(self._vocab_size, self._tokenizer.inner.get_vocab_size()), self._tokenizer.inner.to_str()
                prover = Prover(text, size, self._end_ids)
                prover.start()
                try:
                    tokenizer = load_vocabulary(text, size, self._end_ids)
                except Exception as error:  # the library raises what its parts do
                    raise RequestError(f"structured_outputs: this model's tokenizer cannot be read for grammars: {shorten(error)}") from None
                self._loaded = Vocabulary(tokenizer, llguidance.LLExecutor(), self._tokenizer, self._vocab_size, self._end_ids), prover
            return self._loaded


def _write_grammar(asked: StructuredOutputs) -> str:
    """In llguidance's own form. Raises ValueError, RequestError."""
    from llguidance import LLMatcher, grammar_from

    if asked.form == "regex":
        assert asked.regex is not None
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.form == "choice":
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(asked.choice))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")  # one lexeme: as rules, some thousands are too much for a step
    if asked.form == "grammar":
        assert asked.grammar is not None
        return grammar_from("gbnf" if _GBNF_RULE.search(asked.grammar) else "lark", asked.grammar)
    return _write_schema(read_schema(asked), asked)


def _write_schema(schema: Any, asked: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    schema = settle_numbers(schema, asked.is_lenient)
    if is_endless(schema):
        raise ValueError("no value with an end fulfils it: it requires itself")
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=json_options(asked))


def read_schema(asked: StructuredOutputs) -> Any:
    """Raises RequestError for text that is no JSON, and for false, which nothing fulfils."""
    if asked.form == "json_object":
        return {"type": "object"}
    try:
        schema = asked.schema
    except ValueError as error:
        raise RequestError(str(error)) from None
    if schema is False:
        raise RequestError("structured_outputs.json: nothing fulfils the schema false")
    return {} if schema is True else schema


def json_options(asked: StructuredOutputs) -> Any:
    """A union of which one alone may hold is taken for any union: what fulfils it fulfils one of its parts."""
    options: dict[str, Any] = {"coerce_one_of": True, "lenient": asked.is_lenient}
    if not asked.disable_any_whitespace:
        options["whitespace_pattern"] = WHITESPACE if asked.whitespace_pattern is None else asked.whitespace_pattern
    if asked.disable_any_whitespace:
        options |= {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return options
