"""Grammars are compiled in a process of their own first: a few of some hundred characters overflow the compiler's stack, which ends the process that
compiles them, or keep it at work for ever, and its own limits do not count that.

So what the server compiles itself is known to come out. It costs each new grammar its time once more.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from backend.errors import CapacityError
from backend.limited_process import Busy, LimitedProcess, serve

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

INITIAL_WORK, STEP_WORK, STEP_ITEMS = 1_000_000, 100_000, 50_000
"""llguidance's units: about 20 ms to compile, and 7 ms and 3 ms for a mask at most. What needs more is refused, or ends its request."""
PROVE_SECONDS = 4.0
"""Processor time of what these do not count. Three thousand properties take one."""
VOCABULARY_SECONDS = 60.0
ANSWER_SECONDS = 40.0
"""Until the process is taken for lost: ten times as long, since other work may hold the processor."""
QUEUE_SECONDS = 20.0
"""How long a grammar waits for others."""
MAX_MEMORY_BYTES = 4 << 30
_STACK_BYTES = 4 << 20
"""Half of what the server's threads have: what comes out here comes out there."""


def load_vocabulary(tokenizer: str, size: int, end_ids: Collection[int]) -> LLTokenizer:
    import llguidance

    return llguidance.LLTokenizer(tokenizer, n_vocab=size, eos_token=sorted(end_ids))


def build(vocabulary: LLTokenizer, grammar: str, end_ids: Collection[int]) -> LLMatcher:
    """A matcher at the grammar's beginning. Raises ValueError for what is no grammar, or allows no text."""
    import llguidance

    inner = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=_limits())
    mask = np.zeros(-(-vocabulary.vocab_size // 32), dtype=np.int32)
    if not inner.is_error():
        inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if inner.is_error() and not inner.get_error().startswith("NoExtension"):
        raise ValueError(inner.get_error())
    ends = [token_id for token_id in end_ids if mask[token_id // 32] >> token_id % 32 & 1]
    if inner.is_error() or int(np.unpackbits(mask.view(np.uint8)).sum()) <= len(ends):
        raise ValueError("no text but the empty one fulfils it")
    return inner


def _limits() -> LLParserLimits:
    import llguidance

    return llguidance.LLParserLimits(initial_lexer_fuel=INITIAL_WORK, step_lexer_fuel=STEP_WORK, step_max_items=STEP_ITEMS, verbose_errors=False)


def shorten(error: object) -> str:
    """Without the parser's own state."""
    return " ".join(str(error).partition("<non-verbose/>")[0].partition("<state>")[0].split())[:500]


# -- in the process that proves -----------------------------------------------------------------------------------------------


def main() -> None:
    """Serves one vocabulary, which comes first; then grammars."""
    vocabulary: LLTokenizer | None = None
    end_ids: list[int] = []

    def work(request: dict[str, Any]) -> dict[str, str]:
        nonlocal vocabulary, end_ids
        try:
            if vocabulary is None:
                vocabulary, end_ids = load_vocabulary(**request), request["end_ids"]
            else:
                build(vocabulary, request["grammar"], end_ids).deep_copy()
        except Exception as error:  # the library raises what its parts do
            return {"error": shorten(error)}
        return {}

    threading.stack_size(_STACK_BYTES)
    with ThreadPoolExecutor(1) as thread:
        serve(lambda request: thread.submit(work, request).result(), PROVE_SECONDS, MAX_MEMORY_BYTES, VOCABULARY_SECONDS)


# -- in the server's process --------------------------------------------------------------------------------------------------


class Prover:
    """Asks that process. Thread-safe."""

    def __init__(self, tokenizer: str, size: int, end_ids: Collection[int]) -> None:
        first = {"tokenizer": tokenizer, "size": size, "end_ids": sorted(end_ids)}
        self._process = LimitedProcess("backend.grammar.proving", first, PROVE_SECONDS)

    def start(self) -> None:
        self._process.start()

    def prove(self, grammar: str) -> None:
        """Raises ValueError for what is no grammar, or allows no text, Lost for what ends the process, CapacityError when too many wait for it."""
        try:
            answer = self._process.ask({"grammar": grammar}, ANSWER_SECONDS, QUEUE_SECONDS)
        except Busy as error:
            raise CapacityError(f"structured_outputs: the compiler of grammars was {error}: retry later") from None
        if "error" in answer:
            raise ValueError(answer["error"])
