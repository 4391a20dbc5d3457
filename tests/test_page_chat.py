"""The gateway's page in a real browser, on a real server: chats, answers of a given form, calls of tools, and the same request elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from playwright.sync_api import expect

from client import Client
from tests.pages import open_page, wait_for_answers

FUNCTION = {
    "name": "get_weather",
    "strict": True,
    "parameters": {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False},
}


@pytest.fixture(scope="module")
def server(servers):
    return servers.get()


@pytest.fixture
def page(chromium, gateway, server):
    """In chat mode."""
    server.wait_until_ready()
    with open_page(chromium, gateway) as page:
        page.get_by_label("Chat", exact=True).check()
        page.get_by_label("Max tokens").fill("12")
        yield page


def send(page, text: str) -> None:
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")


def say(page, text: str) -> str:
    """Sends a message, and gives the answer."""
    send(page, text)
    wait_for_answers(page)
    return page.locator("#on .message.assistant .text").last.text_content()


def test_a_conversation(page, server):
    page.get_by_label("System prompt").fill("Be brief.")
    messages = [{"role": "system", "content": "Be brief."}]
    with Client(server.grpc) as client:
        for text in ("read a file", "and <b>write</b>\nit"):
            messages.append({"role": "user", "content": text})
            (expected,) = client.generate(None, messages=messages, max_tokens=12, temperature=0.0)
            assert say(page, text) == expected.text == page.locator("#off .text").text_content()
            messages.append({"role": "assistant", "content": expected.text})
    assert page.locator("#on .message").all_inner_texts()[2].startswith("You\nand <b>write</b>\nit")
    expect(page.locator("#verdict")).to_have_text(re.compile("^same text, .* times as fast"))
    expect(page.locator("#on .summary").last).to_have_text(re.compile(r"12 tokens, \d+\.\d\d a step"))
    page.get_by_role("button", name="Retry").click()
    wait_for_answers(page)
    assert page.locator("#on .message").count() == 4, "the answer takes the other one's place"
    assert page.locator("#on .message.assistant .text").last.text_content() == messages[-1]["content"]
    page.get_by_role("button", name="New conversation").click()
    assert page.locator("#on .message, #off .text").count() == 0
    expect(page.get_by_role("button", name="Retry")).to_be_disabled()
    expect(page.locator("#prompt")).to_be_focused()


def test_modes_keep_what_was_typed(page):
    answer = say(page, "read a file")
    page.locator("#prompt").fill("and")
    page.get_by_label("Completion", exact=True).check()
    expect(page.locator("#prompt")).to_have_value(re.compile("^class Circle"))
    expect(page.get_by_label("Max tokens")).to_have_value("160")
    expect(page.get_by_role("button", name="Retry")).to_be_hidden()
    assert page.locator("#on .output").text_content() == ""
    page.get_by_label("Chat", exact=True).check()
    expect(page.locator("#prompt")).to_have_value("and")
    assert page.locator("#on .message.assistant .text").text_content() == answer


def shown(page) -> list[str]:
    """The conversation's messages, as they stand there and in the colours of their tokens."""
    return page.locator("#on .message").evaluate_all("all => all.map((e) => e.outerHTML)")


def test_a_conversation_survives_a_reload(page):
    page.get_by_label("System prompt").fill("Be brief.")
    say(page, "read a file")
    say(page, "and <b>write</b> it")
    before = shown(page)
    sent = []
    page.on("request", lambda request: sent.append(request.post_data_json) if "completions" in request.url else None)
    page.reload()
    expect(page.get_by_label("Chat", exact=True)).to_be_checked()
    assert shown(page) == before
    expect(page.get_by_label("Chat", exact=True)).to_be_enabled()
    page.get_by_label("Max tokens").fill("4")
    say(page, "go on")
    assert [m["role"] for m in sent[0]["messages"]] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert sent[0]["messages"][3]["content"] == "and <b>write</b> it"
    page.get_by_label("Completion", exact=True).check()
    page.reload()
    expect(page.get_by_label("Completion", exact=True)).to_be_checked()
    assert page.locator("#on .output").text_content() == "", "in the other mode it waits"
    page.get_by_label("Chat", exact=True).check()
    assert len(shown(page)) == 6
    page.get_by_role("button", name="New conversation").click()
    page.reload()
    expect(page.get_by_label("Chat", exact=True)).to_be_checked()
    assert not shown(page)
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")


def test_what_had_no_answer_before_a_reload_can_be_sent_again(page, server):
    page.get_by_label("Max tokens").fill("4")
    say(page, "read a file")
    page.get_by_label("Max tokens").fill("1500")
    with server.cancels(2):
        send(page, "and write it")
        with server.held_amid(2):
            expect(page.locator("#on .message.assistant").last.locator(".token").nth(5)).to_be_visible()
            page.reload()
    expect(page.locator("#prompt")).to_have_value("and write it")
    assert len(shown(page)) == 2


def test_what_is_kept_has_a_limit(page):
    """Of a conversation that is too long the colours go first, and then all of it, which is said; what nobody can read costs nothing else."""
    turns = """(size) => [
        { message: { role: "user", content: "a" } },
        {
            message: {
                role: "assistant", content: "b".repeat(size),
                tool_calls: [{ id: "c", type: "function", function: { name: "f", arguments: "{}" } }],
            },
            summary: "2 tokens",
            parts: { thought: [["hm", "mtp"]], text: [["b".repeat(size), "ngram"]], calls: [[["{}", "target"]]] },
        },
    ]"""
    found = page.evaluate(
        f"""async () => {{
            const {{ keep, load }} = await import("/page/kept.js");
            const found = [];
            for (const size of [10, 1_200_000, 2_000_000]) found.push([keep({{ turns: ({turns})(size) }}), load()?.turns[1].parts ?? null]);
            keep({{ mode: "chat", system: "s", tools: "", unanswered: "", turns: ({turns})(3) }});
            return found;
        }}"""
    )
    assert [is_kept for is_kept, _ in found] == [True, True, False] and [parts is not None for _, parts in found] == [True, False, False]
    page.reload()
    assert page.locator("#on .call .token").all_inner_texts() == ["{}"] and page.locator("#on .message .ngram").all_inner_texts() == ["bbb"]
    expect(page.locator("#prompt-label")).to_have_text("Result of f")
    page.evaluate("sessionStorage.setItem('foretoken-conversation-1', JSON.stringify({ mode: 'chat', turns: [{}] }))")
    page.reload()
    expect(page.locator("#model")).to_have_text(re.compile("Model"))
    assert not shown(page) and page.evaluate("sessionStorage.length") == 0


def test_numbers_that_a_browser_does_not_hold_are_sent_as_they_were_written(page):
    """Beyond 2^53, wherever they are typed; and what the server says of one has it as it was."""
    large = [2**53 + 1, -(2**63), 2**63 - 1]
    page.get_by_text("Sampling", exact=True).click()
    page.get_by_text("The same request as").click()
    sent = []
    page.on("request", lambda request: sent.append(json.loads(request.post_data)) if "completions" in request.url else None)
    for seed in large:
        page.get_by_label("Seed", exact=True).fill(str(seed))
        page.get_by_label("Language").select_option("curl")
        expect(page.locator("#snippet")).to_contain_text(f'"seed": {seed}')
        page.get_by_label("Language").select_option("python")
        expect(page.locator("#snippet")).to_contain_text(f"    seed={seed},")
        say(page, "Which?")
        expect(page.locator("#on .run")).to_contain_text(f"seed {seed}")
    assert [body["seed"] for body in sent] == [seed for seed in large for _ in ("on", "off")]
    page.get_by_text("Form of the answer").click()
    page.locator("#form-of-answer").select_option("JSON schema")
    enum = [large[0], 1.5, "9007199254740993", 'a "1e999" \\']
    page.get_by_label("JSON schema", exact=True).fill(json.dumps({"enum": enum}))
    send(page, "Which?")
    expect(page.get_by_role("alert")).to_contain_text(f"enum {large[0]} cannot be enforced")
    assert sent[-1]["response_format"]["json_schema"]["schema"]["enum"] == enum
    sent.clear()
    page.get_by_label("Seed", exact=True).fill(str(2**64))
    send(page, "Which?")
    assert page.locator("#form [name=seed]").evaluate("e => e.validity.rangeOverflow") and not sent


def test_stopping_keeps_what_came(page, server):
    page.get_by_label("Max tokens").fill("1500")
    with server.cancels(2):
        send(page, "read a file")
        with server.held_amid(2):
            expect(page.locator("#on .message.assistant .token").nth(5)).to_be_visible()
            page.keyboard.press("Escape")
            expect(page.locator("#on .summary")).to_contain_text("stopped")
    expect(page.locator("#verdict")).to_have_text("stopped")
    page.get_by_label("Max tokens").fill("4")
    assert say(page, "go on") and page.locator("#on .message").count() == 4


def test_what_got_no_answer_can_be_sent_again(page):
    page.get_by_label("Max tokens").fill("9999")
    send(page, "read a file")
    expect(page.get_by_role("alert")).to_have_text("max_tokens is 9999; the context holds 2048 tokens, the prompt's among them")
    expect(page.locator("#prompt")).to_have_value("read a file")
    assert page.locator("#on .message").count() == 0
    page.get_by_label("Max tokens").fill("4")
    page.locator("#prompt").press("Enter")
    wait_for_answers(page)
    first = page.locator("#on .message.assistant .text").text_content()
    page.get_by_label("Max tokens").fill("9999")
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_role("alert")).not_to_have_text("")
    assert page.locator("#on .message.assistant .text").text_content() == first, "a retry that fails loses nothing"


def test_lines_within_a_message(page):
    page.locator("#prompt").press_sequentially("a")
    page.locator("#prompt").press("Shift+Enter")
    expect(page.locator("#prompt")).to_have_value("a\n")
    page.locator("#prompt").fill("")
    page.locator("#prompt").press("Enter")
    assert page.locator("#on .message").count() == 0, "there is nothing to send"


def test_answers_of_a_form(page):
    page.get_by_text("Form of the answer").click()
    expect(page.get_by_label("JSON schema", exact=True)).to_be_hidden()
    page.locator("#form-of-answer").select_option("JSON schema")
    page.get_by_label("JSON schema", exact=True).fill('{"enum": [')
    send(page, "Which colour?")
    assert page.locator("#schema").evaluate("e => e.validationMessage").startswith("This is not valid JSON: ")
    assert page.locator("#on .message").count() == 0
    page.get_by_label("JSON schema", exact=True).fill('{"type": "array", "uniqueItems": true}')
    send(page, "Which colour?")
    expect(page.get_by_role("alert")).to_have_text(re.compile("uniqueItems"))
    schema = {"type": "object", "properties": {"background_colour": {"enum": ["red", "blue"]}}}
    page.get_by_label("JSON schema", exact=True).fill(json.dumps({**schema, "required": ["background_colour"], "additionalProperties": False}))
    page.get_by_label("Max tokens").fill("80")
    answer = json.loads(say(page, "Which colour?"))
    assert answer["background_colour"] in ("red", "blue")
    assert page.locator("#on .message .token.grammar").count() > 0, "what the schema forces is drafted, and seen to be"
    expect(page.locator("#on [data-value=reason]")).to_have_text("end of text, or a stop string")


def test_calls_of_tools(page):
    page.get_by_text("Tools", exact=True).click()
    page.get_by_label("Functions, as a JSON list").fill(json.dumps([{"type": "function", "function": FUNCTION}]))
    page.get_by_label("Tool choice").select_option("required")
    page.get_by_label("Max tokens").fill("60")
    send(page, "Is it warm?")
    wait_for_answers(page, "on")
    calls = page.locator("#on .call")
    expect(calls.first).to_contain_text("calls get_weather")
    texts = calls.locator(".text").all_text_contents()
    assert all(json.loads(text)["unit"] in ("C", "F") for text in texts[:-1] or texts)
    expect(page.locator("#prompt-label")).to_have_text("Result of get_weather")
    expect(page.locator("#run")).to_be_enabled()
    page.get_by_label("Tool choice").select_option("none")
    page.get_by_label("Max tokens").fill("4")
    sent = []
    page.on("request", lambda request: sent.append(request.post_data_json) if "completions" in request.url else None)
    for _ in texts:
        assert not sent, "each call has its result first"
        send(page, "20")
    wait_for_answers(page)
    asked, said, *results = sent[0]["messages"]
    assert asked["content"] == "Is it warm?" and len(said["tool_calls"]) == len(results) == len(texts)
    assert [(r["role"], r["tool_call_id"], r["content"]) for r in results] == [("tool", c["id"], "20") for c in said["tool_calls"]]
    expect(page.locator("#prompt-label")).to_have_text("Message")


def test_models_without_a_template_and_models_that_converse(chromium, gateway):
    """By what the gateway says of the model, changed on its way."""
    for own, mode, note in (
        ({"has_chat_template": False}, "Completion", "This model has no chat template, so there is no chat."),
        ({"is_bundled": False}, "Chat", ""),
        ({"is_bundled": False, "methods": ["none", "naive"], "method": "none"}, "Chat", ""),
    ):
        with open_page(chromium, gateway, model=own) as page:
            expect(page.get_by_label(mode, exact=True)).to_be_checked()
            expect(page.locator("#mode-note")).to_have_text(note)
            assert page.get_by_label("Chat", exact=True).is_enabled() == (mode == "Chat")
            if "methods" in own:
                expect(page.locator("#method")).to_be_disabled()
                expect(page.locator("#off")).to_be_hidden()


def test_variables_of_the_template(chromium, gateway, page):
    """Of a model whose template reads some: changed on its way, for the bundled one reads none."""
    expect(page.get_by_text("Chat template", exact=True)).to_be_hidden()
    with open_page(chromium, gateway, model={"is_bundled": False, "template_variables": ["enable_thinking", "tone"]}) as page:
        page.get_by_label("Max tokens").fill("4")
        page.get_by_text("Chat template", exact=True).click()
        expect(page.locator("#of-template .note")).to_have_text("The model's template reads enable_thinking, tone.")
        sent = []
        page.on("request", lambda request: sent.append(request.post_data_json) if "completions" in request.url else None)
        for wrong, message in (("[1]", "This is not a JSON object"), ("{", "This is not valid JSON")):
            page.get_by_label("Variables, as a JSON object").fill(wrong)
            send(page, "a")
            assert page.locator("#variables").evaluate("e => e.validationMessage").startswith(message) and not sent
        page.get_by_label("Variables, as a JSON object").fill('{"enable_thinking": false}')
        say(page, "a")
        assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in sent) and len(sent) == 2
        expect(page.locator("#on .run")).to_contain_text("enable_thinking false")


# What the stream of one answer may bring: thoughts, calls, text that is held back, characters of several tokens.
PARTS = [
    {"tokens": ["<think>", "\n", "hm"], "token_sources": ["target", "grammar", "mtp"], "delta": {"role": "assistant", "reasoning_content": "hm"}},
    {"tokens": ["</think>", "\n\n", "so"], "token_sources": ["target", "target", "ngram"], "delta": {"content": "so"}},
    {"tokens": ["", "é", " end"], "token_sources": ["suffix", "target", "ngram"], "delta": {"content": "é e"}},
    {"tokens": ["x"], "token_sources": ["eagle3"], "delta": {"content": "ndx"}},
    {
        "tokens": ["<call>", '{"', 'name": "f", ', '{"', "a"],
        "token_sources": ["target", "target", "ngram", "grammar", "target"],
        "delta": {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a'}}]},
    },
]


def test_tokens_are_laid_over_the_text(page):
    shown = page.evaluate(
        """async (parts) => {
            const { Answer } = await import("/page/answer.js");
            const answer = new Answer(document.createElement("div"));
            parts.forEach((part) => answer.add(part));
            const spans = (selector) => [...answer.root.querySelectorAll(`${selector} .token`)].map((e) => [e.textContent, e.className, e.title]);
            const { open } = answer.root.querySelector("details");
            return { open, message: answer.message, thought: spans(".thought"), text: spans(":scope > .text"), call: spans(".call") };
        }""",
        PARTS,
    )
    assert not shown["open"], "thoughts are folded"
    assert shown["thought"] == [["hm", "token model", "mtp"]]
    text = [("so", "ngram", "ngram"), ("", "suffix", "suffix"), ("é", "target", "target"), (" e", "ngram", "ngram")]
    text += [("nd", "ngram", "ngram"), ("x", "model", "eagle3")]
    assert shown["text"] == [[piece, f"token {kind}", source] for piece, kind, source in text]
    assert shown["call"] == [['{"', "token grammar", "grammar"], ["a", "token target", "target"]]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
    assert shown["message"] == {"role": "assistant", "content": "soé endx", "tool_calls": [call]}


@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_the_same_request_elsewhere(page, mode):
    """What the page shows as curl and as Python gives its answer, quotes and all."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text = "print('it''s', \"a\\n\", $HOME) # é 🙂"
    if mode == "completion":
        page.get_by_label("Completion", exact=True).check()
    page.get_by_label("Max tokens").fill("9")
    page.get_by_text("Sampling", exact=True).click()
    page.get_by_label("Top k").fill("50")
    page.get_by_label("Stop strings").fill("'''")
    page.locator("#prompt").fill(text)
    page.get_by_text("The same request as").click()
    code = {}
    for language in ("curl", "python"):
        page.get_by_label("Language").select_option(language)
        page.get_by_role("button", name="Copy code").click()
        expect(page.locator("#verdict")).to_have_text("copied")
        code[language] = page.evaluate("navigator.clipboard.readText()")
    page.locator("#prompt").press("Control+Enter")
    wait_for_answers(page)
    page.locator("#on .copy:visible").click()
    expect(page.locator("#verdict")).to_have_text("copied")
    expected = page.evaluate("navigator.clipboard.readText()")
    assert expected and expected in page.locator("#on .output").text_content()
    (choice,) = json.loads(subprocess.check_output(["bash", "-c", code["curl"]], stderr=subprocess.DEVNULL))["choices"]
    assert (choice["message"]["content"] if mode == "chat" else choice["text"]) == expected
    assert subprocess.check_output([sys.executable, "-c", code["python"]], text=True) == expected + "\n"
