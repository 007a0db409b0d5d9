"""Bursts of connections through ``dmsg expose`` and ``dmsg forward``, each a process of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.protocols.wire import Echo
from twisted.python.failure import Failure

from dmsg.testing.network import LocalNetwork

pytestmark = pytest.mark.system


class Short(Protocol):
    """Says one thing, and closes when it has come back; ``over`` fires with what came back in all."""

    def __init__(self, saying: bytes) -> None:
        self.received = b""
        self.over: Deferred[bytes] = Deferred()
        self._saying = saying

    def connectionMade(self) -> None:
        self.transport.write(self._saying)  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        self.received += data
        if len(self.received) >= len(self._saying):
            self.transport.loseConnection()  # type: ignore[union-attr]

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.over.callback(self.received)


@pytest_twisted.ensureDeferred
async def test_bursts_of_short_connections(reactor: Any, start: Any, secret_of: Any) -> None:
    """128 and then 512 at once through one pair, with an access list: none fails."""
    async with LocalNetwork(reactor, relays=1, discovery="http") as network:
        factory = Factory.forProtocol(Echo)
        factory.noisy = False
        service = reactor.listenTCP(0, factory, backlog=1024, interface="127.0.0.1")
        environ = {"DMSG_DISCOVERY": network.discovery_url}
        (bob_file, bob), (alice_file, alice) = secret_of("bob"), secret_of("alice")
        target = f"tcp:127.0.0.1:{service.getHost().port}"
        expose = start("dmsg", "expose", target, "--key", str(bob_file), "--allow", str(alice), environ=environ)
        await expose.saw("ready: ")
        listen = "tcp:0:interface=127.0.0.1"
        forward = start("dmsg", "forward", str(bob), listen, "--key", str(alice_file), "--json", environ=environ)
        rest = await forward.saw('{"event"')
        port = int(json.loads('{"event"' + rest)["listening"].rpartition(":")[2])
        for connections in (128, 512):
            spoken = [b"connection %d" % number for number in range(connections)]
            protocols = [Short(saying) for saying in spoken]
            await gatherResults(
                [connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", port), one) for one in protocols]
            )
            heard = await gatherResults([one.over for one in protocols])
            assert heard == spoken, f"{sum(map(bytes.__ne__, heard, spoken))} of {connections} failed\n{forward.output}"
        await service.stopListening()
