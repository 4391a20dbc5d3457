"""The gateway's page in a real headless Chromium, on a real server."""

from __future__ import annotations

import re
import shutil

import pytest
from playwright.sync_api import expect, sync_playwright

from client import Client
from client.gateway import answers
from deploy.demo import running_gateway
from tests.test_gateway import LOOPS, PROMPT, gateway_in_this_process
from tests.test_server import wait_until

WIDE, NARROW = {"width": 1280, "height": 1500}, {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def server(servers):
    return servers.get()


@pytest.fixture(scope="module")
def address(server, tmp_path_factory):
    with running_gateway(tmp_path_factory.mktemp("gateway") / "log", server.grpc) as (address, _):
        yield address


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        # The system's, or the one that `playwright install chromium` fetched.
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, address, server):
    server.wait_until_ready()
    page = browser.new_page(viewport=WIDE)
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" and "status of" not in message.text else None)
    page.on("request", lambda request: None if request.url.startswith(address) else problems.append(f"asks for {request.url}"))
    page.goto(address)
    yield page
    page.close()
    assert not problems, "scripts fail, or the page needs something from elsewhere"


def fill(page, prompt: str, max_tokens: int) -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_label("Tokens", exact=True).fill(str(max_tokens))


def value(page, pane: str, name: str) -> str:
    return page.locator(f"#{pane} [data-value={name}]").inner_text()


def test_streaming_side_by_side(page, server):
    with Client(server.grpc) as client:
        expected = client.generate(LOOPS, max_tokens=150, temperature=0.0, ignore_eos=False)[0]
    expect(page.locator("#health")).to_have_text("The server is ready.")
    fill(page, LOOPS, 150)
    page.get_by_role("button", name="Run").click()
    tokens = page.locator("#off .output .token")
    expect(tokens.nth(3)).to_be_visible()
    assert tokens.count() < 150, "tokens are shown as they come"
    for pane in ("on", "off"):
        expect(page.locator(f"#{pane}")).to_have_class(re.compile("done"), timeout=60_000)
        assert page.locator(f"#{pane} .output").text_content() == expected.text
    expect(page.locator("#verdict")).to_have_text(re.compile(r"same text, \d+\.\d\d times as fast"))
    count = len(expected.token_ids)
    by_source = {s: page.locator(f"#on .output .{s}").count() for s in ("target", "mtp", "ngram", "suffix")}
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


def test_sources_have_colours_of_their_own(page):
    colours = [page.locator(f".legend .{s}").evaluate("e => getComputedStyle(e).backgroundColor") for s in ("target", "mtp", "ngram", "suffix")]
    assert len(set(colours)) == 4


@pytest.mark.parametrize("how", ["button", "key", "leaving"])
def test_stopping_frees_the_server(page, server, how):
    fill(page, PROMPT, 1900)
    page.get_by_label("Prompt").press("Control+Enter")
    expect(page.locator("#off .output .token").nth(5)).to_be_visible()
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    elif how == "key":
        page.keyboard.press("Escape")
    else:
        page.goto("about:blank")
    assert wait_until(lambda: server.metric("foretoken_requests_running") == 0 == server.metric("foretoken_kv_pages_held"), 5)
    if how != "leaving":
        expect(page.locator("#verdict")).to_have_text("stopped")
        expect(page.get_by_role("button", name="Run")).to_be_enabled()
        expect(page.locator("#on .error")).to_be_hidden()


def test_errors_are_shown(page):
    fill(page, "x", 99_999)
    page.get_by_role("button", name="Run").click()
    for pane in ("on", "off"):
        expect(page.locator(f"#{pane} [role=alert]")).to_have_text(re.compile("max_tokens is 99999; the context holds 2048 tokens"))
    fill(page, "x", 3)
    page.locator("#drafts").evaluate("e => { e.max = 99; }")
    page.locator("#drafts").fill("17")
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#on [role=alert]")).to_have_text(re.compile("num_speculative_tokens"))
    expect(page.locator("#off")).to_have_class(re.compile("done"))
    expect(page.locator("#off [role=alert]")).to_be_hidden()


def test_what_is_served_is_what_is_offered(page):
    expect(page.locator("#model")).to_have_text("Model foretoken, 2048 tokens of context.")
    assert page.locator("#method option").all_inner_texts() == ["default", "mtp", "ngram"]


def test_one_token_has_no_time_between_two(page):
    fill(page, LOOPS, 40)
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#off")).to_have_class(re.compile("done"))
    assert float(value(page, "off", "perSecond")) > 0 and value(page, "off", "reason") == "the limit of tokens"
    fill(page, "x", 1)
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#verdict")).to_have_text("same text")
    assert "NaN" not in page.locator("main").inner_text() and value(page, "off", "perSecond") == "\u2013"
    assert page.locator("#off [data-chart=times] polyline").count() == 0, "the charts are the last run's"


def test_the_answer_is_text_and_not_markup(page):
    fill(page, "x = '<img src=nowhere onerror=alert(1)>'\ny = '<img src=nowhere onerror=alert(1)>'\nz = '<img src=nowhere", 24)
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#off")).to_have_class(re.compile("done"))
    assert page.locator(".output img").count() == 0 and ">" in page.locator("#off .output").text_content()


def test_a_narrow_screen(page):
    page.set_viewport_size(NARROW)
    fill(page, PROMPT, 30)
    page.get_by_role("button", name="Run").click()
    for pane in ("on", "off"):
        expect(page.locator(f"#{pane}")).to_have_class(re.compile("done"))
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"], "nothing sticks out"
    first, second = (page.locator(f"#{pane}").bounding_box() for pane in ("on", "off"))
    assert second["y"] >= first["y"] + first["height"] and first["width"] > 300, "one below the other"


def test_by_keyboard_alone(page):
    page.get_by_label("Prompt").focus()
    reached = []
    for _ in range(12):
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        page.keyboard.press("Tab")
    assert reached[:8] == ["prompt", "max-tokens", "temperature", "seed", "method", "drafts", "key", "run"]
    assert reached.count("output") == 2, "answers can be scrolled"
    page.get_by_role("button", name="Run").focus()
    page.get_by_label("Tokens", exact=True).fill("4")
    page.get_by_role("button", name="Run").press("Enter")
    expect(page.locator("#on")).to_have_class(re.compile("done"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(page, scheme):
    """At least 4.5 to 1, as WCAG asks, for every colour that a token may have."""
    page.emulate_media(color_scheme=scheme)
    for source in ("target", "mtp", "ngram", "suffix"):
        ink, back = page.locator(f".legend .{source}").evaluate("e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor]")
        light, dark = sorted((luminance(c) for c in (ink, back)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def luminance(colour: str) -> float:
    """WCAG's relative luminance of rgb(...)."""
    parts = [int(v) / 255 for v in re.findall(r"\d+", colour)[:3]]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


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


def test_panes_wait_for_their_turn(browser, servers, monkeypatch):
    """Behind another client's request, then one behind the other. The comments that keep their connections do not show."""
    monkeypatch.setattr(answers, "KEEP_ALIVE_SECONDS", 0.1)
    server = servers.get("--max-batch-size=1")
    with gateway_in_this_process(server.grpc) as address, Client(server.grpc) as client:
        page = browser.new_page(viewport=WIDE)
        page.add_init_script(KEEP_BODIES)
        page.goto(address)
        fill(page, PROMPT, 60)
        first = client.stream(PROMPT, max_tokens=1900, n=8, temperature=0.0, ignore_eos=True)
        next(first)
        page.get_by_role("button", name="Run").click()
        assert wait_until(lambda: page.evaluate("begun") == 2, 30)  # by comments: there is nothing else to begin with
        first.close()
        expect(page.locator("#verdict")).to_have_text(re.compile("same text"), timeout=60_000)
        assert wait_until(lambda: page.evaluate("bodies.length") == 2)
        assert all(": keep-alive\n\n" in body for body in page.evaluate("bodies"))
        texts = {page.locator(f"#{pane} .output").text_content() for pane in ("on", "off")}
        assert len(texts) == 1 and "keep-alive" not in texts.pop()
        page.close()


def test_a_key_is_asked_for_and_used(browser, server, tmp_path):
    (tmp_path / "keys").write_text("open-sesame\n")
    with running_gateway(tmp_path / "log", server.grpc, f"--api-keys={tmp_path / 'keys'}") as (address, _):
        page = browser.new_page(viewport=WIDE)
        page.goto(address)
        fill(page, PROMPT, 4)
        page.get_by_role("button", name="Run").click()
        expect(page.locator("#on [role=alert]")).to_have_text(re.compile("a valid API key is needed"))
        page.get_by_label("API key").fill("open-sesame")
        page.get_by_role("button", name="Run").click()
        expect(page.locator("#on")).to_have_class(re.compile("done"))
        page.close()
