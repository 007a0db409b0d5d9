"""Relays that only dials lead a client to: how many it stays connected to, and how many it says it is reached through."""

from __future__ import annotations

from random import Random

import pytest_twisted
from twisted.internet.protocol import Factory, Protocol

from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.entry import SECURE_VERSION, ClientPart, Entry
from dmsg.errors import DialError
from dmsg.mux.client.service import DmsgClient
from dmsg.relays.pool import IDLE_LIMIT, PUBLISHED_WITH_LED_TO
from dmsg.testing.conformance import ConformanceProtocol
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork

sync = pytest_twisted.ensureDeferred
MALLORY = SecretKey.generate()


class Net(LocalNetwork):
    """A client with a session of its own choice, and a peer that says that it is on relays it is not on."""

    client_: DmsgClient
    own: PublicKey

    def __init__(self) -> None:
        super().__init__(MemoryNetwork(random=Random(1)), relays=41)
        self._entries = 0

    async def start(self) -> None:
        await super().start()
        self.client_ = await self.client()
        (self.own,) = self.client_.pool.sessions
        self.others = [one.public_key for one in self.pinned if one.public_key != self.own]

    async def lead_to(self, relays: list[PublicKey]) -> None:
        """Let the client dial the peer in vain, whose entry names ``relays``."""
        client = ClientPart(tuple(relays))
        entry = Entry(SECURE_VERSION, self._entries, self.now_ns() + self._entries, MALLORY.public_key, client, None)
        self._entries += 1
        assert self.discovery is not None
        await self.discovery.post_entry(entry.sign(MALLORY))
        try:
            await self.wait(self.client_.dial(MALLORY.public_key))
        except DialError:
            self.reactor.advance(6.0)  # until the entry is asked for again
        else:
            raise AssertionError("no relay is there")

    async def published(self) -> set[PublicKey]:
        assert self.discovery is not None
        self.reactor.advance(10.0)
        return set((await self.discovery.get_entry(self.client_.public_key)).delegated_servers)


@sync
async def test_a_peer_that_is_on_other_relays_each_time_fills_neither_the_client_nor_its_entry() -> None:
    async with Net() as net:
        for at in range(0, 40, 8):
            await net.lead_to(net.others[at : at + 8])
            assert len(await net.published()) == PUBLISHED_WITH_LED_TO
        assert len(net.client_.pool.sessions) == 1 + IDLE_LIMIT
        assert net.own in net.client_.pool.sessions
        assert net.own in await net.published()
        assert len(net.reactor.pipes) <= 41 + 1 + IDLE_LIMIT


@sync
async def test_peers_on_other_relays_each_time_do_not_make_the_client_publish_each_time() -> None:
    async with Net() as net:
        for at in range(0, 16, 8):
            await net.lead_to(net.others[at : at + 8])
        published = await net.published()
        assert net.discovery is not None
        before = await net.discovery.get_entry(net.client_.public_key)
        for at in range(16, 40):
            await net.lead_to(net.others[at : at + 1])
            assert net.others[at] in net.client_.pool.sessions
        assert await net.published() == published
        assert (await net.discovery.get_entry(net.client_.public_key)).sequence == before.sequence
        assert published <= set(net.client_.pool.sessions)


@sync
async def test_what_carries_a_transport_stays_until_that_is_over() -> None:
    async with Net() as net:
        end = ConformanceProtocol()
        peer = await net.client()
        peer.listen(Factory.forProtocol(Protocol))
        others = [one for one in net.others if one not in peer.pool.sessions]
        await net.lead_to(others[:8])  # these are published
        transport = await net.wait(net.client_.dial(peer.public_key))
        transport.attach(end)
        used = transport.getHost().server_public_key
        for at in range(8, 32, 8):
            await net.lead_to(others[at : at + 8])
        assert used in net.client_.pool.sessions
        assert not end.lost
        transport.loseConnection()
        await net.wait(end.when_lost())
        net.reactor.advance(5.0)
        assert (used in net.client_.pool.sessions) is (used == net.own)
        again = await net.wait(net.client_.dial(peer.public_key))
        again.abortConnection()
