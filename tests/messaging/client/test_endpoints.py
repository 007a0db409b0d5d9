"""Endpoint strings of the messaging system, with programs that know nothing of it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import pytest_twisted
from twisted.internet import error
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import clientFromString, connectProtocol, serverFromString
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.protocols.basic import LineReceiver
from twisted.protocols.wire import Echo

from dmsg.address import DmsgAddress
from dmsg.crypto.keys import SecretKey
from dmsg.endpoints.stream import ClientEndpoint, DmsgConnectError, ServerEndpoint
from dmsg.errors import ConfigError
from dmsg.messaging.client.endpoint import parse_client, parse_server
from dmsg.testing.network import LocalNetwork

sync = pytest_twisted.ensureDeferred
PEER = SecretKey(bytes(31) + b"\x05").public_key
PIN = f"{SecretKey(bytes(31) + bytes([6])).public_key}@127.0.0.1:9".replace(":", r"\:")


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("DMSG_")]:
        monkeypatch.delenv(name)


class Asker(LineReceiver):
    """Asks one line, and closes when it has the answer."""

    def __init__(self, line: bytes) -> None:
        self.answer: Deferred[bytes] = Deferred()
        self.over: Deferred[Any] = Deferred()
        self._line = line

    def connectionMade(self) -> None:
        self.sendLine(self._line)

    def lineReceived(self, line: bytes) -> None:
        self.answer.callback(line)
        self.transport.loseConnection()

    def connectionLost(self, reason: Any = None) -> None:
        self.over.callback(reason.value.with_traceback(None))


async def ask(endpoint: Any, line: bytes = b"hello") -> bytes:
    asker = await connectProtocol(endpoint, Asker(line))
    answer = await asker.answer
    assert isinstance(await asker.over, error.ConnectionDone)
    return answer


def echo_factory() -> Factory:
    factory = Factory.forProtocol(Echo)
    factory.noisy = False
    return factory


async def all_gone(reactor: Any, network: LocalNetwork) -> None:
    """Wait until no client is connected to the network's relays of the messaging system."""
    while any(relay.stats()["connections"] for relay in network.messaging_relays):
        await deferLater(reactor, 0.005)


@pytest.mark.parametrize("discovery", ["http", None])
@sync
async def test_a_program_over_strings(reactor, key_file, discovery):
    """Both sides are plain Twisted: what is of the messaging system stands in the strings."""
    bob = SecretKey.generate()
    path = key_file(bob, "bob")
    async with LocalNetwork(reactor, relays=0, messaging_relays=2, discovery=discovery) as network:
        arguments = network.messaging_endpoint_arguments
        port = await serverFromString(reactor, f"messaging:key={path}:{arguments}").listen(echo_factory())
        assert port.getHost() == DmsgAddress(bob.public_key, scheme="messaging")
        client = clientFromString(reactor, f"messaging:{bob.public_key}:{arguments}")
        assert await ask(client) == b"hello"
        assert await ask(client, b"x" * 10_000) == b"x" * 10_000
        await port.stopListening()
        await all_gone(reactor, network)


@sync
async def test_a_program_that_is_not_there_and_one_that_may_not_come_in(reactor, key_file):
    alice, bob = SecretKey.generate(), SecretKey.generate()
    async with LocalNetwork(reactor, relays=0, messaging_relays=1, discovery=None) as network:
        arguments = network.messaging_endpoint_arguments
        client = clientFromString(reactor, f"messaging:{bob.public_key}:timeout=5:{arguments}")
        with pytest.raises(DmsgConnectError, match="request rejected"):
            await ask(client)
        server = f"messaging:key={key_file(bob, 'bob')}:allow={alice.public_key}:{arguments}"
        port = await serverFromString(reactor, server).listen(echo_factory())
        with pytest.raises(DmsgConnectError, match="request rejected"):
            await ask(client)
        listed = f"messaging:{bob.public_key}:key={key_file(alice, 'alice')}:{arguments}"
        assert await ask(clientFromString(reactor, listed)) == b"hello"
        await port.stopListening()
        await all_gone(reactor, network)


@sync
async def test_both_ends_say_the_same_dialect(reactor, key_file):
    bob = SecretKey.generate()
    async with LocalNetwork(reactor, relays=0, messaging_relays=1, discovery=None) as network:
        arguments = network.messaging_endpoint_arguments
        server = f"messaging:key={key_file(bob, 'bob')}:dialect=v5:layout=seed:{arguments}"
        port = await serverFromString(reactor, server).listen(echo_factory())
        same = clientFromString(reactor, f"messaging:{bob.public_key}:dialect=v5:{arguments}")
        assert await ask(same) == b"hello"
        with pytest.raises(ConfigError, match="dialect"):
            clientFromString(reactor, f"messaging:{bob.public_key}:dialect=v0:{arguments}")
        key = key_file(SecretKey.generate(), "other")
        other = clientFromString(reactor, f"messaging:{bob.public_key}:dialect=v0:key={key}:{arguments}")
        with pytest.raises(DmsgConnectError) as caught:
            await ask(other)
        assert "another dialect" in str(caught.value.attempts[-1].error)
        await port.stopListening()
        await all_gone(reactor, network)


@sync
async def test_a_relay_of_dmsg_is_not_taken_for_one_of_the_messaging_system(reactor, key_file):
    bob = SecretKey.generate()
    async with LocalNetwork(reactor, relays=1, messaging_relays=0, discovery="http") as network:
        server = f"messaging:key={key_file(bob, 'bob')}:timeout=1:{network.messaging_endpoint_arguments}"
        with pytest.raises(error.CannotListenError):
            await serverFromString(reactor, server).listen(echo_factory())


@sync
async def test_endpoints_over_clients_of_ones_own(reactor):
    async with LocalNetwork(reactor, relays=0, messaging_relays=1, discovery=None) as network:
        alice, bob = await network.messaging_client(), await network.messaging_client()
        port = await ServerEndpoint(bob).listen(echo_factory())
        client = ClientEndpoint(alice, DmsgAddress(bob.public_key, scheme="messaging"))
        assert await ask(client) == b"hello"
        connecting = client.connect(Factory.forProtocol(Protocol))
        connecting.cancel()
        with pytest.raises(error.ConnectingCancelledError):
            await connecting
        await port.stopListening()
        assert bob.running


@pytest.mark.parametrize(
    ("string", "what"),
    [
        ("", "public key"),
        ("00", "public key"),
        (str(PEER), "discovery"),
        (f"{PEER}:service=web:server={PIN}", "service="),
        (f"{PEER}:security=hop:server={PIN}", "security="),
        (f"{PEER}:dialect=v1:server={PIN}", "dialect"),
        (f"{PEER}:layout=no:server={PIN}", "layout"),
    ],
)
def test_strings_that_make_no_sense_say_why(reactor, string, what):
    with pytest.raises(ConfigError, match=what):
        clientFromString(reactor, f"messaging:{string}")


def test_a_server_string_needs_a_key(reactor):
    with pytest.raises(ConfigError, match="key"):
        serverFromString(reactor, f"messaging:server={PIN}")
    with pytest.raises(ConfigError, match="a server listens with messaging:key=FILE"):
        serverFromString(reactor, f"messaging:{PEER}:server={PIN}")


def test_settings_come_from_the_environment(reactor, monkeypatch, key_file):
    monkeypatch.setenv("DMSG_DIALECT", "v5")
    monkeypatch.setenv("DMSG_SERVER", PIN.replace("\\", ""))
    monkeypatch.setenv("DMSG_KEY", str(key_file(SecretKey.generate(), "key")))
    client = parse_client(reactor, str(PEER))
    server = parse_server(reactor)
    for endpoint in (client, server):
        assert endpoint._source.settings.client.config.dialect.name == "v5"
    assert client._source is server._source
