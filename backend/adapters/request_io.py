"""Triton tensors -> what the engine takes, and deltas -> Triton tensors."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from backend.core import MAX_CHARACTERS_PER_TOKEN, MAX_TIMEOUT, Delta
from backend.engine_process.calls import MAX_CORPUS_CHARACTERS, MAX_MESSAGES_CHARACTERS, CorpusCall, GenerateCall, read_json
from backend.errors import RequestError
from backend.sampling_params import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams
from backend.structured_outputs import MAX_CHARACTERS as MAX_STRUCTURE_CHARACTERS
from backend.tools import Tools
from backend.truncation import Truncation

SAMPLING_SCALARS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "include_stop", "ignore_eos", "skip_special_tokens", "logprobs", "echo", "n",
)  # fmt: skip
SAMPLING_LISTS = ("stop", "bad_words", "stop_token_ids")
_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,19}")
PROMPTS = ("text_input", "input_ids", "messages")
MAX_JSON_CHARACTERS = 65536
MAX_SPECULATIVE_CHARACTERS = 2_000_000
"""It may hold a predicted answer."""
MAX_ID_CHARACTERS = 65536
MAX_WORD_CHARACTERS = 256
MAX_UTF8_BYTES = 4
"""Of one character."""


class InputLimits:
    """How large each input may be, looked at before anything is made of it."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.counts = {"stop": MAX_STOP_STRINGS, "bad_words": MAX_BAD_WORDS, "stop_token_ids": MAX_STOP_TOKEN_IDS}
        """Elements; every other input has one, but for input_ids."""
        self.characters = {
            "text_input": max_model_len * MAX_CHARACTERS_PER_TOKEN,
            "messages": MAX_MESSAGES_CHARACTERS,
            "logit_bias": MAX_JSON_CHARACTERS,
            "speculative": MAX_SPECULATIVE_CHARACTERS,
            "tools": MAX_MESSAGES_CHARACTERS,
            "tool_choice": MAX_JSON_CHARACTERS,
            "chat_template_kwargs": MAX_JSON_CHARACTERS,
            "truncation": MAX_WORD_CHARACTERS,
            "structured_outputs": 2 * MAX_STRUCTURE_CHARACTERS,
            "stop": MAX_STOP_CHARACTERS,
            "bad_words": MAX_BAD_WORD_CHARACTERS,
            "cancel": MAX_ID_CHARACTERS,
            "suffix_corpus": MAX_CORPUS_CHARACTERS,
        }
        """Of all elements together."""

    def check(self, name: str, array: np.ndarray, is_truncated: bool) -> None:
        """Raises RequestError for a tensor that nothing could be made of. is_truncated: of a prompt that is to be made shorter."""
        if name == "input_ids":
            if is_truncated and array.size > (limit := self.max_model_len * MAX_CHARACTERS_PER_TOKEN):
                raise RequestError(f"the prompt has {array.size} tokens; at most {limit} are looked at for a context of {self.max_model_len}")
            if not is_truncated and array.size >= self.max_model_len:
                raise RequestError(f"the prompt has {array.size} tokens; the context holds {self.max_model_len}, one output token included")
            return
        if array.size > (limit := self.counts.get(name, 1)):
            raise RequestError(f"{name} has {array.size} {'strings' if array.dtype == object else 'values'}; the limit is {limit}")
        if array.dtype == object and (size := sum(map(len, array.reshape(-1)))) > MAX_UTF8_BYTES * (limit := self.characters[name]):
            raise RequestError(f"{name} has {size} bytes; the limit is {limit} characters")


@dataclass(slots=True)
class CancelCall:
    """A request to end another one."""

    target_id: str


class DescribeCall:
    """A request to say what is served."""


def read_text(name: str, value: Any) -> str:
    """Raises RequestError for bytes that are no text."""
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not valid UTF-8: byte {error.object[error.start]:#04x} at {error.start}") from None


def _json_object(name: str, text: str, limit: int = MAX_JSON_CHARACTERS) -> dict[str, Any]:
    value = read_json(name, text, limit)
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be a JSON object, got {text!r:.80}")
    return value


def _read_tools(values: dict[str, Any]) -> Tools | None:
    if "tools" not in values:
        if idle := [name for name in ("tool_choice", "parallel_tool_calls") if name in values]:
            raise RequestError(f"{idle[0]} has no effect without tools")
        return None
    if "messages" not in values:
        raise RequestError("tools are for messages: the chat template writes them into the prompt")
    choice = values.get("tool_choice", [None])[0]
    if choice is not None and choice.lstrip().startswith("{"):
        choice = _json_object("tool_choice", choice)
    return read_tools(values["tools"][0], choice, values.get("parallel_tool_calls", [True])[0])


def read_tools(text: str, choice: object = None, is_parallel: bool = True) -> Tools:
    """Raises RequestError for what are no tools."""
    return Tools.from_values(read_json("tools", text, MAX_MESSAGES_CHARACTERS), choice, is_parallel)


def read_template_variables(text: str) -> dict[str, Any]:
    """Raises RequestError for what is no object."""
    return _json_object("chat_template_kwargs", text)


def read_id(request: Any) -> str:
    """The client's name for a request. Raises RequestError for one that is no text."""
    try:
        return request.request_id()
    except UnicodeDecodeError as error:
        raise RequestError(f"the request's id is not valid UTF-8: byte {error.object[error.start]:#04x} at {error.start}") from None


def read_request(request: Any, limits: InputLimits, defaults: dict[str, Any]) -> GenerateCall | CancelCall | CorpusCall | DescribeCall:
    """Copies and parses one Triton request. defaults: sampling parameters of those who say nothing.

    Raises RequestError or ValueError naming the input, the value seen and the rule.
    """
    values: dict[str, Any] = {}
    tensors = {tensor.name(): tensor for tensor in request.inputs()}
    for name, tensor in tensors.items():
        array = tensor.as_numpy()
        limits.check(name, array, "truncate_prompt_tokens" in tensors)
        if array.size == 0 and name != "input_ids":
            continue
        if array.dtype == object:
            values[name] = [read_text(name, v) for v in array.reshape(-1)]
        else:
            values[name] = array.reshape(-1).tolist()
    if "cancel" in values:
        return CancelCall(values["cancel"][0])
    if values.get("describe", [False])[0]:
        return DescribeCall()
    if "suffix_corpus" in values:
        return CorpusCall(values["suffix_corpus"][0])
    given = [name for name in PROMPTS if name in values]
    if len(given) != 1:
        raise RequestError(f"give one of {', '.join(PROMPTS)}; got {' and '.join(given) or 'none'}")
    prompt: Any = values[given[0]] if given[0] == "input_ids" else values[given[0]][0]
    arguments: dict[str, Any] = {"max_tokens": limits.max_model_len} if given[0] == "messages" else {}
    arguments |= defaults
    arguments |= {name: values[name][0] for name in SAMPLING_SCALARS if name in values}
    arguments |= {name: tuple(values[name]) for name in SAMPLING_LISTS if name in values}
    if values.get("logit_bias", [""])[0]:
        biases = _json_object("logit_bias", values["logit_bias"][0])
        if wrong := [key for key in biases if not _TOKEN_ID.fullmatch(key)]:
            raise RequestError(f"logit_bias's keys must be token ids, got {wrong[0]!r:.80}")
        arguments["logit_bias"] = {int(key): value for key, value in biases.items()}
    if values.get("structured_outputs", [""])[0]:
        arguments["structured_outputs"] = _json_object("structured_outputs", values["structured_outputs"][0], 2 * MAX_STRUCTURE_CHARACTERS)
    timeout_ms = values.get("timeout_ms", [None])[0]
    if timeout_ms is not None and not 0 < timeout_ms < 1000 * MAX_TIMEOUT:
        raise RequestError(f"timeout_ms must be above 0 and below {1000 * MAX_TIMEOUT}, got {timeout_ms}")
    speculative = values.get("speculative", [""])[0]
    variables = values.get("chat_template_kwargs", [""])[0]
    if variables and given[0] != "messages":
        raise RequestError("chat_template_kwargs is for messages: no template makes the prompt of anything else")
    kind = values.get("truncation", [None])[0]
    if kind is not None and given[0] != "messages":
        raise RequestError("truncation is for messages: truncate_prompt_tokens shortens any prompt")
    truncation = Truncation.from_values(values.get("truncate_prompt_tokens", [None])[0], kind, limits.max_model_len)
    return GenerateCall(
        prompt=prompt,
        is_chat=given[0] == "messages",
        params=SamplingParams(**arguments),
        tools=_read_tools(values),
        template_variables=read_template_variables(variables) if variables else None,
        truncation=truncation if truncation != Truncation() else None,
        is_length_default="max_tokens" not in values,
        speculative=_json_object("speculative", speculative, MAX_SPECULATIVE_CHARACTERS) if speculative else None,
        priority=values.get("priority", [0])[0],
        timeout=None if timeout_ms is None else timeout_ms / 1000,
        is_streamed=values.get("stream", [True])[0],
    )


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
            mine.logprobs = (mine.logprobs or []) + delta.logprobs
        if delta.prompt_text is not None:
            mine.prompt_text, mine.prompt_token_ids = delta.prompt_text, delta.prompt_token_ids
        mine.finish_reason, mine.stats = delta.finish_reason, delta.stats
        mine.num_cached_tokens, mine.num_output_tokens = delta.num_cached_tokens, delta.num_output_tokens
        mine.num_thought_tokens = delta.num_thought_tokens

    def tensors(self) -> list[Any]:
        """Every declared output; those that do not apply are empty strings."""
        deltas = self.deltas
        if len(deltas) == 1 and (found := _plain_tensors(deltas[0])) is not None:
            return found
        texts = [(d.prompt_text or "") + d.text for d in deltas]
        ids = [i for d in deltas for i in (*(d.prompt_token_ids or ()), *d.token_ids)]
        sources = [s for d in deltas for s in (*("prompt" for _ in d.prompt_token_ids or ()), *d.sources)]
        counts = [len(d.token_ids) + len(d.prompt_token_ids or ()) for d in deltas]
        is_final = all(d.finish_reason for d in deltas)
        usage = statistics = logprobs = ""
        if any(d.logprobs is not None for d in deltas):
            parts: list[Any] = [
                [{"id": p.token_id, "logprob": p.logprob, "top": [{"id": i, "logprob": v} for i, v in p.top]} for p in d.logprobs or ()]
                for d in deltas
            ]
            logprobs = json.dumps(parts[0] if len(parts) == 1 else parts)
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
            _string("logprobs", logprobs),
            _string("usage", usage),
            _string("speculation", statistics),
            _integers("index", [d.index for d in deltas]),
            _integers("num_tokens", counts),
        ]


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


def _plain_tensors(delta: Delta) -> list[Any] | None:
    """Of what most responses are, tokens of one completion that does not end with them; None: it is more than that."""
    if delta.finish_reason is not None or delta.logprobs is not None or delta.prompt_token_ids is not None:
        return None
    finish_reason, logprobs, usage, speculation = _no_details()
    if is_first(delta):
        usage = _string("usage", _usage([delta]))
    token_ids, text = delta.token_ids, delta.text
    return [
        _kept_string("text_output", text) if len(text) <= MAX_KEPT_CHARACTERS else _strings("text_output", [text]),
        _kept_integer("output_ids", token_ids[0]) if len(token_ids) == 1 else _integers("output_ids", token_ids),
        _kept_sources(tuple(delta.sources)),
        finish_reason,
        logprobs,
        usage,
        speculation,
        _kept_integer("index", delta.index),
        _kept_integer("num_tokens", len(token_ids)),
    ]


def _strings(name: str, values: list[str]) -> Any:
    return pb_utils.Tensor(name, np.array([v.encode("utf-8", "replace") for v in values], dtype=object))


def _integers(name: str, values: list[int]) -> Any:
    return pb_utils.Tensor(name, np.array(values, dtype=np.int32))


def _string(name: str, value: str) -> Any:
    return _strings(name, [value]) if value else _kept_string(name, "")


# Tensors that come again and again are made once, and are in the shared memory from then on: a response of such tensors alone takes a quarter of
# the processor's time (measured: 25 us, 99 us with nine new ones). They are for the sender thread only.

MAX_KEPT = 2048
"""Tensors of a kind, some 200 bytes of shared memory each."""
MAX_KEPT_CHARACTERS = 24


@functools.lru_cache(MAX_KEPT)
def _kept_string(name: str, value: str) -> Any:
    return _strings(name, [value])


@functools.lru_cache(MAX_KEPT)
def _kept_integer(name: str, value: int) -> Any:
    return _integers(name, [value])


@functools.lru_cache(MAX_KEPT)
def _kept_sources(sources: tuple[str, ...]) -> Any:
    return _strings("token_sources", list(sources))


@functools.cache
def _no_details() -> tuple[Any, ...]:
    return tuple(_kept_string(name, "") for name in ("finish_reason", "logprobs", "usage", "speculation"))
