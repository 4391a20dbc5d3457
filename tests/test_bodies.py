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
