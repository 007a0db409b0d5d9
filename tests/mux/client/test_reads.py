"""Connections of clients and relays over TCP: how they are read."""

from __future__ import annotations

import hashlib

import pytest
import pytest_twisted
from twisted.internet.protocol import Factory

from dmsg.glue.sockets import DirectReader
from dmsg.testing.network import LocalNetwork
from dmsg.testing.probes import ConformanceProtocol

MIB = 1 << 20


@pytest.mark.parametrize("security", ["hop", "e2e"])
@pytest_twisted.ensureDeferred
async def test_both_ends_read_past_their_transports_and_many_records_at_a_time(reactor, security):
    async with LocalNetwork(reactor, relays=1) as network:
        alice, bob = await network.client(), await network.client()
        receiver = ConformanceProtocol()
        bob.listen(Factory.forProtocol(lambda: receiver), security=security)
        transport = await alice.dial(bob.public_key, security=security)
        transport.attach(ConformanceProtocol())
        [relay] = network.relays
        shells = [member.owner for member in relay.switch.members.values()]
        shells += [session.shell for client in (alice, bob) for session in client.pool.sessions.values()]
        assert len(shells) == 4
        for shell in shells:
            assert isinstance(vars(shell.transport)["doRead"], DirectReader)
            assert shell.core.takes_views
        for number in range(8):
            data = hashlib.shake_128(b"%d" % number).digest(MIB)
            transport.write(data)
            await receiver.when_received((number + 1) * MIB)
            assert receiver.received[number * MIB :] == data
        transport.loseConnection()
        await receiver.when_lost()
