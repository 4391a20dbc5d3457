"""What the engine's steps made, on its way to the process that answers: one message a step, of plain values, which need no pickling."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from backend.core import Delta, SpeculationStats, TokenLogprobs
from backend.errors import FROM_ELSEWHERE, describe_error, error_code

Packed = tuple[Any, ...]
"""Of numbers, texts, and lists and tuples of them."""


class News(NamedTuple):
    """Of one request."""

    number: int
    """By which both processes know it."""
    delta: Delta
    waits_for: tuple[int, ...] = ()
    """Requests whose ends are to be told before."""


def pack(news: Iterable[News]) -> list[Packed]:
    """Most have tokens of a completion alone, which neither begins nor ends with them; the others more. Errors become those that any process
    knows."""
    packed: list[Packed] = []
    for number, delta, waits_for in news:
        own = (
            number,
            delta.index,
            delta.token_ids,
            delta.text,
            delta.sources,
            delta.num_output_tokens,
            delta.num_prompt_tokens,
            delta.num_cached_tokens,
            delta.num_thought_tokens,
            delta.begins_thinking,
        )
        is_more = delta.finish_reason is not None or delta.error is not None or delta.logprobs is not None or delta.prompt_text is not None
        packed.append((*own, _pack_more(delta), waits_for) if is_more or waits_for else own)
    return packed


def _pack_more(delta: Delta) -> Packed:
    error, scores = delta.error, delta.logprobs
    return (
        delta.finish_reason,
        None if error is None else (error_code(error), describe_error(error)),
        None if scores is None else [(int(own.token_id), float(own.logprob), [(int(i), float(value)) for i, value in own.top]) for own in scores],
        None if delta.stats is None else dataclasses.astuple(delta.stats),
        delta.prompt_text,
        delta.prompt_token_ids,
    )


def unpack(packed: Iterable[Packed]) -> list[News]:
    """What `pack` was given; deltas have no names of requests, whose numbers say enough."""
    return [_unpack(item) for item in packed]


def _unpack(item: Packed) -> News:
    number, index, token_ids, text, sources, num_output, num_prompt, num_cached, num_thought, begins_thinking, *rest = item
    delta = Delta("", index, token_ids, text, sources, None, None, None, num_prompt, num_cached, num_output, num_thought, begins_thinking)
    if not rest:
        return News(number, delta)
    (reason, error, scores, stats, delta.prompt_text, delta.prompt_token_ids), waits_for = rest
    delta.finish_reason = reason
    delta.error = None if error is None else FROM_ELSEWHERE[error[0]](error[1])
    delta.logprobs = None if scores is None else [TokenLogprobs(*own) for own in scores]
    delta.stats = None if stats is None else SpeculationStats(*stats)
    return News(number, delta, waits_for)
