"""A server that strangers talk to: who may come in, what hostile frames do (nothing), and what overload looks like."""

import contextlib
import json
import logging
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_tools import IDS, QUICK, World, read
from tiny import tiny_drafter, tiny_target
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from moa_spec.modeling_moa import WrongTargetError
from moa_spec.serving.auth import Tokens, check_address
from moa_spec.serving.client import MoAClient
from moa_spec.serving.connection import _draft
from moa_spec.serving.identity import drafter_identity
from moa_spec.serving.line import Address, ServerRefused, ServerUnavailable
from moa_spec.serving.messages import (
    PATH,
    SESSION_HEADER,
    VERSION,
    Adopt,
    Committed,
    Hello,
    Memory,
    PrefixDigest,
    ProtocolError,
    Refused,
    Verify,
    Welcome,
    decode_from_client,
    decode_from_server,
    encode,
)
from moa_spec.serving.server import MoAServer, serve_in_thread
from moa_spec.serving.sessions import Limits

ALICE, BOB = "a" * 20, "b" * 20
TEXT = IDS[0].tolist()


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture(scope="module")
def served(world: World) -> Iterator[tuple[MoAServer, str]]:
    with world.serving(tokens=Tokens({ALICE: "alice", BOB: "bob"})) as (server, url):
        yield server, url


@contextlib.contextmanager
def connected(url: str, token: str | None = ALICE, **headers: str) -> Iterator[ClientConnection]:
    extra = {} if token is None else {"Authorization": f"Bearer {token}"}
    with connect(url + PATH, additional_headers=extra | headers, compression=None, proxy=None) as connection:
        yield connection


def hello(world: World, **changes: Any) -> Hello:
    plain = Hello(VERSION, drafter_identity(world.drafter), "int8", TEXT, len(TEXT), 20)
    return msgspec.structs.replace(plain, **changes)


def begin(connection: ClientConnection, first: Hello) -> tuple[Welcome, Committed]:
    """Says hello and takes everything up to the last memory."""
    connection.send(encode(first))
    welcome = committed = None
    held = first.held
    while committed is None or held < committed.held:
        message = decode_from_server(connection.recv(timeout=10))
        assert not isinstance(message, Refused), message
        if isinstance(message, Welcome):
            welcome = message
        elif isinstance(message, Committed):
            committed = message
        elif isinstance(message, Memory):
            held = message.start + message.count
    return welcome, committed


def ask(connection: ClientConnection, message: Any) -> Committed | Refused:
    """Sends and takes the answer, with its memory."""
    connection.send(encode(message) if isinstance(message, msgspec.Struct) else message)
    answer = None
    while not isinstance(answer, (Committed, Refused)):
        answer = decode_from_server(connection.recv(timeout=10))
    return answer


def still_works(world: World, url: str) -> None:
    transcript, _ = read(world.client(url, token=BOB).generate(IDS, max_new_tokens=6))
    assert transcript.tokens == world.answer(length=6)


# -- who may come in ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "wrong", ALICE[:-1], ALICE + "a"])
def test_wrong_tokens_are_refused_before_the_upgrade(served: tuple[MoAServer, str], token: str | None) -> None:
    _, url = served
    with pytest.raises(InvalidStatus) as error, connected(url, token):
        pass
    assert error.value.response.status_code == 401


def test_client_says_that_its_token_is_wrong(world: World, served: tuple[MoAServer, str]) -> None:
    client = world.client(served[1], token="c" * 20)
    with pytest.raises(ServerRefused, match="401: A bearer token is needed"):
        list(client.generate(IDS, max_new_tokens=3))


def test_web_pages_are_refused(served: tuple[MoAServer, str]) -> None:
    with pytest.raises(InvalidStatus) as error, connected(served[1], Origin="https://example.org"):
        pass
    assert error.value.response.status_code == 403


def test_nobody_touches_anothers_session(world: World, served: tuple[MoAServer, str]) -> None:
    server, url = served
    with connected(url) as alice:
        welcome, committed = begin(alice, hello(world))
        with connected(url, BOB, **{SESSION_HEADER: welcome.session}) as bob:
            theirs, _ = begin(bob, hello(world, session=welcome.session))
            assert not theirs.resumed
            assert theirs.session != welcome.session
            verify = Verify(welcome.session, 1, len(TEXT) + 1, b"x" * 8, [])
            assert ask(bob, verify).reason == "session"
        prefix = PrefixDigest(TEXT + committed.tokens).digest()
        assert isinstance(ask(alice, Verify(welcome.session, 1, len(TEXT) + 1, prefix, [])), Committed)
    assert server.metrics.refused["session"] >= 1


def test_tokens_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# who\n\nalice {ALICE}\nbob {BOB}\n")
    tokens = Tokens.from_file(path)
    assert tokens.principal(f"Bearer {ALICE}") == "alice"
    assert tokens.principal(f"bearer {BOB}") == "bob"
    for header in (None, "", "Bearer", f"Basic {ALICE}", ALICE, "Bearer \udc80"):
        assert tokens.principal(header) is None
    for text, problem in (
        ("alice short", "fewer than 16"),
        ("alice", "a name, a space"),
        (f"a {ALICE}\nb {ALICE}", "has the token of a"),
        ("# none", "no token"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=problem):
            Tokens.from_file(path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org"])
def test_other_addresses_need_tokens(host: str) -> None:
    with pytest.raises(ValueError, match="--token-file"):
        check_address(host, None)
    check_address(host, Tokens({ALICE: "alice"}))
    for near in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        check_address(near, None)


def test_token_does_not_travel_in_the_clear() -> None:
    with pytest.raises(ValueError, match="in the clear"):
        Address("ws://example.org:1", token=ALICE)
    Address("ws://example.org:1", token=ALICE, allow_insecure=True)
    Address("ws://127.0.0.1:1", token=ALICE)
    for url in ("http://x", "example.org", "ws://", "wss://x/path", ""):
        with pytest.raises(ValueError, match="wss://host:port"):
            Address(url)


def test_tls(world: World, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    cert, key, ca = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "ca.pem"))
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(cert)
    authority.cert_pem.write_to_path(ca)
    server = MoAServer(world.target, world.drafter, QUICK, Tokens({ALICE: "alice"}))
    with serve_in_thread(server, certificate=cert, key=key) as url:
        assert url.startswith("wss://")
        transcript, _ = read(world.client(url, token=ALICE, ca_file=ca).generate(IDS, max_new_tokens=5))
        assert transcript.tokens == world.answer(length=5)
        with pytest.raises(ServerUnavailable, match=r"(?i)certificate"):
            list(world.client(url, token=ALICE, connect_timeout=0.5).generate(IDS, max_new_tokens=5))
    with pytest.raises(ValueError, match="both a certificate and its key"), serve_in_thread(server, certificate=cert):
        pass


# -- hostile frames ----------------------------------------------------------------------------------------------------


def broken_hellos(world: World) -> dict[str, tuple[Any, str]]:
    good = hello(world)
    plain = msgspec.msgpack.decode(encode(good))

    def raw(**changes: Any) -> bytes:
        return msgspec.msgpack.encode(plain | changes)

    return {
        "nothing": (b"", "invalid"),
        "text": ("hello", "invalid"),
        "json": (json.dumps({"type": "hello"}).encode(), "invalid"),
        "pickle": (b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x01.", "invalid"),
        "another first message": (encode(Verify("s" * 20, 1, 0, b"12345678", [])), "invalid"),
        "another type": (raw(type="welcome"), "invalid"),
        "a field too many": (raw(extra=1), "invalid"),
        "huge list": (encode(good)[:-1] + b"\xdd\xff\xff\xff\xff", "invalid"),
        "no tokens": (raw(tokens=[]), "invalid"),
        "negative token": (raw(tokens=[-1]), "invalid"),
        "token as text": (raw(tokens=["1"]), "invalid"),
        "token as float": (raw(tokens=[1.0]), "invalid"),
        "token out of the vocabulary": (raw(tokens=[9999], prompt=1), "invalid"),
        "eos out of the vocabulary": (raw(eos=[64]), "invalid"),
        "longer prompt than text": (raw(prompt=99), "invalid"),
        "text longer than allowed": (raw(tokens=[3] * 50, prompt=1), "invalid"),
        "held too much": (raw(held=77), "invalid"),
        "too long for the context": (raw(max_new_tokens=1000), "invalid"),
        "no new tokens": (raw(max_new_tokens=0), "invalid"),
        "unknown memory": (raw(memory="float64"), "invalid"),
        "bad session": (raw(session="../../etc"), "invalid"),
        "bad sampling": (raw(sampling={"temperature": -1}), "invalid"),
        "overflowing temperature": (raw(sampling={"temperature": 1e-300}), "invalid"),
        "overflowing penalty": (raw(sampling={"repetition_penalty": 1e-300}), "invalid"),
        "nan": (raw(sampling={"top_p": float("nan")}), "invalid"),
        "another version": (raw(version=2), "version"),
        "another drafter": (raw(drafter="0" * 32), "drafter"),
    }


def test_broken_hellos_are_refused_by_reason(world: World, served: tuple[MoAServer, str]) -> None:
    server, url = served
    for name, (frame, reason) in broken_hellos(world).items():
        with connected(url) as connection:
            answer = ask(connection, frame)
            assert isinstance(answer, Refused), name
            assert answer.reason == reason, name
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv(timeout=5)
            assert closed.value.rcvd.code == 4400, name
    assert server.sessions.places == 0
    still_works(world, url)


def test_broken_rounds_are_refused_and_change_nothing(world: World, served: tuple[MoAServer, str]) -> None:
    _, url = served
    for change, reason in (
        ({"round": 0}, "session"),
        ({"round": 2}, "session"),
        ({"base": 3}, "session"),
        ({"prefix": b"wrong ha"}, "session"),
        ({"session": "s" * 32}, "session"),
        ({"tokens": [64]}, "invalid"),
        ({"tokens": [5] * 65}, "invalid"),
        ({"tokens": [5, 6], "parents": [0, 0]}, "invalid"),
        ({"tokens": [5, 6], "parents": [1, -1]}, "invalid"),
        ({"tokens": [5, 5], "parents": [-1, -1]}, "invalid"),
        ({"tokens": [5, 6], "parents": [-1]}, "invalid"),
    ):
        with connected(url) as connection:
            welcome, committed = begin(connection, hello(world))
            text = TEXT + committed.tokens
            good = Verify(welcome.session, 1, len(text), PrefixDigest(text).digest(), [5, 6])
            answer = ask(connection, msgspec.structs.replace(good, **change))
            assert isinstance(answer, Refused), change
            assert answer.reason == reason, change
        header = {SESSION_HEADER: welcome.session}
        with connected(url, **header) as again:
            resumed, _ = begin(again, hello(world, session=welcome.session, tokens=text, held=len(TEXT)))
            assert resumed.resumed, change
            assert ask(again, good).tokens == world.answer(length=20)[1 : 1 + 1]
    still_works(world, url)


def test_repeated_round_gets_the_same_answer(world: World, served: tuple[MoAServer, str]) -> None:
    server, url = served
    answer = world.answer(length=20)
    before = server.metrics.rounds_repeated
    with connected(url) as connection:
        welcome, committed = begin(connection, hello(world))
        text = TEXT + committed.tokens
        verify = Verify(welcome.session, 1, len(text), PrefixDigest(text).digest(), answer[1:4])
        first = ask(connection, verify)
        assert first.tokens == answer[1:5]
        assert ask(connection, verify) == first
        session = server.sessions.find(welcome.session, "alice")
        assert session.text.tokens == TEXT + answer[:5]
    assert server.metrics.rounds_repeated == before + 1


def test_adopting_cannot_touch_the_prompt_or_outgrow_the_text(world: World, served: tuple[MoAServer, str]) -> None:
    _, url = served
    for base, tokens, reason in ((3, [5], "session"), (len(TEXT), [5] * 21, "invalid"), (len(TEXT), [64], "invalid")):
        with connected(url) as connection:
            welcome, _ = begin(connection, hello(world))
            adopt = Adopt(welcome.session, 1, base, PrefixDigest(TEXT[:base]).digest(), tokens)
            assert ask(connection, adopt).reason == reason


def test_large_frames_close_the_connection(world: World, served: tuple[MoAServer, str]) -> None:
    server, url = served
    with connected(url) as connection, pytest.raises((ConnectionClosed, OSError)):
        ask(connection, b"x" * (server.frame_limit + 1))
    still_works(world, url)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_frame_breaks_the_decoder(data: st.DataObject) -> None:
    """Arbitrary bytes, and real messages with bytes changed, become a valid message or a ProtocolError."""
    good = encode(Verify("s" * 20, 1, 9, b"12345678", [5, 6], [-1, 0]))
    frame = bytearray(data.draw(st.one_of(st.binary(max_size=200), st.just(good))))
    for _ in range(data.draw(st.integers(0, 3))):
        if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    for decode in (decode_from_client, decode_from_server):
        try:
            message = decode(bytes(frame))
        except ProtocolError:
            continue
        if isinstance(message, Verify):
            with contextlib.suppress(ProtocolError):
                draft = _draft(message, 64)
                assert all(parent < node for node, parent in enumerate(draft.parents))


def test_fuzzed_conversations_do_no_harm(world: World, served: tuple[MoAServer, str]) -> None:
    server, url = served
    chance = random.Random(0)
    for _ in range(40):
        with connected(url) as connection, contextlib.suppress(ConnectionClosed, TimeoutError):
            if chance.random() < 0.5:
                welcome, _ = begin(connection, hello(world))
                frame = bytearray(encode(Verify(welcome.session, 1, len(TEXT) + 1, b"12345678", [5, 6, 7])))
            else:
                frame = bytearray(encode(hello(world)))
            for _ in range(chance.randint(1, 6)):
                frame[chance.randrange(len(frame))] = chance.randrange(256)
            connection.send(bytes(frame))
            connection.recv(timeout=2)
    still_works(world, url)
    assert server.sessions.places == 0
    assert "error" not in server.metrics.refused


# -- a server's limits -------------------------------------------------------------------------------------------------


def test_full_servers_say_when_to_come_back(world: World) -> None:
    limits = Limits(sessions=2, kv_tokens=70, heartbeat_seconds=0.2, drain_seconds=0.1, retry_seconds=3)
    with world.serving(limits) as (server, url):
        with connected(url, None) as one:
            begin(one, hello(world))
            with connected(url, None) as two:
                begin(two, hello(world))
                with pytest.raises(InvalidStatus) as error, connected(url, None):
                    pass
                assert error.value.response.status_code == 503
                assert error.value.response.headers["Retry-After"] == "3"
            with connected(url, None) as three:  # two is gone, and its cache makes room
                answer = ask(three, hello(world, max_new_tokens=50))
                assert (answer.reason, answer.retry_after) == ("busy", 3.0)
                with pytest.raises(ConnectionClosed) as closed:
                    three.recv(timeout=5)
                assert closed.value.rcvd.code == 1013
        client = world.client(url, connect_timeout=5)
        assert read(client.generate(IDS, max_new_tokens=20))[0].tokens == world.answer(length=20)
        assert server.sessions.evicted >= 1
        assert server.sessions.places == 0


def test_clients_that_ask_for_nothing_are_sent_away(world: World) -> None:
    limits = Limits(idle_seconds=0.3, hello_seconds=0.3, grace_seconds=0.2, drain_seconds=0.1)
    with world.serving(limits) as (_, url):
        with connected(url, None) as silent:
            assert decode_from_server(silent.recv(timeout=5)).message == "no hello came for 0.3 s"
        with connected(url, None) as idle:
            begin(idle, hello(world))
            assert decode_from_server(idle.recv(timeout=5)).message == "nothing was asked for for 0.3 s"


def test_newest_connection_has_the_session(world: World) -> None:
    with world.serving() as (server, url), connected(url, None) as old:
        welcome, committed = begin(old, hello(world))
        with connected(url, None, **{SESSION_HEADER: welcome.session}) as new:
            resumed, _ = begin(new, hello(world, session=welcome.session, tokens=TEXT + committed.tokens, held=4))
            assert resumed.resumed
            with pytest.raises(ConnectionClosed) as closed:
                old.recv(timeout=5)
            assert closed.value.rcvd.code == 4409
            assert len(server.sessions) == 1


def test_shutdown_lets_texts_finish(world: World) -> None:
    limits = Limits(drain_seconds=20, heartbeat_seconds=0.2)
    server = MoAServer(world.target, world.drafter, limits)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serve_in_thread(server))
        generation = iter(world.client(url).generate(IDS, max_new_tokens=30))
        seen = [next(generation) for _ in range(6)]
        closing = threading.Thread(target=stack.pop_all().close)
        closing.start()
        while not server.draining:
            pass
        with pytest.raises(InvalidStatus) as error, connected(url, None):
            pass
        assert error.value.response.status_code == 503
        seen += list(generation)
        closing.join(20)
    tokens = [event.token for event in seen if hasattr(event, "token")]
    assert tokens == world.answer(length=30)


def test_health_and_metrics(world: World, served: tuple[MoAServer, str]) -> None:
    base = served[1].replace("ws", "http", 1)
    with urllib.request.urlopen(base + "/health") as response:
        assert json.load(response) == {"status": "ok"}
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(base + "/metrics")
    still_works(world, served[1])
    request = urllib.request.Request(base + "/metrics", headers={"Authorization": f"Bearer {ALICE}"})
    with urllib.request.urlopen(request) as response:
        text = response.read().decode()
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(figures["moa_tokens_committed_total"]) >= 6
    assert figures["moa_round_seconds_count"] == figures["moa_rounds_total"]
    assert figures['moa_round_seconds_bucket{le="+Inf"}'] == figures["moa_round_seconds_count"]


def test_strangers_cannot_fill_the_log(served: tuple[MoAServer, str]) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("uvicorn.error").addHandler(handler)
    try:
        for headers in ({}, {"Origin": "https://elsewhere"}):
            with pytest.raises(InvalidStatus), connected(served[1], None, **headers):
                pass
    finally:
        logging.getLogger("uvicorn.error").removeHandler(handler)
    assert [record for record in records if record.levelno >= logging.WARNING] == []


def test_logs_say_nothing_of_texts(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="moa_spec"), world.serving() as (_, url):
        read(world.client(url).generate(TEXT, max_new_tokens=5))
    said = " ".join(record.getMessage() for record in caplog.records if record.name.startswith("moa_spec"))
    assert "9 tokens to read" in said
    assert str(TEXT)[1:-1] not in said


def test_unfit_targets_and_drafters_are_refused(world: World) -> None:
    sliding = tiny_target("mistral_sliding")
    with pytest.raises(WrongTargetError, match="sliding window"):
        MoAServer(sliding, tiny_drafter(sliding))
    with pytest.raises(ValueError, match="standalone"):
        MoAClient("ws://127.0.0.1:1", tiny_drafter(world.target))
    other = World(layer_self_attention_layers=[0, 1])
    with world.serving() as (_, url), pytest.raises(ServerRefused, match="drafter is not the one"):
        list(other.client(url).generate(IDS, max_new_tokens=3))


def test_impossible_arguments(world: World) -> None:
    client = world.client("ws://127.0.0.1:1")
    for arguments, problem in (
        ({"prompt": []}, "one or more token ids"),
        ({"prompt": [64]}, "from 0 to 63"),
        ({"prompt": "text"}, "tokenizer"),
        ({"prompt": [3], "max_new_tokens": 0}, "max_new_tokens"),
        ({"prompt": [3], "max_new_tokens": 1000}, "context of 256"),
        ({"prompt": [3], "temperature": -1.0}, "temperature"),
        ({"prompt": [3], "temperature": 1e-9}, "temperature"),
        ({"prompt": [3], "top_p": 0.0}, "top_p"),
        ({"prompt": [3], "policy": "maybe"}, "policy"),
    ):
        with pytest.raises(ValueError, match=problem):
            client.generate(**arguments)
