"""Ports that are taken before what serves them is known."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.error import CannotListenError

from dmsg.glue.listening import TakenPort
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.probes import ConformanceProtocol, OneProtocolFactory

HOST, PORT = "127.0.0.1", 80


class Counting(OneProtocolFactory):
    """Notes when it is started and stopped."""

    def __init__(self, protocol: ConformanceProtocol) -> None:
        super().__init__(protocol)
        self.told: list[str] = []

    def startFactory(self) -> None:
        self.told.append("started")

    def stopFactory(self) -> None:
        self.told.append("stopped")


def connect(network: MemoryNetwork) -> ConformanceProtocol:
    client = ConformanceProtocol()
    TCP4ClientEndpoint(network, HOST, PORT).connect(OneProtocolFactory(client))
    network.advance(0)
    return client


@pytest_twisted.ensureDeferred
async def test_a_taken_port_refuses_connections_until_it_is_served() -> None:
    network: Any = MemoryNetwork()
    taken = await TakenPort.take(TCP4ServerEndpoint(network, PORT, interface=HOST))
    assert connect(network).lost
    server = ConformanceProtocol()
    factory = Counting(server)
    assert await taken.listen(factory) is taken.port
    client = connect(network)
    client.transport.write(b"hello")  # type: ignore[union-attr]
    network.advance(0)
    assert (server.received, client.lost) == (b"hello", [])
    await taken.port.stopListening()
    assert factory.told == ["started", "stopped"]


@pytest_twisted.ensureDeferred
async def test_a_port_in_use_cannot_be_taken() -> None:
    endpoint = TCP4ServerEndpoint(MemoryNetwork(), PORT, interface=HOST)
    await TakenPort.take(endpoint)
    with pytest.raises(CannotListenError):
        await TakenPort.take(endpoint)
