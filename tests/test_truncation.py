"""Prompts that are made to fit: which messages go, how many tokens stay, and OpenAI's and vLLM's names for it on a real server."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from backend.config import BUNDLED_MODEL
from backend.errors import LengthError, RequestError
from backend.text import Tokenizer
from backend.truncation import Truncation, find_cuts, fit_messages, keep
from client import Client, GenerateError

CONTEXT = 2048
LONG = "x = 1\n" * 70
"""Some 430 tokens of the bundled model's."""


def conversation(text: str) -> list[dict[str, Any]]:
    """s: system's, u: user's, a: assistant's, c and d: its calls of one tool or of two, 1 and 2: what they brought. Contents tell them apart."""
    found: list[dict[str, Any]] = []
    for place, kind in enumerate(text):
        role = {"s": "system", "u": "user", "1": "tool", "2": "tool"}.get(kind, "assistant")
        message: dict[str, Any] = {"role": role, "content": f"{kind}{place}"}
        if kind in "cd":
            message["tool_calls"] = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in "12"[: "_cd".index(kind)]]
        if role == "tool":
            message["tool_call_id"] = kind
        found.append(message)
    return found


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("u", ["u"]),
        ("suau", ["suau", "su"]),
        ("auau", ["auau", "uau", "u"]),  # a greeting comes first
        ("suasuau", ["suasuau", "ssuau", "ssu"]),
        ("uuau", ["uuau", "uau", "u"]),
        ("uc1au", ["uc1au", "u"]),
        ("sud12au", ["sud12au", "su"]),
        ("uauc1c1c1", ["uauc1c1c1", "uc1c1c1", "uc1c1", "uc1"]),  # the newest call and its output stay
        ("ud1au2", ["ud1au2"]),  # an output that comes late keeps its call
        ("ud1a2a", ["ud1a2a", "ua"]),
        ("uau1au", ["uau1au", "u1au", "u"]),
        ("sac1", ["sac1", "sc1"]),
        ("ss", ["ss"]),
    ],
)
def test_what_may_be_dropped(text, kept):
    messages = conversation(text)
    assert ["".join(m["content"][0] for m in keep(messages, cut)) for cut in find_cuts(messages)] == kept


def test_what_clients_should_not_send_is_cut_too():
    odd: Any = [{"role": "user"}, {"role": "assistant", "tool_calls": 5}, {"role": []}, {"role": "tool", "tool_call_id": []}, {"role": "user"}]
    odd[1:1] = [{"role": "assistant", "tool_calls": [3, {"id": {}}]}]
    assert find_cuts(odd) == [0, 5]


@pytest.mark.parametrize("room", range(1, 9))
@pytest.mark.parametrize("limit", [4, 100])
def test_the_fewest_messages_go(room, limit):
    """As many turns stay as fit; what is beyond `limit` is not even rendered."""
    messages = conversation("ua" * 7 + "u")
    rendered = []

    def render(kept):
        assert len(kept) <= limit
        rendered.append(kept)
        return kept

    found = fit_messages(messages, render, lambda kept: len(kept) <= room, lambda kept: len(kept) <= limit)
    fits = min(room, limit, len(messages))
    assert found == messages[len(messages) - (fits - 1) // 2 * 2 - 1 :] and len(rendered) <= 5


def test_what_never_fits_is_told_by_its_least():
    messages = conversation("suau")
    assert fit_messages(messages, list, lambda _: False, lambda _: True) == [messages[0], messages[3]]
    assert fit_messages(messages, list, lambda _: False, lambda _: False) == [messages[0], messages[3]]


def test_what_the_template_writes_around_messages_may_be_too_much():
    """It is known when they are rendered, and not before."""
    messages = conversation("auauau")

    def render(kept):
        if len(kept) > 3:
            raise LengthError("too long")
        return kept

    assert fit_messages(messages, render, lambda _: True, lambda _: True) == messages[3:]
    with pytest.raises(LengthError):
        fit_messages(conversation("ssssu"), render, lambda _: True, lambda _: True)


def test_room_for_the_answer():
    most = Truncation(-1).max_prompt_tokens
    assert [most(2048, n, True) for n in (1, 100, 1900, 0)] == [2047, 1948, 1536, 2047]
    assert [most(131072, n, False) for n in (128, 1900, 131072)] == [131072 - 128, *[131072 - 1024] * 2] and most(2048, 2048, False) == 1536
    assert Truncation(7).max_prompt_tokens(2048, 1900, True) == 7


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, None), "truncate_prompt_tokens must be -1, or from 1 to 2047 .*, got 0"),
        ((-2, None), "got -2"),
        ((2048, None), "got 2048"),
        ((None, "on"), "truncation must be one of auto, disabled, got 'on'"),
        ((5, "auto"), "give one of them"),
    ],
)
def test_values_that_are_none(values, message):
    with pytest.raises(RequestError, match=message):
        Truncation.from_values(*values, CONTEXT)


def test_the_last_tokens_of_a_text():
    """Special tokens stay where they are, as transformers has it with truncation_side left."""
    tokenizer = Tokenizer(BUNDLED_MODEL)
    text = "def main():\n    return 5"
    whole = tokenizer.encode(text)
    for count in range(1, len(whole) + 2):
        assert tokenizer.encode(text, max_tokens=count) == ([whole[0], *whole[len(whole) - count + 1 :]] if count < len(whole) else whole)
        assert tokenizer.encode(text, False, max_tokens=count) == whole[1:][-count:]


# -- on a real server ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(servers):
    return servers.get()


def turns(count: int) -> list[dict[str, str]]:
    return [{"role": role, "content": f"{number} {LONG}"} for number in range(count) for role in ("user", "assistant")]


def test_responses(api):
    own: Any = {"model": "default", "max_output_tokens": 8, "temperature": 0, "instructions": "Be brief."}
    newest = {"role": "user", "content": "and now?"}
    items = [*turns(6), newest]
    with pytest.raises(openai.BadRequestError, match=r"the prompt has \d+ tokens; the context holds 2048"):
        api.responses.create(**own, input=items)
    cut = api.responses.create(**own, input=items, truncation="auto")
    wanted = api.responses.create(**own, input=items[-5:], truncation="disabled")
    assert cut.truncation == "auto" and wanted.truncation == "disabled"
    assert (cut.output_text, cut.usage.input_tokens) == (wanted.output_text, wanted.usage.input_tokens), "two turns and the newest are left"
    assert CONTEXT - 900 < cut.usage.input_tokens <= CONTEXT - 8
    whole = api.responses.create(**own, input=items[-5:], truncation="auto")
    assert whole.usage.input_tokens == wanted.usage.input_tokens, "what fits is left as it is"
    with pytest.raises(
        openai.BadRequestError, match=r"input: without all that truncation auto may drop the prompt has \d+ tokens; the context"
    ) as caught:
        api.responses.create(**own, input=[*items, {"role": "user", "content": LONG * 6}], truncation="auto", stream=True)
    assert caught.value.param == "input"
    with pytest.raises(openai.BadRequestError, match="truncation: Input should be 'auto' or 'disabled', got 'some'"):
        api.responses.create(**own, input="x", truncation="some")


def test_far_too_long_a_conversation(api):
    """More than is rendered."""
    items: Any = [{"role": "user", "content": f"{number} {LONG * 20}"} for number in range(20)]
    answer = api.responses.create(model="default", input=[*items, {"role": "user", "content": "x"}], truncation="auto", max_output_tokens=4)
    assert 0 < answer.usage.input_tokens < 100
    lines: Any = [{"role": "user", "content": "\n" * 60_000}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match="the prompt that it writes has more than 131072 characters") as caught:
        api.responses.create(model="default", input=lines)
    assert caught.value.code == "context_length_exceeded", "the template writes each line break with two characters more"
    answer = api.responses.create(model="default", input=lines, truncation="auto", max_output_tokens=4)
    assert 0 < answer.usage.input_tokens < 100


def test_the_last_tokens(api, server):
    text = f"y = 2\n{LONG * 8}z ="
    ids = Tokenizer(BUNDLED_MODEL).encode(text)
    own: Any = {"model": "default", "max_tokens": 8, "temperature": 0}
    kept = {"extra_body": {"truncate_prompt_tokens": 40}}
    for prompt, last in ((text, [ids[0], *ids[-39:]]), (ids, ids[-40:])):
        found, wanted = api.completions.create(**own, **kept, prompt=prompt), api.completions.create(**own, prompt=last)
        assert found.usage.prompt_tokens == 40 and found.choices[0].text == wanted.choices[0].text
    chat = api.chat.completions.create(messages=[{"role": "user", "content": text}], **own, **kept)
    assert chat.usage.prompt_tokens == 40 and chat.usage.completion_tokens > 0
    with Client(server.grpc) as client:
        (direct,) = client.generate(ids, max_tokens=1, truncate_prompt_tokens=-1)
    assert direct.usage["prompt_tokens"] == CONTEXT - 1


def test_bad_values(api, server):
    def refuse(message: str, **own: Any) -> Any:
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            api.completions.create(**{"model": "default", "prompt": "x", **own})
        return caught.value.param

    assert (
        refuse("truncate_prompt_tokens must be -1, or from 1 to 2047 .*, got 0", extra_body={"truncate_prompt_tokens": 0}) == "truncate_prompt_tokens"
    )
    assert refuse("truncate_prompt_tokens must be .*, got 2048", extra_body={"truncate_prompt_tokens": 2048}) == "truncate_prompt_tokens"
    assert refuse("truncate_prompt_tokens: Input should be a valid integer", extra_body={"truncate_prompt_tokens": "5"}) == "truncate_prompt_tokens"
    assert refuse("'truncation_side': it may be left out, or 'left'", extra_body={"truncation_side": "right"}) == "truncation_side"
    with pytest.raises(openai.BadRequestError, match="truncation needs messages"):
        api.post("/chat/completions", cast_to=object, body={"text": "x", "truncation": "auto"})
    chat = json.dumps([{"role": "user", "content": "x"}])
    with Client(server.grpc) as client:
        for values, message in (
            ({"prompt": "x", "truncation": "auto"}, "truncation is for messages"),
            ({"messages": chat, "truncation": "off"}, "truncation must be one of auto, disabled, got 'off'"),
            ({"messages": chat, "truncation": "a" * 2000}, "truncation has 2000 bytes; the limit is 256 characters"),
            ({"messages": chat, "truncation": "auto", "truncate_prompt_tokens": 5}, "give one of them"),
        ):
            with pytest.raises(GenerateError, match=message) as refused:
                client.generate(**values)
            assert refused.value.code == "INVALID_ARG"
