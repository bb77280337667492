"""`moa demo` as a process: the page first, then the models; what goes wrong is one line."""

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
