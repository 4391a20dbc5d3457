"""What the engine's steps made, on its way to the process that answers: one message a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from backend.core import Delta
from backend.errors import portable


class News(NamedTuple):
    """Of one request."""

    number: int
    """By which both processes know it."""
    delta: Delta
    waits_for: tuple[int, ...] = ()
    """Requests whose ends are to be told before."""


def pack(news: Iterable[News]) -> list[tuple[Any, ...]]:
    """As it is pickled in a sixth of the time: of what most steps make, tokens of completions that neither begin nor end with them, the fields that
    are not empty. Errors become those that any process knows."""
    packed: list[tuple[Any, ...]] = []
    for item in news:
        number, delta, waits_for = item
        is_more = delta.finish_reason is not None or delta.error is not None or delta.logprobs is not None or delta.prompt_token_ids is not None
        if is_more or waits_for or delta.num_output_tokens == len(delta.token_ids):
            if delta.error is not None:
                item = News(number, dataclasses.replace(delta, error=portable(delta.error)), waits_for)
            packed.append(tuple(item))
        else:
            tail = (delta.num_output_tokens, delta.num_prompt_tokens, delta.num_cached_tokens, delta.num_thought_tokens, delta.begins_thinking)
            packed.append((number, delta.index, delta.token_ids, delta.text, delta.sources, *tail))
    return packed


def unpack(packed: Iterable[tuple[Any, ...]]) -> list[News]:
    """What `pack` was given; deltas have no names of requests where the numbers say enough."""
    return [_unpack(item) for item in packed]


def _unpack(item: tuple[Any, ...]) -> News:
    if len(item) == 3:
        return News(*item)
    number, index, token_ids, text, sources, num_output, num_prompt, num_cached, num_thought, begins_thinking = item
    delta = Delta("", index, token_ids, text, sources, None, None, None, num_prompt, num_cached, num_output, num_thought, begins_thinking)
    return News(number, delta)
