"""A crowd of sybil relays in discovery's list: clients find the few that serve all the same, within seconds."""

from __future__ import annotations

from random import Random

import pytest
import pytest_twisted
from twisted.internet.defer import ensureDeferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.protocol import Factory, Protocol
from zope.interface import implementer

from dmsg.address import HostPort
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.entry import Entry, ServerPart
from dmsg.eventlog.schema import SessionDown
from dmsg.interfaces import IDiscovery, IEventLog
from dmsg.relays.race import RaceConfig
from dmsg.testing.raw import RawRelay
from tests.worlds import ScatteredRelays

SYBIL_GROUPS, SYBILS_OF_A_GROUP, HONEST, LISTED, CLIENTS = 50, 200, 10, 64, 20
LIMIT_S = 10.0


class Silent(Protocol):
    """Takes a connection and says nothing."""


@implementer(IDiscovery)
class SybilListing:
    """Lists :data:`LISTED` relays, one of each group before a second of any: 10,000 are sybils, of which those that are
    listed listen, too. A third never answers a SYN, a third accepts and is silent, a third finishes the handshake first.
    """

    def __init__(self, memory, random):
        self.memory, self.random = memory, random
        self.entries = {}
        self.groups = [[f"10.0.{group}.{host}" for host in range(SYBILS_OF_A_GROUP)] for group in range(SYBIL_GROUPS)]
        self.sybil_keys = set()

    def add(self, key, address):
        entry = Entry("0.0.1", 0, 1, key.public_key, None, ServerPart(str(address), 100)).sign(key)
        self.entries[address.host] = entry
        if not address.host.startswith("10.0."):
            self.groups.append([address.host])

    async def available_servers(self, protocol="dmsg"):
        heads = [self.random.choice(hosts) for hosts in self.groups]
        more = [self.random.choice(self.groups[0]) for _ in range(LISTED - len(heads))]
        hosts = list(dict.fromkeys([*self.random.sample(heads, len(heads)), *more]))
        return [self.entry_at(host) for host in hosts]

    def entry_at(self, host):
        if host not in self.entries:
            self.listen_as_sybil(host)
        return self.entries[host]

    def listen_as_sybil(self, host):
        key = SecretKey.generate(self.random.randbytes)
        self.sybil_keys.add(key.public_key)
        self.add(key, HostPort(host, 80))
        endpoint = TCP4ServerEndpoint(self.memory, 80, interface=host)
        match self.random.randrange(3):
            case 0:
                self.memory.silence(host, 80)
            case 1:
                endpoint.listen(Factory.forProtocol(Silent))
            case 2:
                ensureDeferred(RawRelay(endpoint, key, say_ok=False).listen())

    async def get_entry(self, public_key):
        return next(entry for entry in self.entries.values() if entry.static == public_key)


class SybilWorld(ScatteredRelays):
    """Honest relays in groups of their own, and sybils in more."""

    def __init__(self, seed):
        super().__init__(None, delay_s=0.1, seed=seed)
        self.listing = SybilListing(self.memory, self.random)
        self.events = Events()
        for number in range(HONEST):
            address, key = HostPort(f"192.0.{number}.1", 80), SecretKey.generate(self.random.randbytes)
            self.start_relay(key, address.host)
            self.listing.add(key, address)

    def clients(self, count):
        """New clients that know nothing, started at once."""
        return [self.start_client(random=Random(number).randbytes, events=self.events) for number in range(count)]


@implementer(IEventLog)
class Events:
    def __init__(self):
        self.all = []

    def emit(self, event):
        self.all.append(event)


def groups_of(client):
    """The network groups of a client's open connections, by what the memory network has."""
    return {client.pool.group_of(server) for server in client.pool.sessions}


@pytest.mark.parametrize("seed", range(3))
@pytest_twisted.ensureDeferred
async def test_ten_thousand_sybils_in_fifty_groups_cut_no_client_off(seed):
    async with SybilWorld(seed) as world:
        clients = world.clients(CLIENTS)
        busiest = 0
        for _ in range(int(LIMIT_S * 10)):
            world.memory.advance(0.1)
            busiest = max(busiest, *(len(client.pool._flights) for client in clients))
        connected = [client for client in clients if client.pool.sessions]
        assert len(connected) == CLIENTS
        assert busiest <= RaceConfig().attempts
        # the second group follows, and then no attempt and no connection is left over
        world.memory.advance(30)
        assert [len(groups_of(client)) for client in clients] == [2] * CLIENTS
        assert [len(client.pool.sessions) for client in clients] == [2] * CLIENTS
        assert not any(client.pool._flights for client in clients)
        assert len(world.memory.pipes) == 2 * CLIENTS
        assert not world.listing.sybil_keys & {server for client in clients for server in client.pool.sessions}


@pytest_twisted.ensureDeferred
async def test_sybils_get_no_more_than_a_bounded_number_of_attempts():
    """With no honest relay at all a client keeps trying, and never has more than a few connections under way."""
    async with SybilWorld(5) as world:
        for server in world.network.relays:
            await world.network.wait(server.stopService())
        world.network.relays.clear()
        (client,) = world.clients(1)
        for _ in range(600):
            world.memory.advance(0.1)
            assert len(client.pool._flights) <= RaceConfig().attempts
            assert len(world.memory.pipes) <= RaceConfig().attempts
        assert not client.pool.sessions
        tried = {event.server for event in world.events.all if isinstance(event, SessionDown)}
        assert len(tried) > 60
