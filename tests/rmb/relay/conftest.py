"""A relay in a network in memory, with a registry of a few twins, and clients of it that do as they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ClientFactory, Protocol
from zope.interface import implementer

from dmsg.errors import DmsgError
from dmsg.eventlog.schema import Event
from dmsg.glue.shell import Shell
from dmsg.glue.websocket import WebSocketShell, WebSocketUrl, connect_websocket
from dmsg.interfaces import IEventLog
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import RelayProblem
from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.core.limiter import Limit
from dmsg.rmb.core.token import make_token
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope
from dmsg.rmb.interfaces import ITwinRegistry
from dmsg.rmb.relay.api import make_site
from dmsg.rmb.relay.errors import StoreFull, StoreUnavailable
from dmsg.rmb.relay.limits import RelayLimits
from dmsg.rmb.relay.service import RmbRelay
from dmsg.rmb.relay.stores.open import open_queues
from dmsg.rmb.twins.errors import RegistryError
from dmsg.sansio.websocket import WebSocketConfig
from dmsg.sansio.websocket_frames import Closed
from dmsg.testing.memory import MemoryNetwork

#: Unix time when the network's clock says 0.
EPOCH = 1_700_000_000
HOST = "relay.example"


def key_of(twin: int) -> TwinKey:
    return TwinKey(twin.to_bytes(32, "big"), KeyType.ED25519)


def result_of(deferred: Deferred[Any]) -> Any:
    results: list[Any] = []
    deferred.addBoth(results.append)
    [result] = results
    return result


@implementer(ITwinRegistry)
class Registry:
    """Twins by number; ``slow`` is what every answer waits for, ``broken`` makes it fail."""

    def __init__(self) -> None:
        self.twins: dict[int, Twin] = {}
        self.asked: list[int] = []
        self.slow: Deferred[None] | None = None
        self.broken = False

    def add(self, *twins: int, relays: Sequence[str] = (HOST,)) -> None:
        for twin in twins:
            self.twins[twin] = Twin(twin, key_of(twin).account, tuple(relays))

    async def get(self, twin: int) -> Twin | None:
        self.asked.append(twin)
        if self.broken:
            raise RegistryError("unavailable")
        if self.slow is not None:
            waiter: Deferred[None] = Deferred()
            self.slow.addCallback(waiter.callback)
            await waiter
        return self.twins.get(twin)

    async def find(self, account: bytes) -> int | None:
        raise NotImplementedError

    async def update(self, key: Any, relays: Any, pk: Any) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing is open."""


@implementer(IEventLog)
class Events(list[Event]):
    def emit(self, event: Event) -> None:
        self.append(event)

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self if type(event) is kind]


class Client:
    """A twin's program: the owner of a WebSocket to the relay."""

    def __init__(self, world: World, address: SessionAddress) -> None:
        self.world = world
        self.address = address
        self.received: list[bytes] = []
        self.closed: Closed | None = None
        self.lost = False
        self.shell: Any = None

    @property
    def envelopes(self) -> list[Envelope]:
        return [Envelope.FromString(data) for data in self.received]

    def envelope(self, to: object = None, uid: str = "u", **fields: Any) -> Envelope:
        made = Envelope(uid=uid, timestamp=int(self.world.unix_time()), expiration=300)
        self.address.write_to(made.source)
        if isinstance(to, int):
            to = SessionAddress(to)
        if isinstance(to, SessionAddress):
            to.write_to(made.destination)
        made.request.command = "test"
        made.MergeFrom(Envelope(**fields))
        return made

    def send(self, *envelopes: Envelope | bytes) -> None:
        for each in envelopes:
            self.shell.send(each if isinstance(each, bytes) else each.SerializeToString())
        self.shell.flush()
        self.world.turn()

    def leave(self) -> None:
        self.shell.cut()
        self.world.turn()

    # --- as an owner

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        for event in events:
            if isinstance(event, Closed):
                self.closed = event
            else:
                assert isinstance(event, bytes)
                self.received.append(event)

    def after_read(self, shell: Shell) -> None:
        shell.flush()

    def flushed(self, shell: Shell) -> None:
        """Nothing waits for that."""

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: object) -> None:
        self.lost = True


class World:
    """The relay at ``relay:80``; twins 1 to 9 exist and have it as their relay."""

    def __init__(
        self, *, limit: Limit | None = None, demand_audience: bool = False, store: str = "memory:", **limits: Any
    ) -> None:
        self.network = MemoryNetwork(hosts={"relay": "192.0.2.1"})
        self.registry = Registry()
        self.registry.add(*range(1, 10))
        self.events = Events()
        self.store = open_queues(store, _Threads(self.network))
        self.relay = RmbRelay(
            self.network,
            self.registry,
            self.store,
            domains=frozenset({HOST}),
            limits=RelayLimits(**limits),
            limit=limit,
            demand_audience=demand_audience,
            events=self.events,
            unix_time=self.unix_time,
        )
        self.site = make_site(self.relay, self.network, {})
        self.port = self.network.listenTCP(80, self.site)
        self.relay.startService()
        self.clients: list[Client] = []

    def unix_time(self) -> float:
        return EPOCH + self.network.seconds()

    def turn(self) -> None:
        """Let everything that has nothing to wait for happen."""
        for _ in range(4):
            self.network.advance(0)

    def settle(self) -> None:
        """Let megabytes that wait come through, 64 KiB a turn."""
        for _ in range(200):
            self.network.advance(0)

    def token(self, address: SessionAddress, **options: Any) -> str:
        return make_token(key_of(address.twin), *address, int(self.unix_time()), **options)

    def dial(self, query: str, *, host: str = "198.51.100.7", **options: Any) -> Any:
        """A client's shell, or why there is none."""
        client = Client(self, SessionAddress(0))
        opening = connect_websocket(
            _From(self.network, host),  # type: ignore[arg-type]
            WebSocketUrl.parse(f"ws://relay/{query}"),
            client,
            WebSocketConfig(),
            **options,
        )
        self.turn()
        found = result_of(opening)
        if isinstance(found, WebSocketShell):
            client.shell = found
            self.clients.append(client)
            return client
        return found.value

    def connect(self, twin: int, connection: str | None = None, *, host: str = "198.51.100.7") -> Client:
        """The program of a session."""
        address = SessionAddress(twin, connection)
        client = self.dial(f"?{self.token(address)}", host=host)
        assert isinstance(client, Client), client
        client.address = address
        return client

    def http(self, method: str, path: str, body: bytes = b"", headers: str = "", host: str = "203.0.113.9") -> bytes:
        """The answer to a request."""
        return self.raw(
            f"{method} {path} HTTP/1.1\r\nHost: relay\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n{headers}\r\n".encode()
            + body,
            host=host,
        )

    def raw(self, data: bytes, host: str = "203.0.113.9") -> bytes:
        """What comes back for ``data`` on a connection of its own."""
        answer: list[bytes] = []

        class Raw(Protocol):
            def connectionMade(self) -> None:
                self.transport.write(data)

            def dataReceived(self, data: bytes) -> None:
                answer.append(data)

        _From(self.network, host).connectTCP("192.0.2.1", 80, ClientFactory.forProtocol(Raw))
        self.turn()
        return b"".join(answer)

    def stop(self) -> None:
        """End the relay; nothing may be left of it."""
        stopping = self.relay.stopService()
        self.port.stopListening()
        self.network.advance(100)
        assert result_of(stopping) is None
        result_of(self.store.close())
        self.network.advance(0)


class _Threads:
    """The network as a reactor whose threads take 10 ms for whatever they do."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network

    def getThreadPool(self) -> _Threads:
        return self

    def callInThread(self, work: Callable[..., object], *arguments: object) -> None:
        self._network.callLater(0.01, work, *arguments)

    @staticmethod
    def callFromThread(call: Callable[..., object], *arguments: object) -> None:
        call(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


class _From:
    """The network as a program at ``host`` sees it."""

    def __init__(self, network: MemoryNetwork, host: str) -> None:
        self._network = network
        self._host = host

    def connectTCP(self, host: str, port: int, factory: Any, timeout: float = 30, bindAddress: Any = None) -> Any:
        return self._network.connectTCP(host, port, factory, timeout, (self._host, 0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


@pytest.fixture
def make_world() -> Any:
    worlds: list[World] = []

    def make(**options: Any) -> World:
        worlds.append(World(**options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.stop()
        assert not world.network.getDelayedCalls()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


def uids(client: Client) -> list[str]:
    return [envelope.uid for envelope in client.envelopes]


def send_in_one_read(client: Client, uids: Iterable[str]) -> None:
    """Send an envelope to twin 5 for each of ``uids``; the relay reads them together."""
    for uid in uids:
        client.shell.send(client.envelope(5, uid).SerializeToString())
    client.shell.flush()


def stored(world: World, twin: int, connection: str | None = None) -> list[str]:
    found = result_of(world.store.read(SessionAddress(twin, connection), None, 10_000, 1 << 26, world.unix_time()))
    return [Envelope.FromString(one.data).uid for one in found]


class Federation:
    """Writes down what it is given."""

    def __init__(self) -> None:
        self.submitted: list[tuple[int, tuple[str, ...]]] = []
        self.asked: list[Callable[[bool], None]] = []
        self.moved_here: list[Callable[[bool], None]] = []
        self.problem: RelayProblem | None = None
        self.knows_others = True

    def submit(
        self, envelope: Envelope, data: bytes, twin: Any, expires_at: float, moved_here: Callable[[bool], None]
    ) -> RelayProblem | None:
        self.submitted.append((twin.id, twin.relays))
        self.moved_here.append(moved_here)
        return self.problem

    def elsewhere(
        self, envelope: Envelope, data: bytes, twin: Any, expires_at: float, otherwise: Callable[[bool], None]
    ) -> bool:
        if self.knows_others:
            self.asked.append(otherwise)
        return self.knows_others


@pytest.fixture
def federation(world: World) -> Federation:
    world.relay.delivery.federation = made = Federation()
    return made


def errors(client: Client) -> list[tuple[str, int, str]]:
    return [(one.uid, one.error.code, one.error.message) for one in client.envelopes]


def accept(world: World, envelope: Envelope, connected_only: bool = False) -> int:
    outcome = world.relay.delivery.accept(envelope, envelope.SerializeToString(), connected_only)
    world.relay.flush()
    world.turn()
    return outcome if isinstance(outcome, int) else int(result_of(outcome))


class SlowStore:
    """A store whose pushes take 10 ms; ``most`` is how many there were at a time. While it is ``away`` they take 1 s."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.away = self.full = False
        self.most = self.asked = 0
        self.under_way: list[tuple[Deferred[bool], Any]] = []
        self._world = world
        self._push = world.store.push
        monkeypatch.setattr(world.store, "push", self.push)

    def push(self, *arguments: Any) -> Deferred[bool]:
        if not self.under_way:
            self._world.network.callLater(1.0 if self.away else 0.01, self._pushed)
        done: Deferred[bool] = Deferred()
        self.asked += 1
        self.under_way.append((done, arguments))
        self.most = max(self.most, len(self.under_way))
        return done

    def _pushed(self) -> None:
        pushed, self.under_way = self.under_way, []
        for done, arguments in pushed:
            if self.away:
                done.errback(StoreUnavailable("gone"))
            elif self.full:
                done.errback(StoreFull("queue"))
            else:
                self._push(*arguments).chainDeferred(done)
