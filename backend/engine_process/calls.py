"""What clients ask of the engine's process, as the one that Triton has passes it on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from backend.errors import RequestError
from backend.sampling_params import SamplingParams
from backend.tools import Tools
from backend.truncation import Truncation

Arrays = dict[str, np.ndarray]
"""By the name of the drafter model's input or output."""

MAX_MESSAGES_CHARACTERS = 2_000_000
MAX_CORPUS_CHARACTERS = 2_000_000
"""Of one call; more texts come in several."""
DRAFT_SECONDS = 2.0
"""A drafter's model that has not answered by then counts as dead: the server never answers for a process that died during a call."""


@dataclass(slots=True)
class GenerateCall:
    """One request as the engine takes it."""

    prompt: Any
    """Text, token ids, or with `is_chat` messages as JSON, which `read_messages` reads."""
    params: SamplingParams
    is_length_default: bool = False
    """It does not say how long its answer may be: no longer than what the prompt leaves of the context."""
    is_chat: bool = False
    tools: Tools | None = None
    template_variables: dict[str, Any] | None = None
    """Of a chat, beside those that every template is given."""
    truncation: Truncation | None = None
    speculative: dict[str, Any] | None = None
    priority: int = 0
    timeout: float | None = None
    """Seconds, from when it was received."""
    is_streamed: bool = True


@dataclass(slots=True)
class CorpusCall:
    """Texts for the suffix trees."""

    text: str
    """JSON, which `read_corpus_call` reads."""


def read_json(name: str, text: str, limit: int) -> Any:
    """limit: of characters. Raises RequestError that names the input."""
    if len(text) > limit:
        raise RequestError(f"{name} has {len(text)} characters; the limit is {limit}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # the first also of integers with too many digits
        raise RequestError(f"{name} is not valid JSON: {str(error).partition(';')[0]}") from None


def read_messages(text: str) -> list[dict[str, Any]]:
    """Raises RequestError for what is no list of messages."""
    value = read_json("messages", text, MAX_MESSAGES_CHARACTERS)
    good = isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m and ("content" in m or "tool_calls" in m) for m in value)
    if not good:
        raise RequestError(f"messages must be a list of objects with role and content or tool_calls, got {text!r:.80}")
    return value


def read_corpus_call(text: str) -> list[Any]:
    """Raises RequestError for what is no list of anything."""
    value = read_json("suffix_corpus", text, MAX_CORPUS_CHARACTERS)
    if not isinstance(value, list) or not value:
        raise RequestError(f"suffix_corpus must be a list of texts or of lists of token ids, got {text!r:.80}")
    return value
