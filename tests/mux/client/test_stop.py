"""A client that stops at an odd moment: while its network takes nothing, or before its relay has admitted it, or while a factory
builds a protocol."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import CancelledError, TimeoutError
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater
from zope.interface import implementer

from dmsg.clients.errors import ClientStopped
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.entry import Entry
from dmsg.discovery.errors import DiscoveryUnavailable
from dmsg.discovery.registrar import EntryRegistrar
from dmsg.glue.stream_transport import TransportLost
from dmsg.interfaces import IAccessPolicy
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.wire import FrameType
from dmsg.sansio.jitter import Jitter
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork
from dmsg.testing.probes import ConformanceProtocol
from dmsg.testing.raw import RawRelay
from tests.worlds import AliceAndBob


@pytest_twisted.async_yield_fixture
async def stalled() -> AsyncIterator[Any]:
    """Alice, who has stopped while her connection took nothing of what she wrote: ``(network, connection)``."""
    async with AliceAndBob() as network:
        transport = await network.connect(ConformanceProtocol(), ConformanceProtocol())
        connection = network.reactor.pipes[-1]
        connection.freeze()
        transport.write(bytes(400_000))
        await network.settle()
        await network.wait(network.alice.stopService())
        yield network, connection


@pytest_twisted.ensureDeferred
async def test_it_dials_when_it_is_started_again(stalled: Any) -> None:
    network, _ = stalled
    alice = network.alice
    began = network.reactor.seconds()
    alice.startService()
    await network.wait(alice.when_ready())
    transport = await network.wait(alice.dial(network.bob.public_key))
    assert network.reactor.seconds() - began < 1.0
    transport.abortConnection()


@pytest_twisted.ensureDeferred
async def test_nothing_is_left_of_it_soon(stalled: Any) -> None:
    network, connection = stalled
    network.reactor.advance(11.0)
    assert connection.a.disconnected
    assert not network.alice.transports


@implementer(IAccessPolicy)
class StoppingPolicy:
    """Stops the client when it is asked."""

    def __init__(self) -> None:
        self.client: Any = None
        self.stopped: Any = None

    def allow(self, remote: PublicKey, service: str) -> bool:
        self.stopped = self.stopped or self.client.stopService()
        return False


@pytest_twisted.ensureDeferred
async def test_a_policy_may_stop_it_before_the_relay_admits_it() -> None:
    """A base server makes a client reachable before it says OK (:ref:`spec-admission`)."""
    memory, policy = MemoryNetwork(), StoppingPolicy()
    relay = RawRelay(TCP4ServerEndpoint(memory, 80), say_ok=False)
    async with LocalNetwork(memory, relays=0, discovery=None) as network:
        client = policy.client = network.new_client(servers=(await network.wait(relay.listen()),))
        client.listen(Factory.forProtocol(ConformanceProtocol), security=Security.HOP, policy=policy)
        client.startService()
        connection = await network.wait(relay.accept())
        keys = SecretKey(bytes(31) + b"\2").public_key.raw + client.public_key.raw
        connection.send_frames([(FrameType.REQUEST, 1, keys), (FrameType.OK, 0, b"")])  # one read
        await network.wait(connection.lost())
        await network.wait(policy.stopped)
        await network.wait(relay.stop())


@asynccontextmanager
async def behind_a_reader(kind: str) -> AsyncIterator[tuple[LocalNetwork, Any, Any]]:
    """A network with a relay, and two of its clients: the first closes slowly, because the second has paused reading."""
    messaging = kind == "messaging"
    async with LocalNetwork(MemoryNetwork(), relays=not messaging, messaging_relays=messaging) as network:
        make = network.messaging_client if messaging else network.client
        alice, bob = await make(), await make()
        end = ConformanceProtocol()
        bob.listen(Factory.forProtocol(lambda: end))
        transport = await network.wait(alice.dial(bob.public_key))
        transport.attach(ConformanceProtocol())
        await network.wait(end.when(lambda: end.made > 0))
        end.transport.pauseProducing()
        transport.write(bytes(1_000_000))  # the close waits for the reader
        await network.settle()
        yield network, alice, bob


@pytest.mark.parametrize("kind", ["dmsg", "messaging"])
@pytest_twisted.ensureDeferred
async def test_one_whose_end_is_not_waited_for_stops_nevertheless(kind: str) -> None:
    async with behind_a_reader(kind) as (network, alice, bob):
        [relay] = network.messaging_relays if kind == "messaging" else network.relays
        stopping = alice.stopService().addTimeout(0.5, network.reactor)
        with pytest.raises(TimeoutError):
            await network.wait(stopping)
        assert relay.stats()["connections"] == 2
        network.reactor.advance(30.0)
        assert relay.stats()["connections"] == 1
        alice.startService()
        await network.wait(alice.when_ready())
        (await network.wait(alice.dial(bob.public_key))).abortConnection()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("kind", ["dmsg", "messaging"])
@pytest_twisted.ensureDeferred
async def test_one_that_is_started_before_it_has_stopped_begins_then(kind: str, waits: bool) -> None:
    async with behind_a_reader(kind) as (network, alice, bob):
        stopping = alice.stopService()
        if waits:
            with pytest.raises(TimeoutError):
                await network.wait(stopping.addTimeout(0.5, network.reactor))
        alice.startService()
        ready = alice.when_ready()
        assert not ready.called, "the sessions are those that are about to be closed"
        await network.wait(ready)
        network.reactor.advance(30.0)
        assert alice.pool.sessions
        alice.listen(Factory.forProtocol(ConformanceProtocol))
        for one, other in ((alice, bob), (bob, alice)):
            (await network.wait(one.dial(other.public_key))).abortConnection()


@pytest_twisted.ensureDeferred
async def test_one_that_is_stopped_again_before_it_has_begun_stays_stopped() -> None:
    async with behind_a_reader("dmsg") as (network, alice, _):
        first = alice.stopService()
        alice.startService()
        ready = alice.when_ready()
        second = alice.stopService()
        with pytest.raises(ClientStopped):
            await network.wait(ready)
        await network.wait(first)
        await network.wait(second)
        network.reactor.advance(30.0)
        assert not alice.pool.sessions


@pytest_twisted.ensureDeferred
async def test_each_that_stops_it_waits_until_it_has_withdrawn_its_entry() -> None:
    async with LocalNetwork(MemoryNetwork(), relays=1) as network:
        alice = await network.client()
        discovery: Any = network.discovery
        post_entry = discovery.post_entry

        async def post_slowly(entry: Entry) -> None:
            await deferLater(network.reactor, 1.0)
            await post_entry(entry)

        discovery.post_entry = post_slowly
        stopping = [alice.stopService() for _ in range(3)]
        stopping[1].addErrback(lambda failure: failure.trap(CancelledError)).cancel()
        network.reactor.advance(0.9)
        assert [one.called for one in stopping] == [False, True, False]
        network.reactor.advance(0.2)
        assert all(one.called for one in stopping)
        entry = await discovery.get_entry(alice.public_key)
        assert entry.client.delegated_servers == ()


@pytest_twisted.ensureDeferred
async def test_who_waits_for_its_entry_goes_on_to_wait_when_it_is_started_again_at_once() -> None:
    class Again(Factory):
        noisy = False

        def buildProtocol(self, addr: Any) -> None:
            bob.stopService()
            bob.startService()

    async with LocalNetwork(MemoryNetwork(), relays=1) as network:
        discovery: Any = network.discovery
        discovery.failure = DiscoveryUnavailable("it is away")
        alice = network.new_client(discovery=None, servers=network.pinned)
        bob = network.new_client(servers=network.pinned)
        bob.listen(Again())
        for client in (alice, bob):
            client.startService()
        await network.wait(alice.when_ready())
        await network.settle()
        ready = bob.when_ready()
        (await network.wait(alice.dial(bob.public_key))).attach(end := ConformanceProtocol())
        await network.wait(end.when_lost())
        assert not ready.called
        discovery.failure = None
        await network.wait(ready)
        assert bob.pool.sessions


@pytest_twisted.ensureDeferred
async def test_who_waits_for_its_entry_is_told_that_it_stops_although_another_client_goes_on_with_that_entry() -> None:
    async with LocalNetwork(MemoryNetwork(), relays=2) as network:
        discovery: Any = network.discovery
        discovery.failure = DiscoveryUnavailable("it is away")
        key, reactor = SecretKey(bytes(31) + b"\1"), network.reactor
        entry = EntryRegistrar(discovery, key, clock=reactor, now_ns=network.now_ns, random=Jitter(os.urandom))
        one, other = [network.new_client(key=key, servers=(relay,), publish=entry) for relay in network.pinned]
        for client in (one, other):
            client.startService()
        await network.settle()
        ready = [client.when_ready() for client in (one, other)]
        assert one.pool.sessions and not ready[0].called
        await network.wait(one.stopService())
        with pytest.raises(ClientStopped):
            await network.wait(ready[0])
        discovery.failure = None
        await network.wait(ready[1])


@pytest.mark.parametrize("refuses", [False, True])
@pytest_twisted.ensureDeferred
async def test_a_factory_that_stops_it_leaves_no_dialler_waiting(refuses: bool) -> None:
    """Without a word of its own about the end, the other side would look for another path for a minute."""

    class Last(Factory):
        noisy = False

        def buildProtocol(self, addr: Any) -> ConformanceProtocol | None:
            self.stopped = bob.stopService()
            return None if refuses else served

    served, end, factory = ConformanceProtocol(), ConformanceProtocol(), Last()
    async with LocalNetwork(MemoryNetwork(), relays=1, discovery=None) as network:
        alice, bob = await network.client(), await network.client()
        bob.listen(factory)
        began = network.reactor.seconds()
        (await network.wait(alice.dial(bob.public_key))).attach(end)
        await network.wait(end.when_lost())
        await network.wait(factory.stopped)
        assert network.reactor.seconds() - began < 1.0
        assert (served.made, len(served.lost)) == ((0, 0) if refuses else (1, 1))
        assert end.lost[0].check(ConnectionDone if not refuses else TransportLost)


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("kind", ["e2e", "hop", "messaging"])
@pytest_twisted.ensureDeferred
async def test_protocols_are_told_before_it_has_stopped(kind: str, reads: bool) -> None:
    """Also those of transports that are aborted, because the peer takes nothing for too long."""
    messaging = kind == "messaging"
    async with LocalNetwork(MemoryNetwork(), relays=not messaging, messaging_relays=messaging) as network:
        if messaging:
            alice, bob = await network.messaging_client(), await network.messaging_client()
        else:
            alice, bob = [await network.client(security=Security(kind)) for _ in range(2)]
        ours, theirs = ConformanceProtocol(), ConformanceProtocol()
        bob.listen(Factory.forProtocol(lambda: theirs))
        (await network.wait(alice.dial(bob.public_key))).attach(ours)
        await network.wait(theirs.when(lambda: theirs.made > 0))
        if not reads:
            theirs.transport.pauseProducing()
        ours.transport.write(bytes(1_000_000))
        told = alice.stopService().addCallback(lambda _: len(ours.lost))
        assert await network.wait(told) == 1


@pytest.mark.parametrize("kind", ["dmsg", "messaging"])
@pytest_twisted.ensureDeferred
async def test_protocols_are_told_before_it_has_stopped_also_if_the_program_has_just_aborted(kind: str) -> None:
    messaging = kind == "messaging"
    async with LocalNetwork(
        MemoryNetwork(), relays=not messaging, messaging_relays=messaging, discovery=None
    ) as network:
        make = network.messaging_client if messaging else network.client
        alice, bob = await make(), await make()
        ends = [ConformanceProtocol() for _ in range(3)]
        bob.listen(Factory.forProtocol(ConformanceProtocol))
        for end in ends:
            (await network.wait(alice.dial(bob.public_key))).attach(end)
        for end in ends:
            end.transport.abortConnection()
        told = alice.stopService().addCallback(lambda _: sum(len(end.lost) for end in ends))
        assert await network.wait(told) == len(ends)
