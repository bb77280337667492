"""The link emulator, alone and between two real processes, and the commands that start them."""

import json
import math
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import byte_tokenizer, tiny_drafter, tiny_target

import moa_spec
from moa_spec.cli import main
from moa_spec.generation import Draft, DraftOptions
from moa_spec.generation.experience import Experience
from moa_spec.generation.policy import AutoPolicy
from moa_spec.serving.events import Confirmed, Token, Transcript, Withdrawn
from moa_spec.serving.link import Conditions, Link, Profile
from moa_spec.serving.pace import LineCosts, RoundTrip


class Echo:
    """A TCP server that sends back what it gets."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    @staticmethod
    def _echo(connection: socket.socket) -> None:
        try:
            while data := connection.recv(65536):
                connection.sendall(data)
        except OSError:
            pass
        connection.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.socket.close()


def reach(link: Link) -> socket.socket:
    return socket.create_connection(("127.0.0.1", link.port), timeout=5)


def listen(link: Link) -> bytes:
    """What comes without having asked."""
    with reach(link) as connection:
        return connection.recv(1)


def exchange(connection: socket.socket, data: bytes) -> float:
    """Seconds until all of it is back."""
    started = time.monotonic()
    threading.Thread(target=connection.sendall, args=(data,), daemon=True).start()
    received = b""
    while len(received) < len(data):
        piece = connection.recv(65536)
        assert piece
        received += piece
    assert received == data
    return time.monotonic() - started


def test_delay_and_bandwidth(echo: Echo) -> None:
    profile = Profile((Conditions(round_trip=200, jitter=20, down=2, up=1),))
    with Link("127.0.0.1", echo.port, profile) as link, reach(link) as connection:
        times = [exchange(connection, b"x") for _ in range(4)]
        assert all(0.17 < seconds < 0.5 for seconds in times)
        seconds = exchange(connection, os.urandom(150_000))  # 1.2 Mbit: 1.07 s up after the burst, down meanwhile
        assert 1.0 < seconds < 3.0
        assert link.bytes_up == link.bytes_down == 150_004


def test_jitter_is_the_seeds(echo: Echo) -> None:
    profile = Profile((Conditions(round_trip=20, jitter=20),))
    departures = []
    for seed in (1, 1, 2):
        with Link("127.0.0.1", echo.port, profile, seed) as link:
            departures.append([link._up.departure(0.0, 1, profile.turns[0], 0.0) for _ in range(5)])
    assert departures[0] == departures[1] != departures[2]


@pytest.mark.parametrize("kind", ["rst", "fin", "refused", "midframe-down", "midframe-up"])
def test_cuts_end_connections(echo: Echo, kind: str) -> None:
    with Link("127.0.0.1", echo.port) as link, reach(link) as connection:
        exchange(connection, b"hello")
        link.cut(kind)
        data = b""
        try:
            connection.sendall(b"0123456789" * 10)
            while piece := connection.recv(1000):
                data += piece
        except ConnectionError:
            assert kind != "fin"
        # of half a request, an answer may just have come back
        assert len(data) in {"midframe-down": (50,), "midframe-up": (0, 50)}.get(kind, (0,))
        if kind == "refused":
            with pytest.raises(ConnectionRefusedError):
                reach(link)
        link.restore()
        with reach(link) as again:
            exchange(again, b"hello")


@pytest.mark.parametrize("kind", ["blackhole", "blackhole-up", "blackhole-down"])
def test_black_holes_hold_everything_back(echo: Echo, kind: str) -> None:
    with Link("127.0.0.1", echo.port) as link, reach(link) as connection:
        exchange(connection, b"hello")
        link.cut(kind)
        connection.sendall(b"more")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(10)
        assert link.bytes_up == (9 if kind == "blackhole-down" else 5)
        link.restore()
        connection.settimeout(5)
        assert connection.recv(10) == b"more"


def test_links_that_lead_nowhere(echo: Echo) -> None:
    with pytest.raises(ValueError, match="no profile"):
        Link("127.0.0.1", 9, profile="6g")
    with Link("127.0.0.1", 9) as link:
        with pytest.raises(ValueError, match="no cut"):
            link.cut("scissors")
        with pytest.raises(ConnectionError):
            listen(link)


def test_drafts_grow_with_distance_and_acceptance() -> None:
    """What the client's policy asks for, once it knows line, server and drafter; a level is right with these odds."""

    def levels(line: float, odds: float) -> float:
        costs = LineCosts({1: 0.05, 2: 0.05, 5: 0.06, 9: 0.07, 33: 0.2}, 0.004, 0.006, observe=0.0)
        policy = AutoPolicy(DraftOptions(30, 0.0, 1, 30, 0), False, 1, costs, Experience())
        chance, judged = random.Random(0), []
        for _ in range(200):
            plan = policy.plan([Draft()])
            wanted = 0
            while wanted < plan.levels and odds ** (wanted + 1) >= plan.confidence:
                wanted += 1
            chain = Draft.chain(list(range(wanted)), [math.log(odds)] * wanted)
            draft = policy.choose(plan, [chain], [Draft()])[0]
            accepted = 0
            while accepted < len(draft) and chance.random() < odds:
                accepted += 1
            work = costs.pass_seconds(1 + len(draft)) - costs.line
            costs.saw_round(1 + len(draft), line + work, work)
            policy.learn(plan, [draft], [list(range(accepted))], (0.004 * wanted, line + work))
            judged.append(len(draft))
        return sum(judged[100:]) / 100

    distances = [levels(line, 0.85) for line in (0.0, 0.1, 1.0, 10.0)]
    assert distances == sorted(distances)
    assert distances[0] < distances[-1]
    assert levels(0.1, 0.3) < levels(0.1, 0.6) < levels(0.1, 0.9)


def test_lines_are_followed() -> None:
    costs = LineCosts({1: 0.05, 5: 0.1}, 0.004, 0.006, observe=0.0)
    for _ in range(40):
        costs.saw_round(5, 0.5, 0.3)
    assert costs.line == pytest.approx(0.2, rel=0.01)
    assert costs.pass_seconds(5) == pytest.approx(0.5, rel=0.05)
    trip = RoundTrip()
    assert trip.patience(3.0) == 3.0
    for _ in range(40):
        trip.saw(5.0)
    assert 5.0 <= trip.patience(3.0) < 5.5


def test_transcripts_notice_what_does_not_fit() -> None:
    transcript = Transcript([1], ["verified"])
    for event in (Token(0, 5, "verified"), Withdrawn(0, 1), Confirmed(0, 1), Withdrawn(1, 1)):
        with pytest.raises(ValueError, match="does not fit"):
            transcript.add(event)


# -- two processes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, its drafter, and the drafter's client half as `moa serve` exports it."""
    folder = tmp_path_factory.mktemp("serving")
    target = tiny_target(vocab_size=257)
    target.generation_config.eos_token_id = None
    target.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    tiny_drafter(target, eos_token_id=None).save_pretrained(folder / "drafter")
    models = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    assert main(["serve", "--export-client", str(folder / "client"), *models]) == 0
    return folder


def start(*arguments: str) -> "subprocess.Popen[str]":
    program = "import sys; sys.argv[0] = 'moa'; from moa_spec.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def wait_for(process: "subprocess.Popen[str]", pattern: str) -> str:
    """The first match in what a process says."""
    said = ""
    for line in process.stdout:
        said += line
        if found := re.search(pattern, line):
            return found.group(1)
    raise AssertionError(f"ended with {process.wait()}: {said}")


def test_server_link_and_client_in_processes_of_their_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    tokens = folder / "tokens"
    tokens.write_text("someone 0123456789abcdef\n")
    target, tokenizer = moa_spec.load_target(folder / "target")
    ids = tokenizer("Hello", return_tensors="pt")["input_ids"]
    wanted = target.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist()
    server = start("serve", "--port", "0", "--token-file", str(tokens), *models)
    try:
        port = int(wait_for(server, r"running on http://127\.0\.0\.1:(\d+)"))
        with Link("127.0.0.1", port, "4g", seed=1) as link:
            (folder / "token").write_text("0123456789abcdef\n")
            chat = ["chat", "Hello", "--drafter", str(folder / "client"), "--max-new-tokens", "20"]
            chat += ["--server", f"ws://127.0.0.1:{link.port}"]
            capsys.readouterr()
            assert main([*chat, "--json", "--token-file", str(folder / "token")]) == 0
            result = json.loads(capsys.readouterr().out)
            assert result["token_ids"] == wanted
            assert result["exact"] is True
            assert result["round_trip"] > 0.04
            assert main(chat) == 2
            assert "401" in capsys.readouterr().err
    finally:
        server.terminate()
        rest, _ = server.communicate(timeout=30)
    assert server.returncode in (0, -15, 143)
    assert "Hello" not in rest


def test_link_command(echo: Echo) -> None:
    process = start("link", "--listen", "127.0.0.1:0", "--to", f"127.0.0.1:{echo.port}", "--profile", "none")
    try:
        port = int(wait_for(process, r"127\.0\.0\.1:(\d+) leads"))
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            exchange(connection, b"hello")
            process.stdin.write("scissors\nrst\n")
            process.stdin.flush()
            assert wait_for(process, r"(rst; 5 bytes up, 5 down)")
            with pytest.raises(ConnectionError):
                connection.recv(1)
    finally:
        process.terminate()
        process.communicate(timeout=10)


def test_wrong_commands_say_what_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    for arguments, problem in (
        (["serve", "--host", "0.0.0.0", *models], "--token-file"),
        (["serve", "--token-file", "nowhere", *models], "nowhere"),
        (["serve", "--export-client", str(folder / "client"), *models], "exists already"),
        (["serve", "--tls-cert", "nowhere", *models], "certificate and its key"),
        (["chat", "x", "--drafter", str(folder / "drafter"), "--tokenizer", str(folder / "target")], "--export-client"),
        (["chat", "x", "--drafter", str(folder / "client"), "--server", "http://x"], "wss://host:port"),
        (["chat", " ", "--drafter", str(folder / "client")], "empty"),
    ):
        assert main(arguments) == 2, arguments
        assert problem in capsys.readouterr().err


def test_chat_offline_and_in_turns(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["chat", "--drafter", str(folder / "client"), "--server", "ws://127.0.0.1:9", "--offline"]
    lines = iter(["Hello", "again", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert main([*arguments, "--patience", "0", "--max-new-tokens", "8"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("⟦") == captured.out.count("⟧") == 2
    assert captured.out.count("8 written offline, 0 of them withdrawn; 0 the target's") == 2
    assert captured.err.count("[offline: ") == 2
