"""Requests as OpenAI's clients write them, and what the decode model calls the same things."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from client.gateway.no_ops import drop_no_ops
from client.gateway.strict import Strict
from client.gateway.structured import StructuredRequest

MAX_PROMPTS = 256
"""Of one request; each becomes a request of its own to the server."""
MAX_COMPLETIONS = 2048
"""Of one request, all prompts together. More would be refused for ever, and fill the server's queue each time it is tried."""

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]  # a list of a million wrong things is one error, not a million
Strings = Annotated[list[str], Field(fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]


def _leave_wrong(values: Any) -> Any:
    """Of a mapping to numbers the first that is none, if there is one: mappings have no `fail_fast`."""
    wrong = (k for k, v in values.items() if isinstance(v, bool) or not isinstance(v, int | float)) if isinstance(values, dict) else iter(())
    return values if (key := next(wrong, None)) is None else {key: values[key]}


Numbers = Annotated[dict[str, float], BeforeValidator(_leave_wrong)]

_SAME_NAME = (
    "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "stop",
    "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "include_stop",
    "skip_special_tokens", "priority", "timeout_ms", "speculative", "truncate_prompt_tokens",
)  # fmt: skip
"""What OpenAI or vLLM and decode call alike. Ranges are decode's to check: it says the same to every kind of client."""


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


class Prediction(Strict):
    """What most of the answer is expected to be (OpenAI's predicted outputs): drafts are looked up there."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Usage so far in every part."""
    include_obfuscation: bool = False
    """Accepted; there is none."""


class GenerateRequest(StructuredRequest):
    """What both endpoints take."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Int32 = 1
    max_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int64 | None = None
    logit_bias: Numbers | None = None
    stop: str | Strings | None = None
    # Not OpenAI's:
    text: str | None = None
    """The prompt, as PaddleNLP's clients call it: text as it is, with no chat template."""
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    include_stop: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Int32 | None = None
    timeout_ms: Int64 | None = None
    speculative: dict[str, Any] | None = None
    truncate_prompt_tokens: Int32 | None = None
    prediction: Prediction | None = None
    return_tokens: bool = False
    """Each choice also lists its tokens: ids, text and who proposed them."""
    # Of no effect on the answer:
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_no_ops(cls, values: Any) -> Any:
        return drop_no_ops(values, cls.model_fields) if isinstance(values, dict) else values

    def parameters(self) -> dict[str, Any]:
        """The decode model's inputs, without the prompt."""
        values = {name: getattr(self, name) for name in _SAME_NAME}
        if self.prediction is not None:
            values["speculative"] = {"prediction": self.prediction.text(), **(self.speculative or {})}
        return {**values, "max_tokens": self.max_tokens, "structured_outputs": self.form()}

    def server_names(self) -> dict[str, str]:
        if self.prediction is None or self.speculative is not None:
            return super().server_names()
        return {**super().server_names(), "speculative": "prediction", "speculative: prediction": "prediction"}


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(token, int) for token in value))


class CompletionRequest(GenerateRequest):
    """POST /v1/completions."""

    prompt: str | Strings | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] | None = None
    logprobs: Int32 | None = None
    echo: bool | None = None
    add_special_tokens: Literal[True] | None = None
    """Accepted: a prompt of text has them."""

    @model_validator(mode="before")
    @classmethod
    def _count_prompts(cls, values: Any) -> Any:
        """Before each of a million is looked at, where the first one is a prompt."""
        prompt = values.get("prompt") if isinstance(values, dict) else None
        if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and _is_prompt(prompt[0]):
            raise ValueError(f"prompt has {len(prompt)} prompts; the limit is {MAX_PROMPTS}")
        return values

    @model_validator(mode="after")
    def _check_prompt(self) -> CompletionRequest:
        if (self.prompt is None) == (self.text is None):
            raise ValueError("give prompt, or text, and not both")
        if (count := len(self.prompts())) > 1 and count * self.n > MAX_COMPLETIONS:
            raise ValueError(f"n is {self.n}, and prompt has {count} prompts: {count * self.n} completions; the limit is {MAX_COMPLETIONS}")
        return self

    def prompts(self) -> list[dict[str, Any]]:
        """Each prompt as decode's input."""
        prompt: Any = self.text if self.prompt is None else self.prompt
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            prompt = [prompt]
        return [{"text_input" if isinstance(p, str) else "input_ids": p} for p in prompt]

    def parameters(self) -> dict[str, Any]:
        return {**super().parameters(), "logprobs": self.logprobs, "echo": self.echo}

    def server_names(self) -> dict[str, str]:
        return {**super().server_names(), "text_input": "text" if self.prompt is None else "prompt", "input_ids": "prompt"}


_LOST = {"function_call": "send tool_calls, which have ids", "audio": "models of text alone are served"}
"""Of a message, what no template reads: the model would not know of it."""


class Message(BaseModel):
    """Other keys than these two are the chat template's business."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Text
    content: str | Annotated[list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]], Field(fail_fast=True)] | None = None
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


class Templated(Strict):
    """What chats tell the template, beside messages and tools."""

    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's: more variables, such as enable_thinking."""
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    """vLLM's, as the next ones: whether the assistant's turn is opened. Default: unless the final message goes on."""
    continue_final_message: bool | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """What the answer is to go by, where the template reads it."""

    @property
    def variables(self) -> dict[str, Any]:
        """As decode takes them."""
        turn = {"add_generation_prompt": self.add_generation_prompt, "continue_final_message": self.continue_final_message}
        given = {name: value for name, value in turn.items() if value is not None}
        documents = {"documents": self.documents} if self.documents else {}
        return {**effort_variables(self.reasoning_effort), **documents, **(self.chat_template_kwargs or {}), **given}

    def check_is_used(self, has_messages: bool) -> None:
        """Raises ValueError for what a prompt without a template has no use for."""
        turn = {"add_generation_prompt": True, "continue_final_message": False}
        idle: dict[str, Any] = {"chat_template_kwargs": {}, "reasoning_effort": None, "documents": [], **turn}
        if not has_messages and (given := [name for name, value in idle.items() if getattr(self, name) not in (None, value)]):
            raise ValueError(f"{given[0]} needs messages: text has no template")


def write_chat(messages: list[Message], tools: list[dict[str, Any]] | None, variables: dict[str, Any]) -> dict[str, Any]:
    """A chat as the tokenizer model's input."""
    found = {"messages": [m.flat() for m in messages], "tools": tools, "chat_template_kwargs": variables}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in found.items() if value}


class ChatRequest(Templated, GenerateRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    max_completion_tokens: Int32 | None = None
    logprobs: bool = False
    top_logprobs: Int32 | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_special_tokens: Literal[False] | None = None
    """Accepted: the template writes them."""
    truncation: Literal["auto", "disabled"] | None = None
    """As /v1/responses has it: whether the oldest messages may be dropped."""

    @model_validator(mode="after")
    def _check_messages(self) -> ChatRequest:
        if (self.messages is None) == (self.text is None):
            raise ValueError("give messages, or text, and not both")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs true")
        self.check_is_used(self.messages is not None)
        if self.truncation is not None and self.messages is None:
            raise ValueError("truncation needs messages: truncate_prompt_tokens shortens a text")
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise ValueError(f"tool_choice is {self.tool_choice!r:.100}, and there are no tools")
        return self

    @property
    def allowed_tools(self) -> list[str] | None:
        """Names of the tools that alone may be called; None: any. Of a choice that decode has taken."""
        if not isinstance(self.tool_choice, dict):
            return None
        own = self.tool_choice.get("allowed_tools")
        return [tool["function"]["name"] for tool in (own["tools"] if own else [self.tool_choice])]

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        """Whether the answer is calls and nothing else, by its grammar. Of a choice that decode has taken."""
        if not isinstance(self.tool_choice, dict):
            return self.tool_choice == "required"
        own = self.tool_choice.get("allowed_tools")
        return own is None or own["mode"] == "required"

    def prompts(self) -> list[dict[str, Any]]:
        return [{"text_input": self.text}] if self.messages is None else [{"messages": [m.flat() for m in self.messages]}]

    def prompt_value(self) -> dict[str, Any]:
        """Of messages: the prompt as the tokenizer model's input."""
        return write_chat(self.messages or [], self.tools, self.variables)

    def parameters(self) -> dict[str, Any]:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        values = {**super().parameters(), "max_tokens": limit, "logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        if self.messages is not None and (variables := self.variables):
            values["chat_template_kwargs"] = variables
        if self.truncation == "auto":
            values["truncation"] = self.truncation
        if self.tools:
            values |= {"tools": self.tools, "tool_choice": self.tool_choice, "parallel_tool_calls": self.parallel_tool_calls}
        return values

    def server_names(self) -> dict[str, str]:
        own = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        if self.documents and not self.chat_template_kwargs:
            own["chat_template_kwargs"] = "documents"
        return {**super().server_names(), **own, "logprobs": "top_logprobs", "text_input": "text"}


class SuffixCorpusRequest(Strict):
    """POST /v1/suffix_corpus."""

    corpus: Annotated[list[Text | TokenIds], Field(min_length=1, fail_fast=True)]


class TokenizeRequest(Templated):
    """POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    text: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """As decode has it: true for a prompt; a template writes those of messages itself."""
    return_token_strs: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_no_ops(cls, values: Any) -> Any:
        return drop_no_ops(values, cls.model_fields) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _check_prompt(self) -> TokenizeRequest:
        if sum(value is not None for value in (self.prompt, self.text, self.messages)) != 1:
            raise ValueError("give prompt, text or messages, and one of them only")
        if self.tools and self.messages is None:
            raise ValueError("tools needs messages: text has no template")
        self.check_is_used(self.messages is not None)
        if self.add_special_tokens not in (None, self.messages is None):
            raise ValueError(f"add_special_tokens may be left out, or {str(self.messages is None).lower()}")
        return self

    def prompt_value(self) -> dict[str, Any]:
        """The prompt as the tokenizer model's input."""
        if self.messages is not None:
            return write_chat(self.messages, self.tools, self.variables)
        return {"text_input": self.text if self.prompt is None else self.prompt}


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
