"""Answers of /v1/responses: whole, or as their events."""

from __future__ import annotations

import time
from typing import Any

import orjson

from client.gateway.answers import Answer
from client.gateway.forms import ResponseForm
from client.gateway.metrics import Metrics
from client.gateway.response_items import Output
from client.gateway.responses import ResponsesRequest
from client.gateway.upstream import Servers
from client.messages import Chunk


class ResponsesAnswer(Answer):
    """A chat's answer, as a response."""

    _closing = b""

    def __init__(self, upstream: Servers, metrics: Metrics, model: str, request_id: str, request: ResponsesRequest) -> None:
        chat = request.as_chat()
        super().__init__(upstream, metrics, model, request_id, chat)
        self._asked, self._form = request, ResponseForm(chat)
        self._names |= request.server_names()
        self._output = Output(request_id, self._event)
        self._number = 0
        self._finish_reason: str | None = None

    def _response(self, status: str) -> dict[str, Any]:
        asked, usage = self._asked, self._usage
        is_done = status not in ("in_progress", "failed")
        body: dict[str, Any] = {
            "id": f"resp_{self._request_id}",
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "model": self._head["model"],
            "output": self._output.bodies(status) if is_done else [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "text": asked.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": asked.tool_choice if isinstance(asked.tool_choice, str) else asked.tool_choice.model_dump(),
            "tools": [{"parameters": None, "strict": None, **tool.model_dump(exclude_none=True)} for tool in asked.tools],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": asked.top_p,
            "truncation": asked.truncation,
            "usage": None,
        }
        if is_done:
            body["completed_at"] = int(time.time())
            body["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": usage["cached_tokens"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": usage["reasoning_tokens"]},
                "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
            }
            body |= self._metrics_body()
        return body

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    # -- what Answer asks for -----------------------------------------------------------------------------------------

    async def _whole_body(self, chunks: list[Chunk]) -> dict[str, Any]:
        """Piece by piece, as a stream: a chat's message does not say whether its text stood before its calls."""
        for chunk in chunks:
            self._add(await self._write(chunk.index, chunk, is_streamed=True))
        self._output.end(self._status)
        return self._response(self._status)

    def _event(self, kind: str, **values: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._number, **values})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _first_events(self) -> bytes:
        if self._number:
            return b""
        return b"".join(self._event(f"response.{kind}", response=self._response("in_progress")) for kind in ("created", "in_progress"))

    def _part_event(self, part: dict[str, Any]) -> bytes:
        return self._first_events() + self._add(part)

    def _add(self, part: dict[str, Any]) -> bytes:
        self._finish_reason = part["finish_reason"] or self._finish_reason
        return self._output.add(part["delta"], _logprobs_of(part))

    def _last_events(self) -> bytes:
        status = self._status
        return self._first_events() + self._output.end(status) + self._event(f"response.{status}", response=self._response(status))

    def _error_event(self, code: str | None, message: str, body: dict[str, Any]) -> bytes:
        failed = {**self._response("failed"), "error": {"code": "server_error", "message": message}}
        return self._first_events() + self._event("response.failed", response=failed)


def _logprobs_of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    return choice["logprobs"]["content"] if choice["logprobs"] else []
