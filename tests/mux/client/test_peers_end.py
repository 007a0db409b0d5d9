"""The peer's end of a stream is told when the application listens, whenever it came."""

from __future__ import annotations

import pytest
import pytest_twisted
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol
from zope.interface import implementer

from dmsg.mux.core.e2e_negotiation import Security
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork


class Whole(Protocol):
    """Remembers what it is told."""

    def __init__(self):
        self.told = []

    def dataReceived(self, data):
        self.told.append(data)

    def connectionLost(self, reason):
        self.told.append(reason.type)


@implementer(IHalfCloseableProtocol)
class Half(Whole):
    """The same, and each direction may end alone."""

    def readConnectionLost(self):
        self.told.append("end")

    def writeConnectionLost(self):
        self.told.append("taken")


@pytest.mark.parametrize("data", [b"", b"data"])
@pytest.mark.parametrize("kind", [Half, Whole])
@pytest.mark.parametrize("when", ["paused", "before attach"])
@pytest_twisted.ensureDeferred
async def test_an_end_that_comes_while_the_application_does_not_read_is_told_afterwards(kind, when, data):
    async with LocalNetwork(MemoryNetwork(), relays=1, discovery=None) as network:
        peer, here = Half(), kind()
        answering = await network.client(security=Security.E2E)
        answering.listen(Factory.forProtocol(lambda: peer))
        dialling = await network.client(security=Security.E2E)
        transport = await network.wait(dialling.dial(answering.public_key))
        network.reactor.advance(0)
        if when == "paused":
            transport.attach(here)
            transport.pauseProducing()
        peer.transport.write(data)
        peer.transport.loseWriteConnection()
        network.reactor.advance(1)
        assert here.told == [] and peer.told == ["taken"]
        if when == "paused":
            transport.resumeProducing()
        else:
            transport.attach(here)
        network.reactor.advance(1)
        expected = ["end"] if kind is Half else [ConnectionDone]
        assert here.told == ([data] if data else []) + expected
        peer.transport.loseConnection()
        transport.loseConnection()
        network.reactor.advance(1)
