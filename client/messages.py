"""What clients send and receive: parameters -> tensors or JSON, responses -> chunks, chunks -> a completion."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

DEFAULT_GRPC_URL = "127.0.0.1:8001"
DEFAULT_HTTP_URL = "127.0.0.1:8000"
INACTIVITY_SECONDS = 4.0
"""A server that lives sends something to a stream every 1.5 seconds; after this long without anything, to any stream, it is taken for dead
(client/silence.py)."""
CUT_SECONDS = 5
"""After which a connection ends whose network lets nothing through."""
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", triton_grpc.MAX_GRPC_MESSAGE_SIZE),
    ("grpc.max_receive_message_length", triton_grpc.MAX_GRPC_MESSAGE_SIZE),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", int(INACTIVITY_SECONDS * 1000)),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 600_000),
    ("grpc.keepalive_timeout_ms", 1000 * CUT_SECONDS),
]
"""A server that was started anew is found within a second; gRPC's own pauses grow to two minutes. min_reconnect_backoff_ms is no pause: gRPC gives an
attempt to connect as long, and a server that is far away or busy needs more than the other two say. By keepalive_timeout_ms, which counts only where
keepalive_time_ms is given, the system ends a connection whose network lets nothing through for so long (TCP_USER_TIMEOUT): without an end TCP tries
again after pauses of up to two minutes, though the network be mended. Servers hang up on clients that ask for signs of life more than once in five
minutes."""
ANSWER_SECONDS = 600.0
"""The same for an answer that comes whole (`stream` false): nothing tells that it is on its way."""
LATE_SECONDS = 0.5
"""A time limit that is told this late tells of a client that was busy, or stood still, and not of a silent server."""
CANCEL_SECONDS = 0.5
"""How long the answer to a cancellation is waited for where the server may be dead."""

_TYPES: dict[str, str] = {
    "text_input": "BYTES", "messages": "BYTES", "input_ids": "INT32",
    "max_tokens": "INT32", "min_tokens": "INT32", "temperature": "FP32", "top_p": "FP32", "top_k": "INT32", "min_p": "FP32",
    "repetition_penalty": "FP32", "presence_penalty": "FP32", "frequency_penalty": "FP32", "logit_bias": "BYTES",
    "seed": "INT64", "stop": "BYTES", "stop_token_ids": "INT32", "bad_words": "BYTES", "include_stop": "BOOL",
    "ignore_eos": "BOOL", "skip_special_tokens": "BOOL", "logprobs": "INT32",
    "echo": "BOOL", "n": "INT32", "priority": "INT32", "timeout_ms": "INT64",
    "speculative": "BYTES", "structured_outputs": "BYTES", "tools": "BYTES", "tool_choice": "BYTES",
    "parallel_tool_calls": "BOOL", "chat_template_kwargs": "BYTES", "truncate_prompt_tokens": "INT32", "truncation": "BYTES",
    "stream": "BOOL", "cancel": "BYTES", "describe": "BOOL", "suffix_corpus": "BYTES",
}  # fmt: skip
PARAMETERS = tuple(_TYPES)
_TOKENIZER_TYPES = {"add_special_tokens": "BOOL"}
"""Inputs of the model `tokenizer` alone."""
_NUMPY = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "BOOL": np.bool_}
_NUMBERS = {"INT32": ("iu", "an integer"), "INT64": ("iu", "an integer"), "FP32": ("iuf", "a number"), "BOOL": ("b", "true or false")}
"""What a parameter's values have to be: NumPy's kinds, and in words."""
_FORMATS = {"INT32": "i", "INT64": "q", "FP32": "f", "BOOL": "?"}
_NO_TEXT = b"\0\0\0\0"
"""One empty string in the protocol's raw form."""


class GenerateError(RuntimeError):
    """The server refused or lost a request; the message is the server's.

    code: INVALID_ARG (the request's fault), UNAVAILABLE (full, down or not reached), TIMEOUT (it went silent) or INTERNAL.
    """

    def __init__(self, message: str, code: str = "INTERNAL") -> None:
        super().__init__(message)
        self.code = code


def check_unicode(name: str, text: str) -> bytes:
    """The text in UTF-8. Raises GenerateError for half a surrogate pair, which UTF-8 has no form for."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise GenerateError(f"{name} is not valid Unicode: {error.object[error.start]!r} at {error.start}", "INVALID_ARG") from None


def check_numbers(name: str, value: Any) -> None:
    """Raises GenerateError for numbers that the input's tensor would hold as others, as Triton's own reading of JSON does: 2**32 + 5 becomes 5."""
    if (kind := _TYPES[name]) == "BYTES":
        return
    kinds, words = _NUMBERS[kind]
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        array = np.array(None)
    if kind.startswith("INT"):
        end = 2 ** (int(kind.removeprefix("INT")) - 1)
        words = f"{words} from {-end} to {end - 1}"
        is_right = array.dtype.kind in kinds and array.min(initial=0) >= -end and array.max(initial=0) < end
    else:
        is_right = array.dtype.kind in kinds
        if is_right and kind == "FP32" and np.abs(array[np.isfinite(array)]).max(initial=0) > np.finfo(np.float32).max:
            words, is_right = f"{words} that float32 holds, up to {np.finfo(np.float32).max:.4g}", False
    if array.size and not is_right:
        raise GenerateError(f"{name} must be {words}, got {value!r:.80}", "INVALID_ARG")


_STATUS_CODES = {"StatusCode.INVALID_ARGUMENT": "INVALID_ARG", "StatusCode.UNAVAILABLE": "UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED": "TIMEOUT"}
"""gRPC's own status: of a call that is no stream, and of a stream whose connection is lost."""
_LOST = re.compile(r"Stub process '[^']*' is not healthy|^Stream removed|unknown model: '[^']*' has no available versions")
"""What Triton says of a model whose process died, and of one that is unloaded (a server that ends, or starts its model again); and gRPC, whose status
is UNKNOWN then, of a connection that was reset."""
_UNKNOWN = re.compile(r"unexpected inference input '[^']*' for model '[^']*'$")
"""What Triton says of an input that a model's configuration does not have; on a stream without a status."""


def read_error(request_id: str, error: object) -> GenerateError:
    """The error that a server's message tells, with the request's id: our models' begin with a code in brackets."""
    message, status = (str(error.message()), error.status()) if isinstance(error, InferenceServerException) else (str(error), None)
    match = re.match(r"(in ensemble '[^']*', )?\[(INVALID_ARG|UNAVAILABLE|INTERNAL)\] ", message)
    if match is None:
        code = "UNAVAILABLE" if _LOST.search(message) else _STATUS_CODES.get(status or "", "INTERNAL")
        if _UNKNOWN.search(message):  # the request's fault: the server may be older than the client
            message, code = f"{message}, which the server's version does not have", "INVALID_ARG"
        return GenerateError(name_request(request_id, message), code)
    return GenerateError(name_request(request_id, (match[1] or "") + message[match.end() :]), match[2])


@dataclass(slots=True)
class Chunk:
    """One response: what one step added to one completion. An empty one only says that the server lives."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """Who proposed each token: target, or the drafter whose proposal was accepted."""
    finish_reason: str | None = None
    logprobs: list[dict[str, Any]] | None = None
    """Of the last of token_ids: all, or with echo all but the prompt's first."""
    usage: dict[str, int] | None = None
    """In a completion's first chunk, and whole in its last one. With `begins_thinking` where the prompt ends with `<think>`."""
    speculation: dict[str, Any] | None = None
    index: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.token_ids or self.text or self.finish_reason)


@dataclass(slots=True)
class Completion(Chunk):
    """A whole completion: its chunks in one."""

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.sources += chunk.sources
        if chunk.logprobs is not None:
            self.logprobs = (self.logprobs or []) + chunk.logprobs
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.usage = chunk.usage or self.usage
        self.speculation = chunk.speculation or self.speculation


def collect(chunks: Iterable[Chunk]) -> list[Completion]:
    """The completions of one request, by index."""
    found: dict[int, Completion] = {}
    for chunk in chunks:
        found.setdefault(chunk.index, Completion(index=chunk.index)).add(chunk)
    return [found[i] for i in sorted(found)]


def prompt_values(prompt: str | Sequence[int] | None, parameters: dict[str, Any]) -> dict[str, Any]:
    """All inputs by name. Raises TypeError for an unknown parameter."""
    values = {k: v for k, v in parameters.items() if v is not None}
    if unknown := set(values) - set(_TYPES):
        raise TypeError(f"unknown parameters {sorted(unknown)}; known: {', '.join(PARAMETERS)}")
    if prompt is not None:
        values["text_input" if isinstance(prompt, str) else "input_ids"] = prompt
    for name, value in values.items():
        check_numbers(name, value)
    return write_json(values)


_JSON = ("logit_bias", "speculative", "structured_outputs", "tools", "tool_choice", "messages", "chat_template_kwargs", "suffix_corpus")


def write_json(values: dict[str, Any]) -> dict[str, Any]:
    """Inputs by name, those that the server takes as JSON written, unless they are already. Raises what json.dumps does."""
    # Characters as they are: half a surrogate pair is found before it is sent, as in any text.
    return {name: json.dumps(v, ensure_ascii=False) if name in _JSON and not isinstance(v, str) else v for name, v in values.items()}


def name_request(request_id: str, message: object) -> str:
    """An error's message, with the request's id where it has none."""
    return str(message) if request_id in str(message) else f"request {request_id!r}: {message}"


def say_silent(request_id: str, limit: float, silence: float | None = None, sending: float = 0.0) -> str:
    """The message for a request whose server is taken for dead. silence: seconds, where other requests had something meanwhile; sending: as many more
    than the limit that the request had to get there."""
    more = f", and {sending:.1f} s for the request to get there" if sending >= LATE_SECONDS else ""
    if silence is None or silence < limit + sending + LATE_SECONDS:
        return f"request {request_id!r}: the server sent nothing for {limit:g} s, the limit (inactivity_timeout){more}"
    return f"request {request_id!r}: the server sent it nothing for {silence:.0f} s, though others something (inactivity_timeout {limit:g} s)"


def silence_limit(values: dict[str, Any], inactivity_timeout: float) -> float:
    """Seconds without a response after which a request's server is taken for dead."""
    return inactivity_timeout if values.get("stream", True) else max(ANSWER_SECONDS, inactivity_timeout)


def count_bytes(values: Mapping[str, Any]) -> int:
    """Of a gRPC request with these inputs, about."""
    texts = (v if isinstance(v, bytes) else v.encode("utf-8", "replace") for v in values.values() if isinstance(v, (str, bytes)))
    lists = (v for v in values.values() if isinstance(v, (list, tuple, np.ndarray)))
    return sum(map(len, texts)) + sum(4 * len(v) for v in lists)


def make_inputs(values: dict[str, Any]) -> list[triton_grpc.InferInput]:
    """Tensors for the gRPC request. Raises GenerateError for text with half a surrogate pair."""
    inputs = []
    for name, value in values.items():
        kind = _TYPES.get(name) or _TOKENIZER_TYPES[name]
        items = [value] if isinstance(value, (str, bytes)) or np.isscalar(value) else list(value)
        if kind == "BYTES":
            array = np.array([check_unicode(name, v) if isinstance(v, str) else v for v in items], dtype=object)
        else:
            array = np.array(items, dtype=_NUMPY[kind])
        tensor = triton_grpc.InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def read_result(result: triton_grpc.InferResult) -> tuple[list[Chunk], bool]:
    """A gRPC response as chunks, one for each completion that it tells of, and whether it is the request's last."""
    response = result.get_response()
    final = response.parameters.get("triton_final_response")
    is_last = final is not None and final.bool_param
    # Straight from the message: as_numpy searches all outputs for every name, and this is done for every step of every request.
    values = {}
    for output, raw in zip(response.outputs, response.raw_output_contents):
        kind = output.datatype
        if raw != _NO_TEXT or kind != "BYTES":  # half of what comes is empty
            values[output.name] = _decode(kind, raw)
    return _chunks(values), is_last


def _decode(datatype: str, raw: bytes) -> list[Any]:
    """The elements of a tensor in the protocol's raw form; BYTES elements come behind their lengths."""
    if datatype != "BYTES":  # not through NumPy: most have one element, and an array costs more than that
        view: Any = memoryview(raw)
        return view.cast(_FORMATS[datatype]).tolist()
    texts, at = [], 0
    while at < len(raw):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        texts.append(raw[at + 4 : end].decode())
        at = end
    return texts


def read_event(event: dict[str, Any]) -> list[Chunk]:
    """An event of generate_stream, or the answer of generate, as chunks. The server writes lists of one as scalars."""
    return _chunks({k: v if isinstance(v, list) else [v] for k, v in event.items() if k != "model_name"})


def _chunks(values: dict[str, list[Any]]) -> list[Chunk]:
    def parsed(name: str) -> Any:
        texts = values.get(name)
        return json.loads(texts[0]) if texts and texts[0] else None

    chunk = Chunk(
        text="".join(values.get("text_output", [])),
        token_ids=values.get("output_ids", []),
        sources=values.get("token_sources", []),
        finish_reason=(values.get("finish_reason") or [""])[0] or None,
        logprobs=parsed("logprobs") or parsed("output_logprobs"),  # the ensemble's name
        usage=parsed("usage"),
        speculation=parsed("speculation"),
        index=(values.get("index") or [0])[0],
    )
    return [chunk] if len(values.get("index", ())) < 2 else _split(chunk, values)


def _split(whole: Chunk, values: dict[str, list[Any]]) -> list[Chunk]:
    """All n completions of an answer that comes whole, each with what of it is its own."""
    chunks: list[Chunk] = []
    at, count = 0, len(values["index"])
    nothing: list[Any] = [None] * count
    logprobs: Any = whole.logprobs or nothing
    speculation: Any = whole.speculation or nothing
    for place, (index, length) in enumerate(zip(values["index"], values["num_tokens"], strict=True)):
        chunk = Chunk(
            text=values["text_output"][place],
            token_ids=whole.token_ids[at : at + length],
            sources=whole.sources[at : at + length],
            finish_reason=values["finish_reason"][place] or None,
            logprobs=logprobs[place],
            speculation=speculation[place],
            index=index,
        )
        if whole.usage is not None:  # the server gives sums
            chunk.usage = {**whole.usage, "completion_tokens": sum(source != "prompt" for source in chunk.sources)}
            if chunks:
                chunk.usage["cached_tokens"] = chunk.usage["reasoning_tokens"] = 0
        chunks.append(chunk)
        at += length
    return chunks
