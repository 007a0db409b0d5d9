"""Ours and base in every combination: dialler, relay and peer, each with the extension or without.

"Base" is this code without the extension: what it then sends is held against recordings of the reference elsewhere here.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory

from dmsg.mux.client.service import ClientConfig
from dmsg.mux.core.e2e_handshake import UPGRADE_MAGIC
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.wire import ACK, FWD, REQUEST, REQUEST_BYTES
from dmsg.testing.conformance import ConformanceProtocol, pattern
from dmsg.testing.hostile import HostileNetwork
from dmsg.testing.memory import MemoryNetwork

sync = pytest_twisted.ensureDeferred
SIZE = 300 * 1024
BASE: dict[str, Any] = {"security": Security.HOP, "config": ClientConfig(extended=False)}

COMBINATIONS = list(product(["ours", "base"], repeat=3))
every_combination = pytest.mark.parametrize(
    ("dialler", "relay", "peer"), COMBINATIONS, ids=["-".join(one) for one in COMBINATIONS]
)


@pytest.fixture(params=["in memory", pytest.param("over loopback", marks=pytest.mark.system)])
def network(request: pytest.FixtureRequest, reactor: Any) -> HostileNetwork:
    return HostileNetwork(reactor if request.param == "over loopback" else MemoryNetwork(), relays=0)


async def transport(net: HostileNetwork, dialler: str, relay: str, peer: str) -> Any:
    """The two ends of an open transport in one of the combinations, and the relay."""
    server = await net.add_relay(extended=relay == "ours")
    listening = await net.client(**(BASE if peer == "base" else {}))
    dialling = await net.client(**(BASE if dialler == "base" else {}))
    a, b = ConformanceProtocol(), ConformanceProtocol()
    factory: Any = Factory.forProtocol(lambda: b)
    factory.noisy = False
    listening.listen(factory)
    opened = await net.wait(dialling.dial(listening.public_key))
    opened.attach(a)
    await net.wait(b.when(lambda: b.made > 0))
    return a, b, server, dialling, listening


@every_combination
@sync
async def test_data_both_ways_and_a_clean_close(network: HostileNetwork, dialler: str, relay: str, peer: str) -> None:
    async with network as net:
        a, b, server, _, listening = await transport(net, dialler, relay, peer)
        forth, back = pattern(SIZE), pattern(SIZE, 17)
        a.transport.write(forth)
        b.transport.write(back)
        await net.wait(b.when_received(SIZE))
        await net.wait(a.when_received(SIZE))
        assert b.received == forth
        assert a.received == back

        sealed = dialler == peer == "ours"
        assert a.transport.security == b.transport.security == ("e2e" if sealed else "hop")
        carried = b"".join(frame.payload[2:] for frame in server.frames(FWD, listening.public_key))
        assert (carried == forth) is not sealed, "the relay reads what is not sealed, and nothing else"
        (request,) = server.frames(REQUEST)
        assert (len(request.payload) > REQUEST_BYTES) is (sealed and relay == "ours")
        assert carried.startswith(UPGRADE_MAGIC) is (sealed and relay == "base")

        a.transport.loseConnection()
        await net.wait(a.when_lost())
        await net.wait(b.when_lost())
        for end in (a, b):
            (reason,) = end.lost
            assert isinstance(reason.value, ConnectionDone)
            assert end.data_while_not_connected == 0


@every_combination
@sync
async def test_what_the_peer_closes(network: HostileNetwork, dialler: str, relay: str, peer: str) -> None:
    """Everything that was written before the close arrives, also when the peer closes."""
    async with network as net:
        a, b, *_ = await transport(net, dialler, relay, peer)
        b.transport.write(pattern(SIZE))
        b.transport.loseConnection()
        await net.wait(a.when_lost())
        await net.wait(b.when_lost())
        assert a.received == pattern(SIZE)
        assert isinstance(a.lost[0].value, ConnectionDone)
        assert isinstance(b.lost[0].value, ConnectionDone)


@pytest.mark.parametrize("relay", ["ours", "base"])
@pytest.mark.parametrize("dialler", ["ours", "base"])
@sync
async def test_a_base_peer_gets_an_acknowledgement_for_every_frame(dialler: str, relay: str) -> None:
    """Base peers wait for every single ACK: none may be left out or stand for another (:ref:`spec-data`)."""
    async with HostileNetwork(MemoryNetwork(), relays=0) as net:
        a, b, server, dialling, listening = await transport(net, dialler, relay, "base")
        b.transport.write(pattern(SIZE))
        await net.wait(a.when_received(SIZE))
        await net.settle()
        sent = [frame.payload[:2] for frame in server.frames(FWD, dialling.public_key)]
        acknowledged = [frame.payload for frame in server.frames(ACK, listening.public_key)]
        assert acknowledged == sent
        assert len(sent) > 5


@pytest.mark.parametrize("relay", ["ours", "base"])
@sync
async def test_sealed_acknowledgements_stand_for_many(relay: str) -> None:
    """Between two of ours a batch of frames is answered by one ACK."""
    async with HostileNetwork(MemoryNetwork(), relays=0) as net:
        a, b, server, dialling, listening = await transport(net, "ours", relay, "ours")
        a.transport.write(pattern(SIZE))
        await net.wait(b.when_received(SIZE))
        assert len(server.frames(ACK, dialling.public_key)) < len(server.frames(FWD, listening.public_key))


@pytest.mark.parametrize("relay", ["ours", "base"])
@sync
async def test_a_base_peer_that_speaks_and_closes_at_once(relay: str) -> None:
    """ACCEPT, data and CLOSE arrive in one read: the dial has succeeded, and the data is there."""
    async with HostileNetwork(MemoryNetwork(), relays=0) as net:
        server = await net.add_relay(extended=relay == "ours")
        listening = await net.client(**BASE)
        dialling = await net.client()

        class Greeter(ConformanceProtocol):
            def connectionMade(self) -> None:
                self.transport.write(b"hello and goodbye")
                self.transport.loseConnection()

        listening.listen(Factory.forProtocol(Greeter))
        held: list[Any] = []
        server.rule(lambda frame: held.append(frame) or [], to=dialling.public_key, times=None)
        dialled = Deferred.fromCoroutine(dialling.dial(listening.public_key))
        await net.settle()
        server.be_honest()
        assert [frame.kind for frame in held] != []
        # in one write, so that they are read together
        for frame in held:
            server.send(frame)
        for frame in server.frames(FWD, dialling.public_key):
            server.send(type(frame)(dialling.public_key, 3, frame.transport_id, b"\0"))
        opened = await net.wait(dialled)
        end = ConformanceProtocol()
        opened.attach(end)
        await net.wait(end.when_lost())
        assert end.received == b"hello and goodbye"
        assert isinstance(end.lost[0].value, ConnectionDone)
