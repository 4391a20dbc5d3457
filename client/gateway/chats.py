"""Conversations as OpenAI's clients write them, and what the tokenizer model is given of them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from client.gateway.limits import MAX_KEYS, MAX_MESSAGES, MAX_TOOLS, at_most, check_parts
from client.gateway.strict import Strict

Text = Annotated[str, Field(min_length=1)]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much is to be thought: a hint to templates that know `reasoning_effort`; none is `enable_thinking` false as well."""


def effort_variables(effort: Effort | None) -> dict[str, Any]:
    """What a template is given for it, by the names that templates of reasoning models use."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


class TextPart(Strict):
    type: Literal["text", "input_text", "output_text"]
    """The last two are those of responses."""
    text: str
    cache_control: Any = None
    """With the next: where a beginning ends that is to be kept. Of no effect: all beginnings are."""
    prompt_cache_breakpoint: Any = None


class RefusalPart(Strict):
    """Of a former answer of another server's: what it said in the place of one."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Parts = Annotated[list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]], Field(max_length=MAX_MESSAGES, fail_fast=True)]

_LOST = {"function_call": "send tool_calls, which have ids", "audio": "models of text alone are served"}
"""Of a message, what no template reads: the model would not know of it."""


class Message(BaseModel):
    """Other keys than these two are the chat template's business."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Text
    content: str | Parts | None = None
    """Null where the message calls tools, or refuses to answer (`refusal`); a server's answer, or a tool's, may also be nothing."""

    @field_validator("content", mode="before")
    @classmethod
    def _check_parts(cls, value: Any) -> Any:
        kinds = [part.get("type") for part in value if isinstance(part, dict)] if isinstance(value, list) else []
        if other := [kind for kind in kinds if isinstance(kind, str) and kind not in ("text", "input_text", "output_text", "refusal")]:
            raise ValueError(f"a part of type {other[0]!r:.40}: models of text alone are served")
        return value

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        extra = self.model_extra or {}
        if self.content is None and isinstance(extra.get("refusal"), str):
            self.content = extra["refusal"]
        if known := [name for name in _LOST if extra.get(name) is not None]:
            raise ValueError(f"{known[0]}: {_LOST[known[0]]}")
        if self.content is None and not extra.get("tool_calls") and self.role not in ("assistant", "tool"):
            raise ValueError(f"one of role {self.role!r:.40} has no content, and calls no tools")
        return self

    def flat(self) -> dict[str, Any]:
        """With its content as one text; null beside calls stays: some templates tell calls by it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        if self.content is None and (self.model_extra or {}).get("tool_calls"):
            return {"role": self.role, "content": None, **(self.model_extra or {})}
        return {"role": self.role, "content": content, **(self.model_extra or {})}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), BeforeValidator(check_parts)]
Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True), at_most(MAX_TOOLS, "functions")]
Keys = Annotated[dict[str, Any], at_most(MAX_KEYS, "keys")]
"""What is handed on as it is."""


class Templated(Strict):
    """What chats tell the template, beside messages and tools."""

    chat_template_kwargs: Keys | None = None
    """vLLM's: more variables, such as enable_thinking."""
    reasoning_effort: Effort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """How much is to be said: as `reasoning_effort` a hint, to templates that know the variable."""
    add_generation_prompt: bool | None = None
    """vLLM's, as the next ones: whether the assistant's turn is opened. Default: unless the final message goes on."""
    continue_final_message: bool | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True), at_most(MAX_MESSAGES, "documents")] | None = None
    """What the answer is to go by, where the template reads it."""

    @property
    def variables(self) -> dict[str, Any]:
        """As decode takes them."""
        turn = {"add_generation_prompt": self.add_generation_prompt, "continue_final_message": self.continue_final_message}
        given = {name: value for name, value in turn.items() if value is not None}
        hints = effort_variables(self.reasoning_effort) | ({} if self.verbosity is None else {"verbosity": self.verbosity})
        documents = {"documents": self.documents} if self.documents else {}
        return {**hints, **documents, **(self.chat_template_kwargs or {}), **given}

    def check_is_used(self, has_messages: bool) -> None:
        """Raises ValueError for what a prompt without a template has no use for."""
        turn = {"add_generation_prompt": True, "continue_final_message": False}
        idle: dict[str, Any] = {"chat_template_kwargs": {}, "reasoning_effort": None, "verbosity": "medium", "documents": [], **turn}
        if not has_messages and (given := [name for name, value in idle.items() if getattr(self, name) not in (None, value)]):
            raise ValueError(f"{given[0]} needs messages: text has no template")


def write_chat(messages: list[Message], tools: list[dict[str, Any]] | None, variables: dict[str, Any]) -> dict[str, Any]:
    """A chat as the tokenizer model's input."""
    found = {"messages": [m.flat() for m in messages], "tools": tools, "chat_template_kwargs": variables}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in found.items() if value}
