"""The demo's endpoints and decoding, on a tiny target: driven with gradio_client, as anybody else would."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import byte_tokenizer, tiny_drafter, tiny_target

pytest.importorskip("gradio", reason="gradio is not installed (pip install 'moa-spec[demo]')")
from gradio_client import Client
from gradio_client.exceptions import AppError

from moa_spec import attach, load_drafter
from moa_spec.demo.app import build
from moa_spec.demo.comparison import compare
from moa_spec.demo.decoding import encode, warm_up, watch
from moa_spec.demo.drafter_choice import drafter_choice
from moa_spec.demo.models import Loaded, name_drafters
from moa_spec.demo.models import Models as Waiting
from moa_spec.demo.request import BadRequest, Request
from moa_spec.demo.stops import Stops
from moa_spec.demo.views import as_data, clock_html, legend_html, models_html, round_html, verdict

Models = tuple[Any, Any, Any]


@pytest.fixture(scope="module")
def models() -> Models:
    target = tiny_target(vocab_size=257, max_position_embeddings=1024)
    drafter = tiny_drafter(target)
    attach(target, drafter)
    return target, byte_tokenizer(), drafter


@pytest.fixture(scope="module")
def url(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    app = build(*models, results=tmp_path_factory.mktemp("results"))
    _, address, _ = app.launch(prevent_thread_lock=True, quiet=True)
    yield address
    app.close()


def decoding_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "moa-decoding"]


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.fixture
def slowly(models: Models) -> Iterator[None]:
    """Makes every target pass take a while, so that there is time to stop it."""
    hook = models[0].register_forward_pre_hook(lambda *_: time.sleep(0.05))
    yield
    hook.remove()


# -- decoding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["automatic", "chain", "tree"])
@pytest.mark.parametrize("lookup", [True, False])
def test_comparison(models: Models, shape: Any, lookup: bool) -> None:
    request = Request("Hello", max_new_tokens=24, shape=shape, lookup=lookup, levels=3)
    result = list(compare(*models, request, threading.Event()))[-1]
    assert result.finished
    assert result.identical is True
    assert len(result.drafted.token_ids) == len(result.plain.token_ids) == 24
    assert result.plain.target_calls == 24
    assert result.drafted.target_calls == 1 + len(result.rounds)
    assert result.mean_accepted_tokens == pytest.approx(23 / len(result.rounds))
    assert result.speedup == pytest.approx(result.plain.seconds / result.drafted.seconds)
    assert "exactly the same tokens" in verdict(result)
    assert re.match(r"[\d.]+ times the speed", verdict(result))
    named = replace(result, request=replace(request, drafter="MoA, TLI 0"))
    assert re.match(r"With MoA, TLI 0: [\d.]+ times the speed", verdict(named))
    counts = result.counts
    assert counts["accepted"] + counts["lookup"] + counts["own"] == 24
    assert sum(counts.values()) == 1 + sum(len(e.nodes) + len(e.tokens) - e.accepted for e in result.rounds)
    assert f"thrown away</del> <strong>{counts['rejected']}</strong>" in legend_html(result)
    widest = max(sum(node.depth == 1 for node in entry.nodes) for entry in result.rounds)
    if shape != "automatic" and not lookup:
        assert widest == {"chain": 1, "tree": 3}[shape]
        deepest = max(node.depth for entry in result.rounds for node in entry.nodes)
        assert deepest == 3 if shape == "chain" else deepest <= 3  # a tree spends its nodes where they are likely


def test_sampling_claims_no_identity(models: Models) -> None:
    result = list(compare(*models, Request("Hello", 16, temperature=0.9), threading.Event()))[-1]
    assert result.identical is None
    assert result.speedup is not None
    assert "distribution" in verdict(result)


def test_stopping_ends_the_thread(models: Models, slowly: None) -> None:
    for drafter in (models[2], None):
        stop = threading.Event()
        request = Request("Hello", 400)
        steps = watch(models[0], encode(request, *models[:2]), request, drafter, stop)
        wait_for(lambda steps=steps: next(steps).token_ids)
        stop.set()
        last = list(steps)[-1]
        assert last.finished
        assert last.stopped
        assert 0 < len(last.token_ids) < 400
        assert not decoding_threads()


def test_leaving_ends_the_thread(models: Models, slowly: None) -> None:
    request = Request("Hello", 400)
    stop = threading.Event()
    steps = watch(models[0], encode(request, *models[:2]), request, models[2], stop)
    next(steps)
    assert decoding_threads()
    steps.close()
    assert not decoding_threads()
    assert not stop.is_set()


def test_stopped_comparison_promises_nothing(models: Models, slowly: None) -> None:
    stop = threading.Event()
    for result in compare(*models, Request("Hello", 400), stop):
        if result.drafted.token_ids:
            stop.set()
    assert result.finished
    assert (result.speedup, result.identical, result.plain.token_ids) == (None, None, [])
    assert verdict(result).startswith("Stopped")
    assert f"{result.drafted.target_calls} target calls" in clock_html(result.drafted)


def test_errors_of_the_models_reach_the_watcher(models: Models) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    hook = models[0].register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(compare(*models, Request("Hello", 8), threading.Event()))
    hook.remove()
    assert not decoding_threads()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt": " \n"}, "empty"),
        ({"prompt": "x" * 30_000}, "30000 characters"),
        ({"prompt": "\ud800"}, "not valid text"),
        ({"prompt": "x", "max_new_tokens": 0}, "length"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature"),
        ({"prompt": "x", "shape": "forest"}, "chain"),
        ({"prompt": "x", "levels": 99}, "depth"),
    ],
)
def test_bad_requests(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        Request(**arguments)


def test_too_long_prompts_are_refused_before_work(models: Models) -> None:
    with pytest.raises(BadRequest, match="context of 1024"):
        next(compare(*models, Request("x" * 1000, 100), threading.Event()))


def test_odd_bytes(models: Models) -> None:
    result = list(compare(*models, Request("\x00\x1b[31m<script>é\U0001f600", 12), threading.Event()))[-1]
    assert result.identical is True
    assert as_data(result, models[1])["text"] == models[1].decode(result.drafted.token_ids, skip_special_tokens=True)


def test_rounds_outside_are_brought_inside(models: Models) -> None:
    result = list(compare(*models, Request("Hello", 12, shape="chain"), threading.Event()))[-1]
    count = len(result.rounds)
    assert f"Round {count} of {count}" in round_html(result, models[1], 10_000)
    assert f"Round 1 of {count}" in round_html(result, models[1], -3)


def test_warm_up(models: Models) -> None:
    target, tokenizer, drafter = models
    warm_up(target, tokenizer, [drafter])
    assert not decoding_threads()


def test_stops_know_their_sessions() -> None:
    stops = Stops()
    first, second, other = stops.begin("a"), stops.begin("a"), stops.begin("b")
    assert stops.latest("a") is second
    assert stops.stop("a") == 2
    assert first.is_set()
    assert second.is_set()
    assert not other.is_set()
    stops.end("a", second)
    assert stops.latest("a") is first
    stops.end("a", first)
    assert stops.stop("a") == 0
    assert not stops.latest("a").is_set()


# -- drafters ----------------------------------------------------------------------------------------------------------


def test_drafters_are_named_by_tli_and_by_folder_where_it_is_the_same(models: Models, tmp_path: Path) -> None:
    target, _, drafter = models
    reusing = tiny_drafter(target, target_layer_inference=1)
    assert list(name_drafters([drafter, reusing])) == ["MoA, TLI 0", "MoA, TLI 1"]
    for folder in ("long", "short"):
        drafter.save_pretrained(tmp_path / folder)
    saved = [type(drafter).from_pretrained(tmp_path / folder) for folder in ("long", "short")]
    named = name_drafters([saved[0], reusing, saved[1]])
    assert list(named) == ["MoA, TLI 0, long", "MoA, TLI 1", "MoA, TLI 0, short"]
    assert list(named.values()) == [saved[0], reusing, saved[1]]
    with pytest.raises(ValueError, match="both called 'MoA, TLI 0, long'"):
        name_drafters([saved[0], saved[0]])


def test_choosing_a_drafter(models: Models) -> None:
    target, tokenizer, drafter = models
    reusing = tiny_drafter(target, target_layer_inference=1)
    loaded = Loaded(target, tokenizer, name_drafters([drafter, reusing]))
    assert loaded.choose("") == ("MoA, TLI 0", drafter)
    assert loaded.choose("MoA, TLI 1") == ("MoA, TLI 1", reusing)
    with pytest.raises(BadRequest, match='must be "MoA, TLI 0" or "MoA, TLI 1"'):
        loaded.choose("TLI 9")


def test_the_choice_says_how_many_there_are(models: Models) -> None:
    target, tokenizer, drafter = models
    reusing = tiny_drafter(target, target_layer_inference=1)
    loading, one, two = (
        drafter_choice(Waiting(loaded))
        for loaded in (
            None,
            Loaded(target, tokenizer, name_drafters([drafter])),
            Loaded(target, tokenizer, name_drafters([drafter, reusing])),
        )
    )
    assert (loading.choices, loading.value) == ([], None)
    assert "loading" in (loading.info or "")
    assert (one.choices, one.value) == ([("MoA, TLI 0", "MoA, TLI 0")], "MoA, TLI 0")
    assert "nothing to choose" in (one.info or "")
    assert two.choices == [("MoA, TLI 0 (default)", "MoA, TLI 0"), ("MoA, TLI 1", "MoA, TLI 1")]
    assert two.value == "MoA, TLI 0"


@pytest.fixture(scope="module")
def two_drafters(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """The address of a demo with a second drafter, loaded from a folder, and that drafter."""
    target, tokenizer, drafter = models
    folder = tmp_path_factory.mktemp("reusing")
    tiny_drafter(target, seed=2, target_layer_inference=1).save_pretrained(folder)
    reusing = load_drafter(folder, target)
    app = build(target, tokenizer, drafter, reusing)
    _, address, _ = app.launch(prevent_thread_lock=True, quiet=True)
    yield address, reusing
    app.close()


def test_each_drafter_drafts_and_writes_the_same(two_drafters: tuple[str, Any], models: Models) -> None:
    address, reusing = two_drafters
    target, tokenizer, drafter = models
    client = Client(address, verbose=False)
    for name, chosen in {"": drafter, "MoA, TLI 0": drafter, "MoA, TLI 1": reusing}.items():
        request = Request("Hello", 24, shape="tree", lookup=False, drafter=name or "MoA, TLI 0")
        expected = as_data(list(compare(target, tokenizer, chosen, request, threading.Event()))[-1], tokenizer)
        result = client.predict("Hello", 24, shape="tree", lookup=False, drafter=name, api_name="/decode")
        assert result["identical"] is True
        assert result["token_ids"] == expected["plain"]["token_ids"]
        assert result["request"] == expected["request"]
        assert result["marks"] == expected["marks"]  # what was thrown away is the drafter's own
        result = client.predict("Hello", 24, drafter=name, api_name="/decode")
        assert result["identical"] is True


def test_a_drafter_that_is_not_there_is_one_clear_error(
    two_drafters: tuple[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    client = Client(two_drafters[0], verbose=False)
    for endpoint in ("/decode", "/line"):
        with pytest.raises(AppError, match='must be "MoA, TLI 0" or "MoA, TLI 1"'):
            client.predict("Hello", drafter="TLI 9", api_name=endpoint)
    assert "Traceback" not in capfd.readouterr().err


def test_the_target_s_weights_are_there_once(two_drafters: tuple[str, Any], models: Models) -> None:
    target, _, drafter = models
    shared = {parameter.data_ptr() for parameter in target.parameters()}
    for each in (drafter, two_drafters[1]):
        assert each.get_input_embeddings() is target.get_input_embeddings()
        assert not shared & {parameter.data_ptr() for parameter in each.parameters()}


# -- endpoints ---------------------------------------------------------------------------------------------------------


def test_starting_reaches_for_no_other_machine(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    look_up, connect = socket.getaddrinfo, socket.socket.connect

    def note(host: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(str(host))
        return look_up(host, *arguments, **options)

    def note_address(self: socket.socket, address: Any) -> None:
        asked.append(str(address[0]))
        connect(self, address)

    monkeypatch.setattr(socket, "getaddrinfo", note)
    monkeypatch.setattr(socket.socket, "connect", note_address)
    app = build(*models)
    app.launch(prevent_thread_lock=True, quiet=True)
    time.sleep(1)  # a thread could ask later
    app.close(verbose=False)
    assert set(asked) <= {"127.0.0.1", "localhost", "::1"}
    assert asked  # the page itself


def test_the_models_are_named(models: Models) -> None:
    target, tokenizer, drafter = models
    about = models_html(Loaded(target, tokenizer, {"one": drafter}))
    assert "Drafter: " in about
    assert "reuses no layer of the target (TLI 0)" in about
    reusing = [tiny_drafter(target, target_layer_inference=layers) for layers in (1, 2)]
    about = models_html(Loaded(target, tokenizer, name_drafters([drafter, *reusing])))
    assert "Drafters: " in about
    assert "last layer (TLI 1)" in about
    assert "last 2 layers (TLI 2)" in about


def test_decode_endpoint(url: str, models: Models) -> None:
    client = Client(url, verbose=False)
    result = client.predict("Hello", 20, 0.0, "tree", 3, False, api_name="/decode")
    assert result["identical"] is True
    assert len(result["token_ids"]) == 20
    assert result["text"] == models[1].decode(result["token_ids"], skip_special_tokens=True)
    assert {mark["kind"] for mark in result["marks"]} >= {"own", "rejected"}
    assert len(result["trace"]["rounds"]) == result["drafted"]["target_calls"] - 1


@pytest.mark.parametrize(("prompt", "words"), [("", "empty"), ("x" * 1000, "too long")])
def test_endpoint_errors_are_words(url: str, prompt: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AppError, match=words):
        Client(url, verbose=False).predict(prompt, api_name="/decode")
    assert "Traceback" not in capfd.readouterr().err


def test_stop_endpoint_stops_only_its_own_session(
    url: str, models: Models, slowly: None, capfd: pytest.CaptureFixture[str]
) -> None:
    client, other = Client(url, verbose=False), Client(url, verbose=False)
    job = client.submit("SECRETPROMPT", 500, api_name="/decode")
    wait_for(decoding_threads)
    assert other.predict(api_name="/stop") == 0
    assert decoding_threads()
    assert client.predict(api_name="/stop") == 1
    result = job.result(timeout=30)
    assert result["stopped"]
    assert len(result["token_ids"]) < 500
    wait_for(lambda: not decoding_threads())
    captured = capfd.readouterr()
    assert "SECRETPROMPT" not in captured.out + captured.err


def test_visitors_wait_for_each_other_and_get_their_own(url: str) -> None:
    clients = [Client(url, verbose=False) for _ in range(3)]
    jobs = [client.submit(f"Visitor {i}", 16, api_name="/decode") for i, client in enumerate(clients)]
    most = 0
    while not all(job.done() for job in jobs):
        most = max(most, len(decoding_threads()))
        time.sleep(0.005)
    assert most == 1
    prompts = [job.result()["request"]["prompt"] for job in jobs]
    assert prompts == ["Visitor 0", "Visitor 1", "Visitor 2"]


def test_only_the_named_endpoints_are_public(url: str) -> None:
    described = Client(url, verbose=False).view_api(return_format="dict", print_info=False)
    assert set(described["named_endpoints"]) == {"/decode", "/line", "/stop"}
    assert described["unnamed_endpoints"] == {}
