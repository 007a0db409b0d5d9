"""Clients on a network in memory with a fake clock, a registry in memory, and a relay that can be told to misbehave."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

import pytest
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure

from dmsg.glue.websocket import WebSocketShell
from dmsg.rmb.client.handlers import Request
from dmsg.rmb.client.service import RmbClient
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.errors import TokenRefused
from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.core.signing import sign_envelope
from dmsg.rmb.core.token import check_token, read_token
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope, parse_envelope
from dmsg.rmb.twins.errors import RegistryError
from dmsg.sansio.websocket import Role, WebSocket, WebSocketConfig
from dmsg.sansio.websocket_handshake import server_answer
from dmsg.testing.memory import MemoryNetwork

#: Unix time of second 0 on the fake clock.
EPOCH_S = 1_800_000_000


def key_of(twin: int, kind: KeyType = KeyType.ED25519) -> TwinKey:
    """The key of a twin in these tests."""
    return TwinKey(hashlib.sha256(b"twin %d" % twin).digest(), kind)


class MemoryRegistry:
    """Twins in a dict. ``away`` makes every question fail; ``silent`` leaves every question open."""

    def __init__(self) -> None:
        self.twins: dict[int, Twin] = {}
        self.away = False
        self.silent = False
        self.slow_update = False
        self.asked: list[int] = []
        self._open: list[Deferred[None]] = []

    def release(self) -> None:
        """Answer all questions, those that are open first."""
        self.silent = False
        waiting, self._open = self._open, []
        for question in waiting:
            question.callback(None)

    def add(self, number: int, *, relays: Sequence[str] = (), with_key: bool = True) -> None:
        key = key_of(number)
        pk = EncryptionKey(key.secret).public_key if with_key else None
        self.twins[number] = Twin(number, key.account, tuple(relays), pk)

    async def get(self, twin: int) -> Twin | None:
        self.asked.append(twin)
        await self._think()
        return self.twins.get(twin)

    async def find(self, account: bytes) -> int | None:
        await self._think()
        return next((number for number, twin in self.twins.items() if twin.account == account), None)

    async def update(self, key: TwinKey, relays: Iterable[str], pk: bytes | None) -> None:
        await self._think()
        if self.slow_update:
            await Deferred()
        number = await self.find(key.account)
        assert number is not None
        self.twins[number] = Twin(number, key.account, tuple(sorted(relays)), pk)

    async def _think(self) -> None:
        if self.away:
            raise RegistryError("unavailable")
        if self.silent:
            question: Deferred[None] = Deferred()
            self._open.append(question)
            await question

    async def close(self) -> None:
        """There is nothing to close."""


class _Door(Protocol):
    """A connection to a fake relay, until the head of its request is there."""

    def __init__(self, relay: FakeRelay) -> None:
        self._relay = relay
        self._head = b""
        self._shell: WebSocketShell | None = None

    def dataReceived(self, data: bytes) -> None:
        if self._shell is not None:
            self._shell.dataReceived(data)
            return
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if end:
            self._enter(head, rest)

    def _enter(self, head: bytes, rest: bytes) -> None:
        relay, transport = self._relay, self.transport
        assert transport is not None
        first, *lines = head.split(b"\r\n")
        token_text = first.split(b" ")[1].decode().partition("?")[2]
        relay.tokens.append(token_text)
        if relay.answer is not None:
            transport.write(relay.answer)
            transport.loseConnection()
            return
        try:
            token = read_token(token_text, relay.now_s())
            check_token(token, relay.registry.twins[token.twin].account, {relay.url.removeprefix("ws://")})
        except TokenRefused as error:
            body = error.text.encode()
            transport.write(b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s" % (error.status, len(body), body))
            transport.loseConnection()
            return
        headers: dict[bytes, list[bytes]] = {}
        for line in lines:
            name, _, value = line.partition(b": ")
            headers.setdefault(name.lower(), []).append(value)
        core = WebSocket(Role.SERVER, WebSocketConfig(), now=relay.clock.seconds(), head=server_answer(headers))
        self._shell = WebSocketShell(core, relay, relay.clock)
        self._shell.makeConnection(transport)
        relay.enter(SessionAddress(token.twin, token.connection), self._shell)
        if rest:
            self._shell.dataReceived(rest)

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        if self._shell is not None:
            self._shell.connectionLost(reason)


class FakeRelay(Factory):
    """Routes envelopes between its sessions, and keeps them for those that are not there.

    ``mangle(message, envelope)`` gives what is delivered in place of a message: nothing, another one, several.
    ``answer`` are bytes that are sent to a request in place of agreeing to it. ``seen`` are all envelopes that came.
    """

    noisy = False

    def __init__(self, network: MemoryNetwork, registry: MemoryRegistry, port: int, epoch_s: float) -> None:
        self.epoch_s = epoch_s
        self.clock = network
        self.registry = registry
        self.url = f"ws://127.0.0.1:{port}"
        self.port = port
        self.answer: bytes | None = None
        self.mangle: Callable[[bytes, Envelope], Iterable[bytes]] = lambda message, envelope: [message]
        self.tokens: list[str] = []
        self.seen: list[Envelope] = []
        self.sessions: dict[SessionAddress, WebSocketShell] = {}
        self.stored: dict[SessionAddress, list[bytes]] = {}
        self._network = network
        self._listener = network.listenTCP(port, self)
        self.is_listening = True

    def now_s(self) -> float:
        return self.epoch_s + self.clock.seconds()

    def buildProtocol(self, addr: object) -> Protocol:  # type: ignore[override]
        return _Door(self)

    def enter(self, session: SessionAddress, shell: WebSocketShell) -> None:
        older = self.sessions.get(session)
        self.sessions[session] = shell
        if older is not None:
            older.close(code=4001, reason="replaced")
        for message in self.stored.pop(session, ()):
            shell.send(message)
        shell.flush_soon()

    def die(self) -> None:
        """As a process that is killed: no listener, all connections reset, nothing kept."""
        self._listener.stopListening()
        self.is_listening = False
        self.stored.clear()
        for pipe in self._network.pipes_to(self.port):
            pipe.b.abortConnection()

    def come_back(self) -> None:
        self._listener = self._network.listenTCP(self.port, self)
        self.is_listening = True

    def drop_connections(self) -> None:
        """All connections are reset; the listener stays."""
        for pipe in self._network.pipes_to(self.port):
            pipe.b.abortConnection()

    def deliver(self, message: bytes, destination: SessionAddress) -> None:
        shell = self.sessions.get(destination)
        if shell is None:
            self.stored.setdefault(destination, []).append(message)
        else:
            shell.send(message)
            shell.flush_soon()

    def tell(self, destination: SessionAddress, uid: str, text: str) -> None:
        """An error of the relay's own."""
        error = Envelope(uid=uid, timestamp=int(self.now_s()), expiration=300)
        error.error.message = text
        destination.write_to(error.destination)
        self.deliver(error.SerializeToString(), destination)

    # --- the owner of its shells

    def handle_events(self, shell: Any, events: Sequence[object]) -> None:
        for event in events:
            if isinstance(event, bytes):
                envelope = parse_envelope(event)
                self.seen.append(envelope)
                for message in self.mangle(event, envelope):
                    self.deliver(message, SessionAddress.of(envelope.destination))

    def after_read(self, shell: Any) -> None:
        shell.flush()

    def flushed(self, shell: Any) -> None:
        """Nothing waits for this."""

    def connection_lost(self, shell: Any, error: object, reason: Failure) -> None:
        for session, one in list(self.sessions.items()):
            if one is shell:
                del self.sessions[session]


class World:
    """What the tests of one client and those around it stand on."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(delay_s=0.01)
        self.registry = MemoryRegistry()
        self.clients: list[RmbClient] = []
        #: Unix time of second 0.
        self.epoch_s: float = EPOCH_S

    def relay(self, port: int = 9000) -> FakeRelay:
        return FakeRelay(self.network, self.registry, port, self.epoch_s)

    def now_s(self) -> float:
        return self.epoch_s + self.network.seconds()

    def make(
        self, twin: int, *relays: FakeRelay, known: bool = True, key: TwinKey | None = None, **options: Any
    ) -> RmbClient:
        """A client that is not started."""
        if known and twin not in self.registry.twins:
            self.registry.add(twin, relays=[relay.url[5:] for relay in relays])
        options.setdefault("random", Random(len(self.clients)).randbytes)
        client = RmbClient(
            self.network,
            key or key_of(twin),
            self.registry,
            [relay.url for relay in relays],
            **{"now_s": self.now_s, **options},
        )
        self.clients.append(client)
        return client

    def client(self, twin: int, *relays: FakeRelay, **options: Any) -> RmbClient:
        """A client that is connected."""
        client = self.make(twin, *relays, **options)
        client.startService()
        self.settle()
        return client

    def settle(self, seconds: float = 1.0) -> None:
        """Let ``seconds`` pass: enough for everything under way to arrive."""
        self.network.advance(seconds)

    def result(self, call: Any, within_s: float = 1.0) -> Any:
        """What a coroutine or Deferred gives within so many seconds; raises what it fails with."""
        outcome: list[Any] = []
        work = ensureDeferred(call) if not isinstance(call, Deferred) else call
        work.addBoth(outcome.append)
        if not outcome:
            self.settle(within_s)
        assert outcome, "no result in time"
        if isinstance(outcome[0], Failure):
            outcome[0].raiseException()
        return outcome[0]

    def stop(self) -> None:
        for client in self.clients:
            if client.running:
                self.result(client.stopService(), 10.0)
        self.settle()


def serve(client: RmbClient) -> list[bytes]:
    """Serve ``echo``; gives the payloads that its handler is given."""
    handled: list[bytes] = []

    @client.service("echo")
    async def echo(request: Request) -> bytes:
        handled.append(request.data)
        return request.data

    return handled


@pytest.fixture
def world() -> Any:
    """A network, a registry, and a way to make relays and clients; all clients are stopped at the end."""
    world = World()
    yield world
    world.stop()
    left = [call for call in world.network.getDelayedCalls() if call.active()]
    assert not left, f"calls left behind: {left}"


@pytest.fixture
def forge() -> Callable[..., bytes]:
    """``forge(source, destination, …)``: an envelope as a hostile peer may make it, signed by ``signer`` or not."""

    def make(
        source: int,
        destination: SessionAddress,
        *,
        uid: str = "forged",
        kind: str = "request",
        plain: bytes | None = b"",
        cipher: bytes | None = None,
        timestamp: int = EPOCH_S,
        expiration: int = 60,
        signer: int | None = None,
        change: Callable[[Envelope], object] = lambda envelope: None,
    ) -> bytes:
        envelope = Envelope(uid=uid, timestamp=timestamp, expiration=expiration)
        SessionAddress(source).write_to(envelope.source)
        destination.write_to(envelope.destination)
        if kind == "request":
            envelope.request.command = "echo"
        else:
            getattr(envelope, kind).SetInParent()
        if cipher is not None:
            envelope.cipher = cipher
        elif plain is not None:
            envelope.plain = plain
        if signer is not None:
            sign_envelope(envelope, key_of(signer))
        change(envelope)
        return envelope.SerializeToString()

    return make
