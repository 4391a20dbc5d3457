"""Calls whose arguments come key by key: GLM-4.5's and Qwen3-Coder's, from the grammar to what clients get, and back into the prompt."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from backend.config import BUNDLED_MODEL
from backend.errors import RequestError
from backend.grammar import Grammars
from backend.text import Tokenizer
from backend.tools import FORMATS, ToolFormat, Tools
from client.gateway.forms import ChatForm
from client.gateway.keyed_calls import read_value
from client.gateway.openai import ChatRequest
from client.messages import Chunk
from deploy.demo import running_gateway
from tests.servers import serve
from tests.test_chat_template import with_template
from tests.test_tools import follows, in_pieces, parse

KEYED = [own for own in FORMATS if own.marks is not None]
TIGHT, GLM, QWEN = KEYED
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F", None]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "size": {"type": ["integer", "null"]},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        "kind": {"allOf": [{"$ref": "#/$defs/kind"}], "default": "a/b"},
        "other": {},
    },
    "required": ["city", "days"],
    "$defs": {
        "place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "kind": {"type": "string", "enum": ["a/b", "c"]},
    },
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop.it"}},
    {"type": "function", "function": {"name": "put", "parameters": {"type": "object"}}},
]


def write(format: ToolFormat, name: str, **arguments: str) -> str:
    """A call as the family writes it."""
    assert format.marks is not None
    own = "".join(format.marks.before + key + format.marks.between + value + format.marks.after for key, value in arguments.items())
    return format.before + name + format.between + own + format.after


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Tokenizer(BUNDLED_MODEL), 4096, [0])


GOOD: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"city": "Ulm", "days": "3"}, {"city": "Ulm", "days": 3}),
    ({"city": 'a\n"<b> ', "days": "9", "unit": "C"}, {"city": 'a\n"<b> ', "days": 9, "unit": "C"}),
    (
        {"city": "12", "days": "1", "unit": "null", "note": "null", "size": "null"},
        {"city": "12", "days": 1, "unit": None, "note": None, "size": None},
    ),
    ({"city": "null", "days": "1", "note": "", "size": "5"}, {"city": "null", "days": 1, "note": "", "size": 5}),
    ({"city": "ab", "days": "2", "zip": "01234", "places": '[{"x": 1.5}]'}, {"city": "ab", "days": 2, "zip": "01234", "places": [{"x": 1.5}]}),
    ({"city": "ab", "days": "2", "kind": "a/b", "other": "any text"}, {"city": "ab", "days": 2, "kind": "a/b", "other": "any text"}),
]
BAD = [
    {"days": "3"},
    *({"city": city, "days": "3"} for city in ("a", "x" * 13)),
    *({"city": "ab", "days": days} for days in ("12", "")),
    *(
        {"city": "ab", "days": "1", **own}
        for own in ({"unit": "K"}, {"size": "x"}, {"zip": "1234"}, {"kind": "b"}, {"places": '[{"y": 1}]'}, {"u": "1"})
    ),
]


@pytest.mark.parametrize("format", KEYED, ids=["tight", "glm", "qwen"])
def test_arguments_have_their_schema(grammars, format):
    """Where something has to be called, and with `strict` wherever a call begins."""
    required = Tools.from_values(TOOLS, "required")
    strict = Tools.from_values([{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS])
    for tools, before in ((required, ""), (strict, "Let me see.\n")):
        for arguments, _ in GOOD:
            assert follows(grammars, tools, format, before + write(format, "look", **arguments)), arguments
        for wrong in BAD:
            assert not follows(grammars, tools, format, before + write(format, "look", **wrong)), wrong
        assert follows(grammars, tools, format, before + write(format, "stop.it"))
        assert not follows(grammars, tools, format, before + write(format, "stop.it", a="1"))
        assert follows(grammars, tools, format, before + write(format, "put", a="1", b="x\n</y>"))


@pytest.mark.parametrize("format", KEYED, ids=["tight", "glm", "qwen"])
def test_arguments_come_as_their_types(format):
    """However they come: texts piece by piece, what is no text whole."""
    rng = random.Random(4)
    for arguments, expected in GOOD:
        text = "So:\n" + write(format, "look", **arguments) + format.separator + write(format, "stop.it")
        for most in (1, 3, 9, 1000):
            content, _, calls = parse(in_pieces(text, most, rng), tools=TOOLS)
            assert content == "So:\n" and [name for name, _ in calls] == ["look", "stop.it"]
            assert [json.loads(own) for _, own in calls] == [expected, {}]
    long = [call["function"]["arguments"] for call in _feed(format, "look", city="x" * 50).calls]
    assert long[-1].count("x") > 40, "a text is not held back"


def _feed(format: ToolFormat, name: str, **arguments: str) -> Any:
    from client.gateway.tool_calls import AnswerParser

    return AnswerParser("x", has_tools=True, tools=TOOLS).feed(write(format, name, **arguments).partition("x</")[0])


@pytest.mark.parametrize(
    ("text", "kinds", "expected"),
    [
        ("5", {"integer"}, "5"),
        ("5.0", {"integer"}, "5"),
        ("5.5", {"integer"}, '"5.5"'),
        ("null", {"integer"}, "null"),
        ("null", {"string"}, '"null"'),
        ("7", {"number"}, "7"),
        ("True", {"boolean"}, "true"),
        ("FALSE", {"boolean"}, "false"),
        ("None", {"null", "string"}, "null"),
        ("{'a': (1, 'x')}", {"object"}, '{"a": [1, "x"]}'),
        (" [1, 2]\n", {"array"}, "[1, 2]"),
        ("12", {"string", "null"}, '"12"'),
        ('"a"', None, '"a"'),
        ("[1", None, '"[1"'),
        ("1e999", {"number"}, '"1e999"'),
        ("{1, 2}", None, '"{1, 2}"'),
        ("9" * 5000, {"integer"}, '"' + "9" * 5000 + '"'),
        ("[" * 9000, {"array"}, '"' + "[" * 9000 + '"'),
        ("__import__('os')", None, "\"__import__('os')\""),
    ],
)
def test_values_are_read_as_what_they_may_be(text, kinds, expected):
    assert read_value(text, None if kinds is None else frozenset(kinds)) == expected


def test_a_parameter_that_no_schema_has():
    """GLM's is what it can be read as, and Qwen3-Coder's a text, as vLLM has them."""
    for format, expected in ((GLM, {"n": 5, "t": "a b"}), (QWEN, {"n": "5", "t": "a b"})):
        ((name, own),) = parse([write(format, "other", n="5", t="a b")], tools=TOOLS)[2]
        assert (name, json.loads(own)) == ("other", expected)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<tool_call>look\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\nwell </tool_call> then", "well </tool_call> then"),
        ("<tool_call>look\n<arg_key>days</arg_key><arg_value>3</arg_value>\n<arg_key>" + "x" * 600, "<arg_key>" + "x" * 600),
        ("<tool_call>\n<function=look>\n<parameter=days>3</parameter>\n</tool_call>\nthen", "then"),
    ],
    ids=["text", "a key without end", "no closing mark"],
)
def test_a_call_that_breaks_off(text, content):
    """What stands where no mark is is text again: an answer does not vanish in a call."""
    for most in (1, 4, 1000):
        found, _, ((name, arguments),) = parse(in_pieces(text, most, random.Random(2)), tools=TOOLS)
        assert (found.lstrip(), name, json.loads(arguments)) == (content, "look", {"days": 3})


@pytest.mark.parametrize("end", ["\n</function>\n</tool_call>", "\n</function>", "\n</function>\n</tool"])
@pytest.mark.parametrize(
    "values",
    [
        "<parameter=city>\na\n</function> b\n<parameter=days>\n3",
        "<parameter=days>\n3\n<parameter=city>\na\n</function> b",
        "<parameter=city>\na\n</function> b\n</parameter>\n<parameter=days>\n3",
    ],
    ids=["all", "the other way", "the last"],
)
def test_qwen_leaves_closing_marks_out(values, end):
    """As vLLM and SGLang read it: a value ends where the function's next parameter begins, or the call ends."""
    text = f"<tool_call>\n<function=look>\n{values}{end}"
    for most in (1, 4, 1000):
        content, _, ((name, arguments),) = parse(in_pieces(text, most, random.Random(2)), tools=TOOLS)
        assert (content, name, json.loads(arguments)) == ("", "look", {"city": "a\n</function> b", "days": 3})


def test_an_unclosed_value_that_is_empty():
    text = "<tool_call>\n<function=look>\n<parameter=note>\n<parameter=city>\n<parameter=city>\n<parameter=unknown>\n</function>\n</tool_call>"
    for most in (1, 4, 1000):
        ((_, arguments),) = parse(in_pieces(text, most, random.Random(2)), tools=TOOLS)[2]
        assert json.loads(arguments) == {"note": "", "city": "<parameter=city>\n<parameter=unknown>"}


def test_llamas_objects_behind_a_functions_mark():
    text = '<function=look>{"city": "</function>", "days": 3}</function> <function=put>{}</function>'
    for most in (1, 4, 1000):
        expected = ("", "", [("look", '{"city": "</function>", "days": 3}'), ("put", "{}")])
        assert parse(in_pieces(text, most, random.Random(2)), tools=TOOLS) == expected


def test_qwen_leaves_its_first_mark_out():
    own = "<function=look>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>3</parameter>\n</function>\n</tool_call>"
    for most in (1, 4, 1000):
        content, _, ((name, arguments),) = parse(in_pieces("Ok. " + own, most, random.Random(2)), tools=TOOLS)
        assert (content, name, json.loads(arguments)) == ("Ok. ", "look", {"city": "Ulm", "days": 3})


@pytest.mark.parametrize(
    "text",
    [
        "a <function=f> b",
        "<function=",
        "<tool_call>look around</tool_call>",
        "<tool_call>nothing\n</tool_call>!",
        "x <function=other>1",
        "see <function=look> for it",
    ],
)
def test_what_is_no_call_is_text(text):
    for most in (1, 3, 1000):
        assert parse(in_pieces(text, most, random.Random(3)), tools=TOOLS) == (text, "", [])


@pytest.mark.parametrize("format", KEYED, ids=["tight", "glm", "qwen"])
def test_a_call_that_max_tokens_cut(format):
    whole = write(format, "look", city="Ulm", days="3")
    request = ChatRequest(messages=[{"role": "user", "content": "?"}], tools=TOOLS, tool_choice="required")
    for end in range(len(whole)):
        for reason in ("length", "stop"):
            choice = ChatForm(request).write(0, Chunk(text=whole[:end], finish_reason=reason), {}, is_streamed=False)
            arguments = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())]
            is_whole = [own.endswith("}") for own in arguments] == [True]
            assert not choice["message"]["content"] and choice["finish_reason"] == ("tool_calls" if is_whole and reason == "stop" else reason)
            assert not is_whole or json.loads(*arguments) == {"city": "Ulm", "days": 3}


def test_what_cannot_be_enforced_of_a_bare_text(grammars):
    for own, message in (
        ({"type": "string", "format": "date"}, "tools: the parameter 'a' of 'f': 'format' cannot be enforced of a text that stands bare"),
        ({"type": "string", "maxLength": "x"}, "tools: the parameter 'a' of 'f': maxLength must be a whole number"),
    ):
        tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": own}}}}
        with pytest.raises(RequestError, match=message):
            Tools.from_values([tool], "required").form(GLM, {})
    many = {"anyOf": [{"$ref": "#/$defs/a"}] * 3}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": many}, "$defs": {"a": many}}}}
    with pytest.raises(RequestError, match="more than 4096 alternatives"):
        Tools.from_values([tool], "required").form(GLM, {})


GLM_TEMPLATE = (
    "[gMASK]<sop>{% if tools %}<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n{% endif %}{% for m in messages %}<|{{ m.role }}|>\n"
    "{{ m.content }}{% for tc in m.tool_calls or [] %}\n<tool_call>{{ tc.function.name }}\n{% for k, v in tc.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v | tojson if v is not string else v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endfor %}"
)
QWEN_TEMPLATE = (
    "{% if tools %}<function=example>\n<parameter=p>{% endif %}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{%- set call = call.function %}{{ '<tool_call>\n<function=' + call.name + '>\n' }}{% for name, value in call.arguments|items %}"
    "{{ '<parameter=' + name + '>\n' }}{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(("template", "format"), [(GLM_TEMPLATE, GLM), (QWEN_TEMPLATE, QWEN)], ids=["glm", "qwen"])
def test_histories_are_what_the_model_wrote(tmp_path: Path, template: str, format: ToolFormat) -> None:
    from backend.tools import find_format

    assert find_format(template) is format
    arguments = {"city": "Ulm", "days": 3, "places": [{"x": 1.5}], "note": None}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": json.dumps(arguments)}}
    prompt = with_template(tmp_path, template).render_chat([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert write(format, "look", city="Ulm", days="3", places='[{"x": 1.5}]', note="null") in prompt


# -- on a real server ---------------------------------------------------------------------------------------------------------

ASKED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", None]},
    },
    "required": ["city", "days"],
}


@pytest.fixture(scope="module", params=[GLM_TEMPLATE, QWEN_TEMPLATE], ids=["glm", "qwen"])
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("keyed") / "model"
    shutil.copytree(BUNDLED_MODEL, folder, ignore=shutil.ignore_patterns("model.py", "__pycache__"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": request.param}))
    with (
        serve(folder.parent / "log", f"--model={folder}") as server,
        running_gateway(folder.parent / "gateway", server.grpc) as (address, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def test_clients_call(api: openai.OpenAI) -> None:
    """Whole and streamed, with speculation as it is by default; and the call goes back into the next prompt."""
    ask: list[Any] = [{"role": "user", "content": "def weather(city, days):"}]
    own: dict[str, Any] = {"model": "default", "tools": [{"type": "function", "function": {"name": "look", "parameters": ASKED}}], "seed": 3}
    own |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 160, "temperature": 0.8}
    answer = api.chat.completions.create(messages=ask, **own).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls is not None and not answer.message.content
    (call,) = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "look" and set(arguments) <= {"city", "days", "unit"}
    assert isinstance(arguments["city"], str) and len(arguments["city"]) <= 8 and arguments["days"] in range(1, 10)
    assert arguments.get("unit", "C") in ("C", None)
    streamed = [c.function for part in api.chat.completions.create(messages=ask, stream=True, **own) for c in part.choices[0].delta.tool_calls or ()]
    assert streamed[0].name == "look" and json.loads("".join(own.arguments or "" for own in streamed)) == arguments
    history = [
        *ask,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "20"},
    ]
    after = api.chat.completions.create(messages=history, **{**own, "tool_choice": "auto", "max_tokens": 8})
    assert after.usage is not None and after.usage.completion_tokens == 8
