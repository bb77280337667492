"""The demo in a real browser: runs a prompt, steps rounds, stops, cuts and reconnects, at desk and phone width.

Screenshots are kept in screenshots/, which git ignores, or in the folder that MOA_SCREENSHOTS names.
"""

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import byte_tokenizer, tiny_drafter, tiny_target

from moa_spec import attach

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip install playwright)")
pytest.importorskip("gradio", reason="gradio is not installed (pip install 'moa-spec[demo]')")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")

PATIENCE = 60_000  # milliseconds
SCREENSHOTS = Path(os.environ.get("MOA_SCREENSHOTS") or Path(__file__).resolve().parent.parent / "screenshots")


class Slowly:
    """How long every pass of the target takes, so that there is time to press a button."""

    seconds = 0.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    from moa_spec.demo.app import build

    target = tiny_target(vocab_size=257, max_position_embeddings=1024)
    target.register_forward_pre_hook(lambda *_: time.sleep(Slowly.seconds))
    drafter = tiny_drafter(target, eos_token_id=None)
    attach(target, drafter)
    app = build(target, byte_tokenizer(), drafter)
    _, address, _ = app.launch(prevent_thread_lock=True, quiet=True)
    yield address
    app.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    Slowly.seconds = 0.0
    opened = browser.new_page(viewport={"width": 1200, "height": 1000})
    opened.set_default_timeout(PATIENCE)
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(url)
    yield opened
    opened.close()
    assert errors == []


def keep(page: Any, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def decode(page: Any) -> None:
    page.get_by_label("Prompt", exact=True).fill("Hello")
    page.get_by_label("chain").check()
    press(page, "Run")
    page.get_by_text("Download the trace").wait_for()


def test_run_marks_and_rounds(page: Any) -> None:
    decode(page)
    assert page.get_by_text("Both wrote exactly the same tokens.").is_visible()
    drafted = page.locator(".moa-drafted")
    assert drafted.locator("del.moa-rejected").count() > 0
    style = "element => getComputedStyle(element).textDecorationLine"
    assert drafted.locator("del.moa-rejected").first.evaluate(style) == "line-through"
    width = "element => getComputedStyle(element).borderBottomWidth"
    assert drafted.locator(".moa-own").first.evaluate(width) == "0px"
    style = "element => getComputedStyle(element).borderBottomStyle"
    assert page.locator(".moa-legend .moa-accepted").first.evaluate(style) == "solid"
    assert page.locator(".moa-legend .moa-lookup").first.evaluate(style) == "double"
    page.get_by_text("Round 1 of").wait_for()
    press(page, "Next round")
    page.get_by_text("Round 2 of").wait_for()
    press(page, "Previous round")
    page.get_by_text("Round 1 of").wait_for()
    assert page.get_by_role("img", name="Round 1: the draft tree").is_visible()
    with page.expect_download() as download:
        page.get_by_text("Download the trace").click()
    assert download.value.suggested_filename == "moa-trace.json"
    keep(page, "decode")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_phone_width(page: Any, url: str, theme: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{url}?__theme={theme}")
    decode(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    keep(page, f"phone-{theme}")


def test_stop_frees_the_thread(page: Any) -> None:
    Slowly.seconds = 0.05
    page.get_by_label("Prompt", exact=True).fill("Hello")
    press(page, "Run")
    page.locator(".moa-drafted .moa-token").first.wait_for()
    press(page, "Stop")
    page.get_by_text("Stopped.").wait_for()
    assert not [thread for thread in threading.enumerate() if thread.name == "moa-decoding"]
    sync_api.expect(page.get_by_role("button", name="Run", exact=True)).to_be_enabled(timeout=PATIENCE)


def test_errors_are_shown_where_they_belong(page: Any) -> None:
    page.get_by_label("Prompt", exact=True).fill(" ")
    press(page, "Run")
    page.get_by_role("alert").get_by_text("The prompt is empty").wait_for()
    page.get_by_label("Prompt", exact=True).fill("x" * 1020)
    press(page, "Run")
    page.get_by_role("alert").get_by_text("too long").wait_for()


def test_cut_and_reconnect(page: Any) -> None:
    Slowly.seconds = 0.1
    page.get_by_role("tab", name="Client and server").click()
    press(page, "Begin")
    page.get_by_text("Connected.").wait_for()
    page.locator(".moa-line .moa-verified").first.wait_for()
    press(page, "Cut the line")
    page.get_by_text("Cut: the phone writes on alone.").wait_for()
    page.locator(".moa-line .moa-provisional").first.wait_for()
    keep(page, "cut")
    row = page.get_by_role("row", name="calls while the line was cut")
    assert re.search(r"cut\s+0\s+0$", row.inner_text())
    page.get_by_text("The connection broke.").wait_for()
    Slowly.seconds = 0.0
    press(page, "Reconnect")
    page.get_by_text("Done, and every token is the target's.").wait_for()
    assert page.locator(".moa-line .moa-provisional").count() == 0
    keep(page, "reconnected")
