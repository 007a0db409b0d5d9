"""Applications that close while their producers wait, and have not read what came: neither side waits for the other for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory

from dmsg.glue.stream_transport import TransportLost
from dmsg.glue.transport_state import TransportState
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork
from dmsg.testing.probes import ConformanceProtocol, PushProducer

#: More than fits on the way, whatever the windows.
TOTAL_BYTES = 10_000_000


@asynccontextmanager
async def connected(kind: str, theirs: ConformanceProtocol) -> AsyncIterator[tuple[LocalNetwork, ConformanceProtocol]]:
    """A network, and an end that is connected to ``theirs``."""
    messaging = kind == "messaging"
    memory = MemoryNetwork(delay_s=0.001)
    async with LocalNetwork(memory, relays=not messaging, messaging_relays=messaging, discovery=None) as network:
        if messaging:
            alice, bob = await network.messaging_client(), await network.messaging_client()
        else:
            alice, bob = [await network.client(security=Security(kind)) for _ in range(2)]
        bob.listen(Factory.forProtocol(lambda: theirs))
        ours = ConformanceProtocol()
        (await network.wait(alice.dial(bob.public_key))).attach(ours)
        await network.wait(theirs.when(lambda: theirs.made > 0))
        yield network, ours


def push(network: LocalNetwork, end: Any) -> PushProducer:
    """Let ``end`` write :data:`TOTAL_BYTES`, and be done then."""
    source = PushProducer(end.transport, network.reactor, TOTAL_BYTES)
    source.on_end = end.transport.unregisterProducer
    source.start()
    return source


class Echo(ConformanceProtocol):
    """Reads no more than it can write."""

    def connectionMade(self) -> None:
        super().connectionMade()
        self.transport.registerProducer(self.transport, True)
        self.on_data = self.transport.write


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("kind", ["e2e", "hop", "messaging"])
@pytest_twisted.ensureDeferred
async def test_an_echo_goes_on_behind_a_close_that_waits_for_a_producer(kind: str, reads: bool) -> None:
    theirs = Echo()
    async with connected(kind, theirs) as (network, ours):
        if not reads:
            ours.transport.pauseProducing()
        source = push(network, ours)
        network.reactor.advance(0.1 if reads else 10.0)
        ours.transport.loseConnection()
        assert ours.transport.state is TransportState.FINISHING
        for end in (ours, theirs):
            await network.wait(end.when_lost())
        assert source.written == len(theirs.received) == TOTAL_BYTES
        assert ours.lost[0].check(ConnectionDone)


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("kind", ["e2e", "hop", "messaging"])
@pytest_twisted.ensureDeferred
async def test_both_close_while_their_producers_wait(kind: str, read: bool) -> None:
    theirs = ConformanceProtocol()
    async with connected(kind, theirs) as (network, ours):
        ends = (ours, theirs)
        for end in ends:
            if not read:
                end.transport.pauseProducing()
            push(network, end)
        network.reactor.advance(0 if read else 10.0)
        for end in ends:
            end.transport.loseConnection()
            assert end.transport.state is TransportState.FINISHING
        for end in ends:
            await network.wait(end.when_lost())
        if kind == "e2e":
            assert all(end.lost[0].check(TransportLost) for end in ends), "neither has taken all that was written"
