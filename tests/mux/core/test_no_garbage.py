"""A connection that ended at a relay is gone at once: nothing of it waits for the garbage collector, which rarely runs there."""

from __future__ import annotations

import gc
import os
from collections import Counter

import pytest
import pytest_twisted
from noise.state import HandshakeState
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.task import deferLater

from dmsg.crypto.keys import SecretKey
from dmsg.eventlog.schema import ConnectionClosed, HandshakeFailed
from dmsg.mux.core.handshake import Handshake, Role
from dmsg.mux.core.wire import REQUEST
from dmsg.mux.relay.member import Member
from dmsg.serving.shell import RelayShell
from dmsg.testing.network import LocalNetwork
from dmsg.testing.raw import connect_raw
from tests.memory_log import MemoryEventLog

STRANGERS = 20
KINDS = (RelayShell, Member, Handshake, HandshakeState)


def held() -> dict[str, int]:
    """How many objects of a relay's connections there are, alive or garbage."""
    types = Counter(map(type, gc.get_objects()))
    return {kind.__name__: sum(n for each, n in types.items() if issubclass(each, kind)) for kind in KINDS}


async def garbage(network, endpoint):
    """As much as one read takes, and no handshake."""
    raw = await network.wait(connect_raw(endpoint, network.pinned[0].public_key, shake=False))
    raw.send_bytes(os.urandom(65_536))
    return raw


async def half_handshake(network, endpoint):
    """Message 1 and its answer, and no more."""
    server = network.pinned[0].public_key
    raw = await network.wait(connect_raw(endpoint, server, shake=False))
    raw.send_bytes(Handshake(Role.CLIENT, SecretKey.generate(), server, now=0.0).data_to_send())
    while not raw.received:
        await deferLater(network.reactor, 0)
    return raw


async def admitted(network, endpoint):
    """Everything in order."""
    return await network.wait(connect_raw(endpoint, network.pinned[0].public_key))


async def false_record(network, endpoint):
    """A record that does not open, as the last thing the relay hears."""
    raw = await admitted(network, endpoint)
    record = bytearray(raw.seal(bytes(40)))
    record[-1] ^= 1
    raw.send_bytes(bytes(record))
    return raw


async def frame_that_ends_it(network, endpoint):
    """A REQUEST in the name of another key."""
    raw = await admitted(network, endpoint)
    raw.send_frame(REQUEST, 0, SecretKey.generate().public_key.raw * 2)
    return raw


@pytest.mark.parametrize("stranger", [garbage, half_handshake, admitted, false_record, frame_that_ends_it])
@pytest_twisted.ensureDeferred
async def test_a_connection_that_ended_leaves_nothing(reactor, stranger):
    log = MemoryEventLog()
    async with LocalNetwork(reactor, relays=1, discovery=None, events=log) as network:
        address = network.pinned[0].address
        endpoint = TCP4ClientEndpoint(reactor, address.host, address.port)
        gc.collect()
        gc.disable()
        try:
            before = held()
            for _ in range(STRANGERS):
                raw = await stranger(network, endpoint)
                raw.close()
                raw = None
            while len(log.of(ConnectionClosed)) + len(log.of(HandshakeFailed)) < STRANGERS:
                await deferLater(reactor, 0.01)
            await network.settle()
            after = held()
        finally:
            gc.enable()
    grown = {name: after[name] - before[name] for name in after if after[name] > before[name] + 2}
    assert not grown
