"""Clients on real sockets in a network of 10,000 sybil relays in 50 groups and 10 honest ones: all are connected in time."""

from __future__ import annotations

from random import Random

import pytest_twisted
from twisted.internet.defer import gatherResults
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.protocol import Factory, Protocol
from zope.interface import implementer

from dmsg.address import HostPort
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.entry import Entry, ServerPart
from dmsg.interfaces import IDiscovery
from dmsg.mux.relay.service import DmsgRelay
from dmsg.testing.network import LocalNetwork

SYBIL_GROUPS, SYBILS_OF_A_GROUP, HONEST, CLIENTS = 50, 200, 10, 20
LIMIT_S = 10.0


class Tarpit(Protocol):
    """Takes a connection and says nothing."""


@implementer(IDiscovery)
class Listing:
    """Draws one relay of each group, in any order: 50 sybils of 200 each, and the honest relays."""

    def __init__(self, tarpits):
        self.random = Random(1)
        self.tarpits = tarpits
        self.honest = []
        self.sybils = {}

    def entry(self, key, address):
        return Entry("0.0.1", 0, 1, key.public_key, None, ServerPart(str(address), 100)).sign(key)

    def sybil(self, group):
        number = group, self.random.randrange(SYBILS_OF_A_GROUP)
        if number not in self.sybils:
            self.sybils[number] = self.entry(SecretKey.generate(), self.tarpits[group])
        return self.sybils[number]

    async def available_servers(self, protocol="dmsg"):
        listed = [self.sybil(group) for group in range(SYBIL_GROUPS)] + self.honest
        return self.random.sample(listed, len(listed))

    async def get_entry(self, public_key):
        raise AssertionError("what is listed need not be looked up")


@pytest_twisted.ensureDeferred
async def test_twenty_new_clients_are_connected_within_ten_seconds(reactor):
    factory = Factory.forProtocol(Tarpit)
    tarpits = [reactor.listenTCP(0, factory, interface=f"127.1.{group}.1") for group in range(SYBIL_GROUPS)]
    listing = Listing([HostPort(one.getHost().host, one.getHost().port) for one in tarpits])
    network = LocalNetwork(reactor, relays=0, discovery=None)
    try:
        for number in range(HONEST):
            host, key = f"127.2.{number}.1", SecretKey.generate()
            server = DmsgRelay(reactor, key, TCP4ServerEndpoint(reactor, 0, interface=host))
            server.startService()
            network.relays.append(server)
            await server.listening()
            listing.honest.append(listing.entry(key, HostPort(host, server.port.getHost().port)))
        clients = [network.new_client(discovery=listing, publish=False) for _ in range(CLIENTS)]
        for client in clients:
            client.startService()
        await gatherResults([client.when_ready().addTimeout(LIMIT_S, reactor) for client in clients])
        assert all(client.pool.sessions for client in clients)
    finally:
        await network.stop()
        for one in tarpits:
            await one.stopListening()
