"""Answers with a form and calls of tools, from the grammar to OpenAI's own client on a real server."""

from __future__ import annotations

import json
import random
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest
import tokenizers
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from backend.config import BUNDLED_MODEL
from backend.errors import RequestError
from backend.grammar import Grammars
from backend.structured_outputs import StructuredOutputs
from backend.text import TextStream, Tokenizer
from backend.tools import FORMATS, ToolFormat, Tools, find_format, read_history, takes_one_call
from client import Client, GenerateError
from client.gateway.answers import Answer
from client.gateway.forms import ChatForm
from client.gateway.metrics import Metrics
from client.gateway.openai import ChatRequest
from client.gateway.tool_calls import AnswerParser
from client.messages import Chunk

ASK = [{"role": "user", "content": "Which colour, and how large?"}]
ARGUMENTS = '{"city": "a}]\\" <tool_call>", "days": 3}'
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def function(name: str, **own: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **own}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: Any, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def write(format: ToolFormat, names: list[str], arguments: str = ARGUMENTS) -> str:
    """Calls as the family writes them."""
    if (marks := format.marks) is not None:
        values = {key: own if isinstance(own, str) else json.dumps(own) for key, own in json.loads(arguments).items()}
        arguments = "".join(marks.before + key + marks.between + value + marks.after for key, value in values.items())
    return format.begin + format.separator.join(format.before + name + format.between + arguments + format.after for name in names) + format.end


# -- grammars of calls --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Tokenizer(BUNDLED_MODEL), 4096, [0])


def follows(grammars: Grammars, tools: Tools, format: ToolFormat, text: str) -> bool:
    """Whether the text is whole."""
    form = tools.form(format, {})
    assert form is not None
    matcher = grammars.compile(form)
    tokens = matcher.vocabulary.tokenizer.tokenize_str(text)
    return matcher.inner.try_consume_tokens(tokens) == len(tokens) and matcher.inner.is_accepting()


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.markers[-1])
def test_what_has_to_be_called_is(grammars, format):
    both = [function("get_weather"), function("put.it")]
    required, one, own = Tools.from_values(both, "required"), Tools.from_values(both, "required", False), Tools.from_values(both, named("put.it"))
    assert all(follows(grammars, tools, format, write(format, ["put.it"])) for tools in (required, one, own))
    assert follows(grammars, required, format, write(format, ["put.it", "get_weather"]))
    assert not follows(grammars, one, format, write(format, ["put.it", "get_weather"]))
    assert not follows(grammars, own, format, write(format, ["get_weather"]))
    for tools in (required, one, own):
        assert not follows(grammars, tools, format, "It is warm.")
        assert not follows(grammars, tools, format, write(format, ["put.it"], '{"city": "x", "days": 12}'))


def test_a_function_without_parameters_has_none(grammars):
    """As OpenAI has it; a schema that says nothing else is any object."""
    format = FORMATS[-1]
    for own, takes_any in (({}, False), ({"parameters": None}, False), ({"parameters": {}}, True), ({"parameters": {"type": "object"}}, True)):
        tools = Tools.from_values([{"type": "function", "function": {"name": "f", "strict": None, **own}}], "required")
        assert follows(grammars, tools, format, write(format, ["f"], "{}"))
        assert follows(grammars, tools, format, write(format, ["f"], '{"a": 1}')) == takes_any


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.markers[-1])
def test_strict_arguments_are_kept_to_wherever_a_call_begins(grammars, format):
    tools = Tools.from_values([function("get_weather", strict=True), function("put.it")])
    for text in ("It is warm.", write(format, ["put.it", "get_weather"]), ("Let me look.\n" if format.lead else "") + write(format, ["get_weather"])):
        assert follows(grammars, tools, format, text)
    assert not follows(grammars, tools, format, write(format, ["get_weather"], '{"city": "x", "days": "many"}'))
    if format.marks is None:  # else a text stands bare, and 5 is one
        assert not follows(grammars, tools, format, write(format, ["get_weather"], '{"city": 5, "days": 3}'))
    assert Tools.from_values([function("get_weather")]).form(format, {}) is None
    assert Tools.from_values([function("get_weather", strict=True)], "none").form(format, {}) is None


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.markers[-1])
def test_those_that_are_not_allowed_cannot_be_called(grammars, format):
    offered = [function("get_weather"), function("put.it"), function("put")]
    auto, required = (Tools.from_values(offered, allowed(mode, "put.it", "get_weather")) for mode in ("auto", "required"))
    for tools in (auto, required):
        assert follows(grammars, tools, format, write(format, ["put.it", "get_weather"])) and len(tools.tools) == 3, "the prompt has them all"
        for names in (["put"], ["put.it", "put"]):
            assert not follows(grammars, tools, format, write(format, names))
        assert follows(grammars, tools, format, "It is warm.") == (tools is auto)
    assert not follows(grammars, Tools.from_values(offered, allowed("auto", "put"), False), format, write(format, ["put", "put"]))
    answer = Tools.from_values(offered, allowed("auto", "put")).form(format, {}, StructuredOutputs(choice=("yes", "no")))
    assert answer is not None and "get_weather" not in str(answer.grammar)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.markers[-1])
def test_calls_or_an_answer_of_a_form(grammars, format):
    """With auto one or the other; where something has to be called, calls alone."""
    city = '{"city": "x", "days": 5}'
    answers = {"json": PARAMETERS, "is_lenient": True}, {"json": json.dumps(PARAMETERS)}, {"json_object": True}, {"choice": ("yes", "no")}
    for asked, text in zip(answers, (city, city, '{"a": 1}', "no")):
        for choice, is_open in (("auto", True), ("required", False), ("none", True)):
            tools = Tools.from_values([function("put.it")], choice)
            if choice == "auto" and not format.lead and "choice" not in asked:
                with pytest.raises(RequestError, match="this model's calls are JSON themselves"):
                    tools.form(format, {}, StructuredOutputs(**asked))
                continue
            own = tools.form(format, {}, StructuredOutputs(**asked))
            assert own is not None
            for whole, is_good in ((text, is_open), (write(format, ["put.it"]), choice != "none"), ("It is warm.", False)):
                matcher = grammars.compile(own)
                tokens = matcher.vocabulary.tokenizer.tokenize_str(whole)
                found = matcher.inner.try_consume_tokens(tokens) == len(tokens) and matcher.inner.is_accepting()
                # Llama's calls are JSON objects themselves.
                assert found == is_good or (choice == "none" and not format.lead and "json_object" in asked), (choice, whole)
    if format.lead:
        with pytest.raises(RequestError, match=r"structured_outputs\.json is not valid JSON"):
            Tools.from_values([function("put.it")]).form(format, {}, StructuredOutputs(json="{"))


@pytest.mark.parametrize("is_special", [False, True], ids=["Qwen's", "special"])
def test_marks_of_calls_that_are_tokens(is_special):
    """As the tokenizer writes them, which is what models were trained on; in pieces they are the same text, and begin the same calls."""
    tokenizer, format = Tokenizer(BUNDLED_MODEL), find_format("{{ tools }} <tool_call>")
    pieces = tokenizer.encode("<tool_call>", add_special_tokens=False)
    tokenizer.inner.add_tokens([tokenizers.AddedToken(mark, special=is_special) for mark in ("<tool_call>", "</tool_call>")])
    grammars, offered = Grammars(tokenizer, tokenizer.inner.get_vocab_size(), [0]), [function("put.it", strict=True), function("get_weather")]
    whole, other = (tokenizer.encode(write(format, [name], '{"city": "x", "days": 3}'), add_special_tokens=False) for name in ("put.it", "none"))
    for choice in ("required", "auto"):
        form = Tools.from_values(offered, choice).form(format, tokenizer.mark_ids)
        assert form is not None
        matcher = grammars.compile(form)
        assert matcher.inner.validate_tokens(whole) == len(whole) and matcher.inner.validate_tokens(other) < len(other)
        if choice == "required":
            assert matcher.look_ahead([], 3)[1] == whole[:3] and matcher.look_ahead(pieces, 99)[0] == 0
        else:
            assert matcher.inner.validate_tokens(pieces + whole[1:]) == len(pieces + whole[1:])
            assert matcher.inner.validate_tokens(pieces + other[1:]) < len(pieces + other[1:])


def test_special_tokens_are_written_by_their_ids():
    (mistral,) = (f for f in FORMATS if f.markers == ("[TOOL_CALLS]",))
    form = Tools.from_values([function("f")], "required").form(mistral, {"[TOOL_CALLS]": 5, "<s>": 1})
    assert form is not None and form.grammar is not None and 'start: <[5]> "[" call' in form.grammar


@pytest.mark.parametrize(
    ("template", "markers"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "<tool_call>"),
        ("{{ tools }} [TOOL_CALLS] ", "[TOOL_CALLS]"),
        ("{{ tools }} [TOOL_CALLS]f[ARGS]", "[ARGS]"),
        ("{{ tools }} <\uff5ctool\u2581calls\u2581begin\uff5c> ```json", "```json"),
        ("{{ tools }} <\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581begin\uff5c>"),
        ('{{ tools }} {"name": x, "parameters": y}', '"parameters":'),
        ("{{ tools }}", "<tool_call>"),
    ],
)
def test_families_are_told_by_their_templates(template, markers):
    assert find_format(template).markers[-1] == markers


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (([],), "tools must be a list of functions"),
        (([{"type": "function"}],), r"tools\[0\] must be"),
        (([function("a b")],), r"tools\[0\].function.name must be 1 to 64 letters"),
        (([{"type": "function", "function": {"name": "f", "parameters": 5}}],), r"tools\[0\].function.parameters must be a JSON schema"),
        (([function("f", strict="yes")],), r"tools\[0\].function.strict must be true or false, got 'yes'"),
        (([function("f", description=5)],), r"tools\[0\].function.description must be a text, got 5"),
        (([function("f"), function("f")],), "'f' is there twice"),
        (([function("f")], "always"), "tool_choice must be one of none, auto, required"),
        (([function("f")], named("g")), r"tool_choice must name one of the tools \(f\)"),
        (([function("f")], {"type": "custom"}), r"tool_choice must name one of the tools \(f\), got {'type': 'custom'}"),
        (([function("f")], {"type": "allowed_tools"}), "tool_choice.allowed_tools must be an object with mode and tools, got None"),
        (([function("f")], {"type": "allowed_tools", "allowed_tools": {"modus": "auto"}}), "has mode and tools, got 'modus' too"),
        (([function("f")], allowed("none", "f")), "tool_choice.allowed_tools.mode must be auto or required, got 'none'"),
        (([function("f")], allowed(["auto"], "f")), r"tool_choice.allowed_tools.mode must be auto or required, got \['auto'\]"),
        (([function("f")], allowed("auto")), r"allowed_tools.tools must be a list with one at least of the tools \(f\), got \[\]"),
        (([function("f")], {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}), r"allowed_tools.tools must be a list .*, got None"),
        (([function("f")], allowed("auto", "f", "g")), r"allowed_tools.tools\[1\] must name one of the tools \(f\), got .*'g'"),
    ],
)
def test_tools_that_are_none_are_refused(values, message):
    with pytest.raises(RequestError, match=message):
        Tools.from_values(*values)
    with pytest.raises(RequestError, match="chat template takes none"):
        find_format("{{ messages }}")


def test_templates_that_take_one_call():
    assert takes_one_call("{% if not message.tool_calls|length == 1 %}{{ raise_exception('one') }}{% endif %}")
    assert takes_one_call("{% if message.tool_calls | length != 1 %}{{ raise_exception('one') }}{% endif %}")
    assert not takes_one_call("{% for call in message.tool_calls %}{{ call.id|length }}{% endfor %}") and not takes_one_call(None)


def test_history_as_templates_want_it():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    found = read_history([{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "5", "tool_call_id": "1"}])
    assert found[0]["content"] == "" and found[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert found[1] == {"role": "tool", "content": "5", "tool_call_id": "1"}
    with pytest.raises(RequestError, match=r"messages\[0\].tool_calls\[0\].function.arguments is not valid JSON"):
        read_history([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}])
    for function in ({}, {"arguments": "{}"}, {"name": 5, "arguments": "{}"}):
        with pytest.raises(RequestError, match=r"messages\[0\].tool_calls\[0\] must have a function with name and arguments, got"):
            read_history([{"role": "assistant", "tool_calls": [{"function": function}]}])
    for arguments in ({}, {"arguments": ""}, {"arguments": None}):
        (message,) = read_history([{"role": "assistant", "tool_calls": [{"function": {"name": "f", **arguments}}]}])
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_special_tokens_of_calls_are_text_where_there_may_be_calls():
    tokenizer = Tokenizer(BUNDLED_MODEL)
    tokenizer.inner.add_special_tokens(["[TOOL_CALLS]", "[OTHER]"])
    ids = tokenizer.encode("a[TOOL_CALLS]b[OTHER]c", add_special_tokens=False)
    for may_call, text in ((True, "a[TOOL_CALLS]bc"), (False, "abc")):
        stream = TextStream(tokenizer, may_call=may_call)
        assert "".join(stream.append(i)[0] for i in ids) + stream.flush() == text


# -- reading calls ------------------------------------------------------------------------------------------------------------


def parse(pieces: list[str], **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and each call's name and arguments."""
    parser = AnswerParser("x", **{"has_tools": True, **options})
    content = reasoning = ""
    calls: dict[int, list[str]] = {}
    for number, piece in enumerate(pieces, 1):
        part = parser.feed(piece, number == len(pieces))
        content, reasoning = content + part.content, reasoning + part.reasoning
        for delta in part.calls:
            if delta["index"] not in calls:
                assert delta["id"] == f"call_x{delta['index']}" and delta["type"] == "function"
                calls[delta["index"]] = [delta["function"]["name"], ""]
            calls[delta["index"]][1] += delta["function"]["arguments"]
    return content, reasoning, [(name, arguments) for name, arguments in calls.values()]


def in_pieces(text: str, most: int, rng: random.Random) -> list[str]:
    pieces = []
    while text:
        count = rng.randint(1, most)
        pieces.append(text[:count])
        text = text[count:]
    return pieces


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.markers[-1])
def test_calls_are_found_however_they_come(format):
    rng = random.Random(1)
    tools = [function("get_weather"), function("put.it")]
    cases = [("", "", "")]
    if format.lead:
        cases += [("Let me look. ", "Let me look. ", ""), ("<think>\nfirst\n</think>\n\nok ", "ok ", "first\n")]
    for before, content, reasoning in cases:
        text = before + write(format, ["get_weather", "put.it"])
        for most in (1, 2, 5, 20, 1000):
            for _ in range(8):
                expected = (content, reasoning, [("get_weather", ARGUMENTS), ("put.it", ARGUMENTS)])
                assert parse(in_pieces(text, most, rng), tools=tools) == expected
                assert parse(in_pieces(text, most, rng), tools=tools, is_parallel=False) == (content, reasoning, expected[2][:1])
    assert parse([write(format, ["f"])], has_tools=False)[2] == []


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.markers[-1])
def test_what_is_not_allowed_is_text(format):
    """In whatever notation it comes: a grammar keeps the model to its own family's alone."""
    rng = random.Random(3)
    for most in (1, 3, 1000):
        own: Any = {"allowed": ["put.it"], "tools": [function("put"), function("put.it")]}
        content, _, calls = parse(in_pieces(write(format, ["put"]), most, rng), **own)
        assert not calls and "put" in content and (ARGUMENTS if format.marks is None else 'a}]" <').partition("<")[0] in content
        assert parse(in_pieces(write(format, ["put.it"]), most, rng), **own)[2] == [("put.it", ARGUMENTS)]


def test_a_closing_mark_that_is_cut_is_no_text() -> None:
    """By max_tokens."""
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}'
    for end in range(len("\n</tool_call>") + 1):
        assert parse([call + "\n</tool_call>"[:end]]) == ("", "", [("f", '{"a": 1}')])


_DEEPSEEK = FORMATS[1]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>, "b": 2} it is', ', "b": 2} it is'),  # no key of a call that is closed
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "b": 2}</tool_call> it is', "it is"),
        (f'{_DEEPSEEK.begin}\n{_DEEPSEEK.before}f{_DEEPSEEK.between}{{"a": 1}}{_DEEPSEEK.after}{_DEEPSEEK.end}', ""),
    ],
)
def test_what_stands_beside_a_call_is_the_same_however_it_comes(text, content):
    rng = random.Random(7)
    for most in (1, 3, 12, 1000):
        assert parse(in_pieces(text, most, rng)) == (content, "", [("f", '{"a": 1}')])


def test_calls_that_have_ids():
    """Mistral's of version 11, between a function's name and its arguments."""
    text = '[TOOL_CALLS]f[CALL_ID]abc123DEF[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'
    for most in (1, 4, 1000):
        assert parse(in_pieces(text, most, random.Random(5))) == ("", "", [("f", '{"a": 1}'), ("g", "{}")])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (f'<tool_call>\n{{"arguments": {ARGUMENTS}, "name": "f"}}\n</tool_call>', "f"),
        (
            f'ok <tool_call>{{"arguments": {ARGUMENTS}, "name": "f"}}</tool_call>\n<tool_call>{{"name": "g", "arguments": {ARGUMENTS}}}</tool_call>',
            "fg",
        ),
        (f'{{"type": "function", "name": "f", "parameters": {ARGUMENTS}}}; {{"name": "g", "parameters": {ARGUMENTS}}}', "fg"),
        (f'{{"type": "function", "function": {{"name": "f", "arguments": {ARGUMENTS}}}}}', "f"),
        (f'{{"function": "f", "parameters": {ARGUMENTS}}}', "f"),
        (f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGUMENTS}, "id": "aB, }}345"}}, {{"name": "g", "arguments": {ARGUMENTS}, "id": 5}}]', "fg"),
        (f'[TOOL_CALLS] [{{"id": "1", "name": "f", "arguments": {ARGUMENTS}}}, {{"id": "2", "name": "g", "arguments": {ARGUMENTS}}}]', "fg"),
        (f'<tool_call>{{"name": "f", "arguments": {json.dumps(ARGUMENTS)}}}</tool_call>', "f"),
        (f'{{"name": "f", "parameters": {json.dumps(ARGUMENTS)}}}', "f"),
        (f"[TOOL_CALLS]f[ARGS] {ARGUMENTS}[TOOL_CALLS]g[ARGS]\n{ARGUMENTS}", "fg"),
        (f"{_DEEPSEEK.begin}{_DEEPSEEK.before}f{_DEEPSEEK.between}\n{ARGUMENTS}\n{_DEEPSEEK.after}{_DEEPSEEK.end}", "f"),
    ],
)
def test_keys_of_calls_in_any_order(text, names):
    """Hermes 2 Pro's calls end with the name, Llama's may begin with a type, and Mistral's have ids."""
    rng = random.Random(6)
    for most in (1, 2, 7, 30, 1000):
        content, _, calls = parse(in_pieces(text, most, rng))
        assert content == ("ok " if text.startswith("ok") else "") and [name for name, _ in calls] == [*names]
        assert all(json.loads(arguments) == json.loads(ARGUMENTS) for _, arguments in calls)
        assert parse(in_pieces(text, most, rng), is_parallel=False)[2] == calls[:1]
        assert parse(in_pieces(text, most, rng), allowed=["other"])[2] == []


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f"}\n</tool_call>\n<tool_call>{"name": "f", "arguments": null}</tool_call>',
        '[TOOL_CALLS] [{"name": "f"}, {"name": "f"}]',
        '{"name": "f", "parameters": {}}; {"name": "f"}',
    ],
)
def test_calls_without_arguments(text):
    """Behind a mark of calls or a call, as SGLang reads them: an object with a name alone is an answer as likely."""
    for most in (1, 3, 1000):
        assert parse(in_pieces(text, most, random.Random(8))) == ("", "", [("f", "{}"), ("f", "{}")])


@pytest.mark.parametrize(
    "text",
    ['{"name": "f", "parameters": null}', '{"type": "box", "size": [1, {"a": 2}]} and more',
     '{"arguments": {"a": 1}}', '{"id": 5, "name": "a b", "arguments": {}}', '{"type": "x", "cut',
     '<tool_call>{"arguments": {"a": 1}, "nam', '<tool_call> {"arguments": 1e400000, "name": 5}</x>', '{"id": ' + "[" * 70_000, '{"type": "\ud800"}'],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_objects_that_are_no_calls_are_text(text):
    """And are not held back where they begin as answers do."""
    assert AnswerParser("x", has_tools=True).feed('{"id": 1' + ", " * 300).content.startswith('{"id": 1')
    for most in (3, 50, 100_000):
        assert parse(in_pieces(text, most, random.Random(7))) == (text, "", [])


@pytest.mark.parametrize("end", ["<tool", "<tool_call>\n", '<tool_call>\n{"name": "f", "argu', '<tool_call>\n{"name": "f", "arguments": {"a'])
@pytest.mark.parametrize("calls", ["", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'], ids=["first", "second"])
def test_an_answer_of_calls_that_is_cut(calls, end):
    """By max_tokens, or a stop string: a call's beginning is no text, and arguments that are not whole are no reason to run anything."""
    request = ChatRequest(messages=ASK, tools=[function("f")], tool_choice="required")
    for reason in ("length", "stop"):
        choice = ChatForm(request).write(0, Chunk(text=calls + end, finish_reason=reason), {}, is_streamed=False)
        is_cut = end.endswith("a")
        assert not choice["message"]["content"] and len(choice["message"].get("tool_calls", ())) == bool(calls) + is_cut
        assert choice["finish_reason"] == ("tool_calls" if reason == "stop" and calls and not is_cut else reason)
    free = ChatForm(ChatRequest(messages=ASK, tools=[function("f")]))
    assert free.write(0, Chunk(text="see <tool", finish_reason="stop"), {}, is_streamed=False)["message"]["content"] == "see <tool"


@pytest.mark.parametrize("text", ['{"x": 1}', '{"name": "f"}', "see [TOOL", "<tool_call>\nnothing</tool_call> x", "a <b>c</b>", "{" * 2000,
    '{"name": "\\ud800", "arguments": {}}', '{"name": "\\q", "arguments": {}}'])  # fmt: skip
def test_what_is_no_call_is_text(text):
    for most in (1, 3, 5000):
        assert parse(in_pieces(text, most, random.Random(2))) == (text, "", [])


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<think>\nso\n</think>\n\n\n<response>\nyes\n</response>\n", "yes"),
        ("<think>\nso\n</think>\n<response>yes\n", "yes\n"),
        ("<think>\nso\n</think>\nyes <response>\n</response>", "yes <response>\n</response>"),
        ("<response><a>1</a></response>\n", "<response><a>1</a></response>\n"),
        ("Here: <response>\n1\n</response>", "Here: <response>\n1\n</response>"),
    ],
)
def test_what_ernie_writes_around_what_it_says(text, content):
    """Behind thoughts alone: elsewhere it is as likely to be XML that was asked for."""
    rng = random.Random(9)
    for most in (1, 3, 1000):
        assert parse(in_pieces(text, most, rng)) == (content, "so\n" if "think" in text else "", [])
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
    for most in (1, 3, 1000):
        assert parse(in_pieces(f"<think>so</think>\n<response>\nok\n</response>\n{call}", most, rng)) == ("ok", "so", [("f", "{}")])


def test_what_was_thought_is_told_apart():
    assert parse(["<think>\nhm, </th", "ink or not\n</think>\n\nyes"], has_tools=False) == ("yes", "hm, </think or not\n", [])
    assert parse(["<think>never done"], has_tools=False) == ("", "never done", [])
    assert parse(["a </think> b <think>", " c"], has_tools=False)[1] == ""


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("\nso, </th\n</think>\n\nyes </think>", "yes </think>", "so, </th\n"),
        ("<think>\nso</think>yes", "yes", "so"),
        ("<thinking", "", "<thinking"),
        ("</think>\n\nyes", "yes", ""),
        ("{cut", "", "{cut"),
        ("", "", ""),
    ],
)
def test_what_is_thought_where_the_prompt_opens_it(text, content, reasoning):
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    rng = random.Random(4)
    for most in (1, 3, 9, 1000):
        assert parse([*in_pieces(text, most, rng), ""], has_tools=False, begins_thinking=True) == (content, reasoning, [])
        if "</think>" in text:
            assert parse(in_pieces(text + call, most, rng), begins_thinking=True) == (content, reasoning, [("f", '{"a": 1}')])
    assert parse(in_pieces(call, 3, rng), begins_thinking=True) == ("", call, []), "what was only thought of is no call"


# -- on a real server ---------------------------------------------------------------------------------------------------------


class Box(pydantic.BaseModel):
    colour: Literal["red", "green", "blue"]
    is_large: bool
    size: Annotated[int, pydantic.Field(ge=0, le=99)]


@pytest.fixture(scope="module")
def server(servers):
    return servers.get()


def converse(api: openai.OpenAI, **parameters: Any) -> Any:
    return api.chat.completions.create(**{"model": "default", "messages": ASK, "max_tokens": 120, "temperature": 0, **parameters})


def test_parse(api):
    answer = api.chat.completions.parse(model="default", messages=ASK, response_format=Box, max_tokens=120, temperature=1, seed=1)
    assert isinstance(answer.choices[0].message.parsed, Box) and answer.choices[0].finish_reason == "stop"
    with api.chat.completions.stream(model="default", messages=ASK, response_format=Box, max_tokens=120, temperature=1, seed=1) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


def test_forms(api):
    assert converse(api, response_format={"type": "json_object"}).choices[0].message.content.startswith("{")
    assert converse(api, response_format={"type": "text"}).choices[0].message.content == converse(api).choices[0].message.content
    for own in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"regex": "yes|no"}}, {"guided_grammar": 'root ::= "yes" | "no"'}):
        answer = api.completions.create(model="default", prompt="Is it? ", max_tokens=9, extra_body={**own, "return_tokens": True})
        assert answer.choices[0].text in ("yes", "no")
        assert set(answer.choices[0].token_sources) <= {"target", "grammar", "mtp", "ngram", "suffix"}


def test_forms_that_cannot_be(api, server):
    schema = {"name": "a", "schema": {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2}}
    assert converse(api, response_format={"type": "json_schema", "json_schema": schema}).choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        converse(api, response_format={"type": "json_schema", "json_schema": {**schema, "strict": True}})
    assert caught.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="give one of guided_json, guided_regex"):
        converse(api, extra_body={"guided_json": {}, "guided_regex": "a"})
    with pytest.raises(openai.BadRequestError, match="unclosed character class"):
        converse(api, stream=True, extra_body={"guided_regex": "[a"})
    with Client(server.grpc) as client, pytest.raises(GenerateError, match="unknown key 'jsn'") as refused:
        client.generate("x", structured_outputs={"jsn": {}})
    assert refused.value.code == "INVALID_ARG"


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False},
        },
    }
    for name in ("get_weather", "get_time")
]


@pytest.mark.parametrize("count", [1, 2])
def test_a_call_that_comes_whole_with_the_answers_end(count):
    """As from a step of many accepted drafts, or a server that was held up: OpenAI's library tells of a call's end all the same."""
    request = ChatRequest(messages=ASK, tools=[function("f")], stream=True, return_tokens=True)
    answer = Answer(None, Metrics(), "m", "x", request)  # type: ignore[arg-type]
    part = answer._form.write(
        0, Chunk(write(FORMATS[0], ["f"] * count), [7], ["target"], "stop", speculation={"steps": 1}), {7: b"x"}, is_streamed=True
    )
    state = ChatCompletionStreamState(input_tools=request.tools)
    chunks = [json.loads(line.removeprefix("data: ")) for line in answer._part_event(part).decode().split("\n\n") if line]
    done = [e.arguments for c in chunks for e in state.handle_chunk(ChatCompletionChunk(**c)) if e.type == "tool_calls.function.arguments.done"]
    assert done == [ARGUMENTS] * count
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, "tool_calls"] and chunks[1]["choices"][0]["delta"] == {}
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == [7] and ["speculation" in c["choices"][0] for c in chunks] == [False, True]


@pytest.mark.parametrize("choice", ["required", named("get_time")], ids=["required", "named"])
def test_calls(api, choice):
    own = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    answer = converse(api, **own)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
    assert call.function.name in ("get_weather", "get_time") if choice == "required" else call.function.name == "get_time"
    assert json.loads(call.function.arguments)["unit"] in ("C", "F")
    with api.chat.completions.stream(model="default", messages=ASK, max_tokens=120, temperature=0, **own) as stream:
        events = [e.type for e in stream]
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    assert "tool_calls.function.arguments.done" in events
    parts = [part.choices[0] for part in converse(api, **own, stream=True)]
    assert all(part.finish_reason or part.delta.model_dump(exclude_unset=True) for part in parts), "none says nothing"
    said = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    after = converse(api, messages=[*ASK, said, {"role": "tool", "tool_call_id": call.id, "content": "20"}], tools=TOOLS, max_tokens=8)
    assert after.usage.completion_tokens > 0


def test_calls_of_those_that_are_allowed(api):
    """All are in the prompt."""
    every = converse(api, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    (first,) = every.choices[0].message.tool_calls
    other = next(tool["function"]["name"] for tool in TOOLS if tool["function"]["name"] != first.function.name)
    own = {"tools": TOOLS, "tool_choice": allowed("required", other), "parallel_tool_calls": False}
    answer = converse(api, **own)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == other and answer.usage.prompt_tokens == every.usage.prompt_tokens
    streamed = [c for part in converse(api, **own, stream=True) for c in part.choices[0].delta.tool_calls or ()]
    assert streamed[0].function.name == other and "".join(c.function.arguments for c in streamed) == call.function.arguments
    with pytest.raises(openai.BadRequestError, match=r"tool_choice.allowed_tools.tools\[0\] must name one of the tools") as caught:
        converse(api, tools=TOOLS, tool_choice=allowed("auto", "f"))
    assert caught.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError, match=r"tool_choice is {'type': 'allowed_tools'.*, and there are no tools"):
        converse(api, tool_choice=allowed("auto", "f"))


def test_no_calls(api):
    free = converse(api, tools=TOOLS, tool_choice="none")
    assert free.choices[0].message.tool_calls is None and free.choices[0].message.content
    assert converse(api, tools=[], tool_choice="auto").choices[0].message.content == converse(api).choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="there are no tools"):
        converse(api, tool_choice="required")
    odd = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match=r"tools: the parameters of 'f': .*uniqueItems"):
        converse(api, tools=[odd])
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    with pytest.raises(openai.BadRequestError, match="tools: the parameters of 'f': no value with an end fulfils it"):
        converse(api, tools=[{"type": "function", "function": {"name": "f", "parameters": endless}}], tool_choice="required")
    with pytest.raises(openai.BadRequestError, match=r"response_format\.json_schema\.schema: no value with an end fulfils it"):
        converse(api, tools=TOOLS, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": endless}})
    wrong = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": 5}, "strict": True}}
    for choice in ("auto", "required"):  # though calls alone may come
        with pytest.raises(openai.BadRequestError, match=r"response_format\.json_schema\.schema: properties must be an object") as caught:
            converse(api, tools=TOOLS, response_format=wrong, tool_choice=choice)
        assert caught.value.param == "response_format", "and nothing is said of tools"
        with pytest.raises(openai.BadRequestError, match="guided_json is not valid JSON"):
            converse(api, tools=TOOLS, tool_choice=choice, extra_body={"guided_json": "{"})
    with pytest.raises(openai.BadRequestError, match="guided_regex cannot stand beside tools"):
        converse(api, tools=TOOLS, extra_body={"guided_regex": "a"})
    own = {
        "type": "json_schema",
        "json_schema": {"name": "box", "strict": True, "schema": {**Box.model_json_schema(), "additionalProperties": False}},
    }
    either = converse(api, tools=TOOLS, response_format=own, temperature=1, seed=1).choices[0]
    assert bool(either.message.tool_calls) != bool(either.message.content and Box.model_validate_json(either.message.content))
    assert converse(api, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, response_format=own).choices[0].finish_reason == "tool_calls"
