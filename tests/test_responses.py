"""OpenAI's /v1/responses on a real server, through its own client."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pydantic
import pytest

from client.gateway.forms import ResponseForm
from client.gateway.metrics import Metrics
from client.gateway.response_answer import ResponsesAnswer
from client.gateway.response_items import Output
from client.gateway.responses import ResponsesRequest
from client.messages import Chunk

PARAMETERS = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False}
JSON = {"content-type": "application/json"}
TOOLS: Any = [{"type": "function", "name": name, "strict": True, "parameters": PARAMETERS} for name in ("get_weather", "get_time")]

LOGPROBS: Any = "message.output_text.logprobs"
ALLOWED: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}


def test_whole_and_streamed(api):
    messages: Any = [{"role": "user", "content": "read a file"}]
    expected = api.chat.completions.create(model="foretoken", messages=messages, max_tokens=12, temperature=0)
    whole = api.responses.create(model="foretoken", input="read a file", max_output_tokens=12, temperature=0)
    assert whole.output_text == expected.choices[0].message.content and whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens" and whole.id.startswith("resp_")
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (expected.usage.prompt_tokens, 12)
    with api.responses.stream(model="foretoken", input="read a file", max_output_tokens=12, temperature=0) as stream:
        events = list(stream)
    final = events[-1].response
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete"]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == final.output_text == whole.output_text
    assert [e.sequence_number for e in events] == list(range(len(events))) and final.usage == whole.usage


def test_tokens_of_an_input_are_counted(api):
    """As many as the answer's usage says; nothing is generated."""
    items: Any = [{"role": "user", "content": "é🙂"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why?"}]
    for own in ({"input": "read a file"}, {"input": items, "instructions": "Be brief."}, {"input": items, "reasoning": {"effort": "low"}}):
        counted = api.responses.input_tokens.count(model="foretoken", **own)
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == api.responses.create(model="foretoken", max_output_tokens=1, **own).usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        api.responses.input_tokens.count(model="foretoken", input="x", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError, match="the model 'x' does not exist"):
        api.responses.input_tokens.count(model="x", input="x")


def test_logprobs(api):
    """As a chat has them."""
    expected = api.chat.completions.create(
        model="foretoken", messages=[{"role": "user", "content": "é🙂"}], max_tokens=12, temperature=0, logprobs=True, top_logprobs=2
    )
    wanted = expected.choices[0].logprobs.content
    own: Any = {"model": "foretoken", "input": "é🙂", "max_output_tokens": 12, "temperature": 0, "include": [LOGPROBS], "top_logprobs": 2}
    whole = api.responses.create(**own)
    found = whole.output[0].content[0].logprobs
    assert [(e.token, e.bytes, [t.token for t in e.top_logprobs]) for e in found] == [
        (w.token, w.bytes, [t.token for t in w.top_logprobs]) for w in wanted
    ]
    assert [e.logprob for e in found] == pytest.approx([w.logprob for w in wanted], abs=1e-4) and whole.top_logprobs == 2
    with api.responses.stream(**own) as stream:
        events = list(stream)
    deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [(d.token, len(d.top_logprobs)) for d in deltas] == [(w.token, 2) for w in wanted]
    assert [entry.token for entry in events[-1].response.output[0].content[0].logprobs] == [w.token for w in wanted]


def test_logprobs_are_those_of_what_is_said():
    """Not of what was thought before, nor of calls."""

    def entries(*texts: str) -> list[dict[str, Any]]:
        return [{"token": text, "bytes": list(text.encode())} for text in texts]

    tokens = entries("<think>", "a", "</think>", "\n\n", "a", "b", "<end>")
    whole = Output("r", lambda kind, **_: b"")
    whole.add({"reasoning_content": "a", "content": "ab"}, tokens)
    assert [e["token"] for e in whole.items[-1].logprobs] == ["a", "b"] and whole.items[0].logprobs == []
    streamed = Output("r", lambda kind, **_: b"")
    pieces = [({}, tokens[:1]), ({"reasoning_content": "a"}, tokens[1:2]), ({"reasoning_content": "."}, tokens[2:4]), ({}, tokens[4:5])]
    for message, own in [*pieces, ({"content": "ab"}, tokens[5:6]), ({}, tokens[6:])]:
        streamed.add(message, own)
    streamed.end("completed")
    assert [e["token"] for e in streamed.items[-1].logprobs] == ["a", "b", "<end>"]
    streamed = Output("r", lambda kind, **_: b"")  # marks in pieces of their own, which add nothing
    pieces = [({}, tokens[:1]), ({"reasoning_content": "a"}, tokens[1:2]), *(({}, [token]) for token in tokens[2:4])]
    for message, own in [*pieces, ({"content": "a"}, tokens[4:5]), ({"content": "b"}, tokens[5:6])]:
        streamed.add(message, own)
    assert [e["token"] for e in streamed.items[-1].logprobs] == ["a", "b"]
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    for message, own in [({"tool_calls": [call]}, entries("<call>", "{}")), ({}, entries("</call>")), ({"content": "c"}, entries("c"))]:
        streamed.add(message, own)
    assert [e["token"] for e in streamed.items[-1].logprobs] == ["c"] and [item.text for item in streamed.items] == ["a", "ab", "{}", "c"]


def test_a_call_that_ends_in_the_piece_in_which_text_begins():
    """As steps of several tokens have it: the rest of its arguments is not said."""
    output = Output("r", lambda kind, **_: b"")
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a": '}}
    for piece in ({"tool_calls": [call]}, {"content": "bye", "tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}):
        output.add(piece)
    output.end("completed")
    first, second = output.bodies("completed")
    assert first["arguments"] == '{"a": 1}' and second["content"][0]["text"] == "bye"


def test_fields_of_no_effect(api):
    own: Any = {"model": "foretoken", "input": "read a file", "max_output_tokens": 4, "temperature": 0}
    include = [LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "message.input_image.image_url"]
    answer = api.responses.create(
        **own, store=True, metadata={"a": "b"}, background=False, max_tool_calls=3, prompt_cache_key="k", safety_identifier="s", user="u",
        service_tier="auto", include=include, reasoning={"effort": "max"}, extra_body={"seed": 3, "top_k": 5, "context_management": []},
    )  # fmt: skip
    assert answer.output_text == api.responses.create(**own).output_text and answer.metadata == {"a": "b"} and not answer.store
    said: Any = [{"role": "user", "content": [{"type": "input_text", "text": "read a file", "prompt_cache_breakpoint": {}}]}]
    tools: Any = [{**TOOLS[0], "defer_loading": False, "allowed_callers": ["direct"], "output_schema": {"type": "number"}}]
    one, other = (api.responses.create(**{**own, "input": given}, tools=known) for given, known in ((said, tools), ("read a file", TOOLS[:1])))
    assert one.output == other.output or one.output_text == other.output_text
    assert one.usage.input_tokens == other.usage.input_tokens, "the prompt does not have them"


def test_what_load_generators_send(api):
    """guidellm's request: vLLM's names beside OpenAI's."""
    own: Any = {"model": "foretoken", "input": "read a file", "max_output_tokens": 40, "temperature": 0}
    whole = api.responses.create(**own, extra_body={"stop": None, "ignore_eos": True})
    assert whole.usage.output_tokens == 40
    stop = whole.output_text[5:9]
    assert api.responses.create(**own, extra_body={"stop": [stop]}).output_text == whole.output_text.partition(stop)[0]


def test_a_conversation_with_instructions(api):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "c"},
    ]
    found = api.responses.create(model="foretoken", input=items, instructions="Be brief.", max_output_tokens=8, temperature=0, store=False)
    messages = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "and?"), ("assistant", "no"), ("user", "c")]
    wanted = api.chat.completions.create(model="foretoken", messages=[{"role": r, "content": c} for r, c in messages], max_tokens=8, temperature=0)
    assert found.output_text == wanted.choices[0].message.content and found.usage.input_tokens == wanted.usage.prompt_tokens
    roles = [
        api.responses.create(model="foretoken", input=[{"role": role, "content": "Be brief."}, *items], max_output_tokens=8, temperature=0)
        for role in ("developer", "system")
    ]
    assert roles[0].output_text == roles[1].output_text and {r.usage.input_tokens for r in roles} == {found.usage.input_tokens}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input: Field required"),
        ({"input": []}, "input: "),
        ({"input": "x", "previous_response_id": "resp_1"}, "'previous_response_id': nothing is stored: send the whole conversation"),
        ({"input": "x", "conversation": {"id": "conv_1"}}, "'conversation': nothing is stored: send the whole conversation"),
        ({"input": "x", "background": True}, "unsupported parameter 'background': it may be left out, or false"),
        ({"input": "x", "include": ["logprobs"]}, "include[0]: Input should be 'message.output_text.logprobs'"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs is 2, and include does not have 'message.output_text.logprobs'"),
        ({"input": "x", "include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs must be an integer from 0 to 20, got 21"),
        ({"input": "x", "stream_options": {"include_usage": True}}, "parameter 'stream_options.include_usage'"),
        ({"input": "x", "instructions": "\ud800"}, "instructions cannot be given back"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens must be an integer >= 1, got 0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]: Input tag 'input_image' found"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type: Input should be 'function', got 'web_search'"),
        ({"input": "x", "tool_choice": "required"}, "there are no tools"),
        ({"input": "x", "tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice must name one of the tools"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "function.name must be 1 to 64 letters"),
        ({"input": "x", "tools": TOOLS, "tool_choice": "any"}, "tool_choice: Input should be 'none', 'auto' or 'required', got 'any'"),
        ({"input": "x", "tools": TOOLS, "tool_choice": {"type": "mcp"}}, "or an object of type function or allowed_tools, got {'type': 'mcp'}"),
        ({"input": "x", "tools": TOOLS, "tool_choice": {**ALLOWED, "mode": "none"}}, "tool_choice.mode: Input should be 'auto' or 'required', got"),
        ({"input": "x", "tools": TOOLS, "tool_choice": {**ALLOWED, "tools": []}}, "tool_choice.tools: List should have at least 1 item"),
        ({"input": "x", "tools": TOOLS[:1], "tool_choice": ALLOWED}, "tool_choice.tools[0] must name one of the tools (get_weather), got"),
        ({"input": "x", "tool_choice": ALLOWED}, "and there are no tools"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema is missing"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format: Input tag 'xml' found using 'type' does not"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]}, "input[0].arguments: arguments is not valid JSON"),
        ({"input": "x", "tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools[0].defer_loading: Input should be False"),
        ({"input": [{"type": "computer_call"}]}, "input[0]: Input tag 'computer_call'"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input has no message"),
        ({"input": "x", "metadata": {"a": 10**30}}, "metadata cannot be given back with the answer: Integer exceeds 64-bit range"),
        ({"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"maximum": 10**30}}]}, "tools cannot be given back"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"title": "\ud800"}}}}, "text cannot be given back"),
        ({"input": "x", "model": "gpt"}, "the model 'gpt' does not exist"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong(api, body, message, stream):
    with pytest.raises(openai.APIStatusError) as caught:
        api.post("/responses", cast_to=object, content=json.dumps({**body, "stream": stream}).encode(), options={"headers": JSON})
    assert caught.value.status_code in (400, 404) and message in caught.value.message


class Box(pydantic.BaseModel):
    colour: Literal["red", "green", "blue"]
    is_large: bool


def test_answers_of_a_form(api):
    own: Any = {"model": "default", "input": "Which colour?", "temperature": 0, "max_output_tokens": 80}
    found = api.responses.parse(**own, text_format=Box)
    assert isinstance(found.output_parsed, Box) and found.text.format.type == "json_schema"
    assert api.responses.create(**own, text={"format": {"type": "json_object"}, "verbosity": "medium"}).output_text.startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_time"}, ALLOWED], ids=["required", "named", "allowed"])
def test_calls_and_what_they_brought(api, choice):
    own: Any = {"model": "default", "tools": TOOLS, "temperature": 0, "max_output_tokens": 100, "parallel_tool_calls": False}
    whole = api.responses.create(**own, input="Rain?", tool_choice=choice)
    (call,) = whole.output
    assert (call.type, call.status, whole.status) == ("function_call", "completed", "completed")
    assert call.name == "get_time" if choice != "required" else call.name in ("get_weather", "get_time")
    with api.responses.stream(**own, input="Rain?", tool_choice=choice) as stream:
        events = list(stream)
        (streamed,) = stream.get_final_response().output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments) and streamed.parsed_arguments["unit"] in ("C", "F")
    kinds = [e.type for e in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    assert "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta") == call.arguments
    history = [{"role": "user", "content": "Rain?"}, call.model_dump(exclude_none=True)]
    history += [{"type": "function_call_output", "call_id": call.call_id, "output": "20"}]
    after = api.responses.create(**{**own, "input": history, "max_output_tokens": 8})
    function = {"name": call.name, "arguments": call.arguments}
    messages: Any = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
    ]
    tools: Any = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]
    messages += [{"role": "tool", "tool_call_id": "1", "content": "20"}]
    chat = api.chat.completions.create(model="default", messages=messages, tools=tools, temperature=0, max_tokens=8)
    assert after.usage.input_tokens == chat.usage.prompt_tokens and after.output_text == chat.choices[0].message.content


_TEXTS = ("so ", '<tool_call>{"name": "get_time", "arguments": {}}', "</tool_call>\n<tool_call>{")


@pytest.mark.parametrize("texts", [_TEXTS, ["".join(_TEXTS)]], ids=["in steps", "in one step"])
@pytest.mark.parametrize("stream", [False, True])
def test_text_behind_a_call_is_an_item_behind_it(stream, texts):
    """Whether the answer is streamed or not: such as a call's beginning, which max_output_tokens cut."""

    class Servers:
        async def stream(self, request_id, parameters):
            for text in texts:
                yield Chunk(text, [0], ["target"])
            yield Chunk('"name', [0], ["target"], "length", usage={"prompt_tokens": 1, "completion_tokens": 4})

    async def ask() -> bytes:
        sent: list[bytes] = []

        async def send(message):
            sent.append(message.get("body", b""))

        request = ResponsesRequest(input="x", tools=TOOLS, stream=stream)
        await ResponsesAnswer(Servers(), Metrics(), "m", "x", request)({}, asyncio.Event().wait, send)  # type: ignore[arg-type]
        return b"".join(sent)

    raw = asyncio.run(ask())
    output = json.loads(raw.rpartition(b"data: ")[2])["response"]["output"] if stream else json.loads(raw)["output"]
    found = [(item["type"], item["status"], item["arguments"] if "arguments" in item else item["content"][0]["text"]) for item in output]
    cut = '<tool_call>{"name'
    assert found == [("message", "completed", "so "), ("function_call", "completed", "{}"), ("message", "incomplete", cut)]


def test_text_between_calls_of_one_piece():
    """As steps of many tokens have it: items are in the order of the text however much of it a step brings."""
    text = 'a<tool_call>{"name": "f", "arguments": {}}</tool_call> b <tool_call>{"arguments": {}, "name": "f"}</tool_call>c'
    chat = ResponsesRequest(input="x", tools=[{"type": "function", "name": "f"}], include=["message.output_text.logprobs"], stream=True).as_chat()
    for pieces in ([text], list(text), [text[:50], text[50:]]):
        form, output = ResponseForm(chat), Output("r", lambda kind, **_: b"")
        for place, piece in enumerate(pieces, 1):
            entries = [{"token": c, "bytes": list(c.encode())} for c in piece]
            output.add(form.write(0, Chunk(piece, finish_reason="stop" if place == len(pieces) else None, logprobs=[]), {}, True)["delta"], entries)
        output.end("completed")
        assert [(item.kind, item.text) for item in output.items[::2]] == [("message", "a"), ("message", "b "), ("message", "c")]
        assert [item.kind for item in output.items[1::2]] == ["function_call"] * 2
        assert ["".join(e["token"] for e in item.logprobs) for item in output.items[::2]] == ["a", "b ", "c"]


def test_items_in_their_order():
    """Thoughts, text and two calls, which come in pieces: the same items as those of the whole message."""
    calls = [{"index": i, "id": f"c{i}", "function": {"name": "f", "arguments": '{"a"'}} for i in range(2)]
    rest = {"index": 1, "function": {"arguments": ": 1}"}}
    pieces = [{"content": "\n"}, {"reasoning_content": "so"}, {"reasoning_content": "!"}, {"content": "\n"}, {"content": "yes"}]
    pieces += [{"content": " "}, {"tool_calls": [calls[0]]}, {"tool_calls": [calls[1]]}, {"tool_calls": [rest]}]
    events: list[dict[str, Any]] = []
    output = Output("r", lambda kind, **values: events.append({"kind": kind, **values}) or b"")
    for piece in pieces:
        output.add(piece)
    output.end("incomplete")
    bodies = output.bodies("incomplete")
    assert [(b["type"], b["status"]) for b in bodies] == [(k, "completed") for k in ("reasoning", "message", "function_call")] + [
        ("function_call", "incomplete")
    ]
    assert [b["content"][0]["text"] for b in bodies[:2]] == ["so!", "\n\nyes "] and [b["arguments"] for b in bodies[2:]] == ['{"a"', '{"a": 1}']
    done = [e["item"] for e in events if e["kind"] == "response.output_item.done"]
    assert json.dumps(done) == json.dumps(bodies) and [e["output_index"] for e in events if e["kind"].endswith("item.added")] == [0, 1, 2, 3]
