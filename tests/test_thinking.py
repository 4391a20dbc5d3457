"""Models whose chat template opens what they think: reasoning and answer are told apart on a real server, streamed or whole."""

from __future__ import annotations

import json
import shutil
from typing import Any

import openai
import pytest

from backend.config import BUNDLED_MODEL
from deploy.demo import running_gateway
from tests.servers import serve

PART = "<think>\nx = 1\ny = 2\n</think>\n\nprint(x, y)\n\n"
"""The bundled model writes on what comes again and again."""
TEMPLATE = (
    "{{ messages[-1].content }}{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% if tools %}{% endif %}"
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
    # What is asked for as a form is the answer, with no thoughts before it.
    assert read(api, extra_body={"guided_choice": ["yes", "no"]})[0][1] in ("yes", "no")


def test_responses(api):
    own: Any = {"model": "default", "input": PART * 8, "max_output_tokens": 48, "temperature": 0}
    whole = api.responses.create(**own, extra_body={"stop": ASK["stop"]})
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert (whole.output[0].content[0].text, whole.output_text) == ("x = 1\ny = 2\n", "print(x, y)")
    with api.responses.stream(**own, extra_body={"stop": ASK["stop"]}) as stream:
        final = list(stream)[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message"] and final.output_text == whole.output_text
    assert api.responses.create(**own, **PLAIN).output[0].type == "message"


def test_what_the_template_is_given(api):
    messages: Any = ASK["messages"]
    address = str(api.base_url).removesuffix("v1/") + "tokenize"
    counts: list[Any] = [api.post(address, cast_to=object, body={"messages": messages, **own}) for own in ({}, PLAIN["extra_body"])]
    assert counts[0]["count"] < counts[1]["count"]
    for wrong, message in (({"tools": []}, "chat_template_kwargs has 'tools'"), ({"messages": []}, "chat_template_kwargs has 'messages'")):
        with pytest.raises(openai.BadRequestError, match=message):
            api.chat.completions.create(**ASK, extra_body={"chat_template_kwargs": wrong})
