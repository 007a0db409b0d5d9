"""A client with many long-lived transports that carry numbered blocks both ways; every byte is checked.

Both ends know a stream's data from a seed, so missing, repeated and misplaced bytes are found with their position. A
disturbance is measured at the receiver, from the last data over the old path to the first over the new path.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import LoopingCall, deferLater
from twisted.python.failure import Failure
from zope.interface import implementer

from benchmarks.processes import raise_open_files
from benchmarks.roles.discovery import connect_discovery
from dmsg.address import PublicKey
from dmsg.clients.limits import ListenerLimits
from dmsg.crypto.keys import SecretKey
from dmsg.errors import DialError
from dmsg.eventlog.schema import Event, TransportResumed
from dmsg.interfaces import IEventLog
from dmsg.mux.client.service import DmsgClient
from dmsg.mux.core.e2e_negotiation import Security

USES_TWISTED = True
SERVICE: Final = "soak"
_STREAM_BYTES: Final = 4
_BLOCK_HEAD: Final = 8  # number, size
_END: Final = 0xFFFFFFFF
_DIAL_TIMEOUT_S: Final = 30.0
_DRAIN_POLL_S: Final = 0.05


class Blocks:
    """The blocks one end of a stream sends: ``number u32 ‖ size u32 ‖ data``; the last is ``0xffffffff ‖ count``."""

    def __init__(self, seed: int, stream: int, *, forth: bool, sizes: tuple[int, int]) -> None:
        self.count = 0
        self._random = random.Random(f"{seed}/{stream}/{forth}")
        self._sizes = sizes

    def next(self) -> bytes:
        """One more block."""
        number, size = self.count, self._random.randint(*self._sizes)
        self.count += 1
        return number.to_bytes(4, "big") + size.to_bytes(4, "big") + self._random.randbytes(size)

    def end(self) -> bytes:
        """The mark after the last block."""
        return _END.to_bytes(4, "big") + self.count.to_bytes(4, "big")


class Checker:
    """Compares received with sent data. ``fault`` describes the first error, if any."""

    def __init__(self, blocks: Blocks) -> None:
        self.received_bytes = 0
        self.fault = ""
        self.complete = False
        self._blocks = blocks
        self._expected = b""
        self._buffer = bytearray()

    def take(self, data: bytes) -> None:
        """Check the next bytes."""
        self.received_bytes += len(data)
        self._buffer += data
        while not self.fault and self._buffer:
            if self.complete:
                self.fault = "data behind the end"
                return
            if not self._expected:
                if len(self._buffer) < _BLOCK_HEAD:
                    return
                if self._buffer.startswith(_END.to_bytes(4, "big")):
                    self.complete = bytes(self._buffer[:_BLOCK_HEAD]) == self._blocks.end()
                    if not self.complete:
                        self.fault = f"{self._blocks.count} blocks came, {bytes(self._buffer[4:8]).hex()} were sent"
                    del self._buffer[:_BLOCK_HEAD]
                    continue
                self._expected = self._blocks.next()
            size = min(len(self._expected), len(self._buffer))
            if self._buffer[:size] != self._expected[:size]:
                self.fault = self._describe()
                return
            del self._buffer[:size]
            self._expected = self._expected[size:]

    def _describe(self) -> str:
        number = int.from_bytes(self._buffer[:4], "big")
        wanted = self._blocks.count - 1
        kind = "twice" if number < wanted else "too early" if number > wanted else "altered"
        return f"in block {wanted}, at byte {self.received_bytes - len(self._buffer)}: block {number} {kind}?"


@implementer(IHalfCloseableProtocol)
class Streamer(Protocol):
    """Sends a block every ``interval_s`` (with as much jitter) while allowed, and checks received data."""

    transport: Any

    def __init__(self, role: Role, stream: int | None) -> None:
        self.stream = stream
        self.gaps_ms: list[float] = []
        self.sent_bytes = 0
        self.checker: Checker | None = None
        self.outcome = ""
        self._role = role
        self._blocks: Blocks | None = None
        self._head = b""
        self._paused = False
        self._path: object = None
        self._last_s = 0.0

    def connectionMade(self) -> None:
        """The initiator says which stream this is."""
        self.transport.registerProducer(self, True)
        if self.stream is not None:
            self.transport.write(self.stream.to_bytes(_STREAM_BYTES, "big"))
            self._begin(self.stream, forth=True)
        self._role.streamers.append(self)

    def _begin(self, stream: int, *, forth: bool) -> None:
        self.stream = stream
        seed, sizes = self._role.seed, self._role.sizes_of(stream)
        self._blocks = Blocks(seed, stream, forth=forth, sizes=sizes)
        self.checker = Checker(Blocks(seed, stream, forth=not forth, sizes=sizes))
        self._path = self.transport.stream
        self._last_s = self._role.reactor.seconds()

    def send(self) -> None:
        """Send a block if the peer takes it."""
        if self._blocks is not None and not self._paused and not self.outcome:
            block = self._blocks.next()
            self.sent_bytes += len(block)
            self.transport.write(block)

    def finish(self) -> None:
        """Send the mark after the last block, and the end of the stream."""
        if self._blocks is not None and not self.outcome:
            self.sent_bytes += _BLOCK_HEAD
            self.transport.write(self._blocks.end())
        self.transport.unregisterProducer()
        self.transport.loseWriteConnection()

    def dataReceived(self, data: bytes) -> None:
        """Check."""
        if self.checker is None:
            self._head += data
            if len(self._head) < _STREAM_BYTES:
                return
            self._begin(int.from_bytes(self._head[:_STREAM_BYTES], "big"), forth=False)
            data = self._head[_STREAM_BYTES:]
        assert self.checker is not None
        now = self._role.reactor.seconds()
        if self.transport.stream is not self._path:
            self._path = self.transport.stream
            self.gaps_ms.append((now - self._last_s) * 1000)
        self._last_s = now
        self.checker.take(data)

    def pauseProducing(self) -> None:
        """Wait."""
        self._paused = True

    def resumeProducing(self) -> None:
        """Go on."""
        self._paused = False

    def stopProducing(self) -> None:
        """Stop for good."""
        self._paused = True

    def readConnectionLost(self) -> None:
        """The peer has sent everything."""

    def writeConnectionLost(self) -> None:
        """The peer has taken everything."""

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Note how it ended."""
        self.outcome = "done" if reason.check(ConnectionDone) else f"{type(reason.value).__name__}: {reason.value}"
        self._role.check_over()


@implementer(IEventLog)
class ResumedOnly:
    """An event log that only records the times of transports without a path."""

    def __init__(self, found_ms: list[float]) -> None:
        self._found_ms = found_ms

    def emit(self, event: Event) -> None:
        """Take an event of the client."""
        if isinstance(event, TransportResumed):
            self._found_ms.append(event.elapsed_ms)


class Role:
    """Options: ``discovery`` (a URL), ``min_servers``, ``seed``, ``block_sizes`` (two numbers of bytes), ``interval_s``."""

    def __init__(self, reactor: Any, options: dict[str, Any]) -> None:
        raise_open_files()
        self.reactor = reactor
        self.seed: int = options["seed"]
        self.block_sizes: tuple[int, int] = tuple(options["block_sizes"])
        self.streamers: list[Streamer] = []
        self.resumed_ms: list[float] = []
        self._interval_s: float = options["interval_s"]
        self._turns: deque[Streamer] = deque()
        self._over: Deferred[None] | None = None
        self._pace = LoopingCall(self._send)
        self._pace.clock = reactor
        self.client = self.make_client(options)

    def make_client(self, options: dict[str, Any]) -> DmsgClient:
        """The client everything goes through."""
        return DmsgClient(
            self.reactor,
            SecretKey.generate(),
            discovery=connect_discovery(options["discovery"], self.reactor),
            min_servers=options["min_servers"],
            security=Security.E2E,
            events=ResumedOnly(self.resumed_ms),
        )

    def sizes_of(self, stream: int) -> tuple[int, int]:
        """The smallest and the largest block of a stream."""
        return self.block_sizes

    async def start(self) -> dict[str, Any]:
        """Connect and listen."""
        factory: Any = Factory.forProtocol(lambda: Streamer(self, None))
        factory.noisy = False
        self.client.listen(factory, SERVICE, limits=ListenerLimits(offers=1_000, offers_per_key=1_000))
        self.client.startService()
        await self.client.when_ready()
        self._pace.start(0.01)
        return {"key": str(self.client.public_key)}

    def _send(self) -> None:
        """Let the streams that are due in this turn send, each once before any sends again."""
        share = 0.01 / self._interval_s * len(self.streamers)
        whole = int(share) + (random.random() < share - int(share))
        for _ in range(whole):
            if not self._turns:
                self._turns.extend(self.streamers)
            if self._turns:
                self._turns.popleft().send()

    async def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``open`` (target, count), ``finish``, ``result``: see the methods."""
        if command == "open":
            return await self._open(PublicKey.parse(arguments["target"]), arguments["count"])
        if command == "finish":
            return await self._finish(**arguments)
        if command == "result":
            return self._result()
        raise ValueError(command)

    async def _open(self, target: PublicKey, count: int) -> dict[str, Any]:
        """Open ``count`` streams to the other client."""
        for number in range(count):
            while True:
                try:
                    transport = await self.client.dial(
                        target, SERVICE, security=Security.E2E, timeout_s=_DIAL_TIMEOUT_S
                    )
                    break
                except DialError:  # an entry may not be published yet
                    await deferLater(self.reactor, _DRAIN_POLL_S)
            transport.attach(Streamer(self, number))
        return {}

    async def _finish(self, limit_s: float) -> dict[str, Any]:
        """Write no more, and wait until every stream has ended."""
        if self._pace.running:
            self._pace.stop()
        for streamer in self.streamers:
            if not streamer.outcome:
                streamer.finish()
        self._over = Deferred()
        give_up = self.reactor.callLater(limit_s, self._over.callback, None)
        self.check_over()
        await self._over
        if give_up.active():
            give_up.cancel()
        return {}

    def check_over(self) -> None:
        """Whether that was the last one."""
        if self._over is not None and not self._over.called and all(one.outcome for one in self.streamers):
            self._over.callback(None)

    def _result(self) -> dict[str, Any]:
        streams = {}
        for one in self.streamers:
            checker = one.checker
            streams[str(one.stream)] = {
                "sent_bytes": one.sent_bytes,
                "received_bytes": checker.received_bytes if checker else 0,
                "complete": bool(checker and checker.complete),
                "fault": checker.fault if checker else "nothing came",
                "outcome": one.outcome,
            }
        return {
            "streams": streams,
            "resumed_ms": self.resumed_ms,
            "gaps_ms": [gap for one in self.streamers for gap in one.gaps_ms],
        }
