"""A small world on loopback for tests of weaknesses: a server, and two bystanders who must not notice anything."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.protocol import Factory, ProcessProtocol, Protocol
from twisted.internet.task import deferLater
from zope.interface import implementer

from dmsg.address import HostPort, PinnedServer
from dmsg.crypto.keys import SecretKey
from dmsg.glue.processor import has_aes
from dmsg.interfaces import IEventLog
from dmsg.mux.client.service import ClientConfig, DmsgClient
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.hello import AnnouncedLimits, hello_payload
from dmsg.mux.core.wire import FrameType
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.service import DmsgRelay
from dmsg.relays.pool import PoolConfig
from dmsg.testing.raw import RawConnection, RawRelay, connect_raw

HERE = Path(__file__).parent
#: How long anything that ought to happen may take on a busy machine.
#: What a server answers message 1 with: length, key, tag, and what it announces.
MESSAGE_2_BYTES = 51 + len(hello_payload(AnnouncedLimits(0, 0, 0), 1, aes=has_aes()))
PATIENCE_S = 10.0
#: Pause between two rounds of the bystanders.
PING_PAUSE_S = 0.005
#: Reconnects at once, so that tests need not wait for the pauses production makes.
EAGER = ClientConfig(pool=PoolConfig(backoff_first_s=0.01, backoff_limit_s=0.05, poll_s=0.05))


@implementer(IEventLog)
class Log:
    """An event log in a list, which can be waited on."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._waiters: list[tuple[Any, Deferred[Any]]] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)
        for waiter in list(self._waiters):
            if waiter[0](event):
                self._waiters.remove(waiter)
                waiter[1].callback(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def wait(self, wanted: Any) -> Any:
        """The next event from now on of a class, or for which a function is true."""
        waiter: Deferred[Any] = Deferred()
        self._waiters.append(
            ((lambda event: isinstance(event, wanted)) if isinstance(wanted, type) else wanted, waiter)
        )
        return await waiter


class Echo(Protocol):
    """Sends back what it gets."""

    def dataReceived(self, data: bytes) -> None:
        self.transport.write(data)


class Recorder(Protocol):
    """Keeps what it gets and how it ended."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.reason: Any = None
        self.made: Deferred[Any] = Deferred()
        self.lost: Deferred[Any] = Deferred()
        self._wanted: list[tuple[int, Deferred[None]]] = []

    def connectionMade(self) -> None:
        self.made.callback(self)

    def dataReceived(self, data: bytes) -> None:
        self.received += data
        for one in [one for one in self._wanted if one[0] <= len(self.received)]:
            self._wanted.remove(one)
            one[1].callback(None)

    def connectionLost(self, reason: Any) -> None:
        self.reason = reason.value
        self.lost.callback(reason.value)

    async def got(self, n: int) -> bytes:
        """Everything received, once that is at least ``n`` bytes."""
        if len(self.received) < n:
            waiter: Deferred[None] = Deferred()
            self._wanted.append((n, waiter))
            await waiter
        return bytes(self.received)


class Pinger(Protocol):
    """Sends, waits for the echo, and again: notices when its transport ends, stops, or lies."""

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self.rounds = 0
        self.slowest_s = 0.0
        self.reason: Any = None
        self.wrong = b""
        self._sent_at = 0.0
        self._expected = self._got = b""
        self._next: Any = None
        self._waiters: list[tuple[int, Deferred[None]]] = []

    def connectionMade(self) -> None:
        self._ping()

    def _ping(self) -> None:
        self._expected = b"%d. " % self.rounds + os.urandom(50)
        self._got = b""
        self._sent_at = self._reactor.seconds()
        self.transport.write(self._expected)

    def dataReceived(self, data: bytes) -> None:
        self._got += data
        if not self._expected.startswith(self._got):
            self.wrong = self._got
        if self._got != self._expected:
            return
        self.rounds += 1
        self.slowest_s = max(self.slowest_s, self._reactor.seconds() - self._sent_at)
        self._next = self._reactor.callLater(PING_PAUSE_S, self._ping)
        for one in [one for one in self._waiters if one[0] <= self.rounds]:
            self._waiters.remove(one)
            one[1].callback(None)

    def connectionLost(self, reason: Any) -> None:
        self.reason = reason.value
        if self._next is not None and self._next.active():
            self._next.cancel()
        for _, waiter in self._waiters:
            waiter.errback(reason)

    async def more(self, rounds: int) -> None:
        assert self.reason is None, f"the bystanders' transport ended: {self.reason!r}"
        waiter: Deferred[None] = Deferred()
        self._waiters.append((self.rounds + rounds, waiter))
        await waiter
        assert not self.wrong


class Program(ProcessProtocol):
    """A program of ours in a process of its own; ``lines`` is what it says."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.errors = b""
        self.ended: Deferred[Any] = Deferred()
        self.alive = True
        self._buffer = b""
        self._waiters: list[Deferred[None]] = []

    def outReceived(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self.lines += [line.decode() for line in lines]
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.callback(None)

    def errReceived(self, data: bytes) -> None:
        self.errors += data

    def processEnded(self, reason: Any) -> None:
        self.alive = False
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.errback(reason)
        reason.trap(ProcessDone, ProcessTerminated)
        self.ended.callback(reason.value)

    async def line(self) -> str:
        while not self.lines:
            waiter: Deferred[None] = Deferred()
            self._waiters.append(waiter)
            try:
                await waiter
            except (ProcessDone, ProcessTerminated):
                raise AssertionError(self.errors.decode("utf-8", "replace")) from None
        return self.lines.pop(0)


class World:
    """``async with World(reactor, limits) as world``: at its end the bystanders must still be echoing."""

    Echo, Recorder, EAGER = Echo, Recorder, EAGER

    def __init__(self, reactor: Any, limits: RelayLimits | None = None, *, bystanders: bool = True) -> None:
        self.reactor = reactor
        self.log = Log()
        self.key = SecretKey.generate()
        endpoint = TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1")
        self.message_2_bytes = MESSAGE_2_BYTES
        self.server = DmsgRelay(reactor, self.key, endpoint, limits=limits, events=self.log)
        self.pinned: PinnedServer
        self._with_bystanders = bystanders
        self.pinger: Pinger | None = None
        self._sessions: list[Any] = []
        self._clients: list[DmsgClient] = []
        self._raws: list[RawConnection] = []
        self._raw_servers: list[RawRelay] = []
        self._programs: list[Program] = []

    async def __aenter__(self) -> World:
        self.server.startService()
        port = (await self.server.listening()).getHost().port
        self.pinned = PinnedServer(self.key.public_key, HostPort("127.0.0.1", port))
        if self._with_bystanders:
            self.pinger = await self.bystanders()
        return self

    async def bystanders(self, pinned: PinnedServer | None = None) -> Pinger:
        """Two clients of a server (the world's own by default) who echo until the end."""
        listening = await self.client(pinned)
        dialling = await self.client(pinned)
        listening.listen(Factory.forProtocol(Echo))
        transport = await dialling.dial(listening.public_key)
        pinger = Pinger(self.reactor)
        transport.attach(pinger)
        await self.soon(pinger.more(1))
        self._sessions += [one for client in (listening, dialling) for one in client.pool.sessions.values()]
        return pinger

    async def client(self, *pinned: PinnedServer | None, key: SecretKey | None = None, **options: Any) -> DmsgClient:
        """A client with a session to the world's server, or to each of ``pinned``."""
        ready = options.pop("ready", True)
        options.setdefault("config", EAGER)
        servers = [one for one in pinned if one is not None] or [self.pinned]
        # what the reference got wrong is its base protocol, and most peers here are raw ones
        options.setdefault("security", Security.HOP)
        client = DmsgClient(self.reactor, key or SecretKey.generate(), servers=servers, **options)
        client.startService()
        self._clients.append(client)
        if ready:
            await self.soon(client.when_ready())
            await self.turn()  # not in the middle of what made it ready
        return client

    async def echoer(self, *pinned: PinnedServer | None, **options: Any) -> DmsgClient:
        """A client that echoes on every transport."""
        client = await self.client(*pinned, **options)
        client.listen(Factory.forProtocol(Echo))
        return client

    async def connect(self, client: DmsgClient, target: DmsgClient | RawConnection) -> Recorder:
        """A transport from ``client`` to ``target`` with a recorder on it."""
        key = target.public_key if isinstance(target, DmsgClient) else target.key.public_key
        transport = await self.soon(client.dial(key))
        recorder = Recorder()
        transport.attach(recorder)
        return recorder

    def endpoint(self, pinned: PinnedServer | None = None, source: str | None = None) -> TCP4ClientEndpoint:
        address = (pinned or self.pinned).address
        bind = None if source is None else (source, 0)
        return TCP4ClientEndpoint(self.reactor, address.host, address.port, bindAddress=bind)

    async def raw(
        self,
        key: SecretKey | None = None,
        *,
        source: str | None = None,
        ok: bool = True,
        shake: bool = True,
        **options: Any,
    ) -> RawConnection:
        """A raw client of the server, its OK taken."""
        endpoint = self.endpoint(source=source)
        raw = await self.soon(connect_raw(endpoint, self.key.public_key, key, shake=shake, **options))
        self._raws.append(raw)
        if shake and ok:
            assert (await self.soon(raw.next_frame())).kind == FrameType.OK
        return raw

    async def accepting_raw(self) -> RawConnection:
        """A raw client that accepts every REQUEST and acknowledges nothing."""
        raw = await self.raw()

        def accept(frame: Any) -> bool:
            if frame.kind == FrameType.REQUEST:
                raw.send_frame(FrameType.ACCEPT, frame.transport_id, frame.payload)
            return False

        raw.on_frame = accept
        return raw

    async def raw_server(self, **options: Any) -> tuple[RawRelay, PinnedServer]:
        server = RawRelay(TCP4ServerEndpoint(self.reactor, 0, interface="127.0.0.1"), **options)
        self._raw_servers.append(server)
        return server, await server.listen()

    def program(self, role: str, *arguments: str, limits: dict[str, int] | None = None) -> Program:
        """Start ``programs.py role arguments``."""
        program = Program()
        self._programs.append(program)
        command = [sys.executable, str(HERE / "programs.py"), role, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
        self.reactor.spawnProcess(program, sys.executable, command, environment)
        return program

    async def soon(self, work: Any, within_s: float = PATIENCE_S) -> Any:
        """What ``work`` gives, or a failure when it takes too long."""
        waiting = work if isinstance(work, Deferred) else Deferred.fromCoroutine(work)
        try:
            return await waiting.addTimeout(within_s, self.reactor)
        except TimeoutError:
            raise AssertionError(f"nothing within {within_s:g} s") from None

    async def until(self, true: Any, within_s: float = PATIENCE_S) -> None:
        """Wait for something of which no event tells, such as the number of open descriptors."""
        give_up = self.reactor.seconds() + within_s
        await deferLater(self.reactor, 0)
        while not true():
            assert self.reactor.seconds() < give_up, f"not within {within_s:g} s"
            await deferLater(self.reactor, 0.005)

    async def turn(self) -> None:
        """Let the reactor go round once."""
        await deferLater(self.reactor, 0)

    async def unharmed(self, *pingers: Pinger) -> None:
        """The bystanders echo, on the connections they began with."""
        for pinger in pingers or [self.pinger]:
            if pinger is not None:
                await self.soon(pinger.more(2))
        assert all(session.is_ready for session in self._sessions), "a bystander lost its connection"

    async def __aexit__(self, kind: Any, value: Any, traceback: Any) -> None:
        try:
            if kind is None and self._with_bystanders:
                await self.unharmed()
        finally:
            await self._close()

    async def _close(self) -> None:
        for raw in self._raws:
            if raw.lost_reason is None:
                raw.abort()
                await raw.lost()
        for program in self._programs:
            if program.alive:
                program.transport.signalProcess("KILL")
            await program.ended
        for client in self._clients:
            await client.stopService()
        for server in self._raw_servers:
            await server.stop()
        self.server.switch.drop_transports(0)
        await self.server.stopService()


@pytest.fixture
def world(reactor: Any) -> Any:
    """``async with world(limits) as w``: see :class:`World`."""
    return lambda limits=None, **options: World(reactor, limits, **options)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def descriptors() -> Any:
    """``descriptors()``: how many descriptors this process has open."""
    return open_descriptors


@pytest.fixture
def resident() -> Any:
    """``resident()``: bytes of memory this process has."""
    return resident_bytes
