"""OpenAI's /v1/responses: text in, text out, whole or as its events. Nothing is stored, so there is nothing to go on from."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, model_validator

from client.gateway.answers import Answer
from client.gateway.metrics import Metrics
from client.gateway.no_ops import ANY, one_of
from client.gateway.openai import ChatRequest, Int32, Message, Strict, Text
from client.gateway.upstream import Servers

_NO_OPS = {
    "background": one_of(False), "include": one_of([]), "max_tool_calls": ANY, "parallel_tool_calls": ANY, "prompt_cache_key": ANY,
    "prompt_cache_retention": ANY, "safety_identifier": ANY, "service_tier": one_of("auto", "default"), "store": ANY,
    "stream_options": ANY, "text": one_of({}, {"format": {"type": "text"}}), "tool_choice": one_of("auto", "none"), "tools": one_of([]),
    "top_logprobs": one_of(0), "truncation": one_of("disabled"), "user": ANY, "reasoning": one_of({}),
}  # fmt: skip
"""What asks for nothing, by name; other values are errors that name it."""


class ContentPart(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputItem(Strict):
    """A message of a conversation, a former answer's among them."""

    type: Literal["message"] = "message"
    role: Text
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ResponsesRequest(Strict):
    """POST /v1/responses."""

    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    model: str | None = None
    max_output_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    metadata: dict[str, Any] | None = None
    speculative: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_no_ops(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if k in cls.model_fields or k not in _NO_OPS or not _NO_OPS[k](v)}

    def as_chat(self) -> ChatRequest:
        """The same as a chat; the instructions come first, as the system's message."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for item in self.input:
                text = item.content if isinstance(item.content, str) else "".join(part.text for part in item.content)
                messages.append({"role": "system" if item.role == "developer" else item.role, "content": text})
        return ChatRequest(
            messages=[Message(**m) for m in messages],
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            speculative=self.speculative,
        )


class ResponsesAnswer(Answer):
    """One message of one text, as a response."""

    _closing = b""

    def __init__(self, upstream: Servers, metrics: Metrics, model: str, request_id: str, request: ResponsesRequest) -> None:
        super().__init__(upstream, metrics, model, request_id, request.as_chat())
        self._asked = request
        self._message_id = f"msg_{request_id}"
        self._text = ""
        self._number = 0
        self._is_open = False
        self._finish_reason: str | None = None

    # -- objects ------------------------------------------------------------------------------------------------------

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _message(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part()]
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str) -> dict[str, Any]:
        asked, is_over = self._asked, status != "in_progress"
        usage = self._usage
        body: dict[str, Any] = {
            "id": f"resp_{self._request_id}",
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "model": self._head["model"],
            "output": [self._message(status)] if is_over and status != "failed" else [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        if is_over and status != "failed":
            body["completed_at"] = int(time.time())
            body["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": usage["cached_tokens"]},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
            }
            body |= self._metrics_body()
        return body

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    # -- what Answer asks for -----------------------------------------------------------------------------------------

    def _whole_body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        self._text = choices[0]["message"]["content"] or ""
        self._finish_reason = choices[0]["finish_reason"]
        return self._response(self._status)

    def _event(self, kind: str, **values: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._number, **values})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _first_events(self) -> bytes:
        self._is_open = True
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return b"".join(
            [
                self._event("response.created", response=self._response("in_progress")),
                self._event("response.in_progress", response=self._response("in_progress")),
                self._event("response.output_item.added", output_index=0, item=self._message("in_progress")),
                self._event("response.content_part.added", **self._place(), part=empty),
            ]
        )

    def _part_event(self, part: dict[str, Any]) -> bytes:
        text = part["delta"].get("content") or ""
        self._text += text
        self._finish_reason = part["finish_reason"] or self._finish_reason
        data = b"" if self._is_open else self._first_events()
        return data + self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[]) if text else data

    def _last_events(self) -> bytes:
        data = b"" if self._is_open else self._first_events()
        status = self._status
        return data + b"".join(
            [
                self._event("response.output_text.done", **self._place(), text=self._text, logprobs=[]),
                self._event("response.content_part.done", **self._place(), part=self._part()),
                self._event("response.output_item.done", output_index=0, item=self._message(status)),
                self._event(f"response.{status}", response=self._response(status)),
            ]
        )

    def _error_event(self, code: str | None, message: str, body: dict[str, Any]) -> bytes:
        failed = {**self._response("failed"), "error": {"code": "server_error", "message": message}}
        return self._event("response.failed", response=failed)
