"""Draws docs/page.png: the gateway's page after its own example, in a real Chromium.

python -m benchmarks.page_picture [--out docs/page.png]
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

from benchmarks.gateway import serving

SIZE = {"width": 1200, "height": 900}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "page.png")
    args = parser.parse_args()
    with serving() as (address, _), sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = chromium.new_page(viewport=SIZE)
        page.goto(f"http://{address.host}:{address.port}")
        for _ in range(2):  # the first run warms the server up
            page.get_by_role("button", name="Run").click()
            for pane in ("on", "off"):
                expect(page.locator(f"#{pane}")).to_have_class(re.compile("done"), timeout=60_000)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=args.out, full_page=True)
        chromium.close()


if __name__ == "__main__":
    main()
