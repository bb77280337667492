"""The demo over a line: the real client, server and emulator on a tiny target, cut and brought back."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tiny import byte_tokenizer, tiny_drafter, tiny_target

pytest.importorskip("uvicorn", reason="the serving libraries are not installed (pip install 'moa-spec[serve]')")
from gradio_client import Client
from gradio_client.exceptions import AppError

from moa_spec import attach
from moa_spec.demo.app import build
from moa_spec.demo.line import OverTheLine, write_over_line
from moa_spec.demo.views import line_counters, line_picture, line_status, plain_status
from moa_spec.serving.events import Confirmed, Finished, LineState, Token, Withdrawn

Models = tuple[Any, Any, Any]


@pytest.fixture(scope="module")
def models() -> Models:
    target = tiny_target(vocab_size=257)
    drafter = tiny_drafter(target, eos_token_id=None)
    attach(target, drafter)
    return target, drafter, byte_tokenizer()


@pytest.fixture(scope="module")
def url(models: Models) -> Iterator[str]:
    target, drafter, tokenizer = models
    reusing = tiny_drafter(target, eos_token_id=None, target_layer_inference=1)
    attach(target, reusing)
    app = build(target, tokenizer, drafter, reusing)
    _, address, _ = app.launch(prevent_thread_lock=True, quiet=True)
    yield address
    app.close()


def plain(models: Models, length: int) -> list[int]:
    target, _, tokenizer = models
    inputs = tokenizer("Hello", return_tensors="pt")
    ids = target.generate(**inputs, max_new_tokens=length, do_sample=False, eos_token_id=0)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


def served_threads() -> list[str]:
    names = {thread.name for thread in threading.enumerate()}
    return sorted(names & {"moa-server", "moa-link", "moa-line", "moa-plain"})


def test_events_add_up() -> None:
    seen = OverTheLine()
    letters = byte_tokenizer().encode("abXYc")
    events = [LineState("connected"), Token(0, letters[0], "verified"), LineState("offline", "gone")]
    events += [Token(i, letters[i], "provisional") for i in (1, 2, 3)]
    for event in events:
        seen.add(event)
    assert (seen.line, seen.provisional) == ("offline", 3)
    assert "dials again" in line_status(seen)
    assert "no connection" in line_picture(seen)
    seen.cut = True
    assert "writes on alone" in line_status(seen)
    assert "the line is cut" in line_picture(seen)
    more = [LineState("connected"), Confirmed(1, 1), Withdrawn(2, 2), Token(2, letters[4], "verified")]
    for event in [*more, Finished("length", True)]:
        seen.add(event)
    shown = [(mark.text, mark.kind) for mark in seen.marks(byte_tokenizer()).marks]
    assert shown == [
        ("a", "verified"),
        ("b", "confirmed"),
        ("X", "withdrawn"),
        ("Y", "withdrawn"),
        ("c", "verified"),
    ]
    assert "kept 1 provisional tokens and withdrew 2" in line_status(seen)
    assert "every token is the target's" in line_status(seen)


def test_uncut_text_is_the_targets(models: Models) -> None:
    target, drafter, tokenizer = models
    seen = list(write_over_line(target, drafter, tokenizer, "Hello", "none", 24))[-1]
    assert (seen.reason, seen.exact) == ("length", True)
    assert seen.transcript.tokens == plain(models, 24)
    assert seen.bytes_up > 0
    assert seen.bytes_down > 0
    assert (seen.plain.state, seen.plain.token_ids) == ("done", plain(models, 24))
    assert seen.plain.calls_per_100_tokens == 100
    assert seen.plain_bytes_down > 0
    assert f"<td>{seen.target_calls}</td><td>24</td>" in line_counters(seen)
    assert not served_threads()


def test_cut_and_reconnected_text_is_exact_again(models: Models) -> None:
    target, drafter, tokenizer = models
    states, cut_calls = set(), set()
    seen = OverTheLine()
    for seen in write_over_line(target, drafter, tokenizer, "Hello", "none", 40, cut_after=8, reconnect_after=10):
        states.add(seen.line)
        if seen.line == "offline":
            cut_calls.add(seen.calls_while_cut)
    assert "offline" in states
    assert cut_calls == {0}
    assert (seen.reason, seen.exact) == ("length", True)
    assert seen.transcript.tokens == plain(models, 40)
    assert len(seen.confirmed) + sum(len(tokens) for _, tokens in seen.withdrawn) >= 10
    assert not served_threads()


def test_the_plain_client_stops_at_a_cut_and_does_not_come_back(models: Models) -> None:
    target, drafter, tokenizer = models
    hook = target.register_forward_pre_hook(lambda *_: time.sleep(0.02))

    def cut_and_restore(lines: Any) -> None:
        text = lines.plain_client.text
        while len(text.token_ids) <= 2:
            time.sleep(0.01)
        lines.cut()
        while text.state != "cut":
            time.sleep(0.01)
        lines.restore()

    def began(lines: Any) -> None:
        threading.Thread(target=cut_and_restore, args=[lines], daemon=True).start()

    try:
        *_, seen = write_over_line(target, drafter, tokenizer, "Hello", "none", 60, began=began)
    finally:
        hook.remove()
    assert (seen.reason, seen.exact) == ("length", True)
    assert seen.transcript.tokens == plain(models, 60)
    assert seen.plain.state == "cut"
    assert 2 < len(seen.plain.token_ids) < 60
    assert seen.plain.token_ids == plain(models, 60)[: len(seen.plain.token_ids)]
    assert "broke" in plain_status(seen)


def test_cut_and_end_by_hand(models: Models) -> None:
    target, drafter, tokenizer = models
    held: list[Any] = []
    seen = OverTheLine()
    steps = write_over_line(
        target,
        drafter,
        tokenizer,
        "Hello",
        "slow4g",
        200,
        began=held.append,
    )
    for seen in steps:
        if seen.line == "connected" and len(seen.transcript.tokens) > 3 and len(held) == 1:
            held[0].cut()
            held.append("cut")
        if seen.line == "offline" and seen.provisional:
            held[0].stop()
    assert seen.reason == "stopped"
    assert seen.provisional > 0
    assert not seen.exact
    assert not served_threads()


def test_leaving_ends_everything(models: Models) -> None:
    target, drafter, tokenizer = models
    steps = write_over_line(target, drafter, tokenizer, "Hello", "slow4g", 200)
    next(steps)
    steps.close()
    deadline = time.monotonic() + 5
    while served_threads():
        assert time.monotonic() < deadline, served_threads()
        time.sleep(0.02)


@pytest.mark.parametrize("drafter", ["", "MoA, TLI 1"])
def test_line_endpoint(url: str, models: Models, drafter: str) -> None:
    client = Client(url, verbose=False)
    result = client.predict("Hello", "5g", 30, 6, 8, drafter, api_name="/line")
    assert result["exact"] is True
    assert result["token_ids"] == plain(models, 30)
    assert result["calls_while_cut"] == 0
    assert result["plain"]["state"] in ("cut", "done")
    assert result["plain"]["token_ids"] == plain(models, 30)[: len(result["plain"]["token_ids"])]
    assert result["confirmed"] + sum(len(entry["token_ids"]) for entry in result["withdrawn"]) >= 8
    for arguments, words in ((("", "4g"), "empty"), (("Hello", "6g"), "must be one of")):
        with pytest.raises(AppError, match=words):
            client.predict(*arguments, api_name="/line")
