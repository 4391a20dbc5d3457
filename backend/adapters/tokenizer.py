"""The `tokenizer` model: text_input -> input_ids, and back: input_ids -> text_output and tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from backend.adapters.stub import check_interpreter, end_with_server, log_to_server, read_parameters, resolve_model
from backend.errors import ConfigError, RequestError
from backend.text import Tokenizer

MAX_CHARACTERS = 8_000_000
PARAMETERS = ("model",)
INPUTS = ("text_input", "input_ids")


class TritonPythonModel:
    """One response per request: the text's token ids, special tokens included; or the tokens' text, whole and each one's bytes."""

    def initialize(self, args: dict[str, str]) -> None:
        check_interpreter()
        end_with_server()
        log_to_server()
        values = read_parameters(args)
        if unknown := set(values) - set(PARAMETERS):
            raise ConfigError(f"tokenizer: unknown parameters {sorted(unknown)}; known: {', '.join(PARAMETERS)}")
        self._tokenizer = Tokenizer(resolve_model(values, args))

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            values = {tensor.name(): tensor.as_numpy().reshape(-1) for tensor in request.inputs()}
            if len(values) != 1:
                raise RequestError(f"give one of {', '.join(INPUTS)}; got {' and '.join(values) or 'none'}")
            outputs = self._encode(values["text_input"][0]) if "text_input" in values else self._decode(values["input_ids"].tolist())
            return pb_utils.InferenceResponse(outputs)
        except Exception as error:  # whatever it is, it belongs to this request only
            code = pb_utils.TritonError.INVALID_ARG if isinstance(error, ValueError) else pb_utils.TritonError.INTERNAL
            message = f"request {request.request_id()!r:.100}: {error}"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))

    def _encode(self, value: Any) -> list[Any]:
        try:
            text = value if isinstance(value, str) else bytes(value).decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"text_input is not valid UTF-8 at byte {error.start}") from None
        if not text:
            raise RequestError("the prompt is empty")
        if len(text) > MAX_CHARACTERS:
            raise RequestError(f"text_input has {len(text)} characters; the limit is {MAX_CHARACTERS}")
        return [pb_utils.Tensor("input_ids", np.array(self._tokenizer.encode(text), dtype=np.int32))]

    def _decode(self, token_ids: list[int]) -> list[Any]:
        tokens = [self._tokenizer.token_bytes(i) for i in token_ids]
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return [
            pb_utils.Tensor("text_output", np.array([text.encode()], dtype=object)),
            pb_utils.Tensor("tokens", np.array(tokens, dtype=object)),
        ]
