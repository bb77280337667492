"""The messages of the protocol: what may be said, how large it may be, and how it becomes bytes (docs/protocol.md).

One message is one binary WebSocket frame: a msgpack map with the message's name under "type". Every field is checked,
lengths before anything is allocated for them, and a field nobody knows is an error. Knows nothing of models or sockets.
"""

import hashlib
from array import array
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

VERSION = 1
PATH = "/v1/generate"
SESSION_HEADER = "X-MoA-Session"  # names the session to be resumed, so that it needs no place of its own
MAX_TOKENS = 1 << 20  # of one text
MAX_NODES = 512  # of one draft
MAX_CHUNK = 256 * 1024  # bytes of memory in one message, unless a single token needs more

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
RoundNumber = Annotated[int, Meta(ge=0, lt=1 << 62)]
Tokens = Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
SessionName = Annotated[str, Meta(min_length=16, max_length=64, pattern="^[A-Za-z0-9_-]+$")]
PrefixHash = Annotated[bytes, Meta(min_length=8, max_length=8)]
Reason = Literal["version", "drafter", "invalid", "busy", "leaving", "session"]
Ending = Literal["eos", "length"]
MemoryFormat = Literal["int8", "bfloat16", "float32", "none"]


class Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Anything that travels."""


class Sampling(Struct, frozen=True, forbid_unknown_fields=True):
    """How the target's next token is chosen; the meanings are those of `transformers.GenerationConfig`.

    `temperature` 0 is greedy; others begin at 0.01, below which scores overflow. `seed` None lets the server draw one.
    """

    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    seed: Annotated[int, Meta(ge=0, lt=1 << 62)] | None = None

    def __post_init__(self) -> None:
        if 0 < self.temperature < 0.01:
            raise ValueError(f"temperature cannot be {self.temperature!r}: 0 is greedy, sampling begins at 0.01")


# -- client to server --------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """First message of a connection: begins a generation, or goes on with one.

    Attributes:
        version: of the protocol.
        drafter: `drafter_identity` of the client's drafter; the server must have the same.
        memory: how memory vectors travel; "none": not at all, for clients that draft by other means. Any `drafter` will
            do then.
        tokens: the whole text that is final for the client: prompt, then what was committed.
        prompt: how many of them are the prompt.
        max_new_tokens: in all, those already committed included.
        eos: token ids that end the text.
        sampling: how the target chooses.
        session: the session to go on with; None begins one.
        held: for how many tokens, from the first on, the client has memory.
    """

    version: Annotated[int, Meta(ge=0, le=1 << 16)]
    drafter: Annotated[str, Meta(max_length=64)]
    memory: MemoryFormat
    tokens: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS)]
    prompt: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    max_new_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    eos: Annotated[list[TokenId], Meta(max_length=64)] = []
    sampling: Sampling = Sampling()
    session: SessionName | None = None
    held: Count = 0


class Verify(Message, frozen=True, tag="verify"):
    """Has the target judge a draft.

    Attributes:
        session, round: rounds count up by one; a repeated round gets the repeated answer and changes nothing.
        base: position of the draft's first level, which is the number of tokens that are final.
        prefix: `PrefixDigest` of those tokens.
        tokens, parents: as in `Draft`; no parents: a chain.
    """

    session: SessionName
    round: RoundNumber
    base: Count
    prefix: PrefixHash
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_NODES)]
    parents: Annotated[list[Annotated[int, Meta(ge=-1, lt=MAX_NODES)]], Meta(max_length=MAX_NODES)] = []


class Adopt(Message, frozen=True, tag="adopt"):
    """Makes tokens final that the client wrote alone and wants to keep, in place of everything from `base` on. The
    target reads them and does not judge. `prefix` is the hash of the tokens before `base`."""

    session: SessionName
    round: RoundNumber
    base: Count
    prefix: PrefixHash
    tokens: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS)]


class Bye(Message, frozen=True, tag="bye"):
    """The client needs this session no longer; its cache can be freed at once."""

    session: SessionName


# -- server to client --------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag="welcome"):
    """Answer to `Hello`, before any model work.

    Attributes:
        session: a random name; who knows it and has the same bearer token can resume.
        resumed: whether the server still holds the text's cache.
        token_bytes: bytes of memory per token, see `MemoryCodec`.
        max_nodes, max_depth: of one draft.
        trees: whether drafts may branch.
        pass_seconds: what a target pass over so many tokens takes here, for clients to weigh their drafts by.
    """

    version: int
    session: SessionName
    resumed: bool
    token_bytes: Annotated[int, Meta(ge=0, le=1 << 26)]
    max_nodes: Annotated[int, Meta(ge=1, le=MAX_NODES)]
    max_depth: Annotated[int, Meta(ge=0, le=MAX_NODES)]
    trees: bool
    pass_seconds: Annotated[
        dict[Annotated[int, Meta(ge=1, le=1 + MAX_NODES)], Annotated[float, Meta(gt=0, le=3600)]],
        Meta(min_length=1, max_length=64),
    ]


class Working(Message, frozen=True, tag="working"):
    """Sent about once a second while the target is busy, so that a client can tell a slow server from a dead line.

    `done` of `total` tokens of the prompt have been read; both 0 in a round.
    """

    done: Count = 0
    total: Count = 0


class Committed(Message, frozen=True, tag="committed"):
    """Tokens that are final, in answer to `Hello`, `Verify` or `Adopt`.

    Attributes:
        round: the round that this answers; after `Hello` the last round that the server has done.
        base: position of the first of `tokens`.
        tokens: new to the client. After a `Verify`, the accepted path and the target's own next token.
        accepted: how many of them had been drafted.
        held: `Memory` messages follow until the client holds memory of this many tokens.
        finished: why nothing follows; None while it goes on.
        seconds: of model work that this round took.
    """

    session: SessionName
    round: RoundNumber
    base: Count
    tokens: Tokens
    accepted: Count
    held: Count
    finished: Ending | None = None
    seconds: Annotated[float, Meta(ge=0)] = 0.0


class Memory(Message, frozen=True, tag="memory"):
    """Memory of `count` tokens from position `start` on, `count * token_bytes` bytes; see `MemoryCodec`."""

    start: Count
    count: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    data: bytes


class Refused(Message, frozen=True, tag="refused"):
    """Why the server closes the connection.

    Attributes:
        reason: "version", "drafter" and "invalid" will not change by trying again. "busy" and "leaving" may, after
            `retry_after` seconds. "session": begin again with `Hello`, which finds or rebuilds the session.
    """

    reason: Reason
    message: Annotated[str, Meta(max_length=500)]
    retry_after: Annotated[float, Meta(ge=0, le=3600)] | None = None


CLOSE_CODES = {"version": 4400, "drafter": 4400, "invalid": 4400, "busy": 1013, "leaving": 1012, "session": 4409}

FromClient = Hello | Verify | Adopt | Bye
FromServer = Welcome | Working | Committed | Memory | Refused

_encoder = msgspec.msgpack.Encoder()
_from_client = msgspec.msgpack.Decoder(FromClient)
_from_server = msgspec.msgpack.Decoder(FromServer)


class ProtocolError(ValueError):
    """The other side sent something that the protocol does not allow."""


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_from_client(frame: bytes | str | None) -> FromClient:
    """
    Raises:
        ProtocolError: this is no message of a client.
    """
    return _decode(_from_client, frame)


def decode_from_server(frame: bytes | str | None) -> FromServer:
    """
    Raises:
        ProtocolError: this is no message of a server.
    """
    return _decode(_from_server, frame)


def _decode(decoder: "msgspec.msgpack.Decoder[Any]", frame: bytes | str | None) -> Any:
    if not isinstance(frame, bytes):
        raise ProtocolError("a message is a binary frame, and this is none")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"not a message of this protocol: {error}") from error
    except UnicodeDecodeError as error:
        raise ProtocolError("not a message of this protocol: a text is not UTF-8") from error


class PrefixDigest:
    """Running hash of a text: BLAKE2b of 8 bytes over its token ids, each as 4 bytes, the lowest first."""

    def __init__(self, tokens: Iterable[int] = ()):
        self._hash = hashlib.blake2b(digest_size=8)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        ids = array("I", tokens)
        assert ids.itemsize == 4
        if not _LITTLE:
            ids.byteswap()
        self._hash.update(ids.tobytes())

    def digest(self) -> bytes:
        return self._hash.copy().digest()


_LITTLE = array("H", [1]).tobytes()[0] == 1
