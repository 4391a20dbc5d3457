"""The gateway's page in a real headless Chromium, on a real server: completions. Chats are in test_page_chat.py, its looks in test_page_looks.py."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Route, expect

from backend.config import BUNDLED_MODEL
from client import Client
from client.gateway import answers
from deploy.demo import free_ports, running_gateway
from tests.pages import WIDE, fill, open_page, value, wait_for_answers
from tests.servers import wait_until
from tests.test_gateway import LOOPS, PROMPT, ask, gateway_in_this_process


@pytest.fixture(scope="module")
def server(bundled_server):
    return bundled_server


@pytest.fixture(scope="module")
def gateway(bundled_gateway):
    return bundled_gateway


@pytest.fixture
def page(chromium, gateway, server):
    server.wait_until_ready()
    with open_page(chromium, gateway) as page:
        yield page


def test_which_model_it_is_before(gateway):
    (model,) = json.loads(ask(gateway, "/v1/models")[2])["data"]
    assert model["is_bundled"]


# How many tokens there were at each change: a test that looks by itself may come too late.
NOTE_COUNTS = """
    window.counts = [];
    const output = document.querySelector("#off .output");
    new MutationObserver(() => {
        const count = output.querySelectorAll(".token").length;
        if (count) counts.push(count);
    }).observe(output, { childList: true, subtree: true });
"""


def test_streaming_side_by_side(page, server):
    with Client(server.grpc) as client:
        expected = client.generate(LOOPS, max_tokens=450, temperature=0.0, ignore_eos=False)[0]
    expect(page.locator("#health")).to_have_text("The server is ready.")
    fill(page, LOOPS, 450)
    page.evaluate(NOTE_COUNTS)
    page.get_by_role("button", name="Run").click()
    plain = page.locator("#off .output")
    assert wait_until(lambda: plain.evaluate("e => e.scrollTop > 50 && (e.scrollTop = 1)"), 30)  # its reader goes back
    wait_for_answers(page)
    assert 0 < page.evaluate("counts[0]") < len(expected.token_ids), "tokens are shown as they come"
    for pane in ("on", "off"):
        assert page.locator(f"#{pane} .output").text_content() == expected.text
    expect(page.locator("#verdict")).to_have_text(re.compile(r"same text, \d+\.\d\d times as fast"))
    left = page.locator("#on .output").evaluate("e => [e.scrollHeight - e.clientHeight, e.scrollHeight - e.clientHeight - e.scrollTop]")
    assert left[0] > 100 and left[1] < 40, "what comes is in sight"
    assert plain.evaluate("e => e.scrollTop") == 1, "but who has gone back stays there"
    count = len(expected.token_ids)
    by_source = {s: page.locator(f"#on .output .{s}").count() for s in ("target", "model", "ngram", "suffix")}
    assert sum(by_source.values()) == page.locator("#off .output .target").count() == count == int(value(page, "on", "tokens"))
    assert by_source["ngram"] > by_source["target"] > 0 == by_source["suffix"]
    assert float(value(page, "off", "perStep")) == 1
    steps = by_source["target"]
    assert float(value(page, "on", "perStep")) == pytest.approx(count / steps, abs=0.05)
    accepted, drafted = map(int, value(page, "on", "accepted").split(" of "))
    assert accepted == count - steps <= drafted and value(page, "off", "accepted") == "0 of 0"
    assert page.locator("#on [data-chart=steps] rect").count() == min(60, steps)
    assert page.locator("#on [data-chart=positions] rect").count() >= 1 and page.locator("#off [data-chart=positions] rect").count() == 0
    assert len(page.locator("#on [data-chart=times] polyline").get_attribute("points").split()) > 5
    for name in ("perToken", "first"):
        assert float(value(page, "on", name)) > 0


@pytest.mark.parametrize("how", ["button", "key", "leaving"])
def test_stopping_frees_the_server(page, server, how):
    fill(page, PROMPT, 1900)
    with server.cancels(2):
        page.locator("#prompt").press("Control+Enter")
        with server.held_amid(2):
            expect(page.locator("#off .output .token").nth(5)).to_be_visible()
            if how == "button":
                page.get_by_role("button", name="Stop").click()
            elif how == "key":
                page.keyboard.press("Escape")
            else:
                page.goto("about:blank")
    if how != "leaving":
        expect(page.locator("#verdict")).to_have_text("stopped")
        expect(page.get_by_role("button", name="Run")).to_be_enabled()
        expect(page.get_by_role("alert")).to_have_text("")


def test_each_error_is_shown_once(page):
    fill(page, "x", 99_999)
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("alert")).to_have_text("max_tokens is 99999; the context holds 2048 tokens, the prompt's among them")
    fill(page, "x", 3)
    page.get_by_label("Drafts").evaluate("e => { e.max = 99; }")
    page.get_by_label("Drafts").fill("17")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("alert")).to_have_text(re.compile("^With speculation: .*num_speculative_tokens"))
    wait_for_answers(page, "off")
    expect(page.locator("#verdict")).to_have_text("")
    page.get_by_label("Drafts").fill("")
    page.get_by_role("button", name="Run").click()
    wait_for_answers(page)
    expect(page.get_by_role("alert")).to_have_text("")


def test_what_cannot_be_sent_is_said_where_it_was_typed(page):
    fill(page, "x", 3)
    page.get_by_text("Sampling", exact=True).click()
    page.get_by_label("Top p").fill("1.5")
    page.get_by_text("Sampling", exact=True).click()
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_label("Top p")).to_be_visible()
    assert page.locator(":invalid:not(form)").evaluate("e => e.name") == "top_p"
    assert value(page, "on", "tokens") == "\u2013"


def test_all_settings_are_sent(page):
    page.get_by_text("Sampling", exact=True).click()
    values = {"Max tokens": 3, "Temperature": 0.5, "Seed": 7, "Top p": 0.9, "Top k": 20, "Min p": 0.01}
    values |= {"Repetition penalty": 1.1, "Presence penalty": 0.2, "Frequency penalty": 0.3}
    for label, number in values.items():
        page.get_by_label(label, exact=True).fill(str(number))
    page.get_by_label("Stop strings").fill("\\n\\n\nend\\\\n")
    page.locator("#method").select_option("ngram")
    page.get_by_label("Drafts").fill("2")
    with page.expect_request("**/v1/completions") as sent, page.expect_response("**/v1/completions") as answered:
        page.get_by_role("button", name="Run").click()
    body = sent.value.post_data_json
    assert {name.lower().replace(" ", "_"): number for name, number in values.items()}.items() <= body.items()
    assert body["stop"] == ["\n\n", "end\\n"] and body["speculative"] == {"method": "ngram", "num_speculative_tokens": 2}
    assert answered.value.status == 200
    wait_for_answers(page)
    expect(page.locator("#on .run")).to_have_text(re.compile("^foretoken · max tokens 3 · temperature 0.5 .* · ngram"))


def test_an_empty_seed_is_drawn_once_for_both(page):
    fill(page, PROMPT, 24)
    page.get_by_label("Temperature").fill("1")
    seeds = []
    page.on("request", lambda request: seeds.append(request.post_data_json["seed"]) if "completions" in request.url else None)
    for _ in range(2):
        page.get_by_role("button", name="Run").click()
        wait_for_answers(page)
        expect(page.locator("#verdict")).to_have_text(re.compile("^same text"))
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


def test_without_the_comparison(page):
    fill(page, LOOPS, 12)
    page.get_by_label("Compare with plain decoding").uncheck()
    requests = []
    page.on("request", lambda request: requests.append(request.url) if "completions" in request.url else None)
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#verdict")).to_have_text(re.compile(r"^done: 12 tokens, \d\.\d\d a step"))
    assert len(requests) == 1
    expect(page.locator("#off")).to_be_hidden()
    expect(page.get_by_role("heading", level=2)).to_have_text("Answer")


def test_what_is_served_is_what_is_offered(page):
    expect(page.locator("#model")).to_have_text("Model foretoken, 2048 tokens of context.")
    assert page.locator("#method option").all_inner_texts() == ["default (eagle3)", "eagle3", "ngram"]
    assert page.locator(".legend .token").all_inner_texts() == ["target", "eagle3", "ngram", "grammar"]


def test_what_is_served_is_asked_again(chromium, gateway):
    """By a page whose first question had no answer, as of a server that was too busy just then: it knew of no model until it was loaded again."""
    page, asked = chromium.new_page(), []

    def lose_first(route: Route) -> None:
        asked.append(route)
        route.abort() if len(asked) == 1 else route.continue_()

    page.route("**/v1/models", lose_first)
    page.clock.install()
    with page.expect_event("requestfailed"):
        page.goto(gateway)
    expect(page.locator("#health")).to_have_text("The server is ready.")
    assert page.locator("#model").inner_text() == ""
    page.clock.fast_forward(10_000)
    expect(page.locator("#model")).to_have_text(re.compile("^Model foretoken"))
    page.close()


def test_one_token_has_no_time_between_two(page, server):
    fill(page, LOOPS, 40)
    with server.slowed():  # a browser that others keep waiting gets a whole answer at once else
        page.get_by_role("button", name="Run").click()
        wait_for_answers(page)
    assert float(value(page, "off", "perSecond")) > 0 and value(page, "off", "reason") == "max tokens"
    fill(page, "x", 1)
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#verdict")).to_have_text("same text")
    assert "NaN" not in page.locator("main").inner_text() and value(page, "off", "perSecond") == "\u2013"
    assert page.locator("#off [data-chart=times] polyline").count() == 0, "the charts are the last run's"
    assert page.locator("#off [data-chart=times]").get_attribute("aria-label") == "nothing yet"
    assert page.locator("#off [data-chart=steps]").get_attribute("aria-label") == "1 to 1: 1"


def test_the_answer_is_text_and_not_markup(page):
    fill(page, "x = '<img src=nowhere onerror=alert(1)>'\ny = '<img src=nowhere onerror=alert(1)>'\nz = '<img src=nowhere", 24)
    page.get_by_role("button", name="Run").click()
    wait_for_answers(page)
    assert page.locator(".output img").count() == 0 and ">" in page.locator("#off .output").text_content()


# Chromium may drop the bodies of responses before it is asked for them, so the page keeps a copy of each.
KEEP_BODIES = """
    const ask = fetch;
    window.begun = 0;
    window.bodies = [];
    window.fetch = async (...request) => {
        const response = await ask(...request);
        if (response.url.includes("completions")) {
            begun += 1;
            response.clone().text().then((body) => bodies.push(body));
        }
        return response;
    };
"""


def test_panes_wait_for_their_turn(chromium, servers, monkeypatch):
    """Behind another client's request, then one behind the other. The comments that keep their connections do not show."""
    monkeypatch.setattr(answers, "KEEP_ALIVE_SECONDS", 0.1)
    server = servers.get("--max-batch-size=1", f"--model={BUNDLED_MODEL}")
    with gateway_in_this_process(server.grpc) as address, Client(server.grpc) as client:
        page = chromium.new_page(viewport=WIDE)
        page.add_init_script(KEEP_BODIES)
        page.goto(address)
        fill(page, PROMPT, 60)
        with server.slowed():
            first = client.stream(PROMPT, max_tokens=1900, n=8, temperature=0.0, ignore_eos=True)
            next(first)
            page.get_by_role("button", name="Run").click()
            assert wait_until(lambda: page.evaluate("begun") == 2)  # by comments: there is nothing else to begin with
            first.close()
        expect(page.locator("#verdict")).to_have_text(re.compile("same text"), timeout=60_000)
        assert wait_until(lambda: page.evaluate("bodies.length") == 2)
        assert all(": keep-alive\n\n" in body for body in page.evaluate("bodies"))
        texts = {page.locator(f"#{pane} .output").text_content() for pane in ("on", "off")}
        assert len(texts) == 1 and "keep-alive" not in texts.pop()
        page.close()


def test_a_key_is_asked_for_and_used(chromium, server, tmp_path):
    (tmp_path / "keys").write_text("open-sesame\n")
    with (
        running_gateway(tmp_path / "log", server.grpc, f"--api-keys={tmp_path / 'keys'}") as (address, _),
        open_page(chromium, address, has_model=False) as page,
    ):
        fill(page, PROMPT, 4)
        page.get_by_role("button", name="Run").click()
        expect(page.get_by_role("alert")).to_have_text("A valid API key is needed: enter it under Connection.")
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("open-sesame")
        page.get_by_role("button", name="Run").click()
        wait_for_answers(page)
        expect(page.locator("#model")).to_have_text(re.compile("Model foretoken"))
        page.get_by_text("The same request as").click()
        expect(page.locator("#snippet")).to_contain_text("$API_KEY")
        assert "open-sesame" not in page.locator("#snippet").inner_text(), "keys are not for pasting"


def test_a_gateway_that_is_gone(chromium, server, tmp_path):
    with running_gateway(tmp_path / "log", server.grpc) as (address, process), open_page(chromium, address, may_lose=True) as page:
        fill(page, PROMPT, 4)
        process.terminate()
        process.wait()
        page.get_by_role("button", name="Run").click()
        expect(page.get_by_role("alert")).to_have_text("The gateway cannot be reached.")
        expect(page.get_by_role("button", name="Run")).to_be_enabled()


def test_a_server_that_is_not_there_is_told_in_plain_words(chromium, tmp_path):
    """gRPC's own words are for logs."""
    (port,) = free_ports(1)
    said = "The server was lost, or is still starting: try again in a moment."

    def lose(route: Route) -> None:
        """As of a server that is killed in the midst of an answer."""
        route.fulfill(content_type="text/event-stream", body='data: {"error": {"message": "Stream removed (Socket closed)"}}\n\n')

    with (
        running_gateway(tmp_path / "log", f"127.0.0.1:{port}") as (address, _),
        open_page(chromium, address, may_lose=True, has_model=False) as page,
    ):
        expect(page.locator("#health")).to_have_text("The server is not there, or not ready.")
        fill(page, PROMPT, 8)
        page.get_by_role("button", name="Run").click()
        expect(page.get_by_role("alert")).to_have_text(said)
        page.route("**/v1/completions", lose)
        with page.expect_response("**/v1/completions"):
            page.get_by_role("button", name="Run").click()
        expect(page.get_by_role("button", name="Run")).to_be_enabled()
        expect(page.get_by_role("alert")).to_have_text(said)
