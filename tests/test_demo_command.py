"""`moa demo` as a process: the page first, then the models; what goes wrong is one line."""

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import byte_tokenizer, tiny_drafter, tiny_target

pytest.importorskip("gradio", reason="gradio is not installed (pip install 'moa-spec[demo]')")
from gradio_client import Client

from moa_spec.cli import build_parser
from moa_spec.cli.arguments import DEFAULT_DRAFTER
from moa_spec.cli.demo import shipped_drafters

# a shell that starts something in the background makes it deaf to SIGINT, and so all that it starts
PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.argv[0] = 'moa'; "
    "from moa_spec.cli import main; sys.exit(main())"
)


def start(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-u", "-c", PROGRAM, "demo", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    target = tiny_target(vocab_size=257)
    target.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    tiny_drafter(target, target_layer_inference=1).save_pretrained(tmp_path / "reusing")
    return ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]


def test_the_page_is_there_before_the_models(folders: list[str]) -> None:
    process = start(*folders)
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        address = re.match(r"(http://\S+) is there after [\d.]+ s; loading the models", first)
        assert address, first + process.communicate()[1]
        client = Client(address[1], verbose=False)
        job = client.submit("Hello", 12, api_name="/decode")  # waits for the models
        assert process.stdout.readline().startswith("Ready after ")
        result = job.result(timeout=300)
        assert result["identical"] is True
        assert len(result["token_ids"]) == 12
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        print(process.communicate()[1])


def test_several_drafters(folders: list[str], tmp_path: Path) -> None:
    process = start(*folders, "--drafter", str(tmp_path / "reusing"), "--drafter", folders[-1])  # one of them twice
    assert process.stdout is not None
    try:
        address = process.stdout.readline().split()[0]
        client = Client(address, verbose=False)
        assert process.stdout.readline().startswith("Ready after ")
        for name in ("MoA, TLI 0", "MoA, TLI 1"):
            result = client.predict("Hello", 12, drafter=name, api_name="/decode")
            assert result["identical"] is True
            assert result["request"]["drafter"] == name
    finally:
        process.kill()
        print(process.communicate()[1])


def test_the_drafters_that_ship_for_a_target(tmp_path: Path) -> None:
    for name, target in {"b": "us/target", "a": "us/target", "c": "us/other", "d": None}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "moa_drafter", "target_name": target}))
    (tmp_path / "e").mkdir()  # no checkpoint
    (tmp_path / "f").mkdir()  # a baseline's
    (tmp_path / "f" / "config.json").write_text(json.dumps({"model_type": "eagle_drafter", "target_name": "us/target"}))
    assert shipped_drafters("us/target", tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert shipped_drafters("us/unknown", tmp_path) == []
    assert shipped_drafters("HuggingFaceTB/SmolLM2-135M-Instruct")[0] == DEFAULT_DRAFTER


def test_only_the_demo_takes_several_drafters() -> None:
    several = ["--drafter", "a", "--drafter", "b"]
    assert build_parser(["demo"]).parse_args(["demo", *several]).drafter == ["a", "b"]
    assert build_parser(["demo"]).parse_args(["demo"]).drafter is None
    assert build_parser(["serve"]).parse_args(["serve", *several]).drafter == "b"


def test_a_drafter_that_is_not_there_ends_it_in_words(folders: list[str]) -> None:
    process = start(*folders[:2], "--drafter", "nowhere/at all")
    _, said = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "nowhere/at all" in said
    assert "Traceback" not in said


def test_a_port_that_is_taken(folders: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(*folders, "--port", str(port))
        _, said = process.communicate(timeout=300)
    assert process.returncode == 2
    assert f"Port {port} is taken: choose another with --port" in said
