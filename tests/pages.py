"""The gateway's page in a browser: opening it, filling it in, reading it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Browser, Page, Route, ViewportSize, expect

expect.set_options(timeout=30_000)  # machines may be busy
WIDE: ViewportSize = {"width": 1280, "height": 1500}


@contextlib.contextmanager
def open_page(
    browser: Browser, address: str, *, size: ViewportSize = WIDE, has_model: bool = True, may_lose: bool = False, model: dict[str, Any] | None = None
) -> Iterator[Page]:
    """The page, once it has asked what is served. Afterwards: no script of it failed, and it needed nothing from elsewhere.

    has_model: the server tells who has no key; may_lose: the gateway may end meanwhile; model: in place of what the gateway says of its model.
    """
    page = browser.new_page(viewport=size)

    def change(route: Route) -> None:
        answer = route.fetch().json()
        route.fulfill(json={**answer, "data": [{**answer["data"][0], **(model or {})}]})

    if model:
        page.route("**/v1/models", change)
    problems: list[str] = []
    expected = "status of|Failed to load" if may_lose else "status of"
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" and not re.search(expected, m.text) else None)
    page.on("request", lambda request: None if request.url.startswith(address) else problems.append(f"asks for {request.url}"))
    page.goto(address)
    if has_model:
        expect(page.locator("#model")).to_have_text(re.compile("Model"))
    yield page
    page.close()
    assert not problems, "scripts fail, or the page needs something from elsewhere"


def fill(page: Page, prompt: str, max_tokens: int) -> None:
    page.locator("#prompt").fill(prompt)
    page.get_by_label("Max tokens").fill(str(max_tokens))


def wait_for_answers(page: Page, *panes: str) -> None:
    for pane in panes or ("on", "off"):
        expect(page.locator(f"#{pane}")).to_have_class(re.compile("done"), timeout=60_000)


def value(page: Page, pane: str, name: str) -> str:
    return page.locator(f"#{pane} [data-value={name}]").inner_text()
