"""Models whose chat template opens what they think: reasoning and answer are told apart on a real server, streamed or whole."""

from __future__ import annotations

import json
import shutil
from typing import Any

import openai
import pytest
import tokenizers
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from backend.config import BUNDLED_MODEL, EngineConfig
from backend.grammar.thinking import FORM, MAY_THINK, THINKING, Thoughts
from backend.intake import Intake
from backend.sampling_params import SamplingParams
from backend.text import TextStream, Tokenizer
from backend.thought import ThoughtCount
from client.gateway.tool_calls import AnswerParser
from deploy.demo import running_gateway
from tests.servers import serve

PART = "<think>\nx = 1\ny = 2\n</think>\n\nprint(x, y)\n\n"
"""The bundled model writes on what comes again and again."""
TEMPLATE = (
    "{{ messages[-1].content }}{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% if tools %}{% endif %}{% for document in documents or () %}{{ document.text }}{% endfor %}"
)
ASK: Any = {"messages": [{"role": "user", "content": PART * 8}], "model": "default", "max_tokens": 48, "temperature": 0, "stop": ["\n\n<think>"]}
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
PLAIN: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(BUNDLED_MODEL, folder, ignore=shutil.ignore_patterns("model.py", "__pycache__"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    with (
        serve(folder.parent / "log", f"--model={folder}") as server,
        running_gateway(folder.parent / "gateway", server.grpc) as (address, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def read(api: openai.OpenAI, **own: Any) -> list[tuple[str, str]]:
    """Reasoning and content of each choice, streamed and whole, which are the same."""
    whole = [(getattr(c.message, "reasoning_content", ""), c.message.content) for c in api.chat.completions.create(**{**ASK, **own}).choices]
    streamed: dict[int, list[str]] = {}
    for event in api.chat.completions.create(**{**ASK, **own}, stream=True):
        for choice in event.choices:
            found = streamed.setdefault(choice.index, ["", ""])
            found[0] += getattr(choice.delta, "reasoning_content", None) or ""
            found[1] += choice.delta.content or ""
    assert [tuple(streamed[i]) for i in sorted(streamed)] == whole
    return whole


def test_chats(api):
    thought, said = "x = 1\ny = 2\n", "print(x, y)"
    assert read(api) == read(api, tools=TOOLS) == [(thought, said)]
    assert read(api, n=2, seed=1) == [(thought, said)] * 2
    assert read(api, max_tokens=3)[0][1] == "", "cut while it thinks"
    ((reasoning, content),) = read(api, **PLAIN)
    assert not reasoning and content, "the template closes it itself"


def test_forms_come_after_what_is_thought(api):
    """As vLLM has it; with thinking switched off from the first token on."""
    own: Any = {"extra_body": {"guided_choice": ["yes", "no"]}}
    assert read(api, **own)[0][0] == "x = 1\ny = 2\n" and {said for _, said in read(api, **own, n=2, seed=1)} <= {"yes", "no"}
    assert read(api, **own, max_tokens=3) == read(api, max_tokens=3), "cut while it thinks"
    off: Any = {"extra_body": own["extra_body"] | PLAIN["extra_body"]}
    assert not read(api, **off)[0][0] and read(api, **off)[0][1] in ("yes", "no")
    called = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "additionalProperties": False}}}
    for is_streamed in (False, True):
        found = api.chat.completions.create(**{**ASK, "stop": [], "tools": [called], "tool_choice": "required"}, stream=is_streamed)
        parts = [event.choices[0].delta for event in found] if is_streamed else [found.choices[0].message]
        assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts) == "x = 1\ny = 2\n"
        assert [call.function.name for part in parts for call in part.tool_calls or () if call.function.name][:1] == ["f"]
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer", "maximum": 9}, "strict": True}}
    response = api.responses.create(model="default", input=PART * 8, max_output_tokens=48, temperature=0, text=text)
    assert [item.type for item in response.output] == ["reasoning", "message"] and int(response.output_text) <= 9


def test_thoughts_that_a_final_message_leaves_open_go_on():
    intake = Intake(EngineConfig(), Tokenizer(BUNDLED_MODEL), 64, 4096, frozenset())
    for said, is_open in (("<think>\nHm", True), ("<think>\nHm\n</think>\nx", False), ("x", False), ("x <think>", True)):
        messages = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": said}]
        (request,) = intake.make(messages, SamplingParams(max_tokens=1), "own", template_variables={"continue_final_message": True})
        assert request.begins_thinking == is_open, said


def test_marks_that_are_special_tokens(tmp_path):
    """Mistral's: what they mark would else run into the answer."""
    inner = tokenizers.Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    inner.add_special_tokens(["[THINK]", "[/THINK]", "[OTHER]"])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[-1].content }}{# [THINK] ... [/THINK] #}"}))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("[THINK]x = 1[OTHER][/THINK]yes", add_special_tokens=False)
    for is_exact in (False, True):
        stream = TextStream(tokenizer, skip_special_tokens=not is_exact)
        text = "".join([stream.append(token_id)[0] for token_id in ids]) + stream.flush()
        assert text == f"<think>x = 1{'[OTHER]' * is_exact}</think>yes"
        assert is_exact != (text.encode() != b"".join(map(tokenizer.token_bytes, ids)))
    count = ThoughtCount(tokenizer, begins_thinking=False)
    for token_id in ids:
        if not count.is_over:
            count.push(token_id)
    assert tokenizer.decode(ids[: count.num_tokens], skip_special_tokens=False).endswith("[/THINK]")
    thoughts = Thoughts(tokenizer, 200, inner.get_vocab_size(), [])
    begin, end = (inner.token_to_id(mark) for mark in ("[THINK]", "[/THINK]"))
    assert thoughts.follow(MAY_THINK, begin) == THINKING and thoughts.follow(THINKING, end) == FORM
    intake = Intake(EngineConfig(), tokenizer, 2048, inner.get_vocab_size(), frozenset())
    chat, params = [{"role": "user", "content": "x[THINK]"}], SamplingParams()
    assert intake.make(chat, params, "a")[0].begins_thinking and intake.make(ids[:1], params, "b")[0].begins_thinking
    assert not intake.make(ids, params, "c")[0].begins_thinking


@pytest.mark.parametrize(
    ("begins_thinking", "text", "thought"),
    [
        (True, "x = 1\n</think>\n\nyes </think>", "x = 1\n</think>"),
        (True, "\n<think>\nx</think>y", "\n<think>\nx</think>"),
        (True, "never ends </thin", "never ends </thin"),
        (False, " <think>x</think>y", " <think>x</think>"),
        (False, "x <think>y</think>", ""),
        (False, "<thi", ""),
    ],
)
def test_tokens_of_thoughts(begins_thinking, text, thought):
    tokenizer = Tokenizer(BUNDLED_MODEL)
    parser = AnswerParser("", has_tools=False, begins_thinking=begins_thinking)
    assert bool(thought) == bool(parser.feed(text, is_last=True).reasoning), "as clients tell them apart"
    count, ids = ThoughtCount(tokenizer, begins_thinking), tokenizer.encode(text, add_special_tokens=False)
    for token_id in [10**9, *ids]:
        if not count.is_over:
            count.push(token_id)
    *_, last = [n for n in range(len(ids) + 1) if len(tokenizer.decode(ids[: n - 1] if n else [])) < len(thought)] or [0]
    assert count.num_tokens == (last + 1 if thought else 0), "one more for the id that writes nothing"


def count_thought(api: openai.OpenAI, **own: Any) -> int:
    """By the usage of a whole answer, which a stream's end and a response say too; it goes as far as the mark that ends it."""
    asked = {**ASK, **own}
    whole = api.chat.completions.create(**asked, extra_body={"return_tokens": True})
    assert ChatCompletion.model_validate(whole.to_dict()).usage == whole.usage
    *_, last = api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens_details == whole.usage.completion_tokens_details
    tokens = [choice.tokens for choice in whole.choices]
    lengths = [next((n for n in range(len(t)) if "</think>" in "".join(t[:n])), len(t)) for t in tokens]
    assert whole.usage.completion_tokens_details.reasoning_tokens == sum(lengths)
    return sum(lengths)


def test_usage(api):
    *_, first = api.chat.completions.create(
        **{**ASK, "max_tokens": 3}, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    count = count_thought(api)
    assert 3 < count < 48 and count_thought(api, n=2, seed=1) == 2 * count
    assert count_thought(api, max_tokens=3) == first.usage.completion_tokens_details.reasoning_tokens == 3, "cut while it thinks"
    assert api.chat.completions.create(**ASK, **PLAIN).usage.completion_tokens_details.reasoning_tokens == 0
    own: Any = {"model": "default", "input": PART * 8, "max_output_tokens": 48, "temperature": 0, "extra_body": {"stop": ASK["stop"]}}
    whole = api.responses.create(**own)
    with api.responses.stream(**own) as stream:
        final = list(stream)[-1].response
    for response in (whole, final):
        usage = Response.model_validate(response.to_dict()).usage
        assert usage is not None and usage.output_tokens_details.reasoning_tokens == count
        assert usage.input_tokens_details.cached_tokens > 0, "the same prompt was there before"


def test_responses(api):
    own: Any = {"model": "default", "input": PART * 8, "max_output_tokens": 48, "temperature": 0}
    whole = api.responses.create(**own, extra_body={"stop": ASK["stop"]})
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert (whole.output[0].content[0].text, whole.output_text) == ("x = 1\ny = 2\n", "print(x, y)")
    with api.responses.stream(**own, extra_body={"stop": ASK["stop"]}) as stream:
        final = list(stream)[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message"] and final.output_text == whole.output_text
    assert api.responses.create(**own, **PLAIN).output[0].type == "message"
    assert api.responses.create(**own, reasoning={"effort": "none", "summary": "auto"}).output[0].type == "message"
    with pytest.raises(openai.BadRequestError, match=r"reasoning.effort: .*got 'some'"):
        api.responses.create(**own, reasoning={"effort": "some"})


def test_what_the_template_is_given(api):
    messages: Any = ASK["messages"]
    address = str(api.base_url).removesuffix("v1/") + "tokenize"
    counts: list[Any] = [api.post(address, cast_to=object, body={"messages": messages, **own}) for own in ({}, PLAIN["extra_body"])]
    assert counts[0]["count"] < counts[1]["count"]
    texts = [{"title": "a", "text": "print(1)"}, {"text": "print(2)"}]
    for own, text in (({"documents": texts}, "print(1)print(2)"), ({"documents": [], "chat_template_kwargs": {"documents": texts[1:]}}, "print(2)")):
        found: Any = api.post(address, cast_to=object, body={"messages": messages, **own})
        written: Any = api.post(address.replace("tokenize", "detokenize"), cast_to=object, body={"tokens": found["tokens"]})
        assert written["prompt"].endswith("<think>\n" + text)
    with pytest.raises(openai.BadRequestError, match=r"documents.*dictionary"):
        api.chat.completions.create(**ASK, extra_body={"documents": ["a text"]})
    plain = read(api, reasoning_effort="none")
    assert not plain[0][0] and plain == read(api, **PLAIN)
    efforts: Any = {"reasoning_effort": "none", "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    assert read(api, **efforts) == read(api, reasoning_effort="high") == read(api), "what is said by name comes first"
    for wrong, message in (({"tools": []}, "chat_template_kwargs has 'tools'"), ({"messages": []}, "chat_template_kwargs has 'messages'")):
        with pytest.raises(openai.BadRequestError, match=message):
            api.chat.completions.create(**ASK, extra_body={"chat_template_kwargs": wrong})
