"""A client of any protocol: here one whose relays admit it with a byte."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.address import HostPort, PinnedServer
from dmsg.clients.config import RelayClientConfig
from dmsg.clients.errors import ClientStopped
from dmsg.clients.listener import ListeningPort
from dmsg.clients.service import RelayClient
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.entry import Entry, ServerPart
from dmsg.discovery.errors import DiscoveryUnavailable
from dmsg.errors import ConfigError, DialError, DmsgError
from dmsg.eventlog import schema as ev
from dmsg.interfaces import IRankedDiscovery
from dmsg.relays.rankwatch import LOOK_S
from dmsg.relays.state import RelayFile
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import MemoryDiscovery
from tests.memory_log import MemoryEventLog

RELAYS = {
    version: (SecretKey.generate(), f"192.0.{at}.1") for at, version in enumerate(("0.0.1", "0.0.1+call", "0.0.1+chat"))
}


class Admitted(Protocol):
    """A session."""

    spent = False
    idle = True

    def __init__(self, server: PublicKey, client: Client) -> None:
        self.server = server
        self.shell = self
        self.ready: Deferred[Admitted] = Deferred()
        self.started_at = self.ready_at = client.reactor.seconds()
        self._client = client

    def dataReceived(self, data: bytes) -> None:
        self.ready.callback(self)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._client.session_lost(self, DmsgError("gone"))

    def close(self) -> None:
        self.transport.loseConnection()


@dataclass(eq=False)
class Carried:
    """A transport, and the stream under it."""

    remote: PublicKey
    id = 7
    initiator = True
    received_bytes = sent_bytes = 0
    security = "hop"

    @property
    def stream(self) -> Carried:
        return self

    def loseConnection(self) -> None:
        pass

    abortConnection = loseConnection


@dataclass
class Call:
    """A dial of a key that no entry is of."""

    target: PublicKey
    moves = False
    heeds_promise = False
    ended_by = ()


class Client(RelayClient[Any, Any, Any]):
    scheme = "call"

    def make_session(self, relay: PublicKey) -> Admitted:
        return Admitted(relay, self)


class Admitting(Protocol):
    def connectionMade(self) -> None:
        self.transport.write(b"!")


@pytest.fixture
def network() -> MemoryNetwork:
    network = MemoryNetwork(random=Random(1))
    for _, host in RELAYS.values():
        network.listenTCP(80, Factory.forProtocol(Admitting), interface=host)
    return network


@pytest.fixture
def log() -> MemoryEventLog:
    return MemoryEventLog()


@pytest.fixture
def discovery(network) -> MemoryDiscovery:
    discovery = MemoryDiscovery(lambda: int(network.seconds() * 1e9))
    for version, (key, host) in RELAYS.items():
        entry = Entry(version, 0, 0, key.public_key, server=ServerPart(f"{host}:80", 9)).sign(key)
        ensureDeferred(discovery.post_entry(entry))
    return discovery


@pytest.fixture
def client(network, log, discovery):
    client = Client(
        network,
        SecretKey.generate(),
        config=RelayClientConfig(),
        discovery=discovery,
        events=log,
        now_ns=lambda: int(network.seconds() * 1e9),
    )
    client.startService()
    network.advance(5.0)
    yield client
    client.stopService()
    network.advance(5.0)


def test_it_connects_to_relays_of_its_own_protocol(client):
    assert list(client.pool.sessions) == [RELAYS["0.0.1+call"][0].public_key]


def test_a_client_that_is_started_again_is_found_again(client, network, discovery):
    """Its entry is withdrawn with it, and says again where it is once it is connected."""

    def published() -> list[PublicKey]:
        entry: Any = ensureDeferred(discovery.get_entry(client.public_key))
        return list(entry.result.delegated_servers)

    relays = [RELAYS["0.0.1+call"][0].public_key]
    assert published() == relays
    for _ in range(2):
        stopped = client.stopService()
        network.advance(5.0)
        assert stopped.called and not published() and not client.pool.sessions
        client.startService()
        ready = client.when_ready()
        network.advance(5.0)
        assert ready.called and published() == relays == list(client.pool.sessions)
    network.advance(2 * 86_400.0)
    assert published() == relays, "it is posted again before it expires"


@pytest.mark.parametrize("starts", [1, 2])
def test_a_client_that_is_started_twice_is_one(network, discovery, starts):
    """As one that a program starts, and then gives to a parent that runs: it asks no more than one, and nothing once it stops."""
    asked = []

    @implementer(IRankedDiscovery)
    class Ranked(MemoryDiscovery):
        async def relay_ranks(self) -> None:
            asked.append(network.seconds())

    config, now_ns = RelayClientConfig(), lambda: int(network.seconds() * 1e9)
    client = Client(
        network, SecretKey.generate(), config=config, discovery=Ranked(now_ns, discovery.store), now_ns=now_ns
    )
    for _ in range(starts):
        client.startService()
    network.advance(2.5 * LOOK_S)
    assert len(client.pool.sessions) == 1 and len(asked) == 3
    client.stopService()
    network.advance(2.5 * LOOK_S)
    assert len(asked) == 3 and not network.getDelayedCalls()


def test_who_waits_for_its_entry_is_told_when_it_stops(network, discovery):
    """The relay is connected, discovery is away: the wait ends as any other does, not with an error of discovery's."""
    discovery.failure = DiscoveryUnavailable("down")
    key, host = RELAYS["0.0.1+call"]
    relay = PinnedServer(key.public_key, HostPort(host, 80))
    config = RelayClientConfig()
    client = Client(network, SecretKey.generate(), config=config, discovery=discovery, servers=[relay])
    client.startService()
    network.advance(5.0)
    waiting = client.when_ready()
    assert client.pool.sessions and not waiting.called
    assert client.problem == "the entry cannot be published: down"
    client.stopService()
    network.advance(5.0)
    failure = waiting.result
    waiting.addErrback(lambda _: None)
    assert failure.check(ClientStopped), failure


def test_a_client_that_has_nothing_to_find_relays_by_says_so_at_once(network):
    """It would wait for ever."""
    client = Client(network, SecretKey.generate())
    client.startService()
    failures = []
    client.when_ready().addErrback(failures.append)
    [failure] = failures
    assert failure.check(ConfigError) and failure.value.option == "discovery"
    assert client.problem.startswith("no discovery, no server") and "nothing to connect to" in client.problem
    client.stopService()


def test_a_client_that_is_to_have_more_relays_than_it_is_given_says_so_at_once(network):
    """No others can be found without a discovery."""
    relay, host = RELAYS["0.0.1+call"]
    given = [PinnedServer(relay.public_key, HostPort(host, 80))] * 2
    for asked, problem in ((1, ""), (2, "is 2, and 1 can be had: without a discovery there are no others")):
        client = Client(network, SecretKey.generate(), servers=given, min_servers=asked)
        client.startService()
        outcome = []
        client.when_ready().addBoth(outcome.append)
        network.advance(5.0)
        assert len(outcome) == 1 and client.problem == problem
        if problem:
            assert outcome[0].check(ConfigError) and outcome[0].value.option == "min_servers"
            assert client.pool.sessions  # what can be had, it has
        client.stopService()
        network.advance(5.0)


def test_a_file_of_relays_is_something_to_find_relays_by_only_if_it_names_one(network, tmp_path):
    """A program that keeps such a file has none when it runs for the first time."""
    relay, host = RELAYS["0.0.1+call"]
    for names_one in (False, True):
        if names_one:
            kept = RelayFile(tmp_path / "relays", lambda: 1.7e9)
            kept.worked(relay.public_key, HostPort(host, 80))
            kept.save()
        how = {"relay_file": tmp_path / "relays", "now_ns": lambda: 1_700_000_000 * 10**9}
        client = Client(network, SecretKey.generate(), **how)
        client.startService()
        ready, outcome = client.when_ready(), []
        ready.addBoth(outcome.append)
        network.advance(5.0)
        if names_one:
            assert outcome == [None] and not client.problem
        else:
            assert outcome[0].check(ConfigError) and "nothing to connect to" in client.problem
        client.stopService()
        network.advance(5.0)


@pytest.mark.parametrize("timeout_s", [-0.1, -1e9, float("nan")])
def test_a_dial_that_takes_no_time_at_all_is_refused_and_nothing_is_begun(client, log, network, timeout_s):
    failures = []
    ensureDeferred(client.dial(SecretKey.generate().public_key, timeout_s=timeout_s)).addErrback(failures.append)
    [failure] = failures
    assert failure.check(ValueError) and "timeout_s" in failure.getErrorMessage()
    network.advance(30.0)
    assert not [event for event in log.events if isinstance(event, ev.DialFinished)]


def test_a_dial_says_whether_a_relay_was_not_reached_or_did_not_answer(network):
    """A firewall and a program that is no relay are mended in different places."""
    network.listenTCP(80, Factory.forProtocol(Protocol), interface="192.0.2.7")
    network.silence("192.0.2.8")
    relays = {SecretKey.generate().public_key: host for host in ("192.0.2.7", "192.0.2.8")}
    client = Client(network, SecretKey.generate(), servers=[PinnedServer(*one) for one in _placed(relays)])
    client.startService()
    failures = []
    ensureDeferred(client.dial(SecretKey.generate().public_key, timeout_s=3.0)).addErrback(failures.append)
    network.advance(3.0)
    assert {(relays[PublicKey.parse(one.server)], one.stage, one.reason) for one in failures[0].value.attempts} == {
        ("192.0.2.7", "handshake", "timeout"),
        ("192.0.2.8", "connect", "timeout"),
    }
    client.stopService()
    network.advance(5.0)


def _placed(relays):
    return ((key, HostPort(host, 80)) for key, host in relays.items())


def test_what_is_no_public_key_is_not_looked_up(client):
    for peer in (str(client.public_key), client.public_key.raw, None):
        failures = []
        ensureDeferred(client.dial(peer)).addErrback(failures.append)
        [failure] = failures
        assert failure.check(TypeError) and "a peer is a PublicKey" in failure.getErrorMessage()


def test_its_address_names_its_protocol(client):
    address = ListeningPort(client, Factory()).getHost()
    assert str(address) == f"call:{client.public_key}"
    assert IAddress.providedBy(address)


def test_its_events_name_its_protocol(client, log, network):
    [session] = client.pool.sessions.values()
    transport = Carried(SecretKey.generate().public_key)
    client.transport_opened(session, transport)
    client.transport_closed(session, transport, "normal", local=True)
    dial: Any = ensureDeferred(client.open(Call(SecretKey.generate().public_key), "", None))
    network.advance(0)
    assert dial.result.check(DialError)
    dial.addErrback(lambda _: None)
    session.close()
    network.advance(1.0)
    told = [event for event in log.events if hasattr(event, "protocol")]
    kinds = {ev.SessionUp, ev.SessionDown, ev.TransportOpened, ev.TransportClosed, ev.DialFinished}
    assert {(type(event), event.protocol) for event in told} == {(kind, "call") for kind in kinds}
