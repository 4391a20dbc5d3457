"""Triton tensors -> what the engine takes, and deltas -> Triton tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from backend.core import MAX_CHARACTERS_PER_TOKEN, MAX_TIMEOUT
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
INPUTS = (
    *PROMPTS, *SAMPLING_SCALARS, *SAMPLING_LISTS, "logit_bias", "structured_outputs", "tools", "tool_choice", "parallel_tool_calls",
    "truncate_prompt_tokens", "truncation", "chat_template_kwargs", "speculative", "stream", "priority", "timeout_ms", "cancel",
    "suffix_corpus", "describe",
)  # fmt: skip
INPUTS_ELSEWHERE = {
    "sampling_parameters": "an input for each parameter", "exclude_input_in_output": "echo, which repeats the prompt", "stop_words": "stop",
    "min_length": "min_tokens", "random_seed": "seed", "return_log_probs": "logprobs", "num_return_sequences": "n",
    "beam_width": "no input: there is no beam search", "return_finish_reason": "no input: finish_reason always comes",
    "return_num_output_tokens": "no input: usage always comes", "embedding_bias_words": "logit_bias", "embedding_bias_weights": "logit_bias",
    "guided_decoding_guide_type": "structured_outputs", "guided_decoding_guide": "structured_outputs", "draft_input_ids": "prediction in speculative",
    "runtime_top_k": "top_k", "runtime_top_p": "top_p", "max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "prompt": "text_input",
}  # fmt: skip
"""What vLLM's and TensorRT-LLM's models in Triton call inputs: what they are here."""
TRITONS_OWN = re.compile("id|triton_.*")
"""Parameters that are the server's: the `id` of its generate extension, which it passes on as well, and names that it keeps for itself."""
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


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").removesuffix("s")


_BY_LETTERS = {_letters(name): name for name in INPUTS}
"""Only what is all but one of them is taken for it: forwarded headers have any names."""


def check_parameters(request: Any) -> None:
    """Triton makes parameters of the request of what `/generate` is sent and no input is called; a gRPC client may say some, too, and servers
    forward headers so. Nobody reads them.

    Raises RequestError for one that is meant to be an input, with what it is here: an answer other than the one that was asked for would be the only
    sign. Empty texts say nothing."""
    try:
        text = request.parameters()
    except UnicodeDecodeError as error:
        raise RequestError(f"the request's parameters are not valid UTF-8: byte {error.object[error.start]:#04x} at {error.start}") from None
    if not text:
        return
    for name, value in _json_object("the request's parameters", text).items():
        if value == "" or TRITONS_OWN.fullmatch(name):
            continue
        if name in INPUTS:
            raise RequestError(f"{name} came as a parameter of the request: it is an input of the model, a tensor")
        if name in INPUTS_ELSEWHERE:
            raise RequestError(f"unknown input {name!r}; here it is {INPUTS_ELSEWHERE[name]}")
        if likely := _BY_LETTERS.get(_letters(name)):
            raise RequestError(f'unknown input {name!r}; did you mean "{likely}"?')


def read_request(request: Any, limits: InputLimits, defaults: dict[str, Any]) -> GenerateCall | CancelCall | CorpusCall | DescribeCall:
    """Copies and parses one Triton request. defaults: sampling parameters of those who say nothing.

    Raises RequestError or ValueError naming the input, the value seen and the rule.
    """
    check_parameters(request)
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
    # One empty text says nothing, as in the other inputs: clients of TensorRT-LLM's models send it for none.
    arguments |= {name: tuple(values[name]) for name in SAMPLING_LISTS if name in values and list(values[name]) != [""]}
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
