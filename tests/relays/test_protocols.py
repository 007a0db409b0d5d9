"""Relays of two protocols in one discovery: a pool connects those that speak its own."""

from __future__ import annotations

import pytest
import pytest_twisted
from zope.interface import implementer

from dmsg.address import HostPort
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.entry import ClientPart, Entry, ServerPart
from dmsg.discovery.errors import DiscoveryUnavailable, EntryNotFound
from dmsg.errors import DialError, StageError
from dmsg.interfaces import IDiscovery
from dmsg.relays.state import RelayFile
from dmsg.relays.whereabouts import ANOTHER_PROTOCOL_LIMIT, ANOTHER_PROTOCOL_REST_S
from dmsg.testing.memory import MemoryNetwork, Path
from dmsg.testing.network import LocalNetwork
from tests.worlds import ScatteredRelays

OURS, OTHER, PEER = (SecretKey.generate() for _ in range(3))
REASON = "speaks another protocol"


@implementer(IDiscovery)
class Listing:
    """Lists everything it has, whatever is asked for, unless it is ``gone``."""

    def __init__(self):
        self.entries = {}
        self.looked_up = []
        self.gone = False

    def put(self, key, host="", version="0.0.1", sequence=0, relays=None):
        server = ServerPart(f"{host}:80", 5) if host else None
        client = ClientPart(relays) if relays is not None else None
        self.entries[key.public_key] = Entry(version, sequence, sequence, key.public_key, client, server).sign(key)

    async def available_servers(self, protocol="dmsg"):
        return [entry for entry in self.entries.values() if entry.server is not None]

    async def get_entry(self, public_key):
        self.looked_up.append(public_key)
        if self.gone:
            raise DiscoveryUnavailable
        if public_key not in self.entries:
            raise EntryNotFound
        return self.entries[public_key]


@pytest_twisted.ensureDeferred
async def test_the_time_of_a_handshake_begins_once_there_is_a_connection():
    """Connecting takes 9 seconds, as when packets for it were lost. The handshake, two round trips of 1.8 s, takes 3.6."""
    network = LocalNetwork(MemoryNetwork(), relays=1, discovery=None)
    async with network:
        memory, (relay,) = network.reactor, network.pinned
        place = relay.address.host, relay.address.port
        memory.set_path(*place, Path(delay_s=9.0))
        client = network.new_client()
        client.startService()
        memory.advance(8.9)
        memory.set_path(*place, Path(delay_s=0.9))
        for _ in range(40):
            memory.advance(0.1)
        (session,) = client.pool.sessions.values()
        assert session.ready_at - session.started_at == pytest.approx(12.6)
        await client.stopService()


class World(ScatteredRelays):
    """A relay of each protocol. Both would be relays of dmsg if they were connected to."""

    def __init__(self):
        super().__init__(Listing(), delay_s=0.005)
        for key, host, version in ((OURS, "192.0.0.1", "0.0.1"), (OTHER, "192.0.1.1", "0.0.1+messaging")):
            self.start_relay(key, host)
            self.listing.put(key, host, version)

    def refusals(self, client):
        """What a dial through the other relay says; how often it was looked up for that."""
        before, caught = self.listing.looked_up.count(OTHER.public_key), []
        client.pool.get(OTHER.public_key).addErrback(caught.append)
        self.memory.advance(1)
        assert caught[0].check(StageError)
        return caught[0].value.reason, self.listing.looked_up.count(OTHER.public_key) - before

    def connections(self):
        return len(self.memory.pipes)


@pytest_twisted.ensureDeferred
async def test_a_relay_of_another_protocol_is_not_connected_to_though_it_is_listed():
    async with World() as world:
        client = world.start_client(min_servers=2)
        world.memory.advance(120)
        assert set(client.pool.sessions) == {OURS.public_key} and world.connections() == 1


@pytest_twisted.ensureDeferred
async def test_it_is_looked_up_once_in_minutes_and_used_when_its_entry_has_changed():
    async with World() as world:
        client = world.start_client()
        world.memory.advance(5)
        assert world.refusals(client) == (REASON, 1)
        assert world.refusals(client) == (REASON, 0)
        assert client.pool.scores.score(OTHER.public_key, 0.0) == client.pool.scores.score(PEER.public_key, 0.0)
        world.listing.put(OTHER, "192.0.1.1", "0.0.1", 1)
        assert world.refusals(client) == (REASON, 0)
        assert client.pool.rested_at(OTHER.public_key) > world.memory.seconds()
        world.memory.advance(ANOTHER_PROTOCOL_REST_S)
        await world.network.wait(client.pool.get(OTHER.public_key))


@pytest_twisted.ensureDeferred
async def test_a_dial_says_why_and_goes_through_a_relay_of_its_own_protocol():
    async with World() as world:
        client = world.start_client()
        world.memory.advance(5)
        world.listing.put(PEER, relays=(OTHER.public_key,))
        with pytest.raises(DialError) as caught:
            await world.network.wait(client.dial(PEER.public_key))
        assert [(one.stage, one.reason) for one in caught.value.attempts] == [("connect", REASON)]
        assert world.connections() == 1


@pytest.mark.parametrize("gone", [False, True])
@pytest_twisted.ensureDeferred
async def test_a_remembered_relay_is_forgotten_when_it_speaks_something_else(tmp_path, gone):
    """Unless discovery is gone: then its address of last time is tried, as with any other."""
    async with World() as world:
        path = tmp_path / "relays.json"
        memory = RelayFile(path, lambda: world.network.now_ns() / 1e9)
        memory.worked(OTHER.public_key, HostPort("192.0.1.1", 80))
        memory.save()
        world.listing.gone = gone
        client = world.start_client(relay_file=path, min_servers=2)
        world.memory.advance(20)
        assert (OTHER.public_key in client.pool.sessions) is gone
        kept = RelayFile(path, lambda: world.network.now_ns() / 1e9).relays
        assert (OTHER.public_key in {one.public_key for one in kept}) is gone


@pytest_twisted.ensureDeferred
async def test_how_many_are_remembered_is_bounded():
    async with World() as world:
        client = world.start_client(min_servers=0)
        for _ in range(ANOTHER_PROTOCOL_LIMIT + 3):
            key = SecretKey.generate()
            world.listing.put(key, "192.0.3.1", "0.0.1+messaging")
            client.pool.get(key.public_key).addErrback(lambda failure: failure.trap(StageError))
        assert len(client.pool._whereabouts._strangers) == 3
