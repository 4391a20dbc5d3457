"""How the gateway's page looks on a desktop, on a phone and in the dark, from screens of a real browser: by structure, not by pixels."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.pages import WIDE, fill, open_page, wait_for_answers
from tests.test_gateway import LOOPS


@pytest.fixture(scope="module")
def gateway(bundled_gateway):
    return bundled_gateway


PHONE = {"width": 360, "height": 740}
SCREENS = {"desktop": (WIDE, "light"), "phone": (PHONE, "light"), "dark": (WIDE, "dark")}

# What is wrong with a screen, in words. Contrast as WCAG 2.2 has it (1.4.3: 4.5 to 1), sizes of what is clicked too (2.5.8: 24 pixels).
FIND_FAULTS = """() => {
    const faults = [];
    const isShown = (e) => e.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true }) && e.getClientRects().length && !e.closest(".unseen");
    const name = (e) => `${e.tagName.toLowerCase()}#${e.id}.${e.getAttribute("class") ?? ""} ${(e.textContent ?? "").trim().slice(0, 30)}`;
    const read = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const luminance = (colour) => {
        const [r, g, b] = read(colour).slice(0, 3).map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const back = (e) => {
        for (; e; e = e.parentElement) {
            const colour = getComputedStyle(e).backgroundColor;
            if ((read(colour)[3] ?? 1) === 1) return colour;
        }
        return "rgb(255, 255, 255)";
    };
    const scrolls = (e) => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
    const isWithin = (e) => { for (e = e.parentElement; e; e = e.parentElement) if (scrolls(e)) return true; return false; };
    if (document.documentElement.scrollWidth > innerWidth) faults.push(`the page is ${document.documentElement.scrollWidth} wide`);
    const all = [...document.body.querySelectorAll("*")].filter((e) => isShown(e) && !["SCRIPT", "TEMPLATE", "OPTION"].includes(e.tagName));
    for (const e of all) {
        const { left, right } = e.getBoundingClientRect();
        if ((left < -1 || right > innerWidth + 1) && !isWithin(e)) faults.push(`sticks out: ${name(e)}`);
        if (!scrolls(e) && e instanceof HTMLElement && getComputedStyle(e).display !== "inline" && e.clientWidth && e.scrollWidth > e.clientWidth + 1
            && !["INPUT", "SELECT", "TEXTAREA"].includes(e.tagName) && !isWithin(e)) faults.push(`has more than it shows: ${name(e)}`);
        const hasText = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || e.value;
        if (hasText && !e.disabled && !e.closest(":disabled")) {
            const style = getComputedStyle(e);
            const pair = [luminance(e instanceof SVGElement ? style.fill : style.color), luminance(back(e))].sort((a, b) => b - a);
            const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
            if (ratio < 4.5) faults.push(`contrast ${ratio.toFixed(2)}: ${name(e)}`);
        }
    }
    const used = all.filter((e) => e.matches("button, input, select, textarea, summary, [tabindex]"));
    for (const e of used) {
        const box = e.getBoundingClientRect(), isLabelled = e.labels?.length || e.getAttribute("aria-label") || e.textContent.trim();
        if (!isLabelled) faults.push(`has no name: ${name(e)}`);
        if (box.height < 24 && !e.matches("[type=radio], [type=checkbox]")) faults.push(`is ${box.height} high: ${name(e)}`);
        for (const other of used) {
            const b = other.getBoundingClientRect();
            const isApart = box.right <= b.left + 1 || b.right <= box.left + 1 || box.bottom <= b.top + 1 || b.bottom <= box.top + 1;
            if (isApart || e.contains(other) || other.contains(e) || isWithin(e) || isWithin(other)) continue;
            faults.push(`${name(e)} lies over ${name(other)}`);
        }
    }
    return faults;
}"""


def top(page, selector: str) -> float:
    box = page.locator(selector).bounding_box()
    assert box is not None
    return box["y"] + page.evaluate("scrollY")


def check(page, path) -> None:
    assert page.evaluate(FIND_FAULTS) == []
    shot = page.screenshot(path=path, full_page=True)
    assert len(shot) > 10_000, f"{path} shows next to nothing"


@pytest.mark.parametrize("screen", SCREENS)
def test_screens(chromium, gateway, screen, tmp_path):
    """Before anything runs, after a completion and after a chat, with all parts opened."""
    size, scheme = SCREENS[screen]
    is_phone = size is PHONE
    with open_page(chromium, gateway, size=size) as page:
        page.emulate_media(color_scheme=scheme)
        check(page, tmp_path / "empty.png")
        assert (top(page, "#on") < top(page, "#prompt")) == is_phone, "on phones answers come first"
        assert top(page, "#run") < size["height"], "what is typed and sent is on the first screen too"
        fill(page, LOOPS, 24)
        page.get_by_role("button", name="Run").click()
        wait_for_answers(page)
        check(page, tmp_path / "completion.png")
        if is_phone:
            assert 0 <= page.locator("#on .output").bounding_box()["y"] < size["height"] / 2, "the answer is what one sees"
            assert top(page, "#off") > top(page, "#on [data-value=reason]"), "one below the other"
            expect(page.locator("#on .charts")).to_be_hidden()
        else:
            assert top(page, "#off") == top(page, "#on"), "side by side"
            expect(page.locator("#on .charts")).to_be_visible()
        page.get_by_label("Chat", exact=True).check()
        assert top(page, "#on") < top(page, "#prompt"), "what is typed comes below what was said"
        page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        page.locator("#form-of-answer").select_option("JSON schema")
        page.get_by_label("Functions, as a JSON list").fill(json.dumps([{"type": "function"}]))
        page.locator("#prompt").fill("x" * 300)
        check(page, tmp_path / "chat.png")
        page.locator("#prompt").press("Enter")
        expect(page.get_by_role("alert")).not_to_have_text("")
        check(page, tmp_path / "error.png")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_source_has_a_colour_that_can_be_read(chromium, gateway, scheme):
    with open_page(chromium, gateway) as page:
        page.emulate_media(color_scheme=scheme)
        colours = page.evaluate(
            """async () => {
                const { Legend } = await import("/page/sources.js");
                const root = document.getElementById("sources");
                new Legend(root).replace(["target", "medusa", "ngram", "suffix", "grammar", "prediction"]);
                return [...root.children].map((e) => getComputedStyle(e).backgroundColor);
            }"""
        )
        assert len(set(colours)) == 6 and page.evaluate(FIND_FAULTS) == []


def test_by_keyboard_alone(chromium, gateway):
    with open_page(chromium, gateway) as page:
        page.get_by_label("Completion", exact=True).focus()
        reached = []
        for _ in range(16):
            reached.append(
                page.evaluate("(({ id, name, className, textContent }) => id || name || className || textContent)(document.activeElement)")
            )
            page.keyboard.press("Tab")
        assert reached[:7] == ["mode", "prompt", "run", "method", "drafts", "max_tokens", "temperature"]
        assert reached[7:12] == ["compare", "Sampling", "Form of the answer", "Connection", "The same request as curl or Python"]
        assert reached.count("output") == 2, "answers can be scrolled"
        page.get_by_label("Completion", exact=True).focus()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_label("Chat", exact=True)).to_be_checked()
        page.get_by_label("Max tokens").fill("4")
        page.keyboard.press("Enter")
        assert page.locator(":invalid:not(form, fieldset)").get_attribute("id") == "prompt"
        page.keyboard.type("x")
        page.keyboard.press("Enter")
        wait_for_answers(page)
        expect(page.locator("#prompt")).to_be_focused()
        expect(page.get_by_role("log").first).to_have_attribute("aria-busy", "false")
