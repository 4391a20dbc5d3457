"""The `tokenizer` model: text_input or messages -> input_ids, and back: input_ids -> text_output and tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from backend.adapters.request_io import MAX_UTF8_BYTES, check_parameters, read_id, read_template_variables, read_text, read_tools
from backend.adapters.stub import (
    check_interpreter,
    error_code,
    log_to_server,
    read_parameters,
    refuse,
    resolve_model,
)
from backend.core import MAX_CHARACTERS_PER_TOKEN
from backend.engine_process.calls import read_messages
from backend.errors import ConfigError, ModelError, RequestError
from backend.intake import check_unicode
from backend.model_files import read_config
from backend.models.rope_spec import read_context_len
from backend.models.values import Values
from backend.own_process import end_with_parent, has_begun
from backend.text import Tokenizer
from backend.tools import find_format

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 8_000_000
"""Of a model whose configuration does not say how long its context is."""
MAX_TOKENS = 1_000_000
PARAMETERS = ("model",)
INPUTS = ("text_input", "messages", "input_ids")
BESIDE = {"tools": "messages", "chat_template_kwargs": "messages", "add_special_tokens": "text_input"}
"""Inputs that say more of another one: of which."""


def _max_characters(folder: Path) -> int:
    """As many for each token of the context as the decode model takes: tokenizing more would hold up everybody else."""
    try:
        return read_context_len(Values(read_config(folder), f"{folder}/config.json")) * MAX_CHARACTERS_PER_TOKEN
    except ModelError:  # which the decode model reports
        return MAX_CHARACTERS


class TritonPythonModel:
    """One response per request: the text's token ids, with special tokens unless add_special_tokens is false; or the tokens' text, whole and each
    one's bytes."""

    def initialize(self, args: dict[str, str]) -> None:
        check_interpreter()
        end_with_parent()
        log_to_server()
        values = read_parameters(args)
        if unknown := set(values) - set(PARAMETERS):
            raise ConfigError(f"tokenizer: unknown parameters {sorted(unknown)}; known: {', '.join(PARAMETERS)}")
        folder = resolve_model(values, args)
        self._tokenizer = Tokenizer(folder)
        self._special_ids = frozenset(self._tokenizer.special_ids.values())
        self._max_characters = _max_characters(Path(folder))
        has_begun()

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        name = ""
        try:
            name = read_id(request)
            check_parameters(request)
            values = {tensor.name(): tensor.as_numpy().reshape(-1) for tensor in request.inputs()}
            beside = {key: values.pop(key) for key in BESIDE if key in values}
            if len(values) != 1:
                raise RequestError(f"give one of {', '.join(INPUTS)}; got {' and '.join(values) or 'none'}")
            if lone := next((key for key in beside if BESIDE[key] not in values), None):
                raise RequestError(f"{lone} is for {BESIDE[lone]}; got {next(iter(values))}")
            if "input_ids" in values:
                return pb_utils.InferenceResponse(self._decode(values["input_ids"]))
            ((name_of_input, texts),) = values.items()
            text = self._read_text(name_of_input, texts)
            if name_of_input == "messages":
                return pb_utils.InferenceResponse(self._encode_chat(text, beside))
            return pb_utils.InferenceResponse(self._encode(text, bool(beside.get("add_special_tokens", [True])[0])))
        except Exception as error:  # whatever it is, it belongs to this request only
            if error_code(error) == "INTERNAL":
                logger.error("request %r failed", name, exc_info=error)
            return refuse(name, error)

    def _read_text(self, name: str, values: np.ndarray) -> str:
        if values.size != 1:
            raise RequestError(f"{name} has {values.size} texts; give one")
        value = values[0]
        if len(value) > MAX_UTF8_BYTES * self._max_characters:
            raise RequestError(f"{name} has {len(value)} bytes; the limit is {self._max_characters} characters")
        text = read_text(name, value)
        if not text:
            raise RequestError("the prompt is empty")
        if len(text) > self._max_characters:
            raise RequestError(f"{name} has {len(text)} characters; the limit is {self._max_characters}")
        return text

    def _encode(self, text: str, add_special_tokens: bool) -> list[Any]:
        return [pb_utils.Tensor("input_ids", np.array(self._tokenizer.encode(text, add_special_tokens), dtype=np.int32))]

    def _encode_chat(self, text: str, beside: dict[str, np.ndarray]) -> list[Any]:
        """As the decode model does it: the template writes the special tokens itself."""
        texts = {name: self._read_text(name, values) for name, values in beside.items()}
        own = read_template_variables(texts["chat_template_kwargs"]) if "chat_template_kwargs" in texts else None
        variables: dict[str, Any] = {}
        if "tools" in texts:
            find_format(self._tokenizer.tool_template)  # which says whether it takes any
            variables["tools"] = list(read_tools(texts["tools"]).tools)
        prompt = self._tokenizer.render_chat(read_messages(text), self._max_characters, own, **variables)
        check_unicode(prompt, "the rendered chat")
        return [pb_utils.Tensor("input_ids", np.array(self._tokenizer.encode(prompt, add_special_tokens=False), dtype=np.int32))]

    def _decode(self, values: np.ndarray) -> list[Any]:
        if values.size > MAX_TOKENS:
            raise RequestError(f"input_ids has {values.size} tokens; the limit is {MAX_TOKENS}")
        token_ids = values.tolist()
        tokens = [self._tokenizer.token_bytes(i) for i in token_ids]
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return [
            pb_utils.Tensor("text_output", np.array([text.encode()], dtype=object)),
            pb_utils.Tensor("tokens", np.array(tokens, dtype=object)),
            pb_utils.Tensor("is_special", np.array([i in self._special_ids for i in token_ids], dtype=bool)),
        ]
