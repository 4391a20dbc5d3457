"""Requests to OpenAI's /v1/responses, as chats. Nothing is stored, so there is nothing to go on from: the whole conversation comes with each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Discriminator, Field, PrivateAttr, Tag, ValidationError, field_validator, model_validator

from client.gateway.chats import Effort, Keys, RefusalPart, Text
from client.gateway.limits import MAX_MESSAGES, MAX_TOOLS, at_most, check_parts
from client.gateway.no_ops import drop_no_ops
from client.gateway.openai import Biases, ChatRequest, Int32, Int64, Stop
from client.gateway.strict import Strict
from client.gateway.structured import JsonSchema, ObjectFormat, SchemaFormat, TextFormat

LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
]  # fmt: skip
"""OpenAI's names. What was thought is in the answer as it is, encrypted nowhere; what the others are of is in no answer."""
_AS_CHATS = (
    "temperature", "top_p", "stream", "stop", "ignore_eos", "seed", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "priority", "timeout_ms", "chat_template_kwargs", "speculative", "truncation",
)  # fmt: skip
"""What chats call alike."""


class Reasoning(Strict):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Of no effect: what was thought is in the answer whole."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    """Which of the former thoughts a template writes is its own to say."""
    mode: Literal["standard"] | None = None


class ContentPart(Strict):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None
    """Of no effect, as in chats."""


Parts = Annotated[list[Annotated[ContentPart | RefusalPart, Field(discriminator="type")]], Field(max_length=MAX_MESSAGES, fail_fast=True)]
Content = str | Parts


def join(content: str | Sequence[ContentPart | RefusalPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class MessageItem(Strict):
    """A message of a conversation, a former answer's among them."""

    type: Literal["message"] = "message"
    role: Text
    content: Content
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Strict):
    """A call that a former answer made."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: str
    id: str | None = None
    status: str | None = None

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, value: str) -> str:
        """Here, where it is known which item they are of."""
        try:
            json.loads(value or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"arguments is not valid JSON: {error}") from None
        return value


class OutputItem(Strict):
    """What a call brought."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content
    id: str | None = None
    status: str | None = None


class ReasoningItem(Strict):
    """What was thought before a former answer."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[ContentPart], Field(fail_fast=True)] = []
    content: Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    encrypted_content: str | None = None
    status: str | None = None


Item = Annotated[MessageItem | CallItem | OutputItem | ReasoningItem, Field(discriminator="type")]


class FunctionTool(Strict):
    """With `strict` what of the schema cannot be enforced is an error; left out it means false."""

    type: Literal["function"]
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    # Of no effect at these values:
    defer_loading: Literal[False] | None = Field(default=None, exclude=True)
    allowed_callers: Annotated[list[Literal["direct"]], Field(fail_fast=True)] | None = Field(default=None, exclude=True)
    output_schema: Any = Field(default=None, exclude=True)
    """Of what the client's function gives back."""


class NamedFunction(Strict):
    type: Literal["function"]
    name: Text

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}


class AllowedTools(Strict):
    """Which of the tools may be called, where the prompt has more."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, fail_fast=True), at_most(MAX_TOOLS, "functions")]

    def as_chat(self) -> dict[str, Any]:
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": [tool.as_chat() for tool in self.tools]}}


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedFunction, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(
        lambda value: "word" if not isinstance(value, dict) else value.get("type"),
        custom_error_type="tool_choice",
        custom_error_message="Input should be 'none', 'auto', 'required', or an object of type function or allowed_tools",
    ),
]


class NamedSchema(JsonSchema):
    """As /v1/chat/completions has it, but in one object."""

    type: Literal["json_schema"]


class TextConfig(Strict):
    format: Annotated[TextFormat | ObjectFormat | NamedSchema, Field(discriminator="type")] = TextFormat(type="text")
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(Strict):
    include_obfuscation: bool = False
    """Accepted; there is none."""


class ResponsesRequest(Strict):
    """POST /v1/responses."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    model: str | None = None
    max_output_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextConfig = TextConfig()
    tools: Annotated[list[FunctionTool], Field(fail_fast=True), at_most(MAX_TOOLS, "functions")] = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    stream: bool = False
    # Of no effect on the answer:
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    user: str | None = None
    stream_options: ResponseStreamOptions = ResponseStreamOptions()
    include: Annotated[list[Includable], Field(fail_fast=True)] = []
    top_logprobs: Int32 | None = None
    # vLLM's, and what decode has besides:
    stop: Stop | None = None
    ignore_eos: bool | None = None
    seed: Int64 | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases | None = None
    priority: Int32 | None = None
    timeout_ms: Int64 | None = None
    chat_template_kwargs: Keys | None = None
    speculative: Keys | None = None
    _chat: ChatRequest = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _drop_no_ops(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        found = drop_no_ops(values, cls.model_fields)
        if isinstance(items := found.get("input"), list) and len(items) <= MAX_MESSAGES:  # messages may leave out that they are
            found["input"] = [{**item, "type": "message"} if isinstance(item, dict) and item.get("type") is None else item for item in items]
        return found

    @field_validator("input", mode="before")
    @classmethod
    def _check_items(cls, value: Any) -> Any:
        kinds = (item.get("type") if isinstance(item, dict) else None for item in value[:MAX_MESSAGES]) if isinstance(value, list) else ()
        if (place := next((i for i, kind in enumerate(kinds) if kind == "item_reference"), None)) is not None:
            raise ValueError(f"item {place} is an item_reference, and nothing is stored: send the item itself, as clients do where store is false")
        return check_parts(value)

    @model_validator(mode="after")
    def _check_chat(self) -> ResponsesRequest:
        if self.top_logprobs and LOGPROBS not in self.include:
            raise ValueError(f"top_logprobs is {self.top_logprobs}, and include does not have {LOGPROBS!r}")
        for key in ("instructions", "metadata", "text", "tools"):
            try:
                orjson.dumps(getattr(self, key), default=lambda value: value.model_dump())
            except TypeError as error:  # half a surrogate pair, an integer beyond 64 bits, depth
                raise ValueError(f"{key} cannot be given back with the answer: {error}") from None
        self._chat = self._make_chat()
        return self

    def as_chat(self) -> ChatRequest:
        """The same as a chat; the instructions come first, as the system's message."""
        return self._chat

    def _make_chat(self) -> ChatRequest:
        """Raises ValueError."""
        values: dict[str, Any] = {"messages": self._messages()}
        if not values["messages"]:
            raise ValueError("input has no message: reasoning alone is none")
        if self.tools:
            values["tools"] = [{"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)} for tool in self.tools]
            values["parallel_tool_calls"] = self.parallel_tool_calls
        choice = self.tool_choice
        if self.tools or choice not in ("none", "auto"):
            values["tool_choice"] = choice if isinstance(choice, str) else choice.as_chat()
        if LOGPROBS in self.include:
            values |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        own = self.text.format
        if isinstance(own, NamedSchema):
            if own.schema_ is None:
                raise ValueError("text.format.schema is missing")
            values["response_format"] = SchemaFormat.model_construct(type="json_schema", json_schema=own)
        elif isinstance(own, ObjectFormat):
            values["response_format"] = own
        try:
            return ChatRequest(
                max_completion_tokens=self.max_output_tokens,
                reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
                verbosity=self.text.verbosity,
                **{name: getattr(self, name) for name in _AS_CHATS},
                **values,
            )
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None

    def server_names(self) -> dict[str, str]:
        """What of it decode calls otherwise."""
        form = "text.format"
        names = {"structured_outputs": form, "structured_outputs.json": f"{form}.schema", "structured_outputs.json_object": form}
        return {**names, "max_tokens": "max_output_tokens", "messages": "input", "tool_choice.allowed_tools": "tool_choice"}

    def _messages(self) -> list[dict[str, Any]]:
        """What an answer consists of, thoughts, text and calls, is one message of the assistant's."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        answer: dict[str, Any] = {}
        for item in [*self.input, None]:
            if isinstance(item, ReasoningItem):
                if thought := join(item.content or item.summary):
                    answer["reasoning_content"] = answer.get("reasoning_content", "") + thought
                continue
            if isinstance(item, CallItem):
                call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
                answer.setdefault("tool_calls", []).append(call)
                continue
            if isinstance(item, MessageItem) and item.role == "assistant" and not answer.keys() & {"content", "tool_calls"}:
                answer["content"] = join(item.content)
                continue
            if answer.keys() & {"content", "tool_calls"}:
                messages.append({"role": "assistant", "content": None, **answer})
            answer = {}
            if isinstance(item, OutputItem):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": join(item.output)})
            elif isinstance(item, MessageItem) and item.role == "assistant":
                answer["content"] = join(item.content)
            elif item is not None:
                messages.append({"role": item.role, "content": join(item.content)})
        return messages
