"""Libraries that people ask OpenAI's interface with, as their documentation has it: structured answers, calls, streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pydantic
import pytest

ASK = "Which colour?"
SAMPLING: dict[str, Any] = {"max_tokens": 80, "temperature": 0}


class Box(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    colour: Literal["red", "green", "blue"]
    is_large: bool


@pytest.fixture(scope="module", autouse=True)
def _no_reports(monkeypatch_module):
    """None of them writes to a service of its makers."""
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2", "LOGFIRE_SEND_TO_LOGFIRE"):
        monkeypatch_module.setenv(name, "false")


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize("kind", ["from_openai", "from_vllm"])
def test_outlines(api, kind):
    import outlines

    model = getattr(outlines, kind)(api, "default")
    assert Box.model_validate_json(model(ASK, Box, **SAMPLING))
    if kind == "from_vllm":  # OpenAI's own interface has schemas only
        assert model(ASK, Literal["yes", "no"], **SAMPLING) in ("yes", "no")
        assert model(ASK, outlines.regex("[0-9]{3}"), **SAMPLING).isdigit()
        assert Box.model_validate_json("".join(model.stream(ASK, Box, **SAMPLING)))


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("uses_responses", [False, True], ids=["chat", "responses"])
def test_langchain(gateway, method, uses_responses):
    from langchain_openai import ChatOpenAI

    own: Any = {"base_url": f"{gateway}/v1", "api_key": "none", "max_retries": 0, **SAMPLING}
    model = ChatOpenAI(model="default", use_responses_api=uses_responses, **own)
    assert isinstance(model.with_structured_output(Box, method=method).invoke(ASK), Box)
    if method == "json_schema":
        text = "".join(part.text for part in model.stream(ASK))
        assert text and text == model.invoke(ASK).text
        return
    tool = {"title": "put", "description": "Puts a box.", **{k: v for k, v in Box.model_json_schema().items() if k != "title"}}
    bound = model.bind_tools([tool], tool_choice="put", strict=True)
    whole, streamed = bound.invoke(ASK), None
    for part in bound.stream(ASK):
        streamed = part if streamed is None else streamed + part
    (call,) = whole.tool_calls
    assert call["name"] == "put" and Box(**call["args"])
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [("put", call["args"])]
    history: Any = [("user", ASK), whole, {"role": "tool", "content": "done", "tool_call_id": call["id"]}]
    assert model.bind_tools([tool]).invoke(history).usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("name", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(gateway, name):
    import pydantic_ai
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    async def ask() -> None:
        provider = OpenAIProvider(base_url=f"{gateway}/v1", api_key="none")
        model = getattr(openai, name)("default", provider=provider)
        settings: Any = dict(SAMPLING)
        for kind in (pydantic_ai.ToolOutput(Box, strict=True), pydantic_ai.NativeOutput(Box)):
            agent: Any = pydantic_ai.Agent(model, output_type=kind, model_settings=settings, retries=0)
            assert isinstance((await agent.run(ASK)).output, Box)
        settings["max_tokens"] = 8
        agent = pydantic_ai.Agent(model, model_settings=settings)
        whole = (await agent.run(ASK)).output
        async with agent.run_stream(ASK) as stream:
            assert whole == "".join([part async for part in stream.stream_text(delta=True)]) != ""

    asyncio.run(ask())


def test_a_schema_beside_json_object(api):
    """As instructor's mode JSON_SCHEMA has it, and llama.cpp's and Together's clients."""
    schema = {"type": "json_object", "schema": Box.model_json_schema()}
    answer = api.chat.completions.create(model="default", messages=[{"role": "user", "content": ASK}], response_format=schema, **SAMPLING)
    assert Box(**json.loads(answer.choices[0].message.content))
