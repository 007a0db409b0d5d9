"""A transport that has ended is gone at once: nothing of a dial waits for the garbage collector."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import pytest_twisted
from twisted.internet.protocol import Factory, Protocol

from dmsg.glue.deadlines import Deadlines
from dmsg.mux.client.dial import DialRequest
from dmsg.mux.client.transport import DmsgTransport
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.stream import Stream
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork

KINDS = (Deadlines, DialRequest, DmsgTransport, Protocol, Stream)


def held() -> dict[str, int]:
    """How many objects of a client's transports there are, alive or garbage."""
    types = Counter(map(type, gc.get_objects()))
    return {kind.__name__: sum(n for each, n in types.items() if issubclass(each, kind)) for kind in KINDS}


@pytest.mark.parametrize("security", [Security.HOP, Security.E2E])
@pytest.mark.parametrize("close", ["loseConnection", "abortConnection"])
@pytest_twisted.ensureDeferred
async def test_a_transport_that_ended_leaves_nothing(security: Security, close: str) -> None:
    async with LocalNetwork(MemoryNetwork(), relays=1) as network:
        bob = await network.client(security=security)
        bob.listen(Factory.forProtocol(Protocol))
        alice = await network.client(security=security)

        async def dial() -> None:
            transport = await network.wait(alice.dial(bob.public_key))
            transport.set_deadline(transport._clock.seconds() + 100.0)
            transport.attach(Protocol())
            transport.write(b"something")
            getattr(transport, close)()

        await dial()
        await network.settle()
        gc.collect()
        gc.disable()
        try:
            before = held()
            for _ in range(10):
                await dial()
            await network.settle()
            after = held()
        finally:
            gc.enable()
    assert after == before
