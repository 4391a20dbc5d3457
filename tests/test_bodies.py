"""Bodies of the gateway's requests, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from client.gateway.openai import ChatRequest, CompletionRequest
from client.gateway.responses import ResponsesRequest

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
