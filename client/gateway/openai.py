"""Requests as OpenAI's clients write them, and what the decode model calls the same things."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from client.gateway.chats import Keys, Messages, Templated, Text, TextPart, Tools, write_chat
from client.gateway.limits import (
    MAX_BAD_WORDS,
    MAX_CORPUS_TEXTS,
    MAX_KEYS,
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    at_most,
)
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


def _leave_wrong(values: Any) -> Any:
    """Of a mapping to numbers the first that is none, if there is one: mappings have no `fail_fast`."""
    wrong = (k for k, v in values.items() if isinstance(v, bool) or not isinstance(v, int | float)) if isinstance(values, dict) else iter(())
    return values if (key := next(wrong, None)) is None else {key: values[key]}


Biases = Annotated[dict[str, float], BeforeValidator(_leave_wrong), at_most(MAX_LOGIT_BIASES, "entries")]
Stop = Annotated[str | Strings, at_most(MAX_STOP_STRINGS, "strings")]

_SAME_NAME = (
    "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "stop",
    "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "include_stop",
    "skip_special_tokens", "priority", "timeout_ms", "speculative", "truncate_prompt_tokens",
)  # fmt: skip
"""What OpenAI or vLLM and decode call alike. Ranges are decode's to check: it says the same to every kind of client."""


class Prediction(Strict):
    """What most of the answer is expected to be (OpenAI's predicted outputs): drafts are looked up there."""

    type: Literal["content"]
    content: Annotated[str | Annotated[list[TextPart], Field(fail_fast=True)], at_most(MAX_MESSAGES, "parts")]

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
    logit_bias: Biases | None = None
    stop: Stop | None = None
    # Not OpenAI's:
    text: str | None = None
    """The prompt, as PaddleNLP's clients call it: text as it is, with no chat template."""
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, at_most(MAX_STOP_TOKEN_IDS, "values")] | None = None
    bad_words: Annotated[Strings, at_most(MAX_BAD_WORDS, "strings")] | None = None
    include_stop: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Int32 | None = None
    timeout_ms: Int64 | None = None
    speculative: Keys | None = None
    truncate_prompt_tokens: Int32 | None = None
    prediction: Prediction | None = None
    return_tokens: bool = False
    """Each choice also lists its tokens: ids, text and who proposed them."""
    return_token_ids: bool = False
    """vLLM's: each choice has token_ids, and the prompt's are told, which must be whole for it."""
    return_tokens_as_token_ids: bool = False
    """vLLM's: log-probabilities name tokens `token_id:N`, which tells those apart that write the same."""
    return_cached_tokens_details: bool = False
    """SGLang's: where the prompt's cached tokens lay, which is the device's memory."""
    # Of no effect on the answer:
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_no_ops(cls, values: Any) -> Any:
        return drop_no_ops(values, cls.model_fields) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _check_truncation(self) -> GenerateRequest:
        if self.truncate_prompt_tokens is not None:
            self.check_prompt_is_whole("truncate_prompt_tokens")
        return self

    def check_prompt_is_whole(self, name: str) -> None:
        """Raises ValueError where the prompt's tokens are asked for, of which the server may drop some by this name."""
        if self.return_token_ids:
            raise ValueError(f"return_token_ids does not go with {name}: which tokens a prompt keeps is decided behind the gateway")

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


class ChatRequest(Templated, GenerateRequest):
    """POST /v1/chat/completions."""

    messages: Messages | None = None
    max_completion_tokens: Int32 | None = None
    logprobs: bool = False
    top_logprobs: Int32 | None = None
    tools: Tools | None = None
    tool_choice: Annotated[str | dict[str, Any], at_most(MAX_KEYS, "keys")] | None = None
    parallel_tool_calls: bool | None = None
    add_special_tokens: Literal[False] | None = None
    """Accepted: the template writes them."""
    truncation: Literal["auto", "disabled"] | None = None
    """As /v1/responses has it: whether the oldest messages may be dropped."""
    echo: bool = False
    """vLLM's: whether the answer begins with a last message that is the assistant's. Accepted where there is none."""

    @model_validator(mode="after")
    def _check_messages(self) -> ChatRequest:
        if (self.messages is None) == (self.text is None):
            raise ValueError("give messages, or text, and not both")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs true")
        self.check_is_used(self.messages is not None)
        if self.truncation == "auto":
            self.check_prompt_is_whole("truncation")
        if self.truncation is not None and self.messages is None:
            raise ValueError("truncation needs messages: truncate_prompt_tokens shortens a text")
        if self.echo and (self.messages is None or self.messages[-1].role == "assistant"):
            raise ValueError("echo: it may be left out, or false, where the prompt ends with what the answer goes on from")
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

    corpus: Annotated[list[Text | TokenIds], Field(min_length=1, fail_fast=True), at_most(MAX_CORPUS_TEXTS, "texts")]


class TokenizeRequest(Templated):
    """POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    text: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    """None: as decode has it, true for a prompt; a template writes those of messages itself."""
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
        if self.add_special_tokens and self.messages is not None:
            raise ValueError("add_special_tokens needs prompt or text: of messages, the chat template writes them")
        return self

    def prompt_value(self) -> dict[str, Any]:
        """The prompt as the tokenizer model's input."""
        if self.messages is not None:
            return write_chat(self.messages, self.tools, self.variables)
        value: dict[str, Any] = {"text_input": self.text if self.prompt is None else self.prompt}
        return value if self.add_special_tokens is None else {**value, "add_special_tokens": self.add_special_tokens}

    def server_names(self) -> dict[str, str]:
        """What of it the tokenizer model calls otherwise."""
        return {"text_input": "text" if self.prompt is None else "prompt"}


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
