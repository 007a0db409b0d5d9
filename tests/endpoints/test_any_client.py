"""Endpoints and shared clients know nothing of a client but its interface: here one whose peers are in one dictionary."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from twisted.internet.defer import Deferred, succeed
from twisted.internet.error import CannotListenError, ConnectionDone
from twisted.internet.interfaces import IProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from dmsg.address import DmsgAddress
from dmsg.clients.parts import ClientParts
from dmsg.clients.settings import RelayClientSettings
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.endpoints.sharing import SharedClients, SharedSettings
from dmsg.endpoints.stream import ClientEndpoint, DmsgConnectError, ServerEndpoint
from dmsg.errors import Attempt, DialError

ECHO = DmsgAddress(SecretKey.generate().public_key, "echo", scheme="call")


class Pipe:
    """One end of a transport to a peer in the same process."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.on_over: Callable[[], object] | None = None
        self.other: Pipe
        self.protocol: IProtocol | None = None

    def getPeer(self) -> str:
        return self.peer

    def attach(self, protocol: IProtocol) -> None:
        self.protocol = protocol
        protocol.makeConnection(self)

    def write(self, data: bytes) -> None:
        self.other.protocol.dataReceived(data)

    def loseConnection(self) -> None:
        for end in (self, self.other):
            protocol, end.protocol = end.protocol, None
            if protocol is not None:
                protocol.connectionLost(Failure(ConnectionDone()))
            if end.on_over is not None:
                end.on_over()

    abortConnection = loseConnection


class Listening:
    """A name that is listened for."""

    def __init__(self, names: dict[str, Factory], name: str) -> None:
        self._names = names
        self._name = name

    def stopListening(self) -> Deferred[None]:
        del self._names[self._name]
        return succeed(None)

    def getHost(self) -> str:
        return self._name


class Switchboard:
    """A client; all of them share ``names``."""

    scheme = "call"
    problem = "the exchange is closed"

    def __init__(self, reactor: Clock, names: dict[str, Factory]) -> None:
        self.reactor = reactor
        self.names = names
        self.running = 0
        self.hold: Callable[[], object] | None = None
        self.release: Callable[[], object] | None = None
        self.ready: Deferred[None] = succeed(None)
        #: Whether transports hold it, as they do real clients.
        self.holds = False

    def startService(self) -> None:
        self.running += 1

    def stopService(self) -> Deferred[None]:
        self.running -= 1
        return succeed(None)

    def when_ready(self) -> Deferred[None]:
        return self.ready

    async def dial(self, key: PublicKey, name: str, *, timeout_s: float | None, loud: bool = False) -> Pipe:
        if name not in self.names:
            raise DialError(name, [Attempt("request", "", 0.0, "NO SUCH NAME" if loud else "no such name")])
        here, there = Pipe(name), Pipe("a caller")
        here.other, there.other = there, here
        there.attach(self.names[name].buildProtocol(None))
        if self.holds and self.hold is not None:
            self.hold()
            here.on_over = self.release
        return here

    def listen(self, factory: Factory, name: str, *, policy: object, limits: object) -> Listening:
        self.names[name] = factory
        return Listening(self.names, name)


class Echo(Protocol):
    def dataReceived(self, data: bytes) -> None:
        self.transport.write(data)


class Caller(Protocol):
    received = b""

    def dataReceived(self, data: bytes) -> None:
        self.received += data


@pytest.fixture
def made() -> list[Switchboard]:
    return []


@pytest.fixture
def shared(clock: Clock, made: list[Switchboard]) -> Iterator[SharedClients[RelayClientSettings, Switchboard]]:
    def make(parts: ClientParts[RelayClientSettings], *, publish: bool, min_servers: int | None) -> Switchboard:
        made.append(Switchboard(parts.reactor, {}))
        return made[-1]

    yield SharedClients(clock, make, lambda url, reactor, keys: None)
    clock.advance(0)
    assert not any(client.running for client in made)


def factory_of(kind: type[Protocol]) -> Factory:
    factory = Factory.forProtocol(kind)
    factory.noisy = False
    return factory


def test_a_call_is_answered(clock):
    source = Switchboard(clock, {})
    port = ServerEndpoint(source, "echo").listen(factory_of(Echo)).result
    assert port.getHost() == "echo"
    caller = ClientEndpoint(source, ECHO).connect(factory_of(Caller)).result
    caller.transport.write(b"hello")
    assert caller.received == b"hello"
    port.stopListening()
    outcome = []
    ClientEndpoint(source, ECHO, loud=True).connect(factory_of(Caller)).addErrback(outcome.append)
    assert outcome[0].check(DmsgConnectError)
    assert outcome[0].value.reason == "NO SUCH NAME"


def test_a_client_that_no_peer_can_reach_listens_for_a_limited_time(clock):
    client = Switchboard(clock, {})
    client.ready = Deferred()
    outcome = []
    ServerEndpoint(client, "echo", timeout_s=5.0).listen(factory_of(Echo)).addErrback(outcome.append)
    clock.advance(5.0)
    assert outcome[0].check(CannotListenError)
    assert "took longer than 5 s (the exchange is closed)" in outcome[0].getErrorMessage()
    assert not client.names


def test_endpoints_share_a_client_until_the_last_has_let_go(clock, shared, made):
    source = shared.get(SharedSettings(None, RelayClientSettings()))
    assert shared.get(SharedSettings(None, RelayClientSettings())) is source
    port = ServerEndpoint(source, "echo").listen(factory_of(Echo)).result
    caller = ClientEndpoint(source, ECHO).connect(factory_of(Caller)).result
    caller.transport.write(b"hello")
    assert caller.received == b"hello"
    clock.advance(0)
    assert [client.running for client in made] == [1]
    port.stopListening()
    clock.advance(0)
    assert [client.running for client in made] == [0]
    again = ServerEndpoint(source, "echo").listen(factory_of(Echo)).result
    assert [client.running for client in made] == [0, 1]
    again.stopListening()


def test_a_factory_that_fails_when_it_is_stopped_keeps_no_client(clock, shared, made):
    class Failing(Factory):
        noisy = False
        protocol = Caller

        def stopFactory(self) -> None:
            raise ZeroDivisionError

    source = shared.get(SharedSettings(None, RelayClientSettings()))
    port = ServerEndpoint(source, "echo").listen(factory_of(Echo)).result
    made[0].holds = True
    caller = ClientEndpoint(source, ECHO).connect(Failing()).result
    port.stopListening()
    with pytest.raises(ZeroDivisionError):
        caller.transport.loseConnection()
    clock.advance(0)
    assert [client.running for client in made] == [0]


def test_the_time_of_a_connect_includes_the_end_of_the_client_before(clock, shared, made):
    source = shared.get(SharedSettings(None, RelayClientSettings()))
    port = ServerEndpoint(source, "echo").listen(factory_of(Echo)).result
    stopping: Deferred[None] = Deferred()
    made[0].stopService = lambda: setattr(made[0], "running", 0) or stopping
    port.stopListening()
    clock.advance(0)
    outcome = []
    ClientEndpoint(source, ECHO, timeout_s=2.0).connect(factory_of(Caller)).addErrback(outcome.append)
    clock.advance(1.9)
    assert not outcome
    clock.advance(0.1)
    assert outcome[0].check(DmsgConnectError) and outcome[0].value.reason == "timeout"
    stopping.callback(None)
    clock.advance(0)
    assert [client.running for client in made] == [0]


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
def test_a_time_limit_below_nothing_is_refused(clock, timeout_s):
    client = Switchboard(clock, {})
    with pytest.raises(ValueError, match="0 or more"):
        ClientEndpoint(client, ECHO, timeout_s=timeout_s)
    with pytest.raises(ValueError, match="0 or more"):
        ServerEndpoint(client, "echo", timeout_s=timeout_s)
