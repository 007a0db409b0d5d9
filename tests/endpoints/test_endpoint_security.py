"""``security=`` in endpoint strings."""

from __future__ import annotations

import os

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import clientFromString, connectProtocol, serverFromString
from twisted.internet.protocol import Factory, Protocol

from dmsg.crypto.keys import SecretKey
from dmsg.endpoints.stream import DmsgConnectError
from dmsg.errors import ConfigError
from dmsg.mux.client.endpoint import parse_client, parse_server
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.errors import DowngradeRefused
from dmsg.testing.network import LocalNetwork

PEER = str(SecretKey.generate().public_key)
PIN = f"{SecretKey.generate().public_key}@127.0.0.1:9"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("DMSG_")]:
        monkeypatch.delenv(name)


class Told(Protocol):
    """``lost`` fires with the reason of the end."""

    def __init__(self):
        self.lost = Deferred()

    def connectionLost(self, reason):
        self.lost.callback(reason.value)


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [
        ({}, None, None),
        ({"security": "e2e"}, None, Security.E2E),
        ({}, "hop", Security.HOP),
        ({"security": "prefer"}, "hop", Security.PREFER),
    ],
)
def test_a_string_says_what_security_is_wanted_or_the_environment_does(
    reactor, key_file, monkeypatch, arguments, variable, expected
):
    if variable is not None:
        monkeypatch.setenv("DMSG_SECURITY", variable)
    key = str(key_file(SecretKey.generate()))
    assert parse_client(reactor, PEER, server=PIN, **arguments).security is expected
    assert parse_server(reactor, key=key, server=PIN, **arguments).security is expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"security": ""}, "security: must be one of e2e, prefer, hop, not ''"),
        ({"security": "E2E"}, "security: must be one of"),
        ({"security": "hop", "service": "web"}, "service: needs end-to-end security"),
    ],
)
def test_what_cannot_be_is_told(reactor, arguments, message):
    with pytest.raises(ConfigError, match=message):
        parse_client(reactor, PEER, server=PIN, **arguments)


def test_a_bad_variable_is_told_with_its_place(reactor, monkeypatch):
    monkeypatch.setenv("DMSG_SECURITY", "none")
    with pytest.raises(ConfigError, match="in variable DMSG_SECURITY"):
        parse_client(reactor, PEER, server=PIN)


@pytest.mark.parametrize(("asked", "got"), [("prefer", "hop"), ("hop", "hop"), ("e2e", None)])
@pytest_twisted.ensureDeferred
async def test_it_holds_for_the_transport(reactor, asked, got):
    async with LocalNetwork(reactor, relays=1, discovery="http") as network:
        base = await network.client(security=Security.HOP)
        base.listen(Factory.forProtocol(Protocol))
        endpoint = clientFromString(reactor, f"dmsg:{base.public_key}:{network.endpoint_arguments}:security={asked}")
        if got is None:
            with pytest.raises(DmsgConnectError) as caught:
                await connectProtocol(endpoint, Protocol())
            assert isinstance(caught.value.attempts[-1].error, DowngradeRefused)
            return
        connected = await connectProtocol(endpoint, Told())
        assert connected.transport.security == got
        connected.transport.loseConnection()
        await connected.lost


@pytest_twisted.ensureDeferred
async def test_it_holds_for_the_listener(reactor, key_file):
    async with LocalNetwork(reactor, relays=1, discovery="http") as network:
        key = SecretKey.generate()
        text = f"dmsg:key={key_file(key)}:{network.endpoint_arguments}:security=e2e"
        port = await serverFromString(reactor, text).listen(Factory.forProtocol(Protocol))
        client = await network.client(security=Security.HOP)
        transport = await client.dial(key.public_key)
        told = Told()
        transport.attach(told)
        transport.write(b"in the clear")
        assert isinstance((await told.lost).cause, DowngradeRefused)
        await port.stopListening()
