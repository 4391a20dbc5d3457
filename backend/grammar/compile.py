"""What a request asks for -> a grammar at its beginning. Safe from any thread; never called on the engine's, where a server runs it."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from backend.errors import RequestError
from backend.grammar.matcher import Matcher, Vocabulary
from backend.structured_outputs import StructuredOutputs
from backend.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLParserLimits

logger = logging.getLogger(__name__)

MAX_CACHED, MAX_CACHED_CHARACTERS = 256, 4_000_000
"""Grammars that are kept, and characters of what was asked; the least used goes first."""
INITIAL_WORK, STEP_WORK, STEP_ITEMS = 1_000_000, 100_000, 50_000
"""llguidance's units: about 20 ms to compile, and 7 ms and 3 ms for a mask at most. What needs more is refused, or ends its request."""


Key = tuple[str, str, bool, "str | None", bool]
WHITESPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,40}"
"""Between the parts of JSON: any indentation, and not any amount: small models go on with it to the limit of the answer."""


class Grammars:
    """Compiles for one model, and keeps what it compiled."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_ids = tokenizer, vocab_size, end_ids
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[Key, Matcher] = OrderedDict()
        self._num_characters = 0
        self._lock = threading.Lock()
        self._loading = threading.Lock()

    def compile(self, asked: StructuredOutputs, ignores_end: bool = False) -> Matcher:
        """A matcher of the request's own. Raises RequestError for what is no grammar, cannot be enforced, or allows no text; it says where."""
        key = (asked.form, asked.text, asked.disable_any_whitespace, asked.whitespace_pattern, asked.is_lenient)
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found.copy(ignores_end)
        made = self._compile(asked)
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = made
                self._num_characters += len(asked.text)
            while len(self._compiled) > MAX_CACHED or self._num_characters > MAX_CACHED_CHARACTERS:
                (_, text, *_), _ = self._compiled.popitem(last=False)
                self._num_characters -= len(text)
        return made.copy(ignores_end)

    def _compile(self, asked: StructuredOutputs) -> Matcher:
        vocabulary = self._load()
        import llguidance

        name = f"structured_outputs.{asked.form}"
        try:
            inner = llguidance.LLMatcher(vocabulary.tokenizer, _write_grammar(asked), log_level=0, limits=_limits())
        except RequestError:
            raise
        except ValueError as error:
            raise RequestError(f"{name}: {_shorten(error)}") from None
        mask = np.zeros(vocabulary.num_own_words, dtype=np.int32)
        if not inner.is_error():
            inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if inner.is_error() and not inner.get_error().startswith("NoExtension"):
            raise RequestError(f"{name}: {_shorten(inner.get_error())}")
        ends = [token_id for token_id in vocabulary.end_ids if mask[token_id // 32] >> token_id % 32 & 1]
        if inner.is_error() or int(np.unpackbits(mask.view(np.uint8)).sum()) <= len(ends):
            raise RequestError(f"{name}: no text but the empty one fulfils it")
        return Matcher(inner, vocabulary, asked)

    def load(self) -> None:
        """Reads the vocabulary, which takes up to a second and holds Python's lock: before requests come. The first one does it else."""
        try:
            self._load()
        except RequestError as error:
            logger.warning("requests that ask for a form of their answers will be refused: %s", error)

    def _load(self) -> Vocabulary:
        with self._loading:
            if self._vocabulary is None:
                try:
                    import llguidance
                except ImportError as error:
                    raise RequestError(f"structured_outputs: this server has no llguidance: {error}") from None
                size = max(self._vocab_size, self._tokenizer.inner.get_vocab_size())
                try:
                    tokenizer = llguidance.LLTokenizer(self._tokenizer.inner.to_str(), n_vocab=size, eos_token=sorted(self._end_ids))
                except Exception as error:  # the library raises what its parts do
                    raise RequestError(f"structured_outputs: this model's tokenizer cannot be read for grammars: {_shorten(error)}") from None
                self._vocabulary = Vocabulary(tokenizer, llguidance.LLExecutor(), self._vocab_size, self._end_ids)
            return self._vocabulary


def _limits() -> LLParserLimits:
    import llguidance

    return llguidance.LLParserLimits(initial_lexer_fuel=INITIAL_WORK, step_lexer_fuel=STEP_WORK, step_max_items=STEP_ITEMS, verbose_errors=False)


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
        return grammar_from("grammar", asked.grammar)
    return LLMatcher.grammar_from_json_schema(json.dumps(read_schema(asked)), overrides=json_options(asked))


def read_schema(asked: StructuredOutputs) -> Any:
    """Raises RequestError for text that is no JSON, and for false, which nothing fulfils."""
    if asked.form == "json_object":
        return {"type": "object"}
    schema = asked.json
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"structured_outputs.json is not valid JSON: {error}") from None
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


def _shorten(error: object) -> str:
    """Without the parser's own state."""
    return " ".join(str(error).partition("<non-verbose/>")[0].partition("<state>")[0].split())[:500]
