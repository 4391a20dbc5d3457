"""Prompts that are too long, made to fit where their requests say so: by their last tokens, or without a conversation's oldest messages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from backend.errors import LengthError, RequestError

MAX_ROOM = 1024
"""Tokens that are left for an answer whose length is not said; of a short context, a quarter."""
KINDS = ("auto", "disabled")
_KEPT_ROLES = ("system", "developer")

Message = Mapping[str, Any]
Prompt = TypeVar("Prompt")


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a prompt may be shortened. Raises RequestError."""

    num_tokens: int | None = None
    """vLLM's truncate_prompt_tokens: so many of its last tokens are kept at most; -1: as many as leave room for the answer."""
    drops_messages: bool = False
    """OpenAI's truncation "auto": as few of the oldest messages are dropped as leaves room for the answer."""

    @classmethod
    def from_values(cls, num_tokens: int | None, kind: str | None, max_model_len: int) -> Truncation:
        if num_tokens is not None and num_tokens != -1 and not 1 <= num_tokens < max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens must be -1, or from 1 to {max_model_len - 1} (the context but for one output token), got {num_tokens}"
            )
        if kind is not None and kind not in KINDS:
            raise RequestError(f"truncation must be one of {', '.join(KINDS)}, got {kind!r:.80}")
        if num_tokens is not None and kind == "auto":
            raise RequestError("truncation auto and truncate_prompt_tokens are two ways to shorten a prompt: give one of them")
        return cls(num_tokens, kind == "auto")

    def max_prompt_tokens(self, max_model_len: int, max_tokens: int, is_asked: bool) -> int:
        """Of a prompt that is to be shortened. max_tokens: of the answer; is_asked: by the request, not by default."""
        if self.num_tokens is not None and self.num_tokens > 0:
            return self.num_tokens
        room = min(max_tokens if is_asked else min(max_tokens, MAX_ROOM), max_model_len // 4)
        return max_model_len - max(room, 1)


def fit_messages(
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], Prompt],
    fits: Callable[[Prompt], bool],
    may_fit: Callable[[Sequence[Message]], bool],
) -> Prompt:
    """The prompt of a conversation less the fewest of its oldest messages with which it fits; where it never does, less all that may be dropped.

    render: makes the prompt; fits: asked of it; may_fit: asked before, of the messages, for what is far too long to be rendered.
    """
    cuts = find_cuts(messages)
    made: dict[int, Prompt] = {}

    def fits_from(place: int) -> bool:
        kept = keep(messages, cuts[place])
        if not may_fit(kept):
            return False
        try:
            made[place] = render(kept)
        except LengthError:  # what the template writes around them is not counted before
            return False
        return fits(made[place])

    if fits_from(0):
        return made[0]
    # Halving costs little more than the first look: what is many times too long is half as long each time.
    place = min(1 + bisect_left(range(1, len(cuts) - 1), True, key=fits_from), len(cuts) - 1)
    return made[place] if place in made else render(keep(messages, cuts[place]))


def find_cuts(messages: Sequence[Message]) -> list[int]:
    """Places before which messages may be dropped: 0, where a user's turn begins, and after the newest user's message where an answer does.

    So what is left begins as templates want it to, and an output is never there without its call.
    """
    newest = _find_newest(messages)
    calls: dict[str, int] = {}
    opened = [0] * (len(messages) + 1)  # how many more outputs are to come for calls before a place than for those before the last one
    for place, message in enumerate(messages):
        own = message.get("tool_call_id")
        if isinstance(own, str) and own in calls:
            opened[calls[own] + 1] += 1
            opened[place + 1] -= 1
        made = message.get("tool_calls")
        calls |= {call["id"]: place for call in made if isinstance(call, dict) and isinstance(call.get("id"), str)} if isinstance(made, list) else {}
    cuts, num_dropped, num_open = [0], 0, 0
    for place, message in enumerate(messages):
        num_open += opened[place]
        is_start = message.get("role") == ("user" if place <= newest else "assistant")
        if is_start and num_dropped and not num_open:
            cuts.append(place)
            num_dropped = 0
        num_dropped += place != newest and message.get("role") not in _KEPT_ROLES
    return cuts


def keep(messages: Sequence[Message], cut: int) -> list[Message]:
    """What is left: all from the cut on, and before it the system's messages and the newest of the user's."""
    newest = _find_newest(messages)
    return [m for place, m in enumerate(messages) if place >= cut or place == newest or m.get("role") in _KEPT_ROLES]


def _find_newest(messages: Sequence[Message]) -> int:
    return max((place for place, message in enumerate(messages) if message.get("role") == "user"), default=-1)
