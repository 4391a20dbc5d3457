"""Deltas -> what one response holds, and that as Triton tensors."""

from __future__ import annotations

import functools
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from backend.core import Delta, TokenLogprobs

MAX_KEPT = 2048
"""Tensors of a kind, some 200 bytes of shared memory each."""
MAX_KEPT_CHARACTERS = 24


class _Top(Sequence[tuple[int, float]]):
    """The likeliest tokens of one place, as long as an answer is not sent: 20 of them are 0.4 KB here, and 2.3 KB as pairs."""

    __slots__ = ("_ids", "_values")

    def __init__(self, top: Sequence[tuple[int, float]]) -> None:
        self._ids, self._values = array("q", [token_id for token_id, _ in top]), array("d", [value for _, value in top])

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, place: Any) -> Any:
        return list(zip(self._ids, self._values))[place]

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self._ids, self._values)


@dataclass(slots=True)
class Answer:
    """What one response holds: one completion's step, or with `stream` false all n completions whole."""

    deltas: list[Delta] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Merges a later delta into its completion's part."""
        for mine in self.deltas:
            if mine.index == delta.index:
                break
        else:
            self.deltas.append(delta)
            self.deltas.sort(key=lambda d: d.index)
            return
        mine.text += delta.text
        mine.token_ids = mine.token_ids + delta.token_ids
        mine.sources = mine.sources + delta.sources
        if delta.logprobs is not None:
            mine.logprobs = (mine.logprobs or []) + [TokenLogprobs(p.token_id, p.logprob, _Top(p.top)) for p in delta.logprobs]
        if delta.prompt_text is not None:
            mine.prompt_text, mine.prompt_token_ids = delta.prompt_text, delta.prompt_token_ids
        mine.finish_reason, mine.stats = delta.finish_reason, delta.stats
        mine.num_cached_tokens, mine.num_output_tokens = delta.num_cached_tokens, delta.num_output_tokens
        mine.num_thought_tokens = delta.num_thought_tokens


class AnswerTensors:
    """Makes the tensors of answers, for one thread that sends.

    Tensors that come again and again are made once, and are in the shared memory from then on: a response of such tensors alone takes a quarter of
    the processor's time (measured: 25 us, 99 us with nine new ones). The server's library does not say that two threads may send one tensor at once.
    """

    def __init__(self) -> None:
        self._kept_string = functools.lru_cache(MAX_KEPT)(lambda name, value: _strings(name, [value]))
        self._kept_integer = functools.lru_cache(MAX_KEPT)(lambda name, value: _integers(name, [value]))
        self._kept_sources = functools.lru_cache(MAX_KEPT)(lambda sources: _strings("token_sources", list(sources)))
        self._no_details = tuple(self._kept_string(name, "") for name in ("finish_reason", "logprobs", "usage", "speculation"))

    def of(self, answer: Answer) -> list[Any]:
        """Every declared output; those that do not apply are empty strings."""
        deltas = answer.deltas
        if len(deltas) == 1 and (found := self._plain(deltas[0])) is not None:
            return found
        texts = [(d.prompt_text or "") + d.text for d in deltas]
        ids = [i for d in deltas for i in (*(d.prompt_token_ids or ()), *d.token_ids)]
        sources = [s for d in deltas for s in (*("prompt" for _ in d.prompt_token_ids or ()), *d.sources)]
        counts = [len(d.token_ids) + len(d.prompt_token_ids or ()) for d in deltas]
        is_final = all(d.finish_reason for d in deltas)
        usage = statistics = logprobs = ""
        if any(d.logprobs is not None for d in deltas):
            parts = [_write_logprobs(d.logprobs or ()) for d in deltas]
            logprobs = parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"
        if is_final or (len(deltas) == 1 and is_first(deltas[0])):
            usage = _usage(deltas)
        if is_final:
            parts_stats = [d.stats.as_dict() for d in deltas if d.stats is not None]
            statistics = json.dumps(parts_stats[0] if len(parts_stats) == 1 else parts_stats)
        return [
            _strings("text_output", texts),
            _integers("output_ids", ids),
            _strings("token_sources", sources),
            _strings("finish_reason", [d.finish_reason or "" for d in deltas]),
            self._string("logprobs", logprobs),
            self._string("usage", usage),
            self._string("speculation", statistics),
            _integers("index", [d.index for d in deltas]),
            _integers("num_tokens", counts),
        ]

    def _plain(self, delta: Delta) -> list[Any] | None:
        """Of what most responses are, tokens of one completion that does not end with them; None: it is more than that."""
        if delta.finish_reason is not None or delta.logprobs is not None or delta.prompt_token_ids is not None:
            return None
        finish_reason, logprobs, usage, speculation = self._no_details
        if is_first(delta):
            usage = self._string("usage", _usage([delta]))
        token_ids, text = delta.token_ids, delta.text
        return [
            self._kept_string("text_output", text) if len(text) <= MAX_KEPT_CHARACTERS else _strings("text_output", [text]),
            self._kept_integer("output_ids", token_ids[0]) if len(token_ids) == 1 else _integers("output_ids", token_ids),
            self._kept_sources(tuple(delta.sources)),
            finish_reason,
            logprobs,
            usage,
            speculation,
            self._kept_integer("index", delta.index),
            self._kept_integer("num_tokens", len(token_ids)),
        ]

    def _string(self, name: str, value: str) -> Any:
        return _strings(name, [value]) if value else self._kept_string(name, "")


def is_first(delta: Delta) -> bool:
    """Whether it has a completion's first token."""
    return 0 < len(delta.token_ids) == delta.num_output_tokens


def _usage(deltas: list[Delta]) -> str:
    counts_of = {
        "prompt_tokens": deltas[0].num_prompt_tokens,
        "cached_tokens": sum(d.num_cached_tokens for d in deltas),
        "completion_tokens": sum(d.num_output_tokens for d in deltas),
        "reasoning_tokens": sum(d.num_thought_tokens for d in deltas),
    }
    return json.dumps({**counts_of, "begins_thinking": True} if deltas[0].begins_thinking else counts_of)


def _write_logprobs(logprobs: Iterable[TokenLogprobs]) -> str:
    """JSON, token by token: one call for all would keep Python's lock, and nobody would be answered meanwhile (38,400 tokens with 20 likeliest
    each: 1.4 s, measured)."""
    tokens = (json.dumps({"id": p.token_id, "logprob": p.logprob, "top": [{"id": i, "logprob": v} for i, v in p.top]}) for p in logprobs)
    return f"[{', '.join(tokens)}]"


def _strings(name: str, values: list[str]) -> Any:
    return pb_utils.Tensor(name, np.array([v.encode("utf-8", "replace") for v in values], dtype=object))


def _integers(name: str, values: list[int]) -> Any:
    return pb_utils.Tensor(name, np.array(values, dtype=np.int32))
