"""Bodies of the gateway's requests, without a server."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from backend import sampling_params, structured_outputs
from backend.engine_process.calls import MAX_CORPUS_CHARACTERS
from backend.tools import MAX_TOOLS
from client.gateway import limits
from client.gateway.answers import Answer
from client.gateway.bodies import JsonRequest
from client.gateway.errors import ApiError, from_validation
from client.gateway.metrics import Metrics
from client.gateway.openai import ChatRequest, CompletionRequest, SuffixCorpusRequest, TokenizeRequest
from client.gateway.responses import ResponsesRequest
from client.gateway.upstream import Upstream

COUNT = 1000
KEYS = {f"key{i}": 1 for i in range(COUNT)}
TEXT = {"type": "text", "text": "x"}
MANY: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (CompletionRequest, {"prompt": "x", **KEYS}),
    (CompletionRequest, {"prompt": "x", "stream_options": KEYS}),
    (CompletionRequest, {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, **KEYS}}}),
    (CompletionRequest, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(COUNT)), "x")}),
    (CompletionRequest, {"prompt": [[1]] * (COUNT - 1) + [["x"]]}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{**TEXT, **KEYS}]}]}),
    (ResponsesRequest, {"input": [{"type": "reasoning", "summary": ["x"] * COUNT}]}),
    (ResponsesRequest, {"input": [{"type": "reasoning", "content": ["x"] * COUNT}]}),
    (ResponsesRequest, {"input": "x", "tools": [{"type": "function", "name": "f", "allowed_callers": ["x"] * COUNT}]}),
]


@pytest.mark.parametrize(
    ("request_type", "body"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}] * 130_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [TEXT] * 130_000}]}),
        (ResponsesRequest, {"input": [{"role": "user", "content": "x"}] * 130_000}),
    ],
)
def test_a_conversation_of_more_than_anybody_has_is_not_looked_through(request_type: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="List should have at most 16384 items"):
        request_type.model_validate(body)


@pytest.mark.parametrize(("request_type", "body"), MANY)
def test_many_wrong_things_are_few_errors(request_type: type[BaseModel], body: dict[str, Any]) -> None:
    """Each takes time, in which the gateway answers nobody: 200,000 unknown keys of a body were ten seconds."""
    with pytest.raises(ValidationError) as caught:
        request_type.model_validate(body)
    assert caught.value.error_count() <= 2  # of what may be a text or a list, one for each


def test_the_first_unknown_key_is_told_beside_those_of_no_effect() -> None:
    body = {"prompt": "x", "service_tier": "auto", "first": None, "second": 1, "third": 2}
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(body)
    assert [error["loc"] for error in caught.value.errors()] == [("second",)]


def test_names_of_other_servers_are_kept_for_errors() -> None:
    """SGLang's: the client knows no other."""
    names = CompletionRequest.model_validate({"prompt": "x", "ebnf": "(", "no_stop_trim": True}).server_names()
    assert (names["structured_outputs"], names["structured_outputs.grammar"], names["include_stop"]) == ("ebnf", "ebnf", "no_stop_trim")
    with pytest.raises(ValidationError, match="give one of json_schema, guided_regex, ebnf"):
        ChatRequest.model_validate({"text": "x", "ebnf": "x", "json_schema": {}, "guided_regex": "x"})
    both = {"prompt": "x", "response_format": {"type": "text"}}
    assert CompletionRequest.model_validate({**both, "guided_regex": "("}).server_names()["structured_outputs.regex"] == "guided_regex"
    assert "structured_outputs" not in CompletionRequest.model_validate({**both, "structured_outputs": {}}).server_names()
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "documents": [{"text": "y"}]})
    assert chat.server_names()["chat_template_kwargs"] == "documents" and chat.parameters()["chat_template_kwargs"] == {"documents": [{"text": "y"}]}
    with pytest.raises(ValidationError, match="documents needs messages: text has no template"):
        ChatRequest.model_validate({"text": "x", "documents": [{"text": "y"}]})


def test_an_item_without_a_type_is_a_message() -> None:
    """Null is as good as absent."""
    item = {"role": "user", "content": "x"}
    wanted = ResponsesRequest.model_validate({"input": [item]}).as_chat()
    assert ResponsesRequest.model_validate({"input": [{**item, "type": None}]}).as_chat() == wanted


def test_one_form_by_both_of_its_names() -> None:
    """guidance's client for vLLM sends it for old servers and new ones."""
    body = {"prompt": "x", "structured_outputs": {"grammar": "start: /a/"}, "guided_grammar": "start: /a/"}
    assert CompletionRequest.model_validate(body).form() == {"grammar": "start: /a/"}
    with pytest.raises(ValidationError, match="give one of structured_outputs, guided_grammar"):
        CompletionRequest.model_validate(body | {"guided_grammar": "start: /b/"})


def test_verbosity_is_a_hint_to_the_template() -> None:
    """Of chats and responses, as OpenAI's clients of either send it."""
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "verbosity": "low"})
    assert chat.parameters()["chat_template_kwargs"] == {"verbosity": "low"}
    own = {"input": "x", "text": {"verbosity": "high"}, "reasoning": {"effort": "low"}}
    found = ResponsesRequest.model_validate(own).as_chat().parameters()["chat_template_kwargs"]
    assert found == {"verbosity": "high", "reasoning_effort": "low"}
    with pytest.raises(ValidationError, match="verbosity needs messages: text has no template"):
        ChatRequest.model_validate({"text": "x", "verbosity": "low"})


def test_a_reference_to_an_answer_says_that_none_is_stored() -> None:
    """Vercel's SDK sends it in a conversation's second turn, unless it is told not to store."""
    with pytest.raises(ValidationError, match="item 1 is an item_reference, and nothing is stored: send the item itself"):
        ResponsesRequest.model_validate({"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_1"}]})


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
FUNCTION = {"type": "function", "name": "f"}
COUNTED: list[tuple[type[BaseModel], dict[str, Any], str]] = [
    (CompletionRequest, {"prompt": "x", "stop": [1] * 65}, "has 65 strings; the limit is 64"),
    (CompletionRequest, {"prompt": "x", "bad_words": [1] * 257}, "has 257 strings; the limit is 256"),
    (CompletionRequest, {"prompt": "x", "stop_token_ids": ["x"] * 257}, "has 257 values; the limit is 256"),
    (CompletionRequest, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(1025)), "x")}, "has 1025 entries; the limit is 1024"),
    (CompletionRequest, {"prompt": "x", "guided_choice": [1] * 4097}, "has 4097 strings; the limit is 4096"),
    (CompletionRequest, {"prompt": "x", "allowed_token_ids": ["x"] * 65_537}, "has 65537 token ids; the limit is 65536"),
    (CompletionRequest, {"prompt": "x", "speculative": dict.fromkeys(range(16_385))}, "has 16385 keys; the limit is 16384"),
    (CompletionRequest, {"prompt": "x", "structured_outputs": dict.fromkeys(range(16_385))}, "has 16385 keys; the limit is 16384"),
    (CompletionRequest, {"prompt": "x", "prediction": {"type": "content", "content": [1] * 16_385}}, "has 16385 parts; the limit is 16384"),
    (ChatRequest, {**CHAT, "tools": [1] * 257}, "has 257 functions; the limit is 256"),
    (ChatRequest, {**CHAT, "tool_choice": dict.fromkeys(range(16_385))}, "has 16385 keys; the limit is 16384"),
    (ChatRequest, {**CHAT, "chat_template_kwargs": dict.fromkeys(range(16_385))}, "has 16385 keys; the limit is 16384"),
    (ChatRequest, {**CHAT, "documents": [1] * 16_385}, "has 16385 documents; the limit is 16384"),
    (ChatRequest, {"messages": [{"role": 1, "content": [1] * 9000}] * 2}, "has 18000 parts in all; the limit is 16384"),
    (TokenizeRequest, {**CHAT, "tools": [1] * 257}, "has 257 functions; the limit is 256"),
    (ResponsesRequest, {"input": "x", "stop": [1] * 65}, "has 65 strings; the limit is 64"),
    (ResponsesRequest, {"input": "x", "tools": [1] * 257}, "has 257 functions; the limit is 256"),
    (ResponsesRequest, {"input": [{"role": 1, "content": [1] * 9000}] * 2}, "has 18000 parts in all; the limit is 16384"),
    (ResponsesRequest, {"input": [{"type": "reasoning", "summary": [1] * 9000}] * 2}, "has 18000 parts in all; the limit is 16384"),
    (ResponsesRequest, {"input": [{"type": "function_call_output", "output": [1] * 9000}] * 2}, "has 18000 parts in all; the limit is 16384"),
    (
        ResponsesRequest,
        {"input": "x", "tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [1] * 257}},
        "has 257 functions; the limit is 256",
    ),
    (SuffixCorpusRequest, {"corpus": [1] * 400_001}, "has 400001 texts; the limit is 400000"),
]


@pytest.mark.parametrize(("request_type", "body", "message"), COUNTED)
def test_what_is_too_many_is_not_looked_through(request_type: type[BaseModel], body: dict[str, Any], message: str) -> None:
    """What they hold is wrong, too, which nobody has come to see: a million strings were 1.3 seconds, in which the gateway answered nobody."""
    with pytest.raises(ValidationError) as caught:
        request_type.model_validate(body)
    assert [error["msg"] for error in caught.value.errors()] == [message]
    found = from_validation(RequestValidationError([{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()], body=body))
    name = next(key for key in reversed(body) if key in found.message)
    assert (found.param, found.code, found.message.endswith(f" {message}")) == (name, "invalid_value", True)


def test_as_many_as_may_be_are_taken() -> None:
    body = {"prompt": "x", "stop": ["x"] * 64, "logit_bias": dict.fromkeys(map(str, range(1024)), 1.0), "stop_token_ids": [1] * 256}
    CompletionRequest.model_validate(body)
    ChatRequest.model_validate({"messages": [{"role": "user", "content": [TEXT] * 8192}] * 2})


def test_counts_are_the_server_s() -> None:
    assert (limits.MAX_STOP_STRINGS, limits.MAX_BAD_WORDS) == (sampling_params.MAX_STOP_STRINGS, sampling_params.MAX_BAD_WORDS)
    assert (limits.MAX_STOP_TOKEN_IDS, limits.MAX_LOGIT_BIASES) == (sampling_params.MAX_STOP_TOKEN_IDS, sampling_params.MAX_LOGIT_BIASES)
    assert (limits.MAX_TOOLS, limits.MAX_CHOICES) == (MAX_TOOLS, structured_outputs.MAX_CHOICES)
    assert 2 * limits.MAX_TOKEN_IDS == structured_outputs.MAX_CHARACTERS
    assert 5 * limits.MAX_CORPUS_TEXTS == MAX_CORPUS_CHARACTERS


def test_parameters_are_written_once_for_all_prompts() -> None:
    """For each of 256 prompts anew, 4 MB of a schema were 48 seconds, and a gigabyte to send."""
    body = {"prompt": ["x"] * 256, "structured_outputs": {"json": {"enum": ["x" * 100_000]}}}
    answer = Answer(Upstream("127.0.0.1:1", "decode"), Metrics(), "x", "id", CompletionRequest.model_validate(body))
    assert answer._parameters["structured_outputs"] == json.dumps(body["structured_outputs"])
    body = {"prompt": ["x"] * 256, "guided_json": {"enum": ["x" * 300_000]}}
    rule = r"guided_json is sent with each of 256 prompts, with the other parameters 768\d{5} characters; the limit is 67108864"
    with pytest.raises(ApiError, match=rule) as caught:
        Answer(Upstream("127.0.0.1:1", "decode"), Metrics(), "x", "id", CompletionRequest.model_validate(body))
    assert (caught.value.status_code, caught.value.param) == (400, "guided_json")


def test_json_is_read_without_a_search_for_cycles() -> None:
    """Which goes through all lists so far, again and again."""

    async def read(body: bytes) -> Any:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        return await JsonRequest({"type": "http", "headers": []}, receive).json()

    collections: list[str] = []
    body, before, note = b"[" + b",".join([b"[1]"] * 20_000) + b"]", gc.get_threshold(), lambda phase, info: collections.append(phase)
    gc.set_threshold(100, 10, 10)
    gc.callbacks.append(note)
    try:
        found = asyncio.run(read(body))
        own, collections[:] = len(collections), []
        assert found == json.loads(body) and len(collections) > 10 * own
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
    assert gc.isenabled()
    with pytest.raises(json.JSONDecodeError):
        asyncio.run(read(b"["))
    assert gc.isenabled()
