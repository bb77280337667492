"""Takes the README's pictures of the demo, decode.png and line-cut.png, from one that runs: take.py URL.

Needs Playwright and a Chromium. Nothing is staged: the page does what it does, and the picture is of that.
"""

import base64
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).resolve().parent
PATIENCE = 180_000  # milliseconds


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def take(page: Any, name: str, first: Any, last: Any) -> None:
    """The page from the top of one element to the bottom of another."""
    page.mouse.move(2, 2)
    page.wait_for_timeout(500)
    top, end = first.bounding_box(), last.bounding_box()
    clip = {"x": 40, "y": top["y"] - 12, "width": 1020, "height": end["y"] + end["height"] - top["y"] + 24}
    page.screenshot(path=FOLDER / f"{name}.png", clip=clip)


def telling_much(entry: dict[str, Any]) -> int:
    """High for a round of which something was kept and something thrown away, and that is not too wide."""
    kept = sum(node["accepted"] for node in entry["nodes"])
    thrown = len(entry["nodes"]) - kept
    return min(kept, 3) + min(thrown, 4) if 0 < kept <= 4 and 0 < thrown <= 8 else 0


def decode(page: Any) -> None:
    page.get_by_label("number input for Longest answer, tokens").fill("64")
    press(page, "Run")
    page.get_by_text("Download the trace").wait_for()
    link = page.get_by_text("Download the trace").get_attribute("href")
    trace = json.loads(base64.b64decode(link.partition(",")[2]))["trace"]
    telling = 1 + max(range(len(trace["rounds"])), key=lambda index: telling_much(trace["rounds"][index]))
    tree = page.get_by_role("group", name="the draft tree")
    page.get_by_role("slider", name="Round").fill(str(telling))
    page.get_by_text(f"Round {telling} of").wait_for()
    take(page, "decode", page.get_by_role("heading", name="See speculative decoding"), tree)


def cut(page: Any) -> None:
    page.get_by_role("tab", name="Client and server").click()
    press(page, "Begin")
    page.locator(".moa-line .moa-verified").nth(70).wait_for()
    press(page, "Cut the line")
    page.locator(".moa-line .moa-provisional").nth(14).wait_for()
    press(page, "Reconnect")
    page.get_by_text("provisional tokens and withdrew").wait_for()
    last = page.get_by_text("so this is no race")
    take(page, "line-cut", page.get_by_role("button", name="Begin", exact=True), last)
    press(page, "End")


def main() -> None:
    browsers = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=next(filter(None, browsers)), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 2600})
        page.set_default_timeout(PATIENCE)
        page.goto(sys.argv[1])
        page.get_by_role("radio", name="MoA, TLI 0").first.wait_for()  # the models are there
        decode(page)
        cut(page)
        browser.close()


if __name__ == "__main__":
    main()
