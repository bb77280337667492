"""The demo in a real browser: runs a prompt, steps rounds, stops, cuts and reconnects, at desk and phone width.

Screenshots are kept in screenshots/, which git ignores, or in the folder that MOA_SCREENSHOTS names.
"""

import json
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
def models() -> tuple[Any, ...]:
    target = tiny_target(vocab_size=257, max_position_embeddings=1024)
    target.register_forward_pre_hook(lambda *_: time.sleep(Slowly.seconds))
    drafters = (
        tiny_drafter(target, eos_token_id=None),
        tiny_drafter(target, eos_token_id=None, target_layer_inference=1),
    )
    for drafter in drafters:
        attach(target, drafter)
    return target, byte_tokenizer(), *drafters


@pytest.fixture(scope="module")
def url(models: tuple[Any, ...]) -> Iterator[str]:
    from moa_spec.demo.app import build

    app = build(*models)
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
    opened = new_page(browser, url)
    yield opened
    opened.close()
    assert opened.errors == []


def new_page(browser: Any, url: str) -> Any:
    """A visitor's page, whose `errors` are scripts that failed and requests to anywhere else."""
    opened = browser.new_page(viewport={"width": 1200, "height": 1000})
    opened.set_default_timeout(PATIENCE)
    opened.errors = []
    opened.on("pageerror", lambda error: opened.errors.append(str(error)))
    local = (url, "data:", "blob:", url.replace("http", "ws", 1))
    opened.on("request", lambda asked: asked.url.startswith(local) or opened.errors.append(asked.url))
    opened.goto(url)
    return opened


def decoding_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "moa-decoding"]


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE / 1000
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


# contrast of each mark in the legend, as WCAG 2 defines it
CONTRASTS = """list => {
    const channels = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
        .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = element => {
        for (; element; element = element.parentElement) {
            const [r, g, b, a = 1] = channels(getComputedStyle(element).backgroundColor);
            if (a === 1) return [r, g, b];
        }
        return [255, 255, 255];
    };
    return Object.fromEntries([...list.querySelectorAll('.moa-token')].map(token => {
        const lights = [light(channels(getComputedStyle(token).color)), light(behind(token))].sort((a, b) => b - a);
        return [token.className, (lights[0] + 0.05) / (lights[1] + 0.05)];
    }));
}"""
NAMED = re.compile(r"^- '?\w+ \"[^\"]+")  # as Playwright writes a role with a name


def sign(character: str) -> str:
    """As the page shows it."""
    from moa_spec.demo.marks import visible

    return character if character in " \n\t" else visible(character)


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


def trace_of(page: Any) -> Any:
    """What the page lets one download."""
    with page.expect_download() as download:
        page.get_by_text("Download the trace").click()
    return json.loads(Path(download.value.path()).read_text())


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


def test_the_second_drafter_is_chosen(page: Any) -> None:
    decode(page)
    assert trace_of(page)["request"]["drafter"] == "MoA, TLI 0"
    page.get_by_label("MoA, TLI 0 (default)").locator("visible=true").focus()
    page.keyboard.press("Tab")  # in Gradio each radio is a stop of its own
    page.keyboard.press("Space")
    press(page, "Run")
    page.get_by_text("With MoA, TLI 1:").wait_for()
    assert page.get_by_text("Both wrote exactly the same tokens.").is_visible()
    page.get_by_text("Download the trace").wait_for()
    assert trace_of(page)["request"]["drafter"] == "MoA, TLI 1"
    keep(page, "decode-second-drafter")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_phone_width(page: Any, url: str, theme: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{url}?__theme={theme}")
    decode(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for kind, contrast in page.locator(".moa-legend").first.evaluate(CONTRASTS).items():
        assert contrast >= 4.5, f"{kind} can hardly be read: contrast {contrast:.1f}"
    keep(page, f"phone-{theme}")
    for tab in ("Client and server", "Results"):
        page.get_by_role("tab", name=tab).click()
        page.get_by_role("tab", name=tab, selected=True).wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        keep(page, f"phone-{theme}-{tab.split()[0].lower()}")


def test_keyboard_alone(page: Any) -> None:
    page.get_by_label("Prompt", exact=True).focus()
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent.trim()") == "Run":
            break
    page.keyboard.press("Enter")
    page.get_by_text("Round 1 of").wait_for()
    page.get_by_role("slider", name="Round").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_text("Round 2 of").wait_for()
    page.get_by_role("group", name="Round 2: the draft tree").focus()  # so that arrows scroll it


def test_every_control_has_a_name_and_the_outcome_is_read_out(page: Any) -> None:
    page.get_by_role("tab", name="Client and server").click()
    for tab in ("Client and server", "Decode"):
        page.get_by_role("tab", name=tab).click()
        for role in ("button", "slider", "textbox", "radio", "checkbox", "spinbutton"):
            for control in page.get_by_role(role).all():
                assert NAMED.search(control.aria_snapshot()), control.evaluate("element => element.outerHTML")
    decode(page)
    said = page.get_by_role("status").filter(has_text="exactly the same tokens")
    assert said.get_attribute("aria-live") == "polite"


def test_loading_is_said_and_what_was_begun_waits(browser: Any, models: tuple[Any, ...]) -> None:
    from moa_spec.demo.app import build_page
    from moa_spec.demo.models import Loaded, Models, name_drafters

    wanted = Models()
    app = build_page(wanted)
    _, address, _ = app.launch(prevent_thread_lock=True, quiet=True)
    page = new_page(browser, address)
    page.get_by_text("Loading the models").wait_for()
    press(page, "Run")
    page.get_by_text("still loading").wait_for()
    press(page, "Stop")
    page.get_by_text("Stopped before it began.").wait_for()
    press(page, "Run")
    page.get_by_text("still loading").wait_for()
    keep(page, "loading")
    assert page.get_by_role("radio", name="MoA").count() == 0
    target, tokenizer, *drafters = models
    wanted.put(Loaded(target, tokenizer, name_drafters(drafters)))
    page.get_by_text("Both wrote exactly the same tokens.").wait_for()
    page.get_by_text("Loading the models").wait_for(state="hidden")
    assert trace_of(page)["request"]["drafter"] == "MoA, TLI 0"
    page.get_by_label("MoA, TLI 1").locator("visible=true").check()
    press(page, "Run")
    page.get_by_text("With MoA, TLI 1:").wait_for()
    late = new_page(browser, address)
    late.get_by_label("MoA, TLI 1").locator("visible=true").check()
    late.close()
    page.close()
    app.close()
    assert page.errors == []


def test_visitors_never_see_each_other_s_text(page: Any, browser: Any, url: str, models: tuple[Any, ...]) -> None:
    target, tokenizer, *_ = models
    other = new_page(browser, url)
    prompts = {"AAAA": page, "zz z": other}
    for prompt, visitor in prompts.items():
        visitor.get_by_label("Prompt", exact=True).fill(prompt)
        press(visitor, "Run")
    for prompt, visitor in prompts.items():
        visitor.get_by_text("Download the trace").wait_for()
        inputs = tokenizer(prompt, return_tensors="pt")
        answer = target.generate(**inputs, max_new_tokens=128, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        trace = trace_of(visitor)
        assert trace["request"]["prompt"] == prompt
        assert trace["plain"]["token_ids"] == answer.tolist()
        kept = visitor.locator(".moa-drafted .moa-token:not(.moa-rejected)").evaluate_all(
            "found => found.map(element => element.textContent).join('')"
        )
        assert kept.replace("<end>", "") == "".join(map(sign, trace["text"]))
    other.close()


def test_closing_the_page_frees_the_thread(browser: Any, url: str) -> None:
    Slowly.seconds = 0.05
    page = new_page(browser, url)
    press(page, "Run")
    page.locator(".moa-drafted .moa-token").first.wait_for()
    assert decoding_threads()
    page.close()
    wait_until(lambda: not decoding_threads())


def test_stop_frees_the_thread(page: Any) -> None:
    Slowly.seconds = 0.05
    page.get_by_label("Prompt", exact=True).fill("Hello")
    press(page, "Run")
    page.locator(".moa-drafted .moa-token").first.wait_for()
    press(page, "Stop")
    page.get_by_text("Stopped.").wait_for()
    assert not decoding_threads()
    sync_api.expect(page.get_by_role("button", name="Run", exact=True)).to_be_enabled(timeout=PATIENCE)


def test_errors_are_shown_where_they_belong(page: Any) -> None:
    page.get_by_label("Prompt", exact=True).fill(" ")
    press(page, "Run")
    page.get_by_role("alert").get_by_text("The prompt is empty").wait_for()
    page.get_by_label("Prompt", exact=True).fill("x" * 1020)
    press(page, "Run")
    page.get_by_role("alert").get_by_text("too long").wait_for()
    page.get_by_label("Prompt", exact=True).fill("\x00\x1b[31m<script>alert(1)</script>\u202e\U0001f600")
    press(page, "Run")
    page.get_by_text("Both wrote exactly the same tokens.").wait_for()


def test_a_server_that_is_gone_is_said_to_be(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> None:
        raise RuntimeError("The server did not come up")

    monkeypatch.setattr("moa_spec.demo.line.serve_in_thread", gone)
    page.get_by_role("tab", name="Client and server").click()
    press(page, "Begin")
    page.get_by_role("alert").get_by_text("The server is gone or refused").wait_for()
    sync_api.expect(page.get_by_role("button", name="Begin", exact=True)).to_be_enabled(timeout=PATIENCE)


def test_presets_set_the_sliders(page: Any) -> None:
    page.get_by_role("tab", name="Client and server").click()
    page.get_by_label("slow 4G").check()
    box = page.get_by_role("spinbutton", name=re.compile("Round trip"))
    sync_api.expect(box).to_have_value("150", timeout=PATIENCE)
    box.fill("80")
    box.press("Enter")
    sync_api.expect(page.get_by_label("slow 4G")).not_to_be_checked(timeout=PATIENCE)


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
