"""A relay is killed while discovery stands still: what a forwarder has accepted goes on when discovery does."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory
from zope.interface import implementer

from dmsg.cli.redial import MOVE_S, Redialer
from dmsg.clients.dial import DialConfig
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import Entry
from dmsg.interfaces import IDiscovery
from dmsg.mux.client.service import DmsgClient
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LOOPBACK, LocalNetwork, MemoryDiscovery
from dmsg.testing.probes import ConformanceProtocol

sync = pytest_twisted.ensureDeferred


@implementer(IDiscovery)
class HaltingDiscovery(MemoryDiscovery):
    """While it stands still, what it is asked waits; then it is answered in the order in which it came."""

    _waiting: list[Deferred[None]] | None = None

    def halt(self) -> None:
        self._waiting = []

    def go_on(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        for one in waiting:
            one.callback(None)

    async def get_entry(self, public_key: PublicKey) -> Entry:
        await self._turn()
        return await super().get_entry(public_key)

    async def post_entry(self, entry: Entry) -> None:
        await self._turn()
        await super().post_entry(entry)

    async def available_servers(self, *arguments: Any) -> list[Entry]:
        await self._turn()
        return await super().available_servers(*arguments)

    async def _turn(self) -> None:
        if self._waiting is not None:
            self._waiting.append(Deferred())
            await self._waiting[-1]


class World(LocalNetwork):
    """Two relays, Bob with a session to one of them at a time, and Alice, who dials him as ``dmsg forward`` does."""

    discovery: HaltingDiscovery
    #: Whether connections end at once.
    closes = True

    def __init__(self, *, alices_relays: int = 0) -> None:
        random = Random(1)
        self._alices_relays = alices_relays
        self.memory = MemoryNetwork(delay_s=0.01, random=random)
        super().__init__(self.memory, relays=0, random=random.randbytes)
        self.outcomes: list[Any] = []

    async def start(self) -> None:
        await super().start()
        self.discovery = HaltingDiscovery(self.now_ns)
        for _ in range(2):
            await self.add_relay()
        self.bob: DmsgClient = await self.client(min_servers=1)
        self.bob.listen(Factory.forProtocol(ConformanceProtocol))
        self.alice = self.new_client(min_servers=self._alices_relays, publish=False)
        self.alice.startService()
        self.redialer = Redialer(
            self.alice,
            self.bob.public_key,
            "",
            timeout_s=DialConfig().timeout_s,
            clock=self.memory,
            random=self._random,
        )

    def begin(self) -> None:
        """A connection comes in, and is dialled for."""
        dialling = Deferred.fromCoroutine(self.redialer.dial())
        dialling.addCallbacks(self.opened, lambda failure: self.outcomes.append(failure.value))

    def opened(self, transport: Any) -> None:
        self.outcomes.append(transport.getHost().server_public_key)
        transport.attach(ConformanceProtocol())
        if self.closes:
            transport.loseConnection()

    def kill_bobs_relay(self) -> PublicKey:
        """Its connections are reset, and it takes no others."""
        [relay] = self.bob.pool.sessions
        port = next(one.address.port for one in self.pinned if one.public_key == relay)
        self.memory.refuse(LOOPBACK, port)
        for pipe in self.memory.pipes_to(port):
            pipe.cut()
        return relay


@pytest.mark.parametrize("in_flight", [0, 1])
@sync
async def test_all_that_came_meanwhile_is_carried_when_discovery_goes_on(in_flight: int) -> None:
    """Discovery first gives the old entry to those who have asked for long, and only then reads that Bob is elsewhere."""
    async with World() as world:
        world.begin()
        world.memory.advance(10)
        for _ in range(in_flight):
            world.begin()
        world.memory.advance(0.001)
        world.discovery.halt()
        dead = world.kill_bobs_relay()
        for _ in range(10):
            world.begin()
            world.memory.advance(0.1 * MOVE_S + 0.2)
        assert len(world.outcomes) == 1
        world.discovery.go_on()
        world.memory.advance(3)
        assert len(world.outcomes) == 11 + in_flight
        assert not [one for one in world.outcomes if isinstance(one, Exception)]
        assert dead not in world.outcomes[1:]
        world.memory.advance(1)


@sync
async def test_a_peer_whose_entry_names_no_relay_for_a_moment_is_looked_for() -> None:
    """Connecting to another relay takes it longer than it waits for more changes before it publishes."""
    async with World() as world:
        world.begin()
        world.memory.advance(10)
        [other] = [one for one in world.pinned if one.public_key not in world.bob.pool.sessions]
        world.memory.refuse(LOOPBACK, other.address.port)
        dead = world.kill_bobs_relay()
        world.memory.advance(1.0)
        assert not world.bob.pool.sessions
        world.begin()
        world.memory.advance(0.2)
        assert len(world.outcomes) == 1
        world.memory.heal(LOOPBACK, other.address.port)
        await world.wait(world.bob.when_ready())
        world.memory.advance(2)
        assert world.outcomes[1:] == [other.public_key] != [dead]


@sync
async def test_where_a_transport_has_found_its_peer_new_ones_find_it_too() -> None:
    """Discovery stays away. The transport that was open goes on over a relay that both are connected to."""
    async with World(alices_relays=1) as world:
        world.closes = False
        world.begin()
        world.memory.advance(10)
        world.discovery.halt()
        dead = world.kill_bobs_relay()
        [transport] = world.alice.transports
        world.closes = True
        world.begin()  # before the transport has found its peer
        world.memory.advance(5)
        other = transport.getHost().server_public_key
        assert not transport.detached and other != dead
        assert world.outcomes[1:] == [other]
        world.begin()
        world.memory.advance(DialConfig().look_up_s + 0.2)
        assert world.outcomes[1:] == [other, other]
        world.discovery.go_on()
        transport.abortConnection()
        world.memory.advance(1)
