"""A client of any protocol: here one whose relays admit it with a byte."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure

from dmsg.clients.config import RelayClientConfig
from dmsg.clients.listener import ListeningPort
from dmsg.clients.service import RelayClient
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.entry import Entry, ServerPart
from dmsg.errors import DmsgError
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import MemoryDiscovery

RELAYS = {
    version: (SecretKey.generate(), f"192.0.{at}.1") for at, version in enumerate(("0.0.1", "0.0.1+call", "0.0.1+chat"))
}


class Admitted(Protocol):
    """A session."""

    spent = False

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
def client(network):
    discovery = MemoryDiscovery(lambda: int(network.seconds() * 1e9))
    for version, (key, host) in RELAYS.items():
        entry = Entry(version, 0, 0, key.public_key, server=ServerPart(f"{host}:80", 9)).sign(key)
        ensureDeferred(discovery.post_entry(entry))
    client = Client(
        network,
        SecretKey.generate(),
        RelayClientConfig(),
        discovery=discovery,
        now_ns=lambda: int(network.seconds() * 1e9),
    )
    client.startService()
    network.advance(5.0)
    yield client
    client.stopService()
    network.advance(5.0)


def test_it_connects_to_relays_of_its_own_protocol(client):
    assert list(client.pool.sessions) == [RELAYS["0.0.1+call"][0].public_key]


def test_its_address_names_its_protocol(client):
    address = ListeningPort(client, Factory()).getHost()
    assert str(address) == f"call:{client.public_key}"
    assert IAddress.providedBy(address)
