"""A bad line on one machine: a TCP proxy with delay, jitter, limited bandwidth, and cuts of every kind.

    with Link("127.0.0.1", 8040, profile="4g", seed=0) as link:
        client = MoAClient(f"ws://127.0.0.1:{link.port}", ...)
        link.cut("blackhole"); ...; link.restore()

Knows bytes only; what is said over the line is not its business. It acts above TCP, so nothing is lost or reordered:
what a black hole swallows arrives when the line is back, as TCP would send it again, if both ends still wait for it.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Cut = Literal["rst", "fin", "blackhole", "blackhole-up", "blackhole-down", "midframe-up", "midframe-down", "refused"]
CUTS: tuple[Cut, ...] = (
    "rst",
    "fin",
    "blackhole",
    "blackhole-up",
    "blackhole-down",
    "midframe-up",
    "midframe-down",
    "refused",
)
Result = TypeVar("Result")
_PIECE = 4096  # bytes read at once
_BURST = 16 * 1024  # bytes that may pass before the bandwidth is felt


@dataclass(frozen=True)
class Conditions:
    """Of a line for a while: milliseconds of a round trip and its greatest deviation, Mbit/s (0: no limit), seconds."""

    round_trip: float = 0.0
    jitter: float = 0.0
    down: float = 0.0
    up: float = 0.0
    seconds: float | None = None


@dataclass(frozen=True)
class Profile:
    """Conditions that take turns, and black holes: their shortest and longest duration and the time between, in s."""

    turns: tuple[Conditions, ...]
    holes: tuple[float, float, float, float] | None = None


_FIVE_G = Conditions(20, 5, 100, 20)
PROFILES = {
    "none": Profile((Conditions(),)),
    "5g": Profile((_FIVE_G,)),
    "4g": Profile((Conditions(55, 15, 35, 10),)),
    "slow4g": Profile((Conditions(150, 40, 1.6, 0.75),)),
    "bursty": Profile((Conditions(40, 0, 30, 15, seconds=8), Conditions(250, 0, 5, 2, seconds=2))),
    "tunnel": Profile((_FIVE_G,), holes=(3, 30, 5, 20)),
}


class _Direction:
    """One direction of the line, shared by all of its connections."""

    def __init__(self, seed: str):
        self.random = random.Random(seed)
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.midframe = False  # reset in the middle of the next piece
        self.busy_until = 0.0
        self.bytes = 0

    def departure(self, now: float, size: int, conditions: Conditions, bits_per_second: float) -> float:
        """When a piece that comes now gets to the other end: a token bucket, then the delay."""
        if bits_per_second:
            seconds = 8 / bits_per_second
            self.busy_until = max(self.busy_until, now - _BURST * seconds) + size * seconds
            now = max(now, self.busy_until)
        jitter = self.random.uniform(-conditions.jitter, conditions.jitter)
        return now + max(0.0, conditions.round_trip + jitter) / 2000


class Link:
    """The proxy, in a thread of its own. Every method may be called from any thread.

    Args:
        host, port: where it leads to.
        profile: a name in `PROFILES`, or a profile.
        seed: of jitter and black holes.
        listen_host, listen_port: where it listens; port 0 takes a free one.

    Attributes:
        port: where it listens.

    Raises:
        ValueError: there is no such profile.
        OSError: the address is taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        profile: str | Profile = "none",
        seed: int = 0,
        listen_host: str = "127.0.0.1",
        listen_port: int = 0,
    ):
        if isinstance(profile, str):
            if profile not in PROFILES:
                raise ValueError(f"There is no profile {profile!r}; there are {', '.join(PROFILES)}")
            profile = PROFILES[profile]
        self.host, self.target_port, self.profile, self.seed = host, port, profile, seed
        self.listen_host, self.port = listen_host, listen_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="moa-link", daemon=True)
        self._thread.start()
        try:
            self._call(self._start())
        except BaseException:
            self._stop_loop()
            raise

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def bytes_up(self) -> int:
        """Delivered to the server so far."""
        return self._up.bytes

    @property
    def bytes_down(self) -> int:
        return self._down.bytes

    def cut(self, kind: Cut) -> None:
        """Cuts the line. All but "rst", "fin" and the two in mid-frame last until `restore`.

        "rst", "fin": connections are reset, or closed in order. "blackhole": nothing passes any more, in one direction
        ("-up" to the server, "-down" from it) or both. "midframe-up", "midframe-down": connections are reset after half
        of the next piece in that direction. "refused": connections are reset and new ones refused.

        Raises:
            ValueError: there is no such cut.
        """
        if kind not in CUTS:
            raise ValueError(f"There is no cut {kind!r}; there are {', '.join(CUTS)}")
        self._call(self._cut(kind))

    def restore(self) -> None:
        """Everything passes again; connections that were closed stay closed."""
        self._call(self._restore())

    def close(self) -> None:
        """Resets what is open and stops listening."""
        if self._thread.is_alive():
            self._call(self._shut())
            self._stop_loop()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        self._up, self._down = _Direction(f"{self.seed} up"), _Direction(f"{self.seed} down")
        self._conditions = self.profile.turns[0]
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        await self._listen()
        if len(self.profile.turns) > 1:
            self._spawn(self._take_turns())
        if self.profile.holes:
            self._spawn(self._dig_holes(*self.profile.holes))

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(
                self._accept, self.listen_host, self.port, limit=_PIECE, reuse_address=True
            )
            self.port = self._server.sockets[0].getsockname()[1]

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take_turns(self) -> None:
        while True:
            for conditions in self.profile.turns:
                self._conditions = conditions
                await asyncio.sleep(conditions.seconds or 3600)

    async def _dig_holes(self, shortest: float, longest: float, least: float, most: float) -> None:
        chance = random.Random(f"{self.seed} holes")
        while True:
            await asyncio.sleep(chance.uniform(least, most))
            await self._cut("blackhole")
            await asyncio.sleep(chance.uniform(shortest, longest))
            await self._restore()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(self.host, self.target_port, limit=_PIECE)
        except OSError:
            self._reset({writer})
            return
        self._writers.add(far_writer)
        pair = {writer, far_writer}
        self._spawn(self._carry(reader, far_writer, self._up, pair))
        self._spawn(self._carry(far_reader, writer, self._down, pair))

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        direction: _Direction,
        pair: set[asyncio.StreamWriter],
    ) -> None:
        """Takes bytes on one side, puts them out on the other when it is their time."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)
        putting = self._loop.create_task(self._put_out(under_way, writer, direction, pair))
        arrives = 0.0
        try:
            while True:
                piece = await reader.read(_PIECE)
                conditions = self._conditions
                rate = 1e6 * (conditions.up if direction is self._up else conditions.down)
                departure = direction.departure(self._loop.time(), len(piece), conditions, rate)
                arrives = max(arrives, departure)  # nothing overtakes
                await under_way.put((arrives, piece))
                if not piece:
                    break
            await putting
        except (OSError, asyncio.CancelledError):
            putting.cancel()
            self._reset(pair)

    async def _put_out(
        self,
        under_way: "asyncio.Queue[tuple[float, bytes]]",
        writer: asyncio.StreamWriter,
        direction: _Direction,
        pair: set[asyncio.StreamWriter],
    ) -> None:
        while True:
            arrives, piece = await under_way.get()
            await asyncio.sleep(max(0.0, arrives - self._loop.time()))
            await direction.flowing.wait()
            try:
                if direction.midframe and piece:
                    direction.midframe = False
                    writer.write(piece[: max(1, len(piece) // 2)])
                    await asyncio.sleep(0.01)  # a reset would overtake what has not left yet
                    self._reset(pair)
                    return
                if not piece:
                    writer.write_eof() if writer.can_write_eof() else writer.close()
                    return
                direction.bytes += len(piece)  # before the other end can have answered
                writer.write(piece)
                await writer.drain()
            except (OSError, RuntimeError):
                self._reset(pair)
                return

    def _reset(self, writers: set[asyncio.StreamWriter]) -> None:
        for writer in list(writers):
            sock = writer.get_extra_info("socket")
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            self._writers.discard(writer)

    async def _cut(self, kind: Cut) -> None:
        if kind in ("blackhole", "blackhole-up"):
            self._up.flowing.clear()
        if kind in ("blackhole", "blackhole-down"):
            self._down.flowing.clear()
        if kind == "midframe-up":
            self._up.midframe = True
        if kind == "midframe-down":
            self._down.midframe = True
        if kind == "fin":
            for writer in list(self._writers):
                writer.close()
            self._writers.clear()
        if kind == "refused" and self._server is not None:
            self._server.close()
            self._server = None
        if kind in ("rst", "refused"):
            self._reset(self._writers)

    async def _restore(self) -> None:
        for direction in (self._up, self._down):
            direction.flowing.set()
            direction.midframe = False
        await self._listen()

    async def _shut(self) -> None:
        if self._server is not None:
            self._server.close()
        self._reset(self._writers)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
