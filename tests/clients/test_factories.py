"""Factories that are none of Twisted's ``Factory``, but an ``IProtocolFactory``, as ``reactor.listenTCP`` takes them."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted
from twisted.internet.interfaces import IAddress, IProtocolFactory
from twisted.internet.protocol import Protocol
from zope.interface import implementer

from dmsg.clients.service import RelayClient
from dmsg.messaging.client.service import MessagingClient
from dmsg.mux.client.service import DmsgClient
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork


@implementer(IProtocolFactory)
class OwnFactory:
    """Counts its starts and stops."""

    def __init__(self) -> None:
        self.starts = self.stops = 0
        self.made: list[Protocol] = []

    def doStart(self) -> None:
        self.starts += 1

    def doStop(self) -> None:
        self.stops += 1

    def buildProtocol(self, addr: IAddress) -> Protocol:
        self.made.append(Protocol())
        return self.made[-1]


@pytest.mark.parametrize("kind", [RelayClient, DmsgClient, MessagingClient])
def test_such_a_factory_has_the_type_that_clients_listen_with(kind: type[Any]) -> None:
    assert kind.listen.__annotations__["factory"] == "IProtocolFactory | Factory"


@pytest.mark.parametrize("kind", ["client", "messaging_client"])
@pytest_twisted.ensureDeferred
async def test_a_client_listens_and_connects_with_it(kind: str) -> None:
    async with LocalNetwork(MemoryNetwork(), relays=1, messaging_relays=1) as network:
        bob, alice = [await getattr(network, kind)() for _ in "ab"]
        there, here = OwnFactory(), OwnFactory()
        port = bob.listen(there)
        protocol = await network.wait(alice.connect(here, bob.public_key))
        await network.settle()
        assert protocol is here.made[0] and len(there.made) == 1
        await port.stopListening()
        assert (there.starts, there.stops) == (1, 1)
