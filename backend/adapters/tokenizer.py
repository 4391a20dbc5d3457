"""The `tokenizer` model: text_input -> input_ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from backend.adapters.stub import check_interpreter, end_with_server, log_to_server, read_parameters, resolve_model
from backend.errors import ConfigError, RequestError
from backend.text import Tokenizer

MAX_CHARACTERS = 8_000_000
PARAMETERS = ("model",)


class TritonPythonModel:
    """One response per request: the prompt's token ids, special tokens included."""

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
            value = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0]
            try:
                text = value if isinstance(value, str) else bytes(value).decode("utf-8")
            except UnicodeDecodeError as error:
                raise RequestError(f"text_input is not valid UTF-8 at byte {error.start}") from None
            if not text:
                raise RequestError("the prompt is empty")
            if len(text) > MAX_CHARACTERS:
                raise RequestError(f"text_input has {len(text)} characters; the limit is {MAX_CHARACTERS}")
            ids = np.array(self._tokenizer.encode(text), dtype=np.int32)
            return pb_utils.InferenceResponse([pb_utils.Tensor("input_ids", ids)])
        except Exception as error:  # whatever it is, it belongs to this request only
            code = pb_utils.TritonError.INVALID_ARG if isinstance(error, ValueError) else pb_utils.TritonError.INTERNAL
            message = f"request {request.request_id()!r:.100}: {error}"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
