"""LocalNetwork: what the documentation promises of it, on sockets and on a fake clock."""

from __future__ import annotations

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.protocols.wire import Echo

from dmsg.crypto.keys import SecretKey
from dmsg.discovery.errors import DiscoveryUnavailable, EntryNotFound
from dmsg.errors import DialError
from dmsg.testing.link import Link
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork


class Collector(Protocol):
    """Waits for a number of bytes, then for the end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.received = b""
        self.complete: Deferred[bytes] = Deferred()
        self.lost: Deferred[object] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.received += data
        if len(self.received) >= self.size and not self.complete.called:
            self.complete.callback(self.received)

    def connectionLost(self, reason=None) -> None:
        self.lost.callback(reason.value)


async def echoed(network: LocalNetwork, alice, bob, text: bytes = b"hello") -> bytes:
    collector = Collector(len(text))
    await network.wait(alice.connect(Factory.forProtocol(lambda: collector), bob.public_key))
    collector.transport.write(text)
    received = await network.wait(collector.complete)
    collector.transport.loseConnection()
    await network.wait(collector.lost)
    return received


def make(reactor, kind, **options) -> LocalNetwork:
    return LocalNetwork(MemoryNetwork() if kind == "fake clock" else reactor, **options)


@pytest.mark.parametrize(
    ("kind", "discovery"),
    [("sockets", "memory"), ("sockets", "http"), ("sockets", None), ("fake clock", "memory"), ("fake clock", None)],
)
@pytest_twisted.ensureDeferred
async def test_two_clients_talk(reactor, kind, discovery):
    async with make(reactor, kind, discovery=discovery) as network:
        alice, bob = await network.client(), await network.client(min_servers=2)
        bob.listen(Factory.forProtocol(Echo))
        assert await echoed(network, alice, bob) == b"hello"
        assert len(bob.pool.sessions) == 2


@pytest.mark.parametrize("kind", ["sockets", "fake clock"])
@pytest_twisted.ensureDeferred
async def test_servers_come_and_go(reactor, kind):
    async with make(reactor, kind, relays=1) as network:
        alice, bob = await network.client(), await network.client()
        bob.listen(Factory.forProtocol(Echo))
        [old] = network.relays
        new = await network.add_relay()
        await network.stop_relay(old)
        assert list(network.relays) == [new]
        assert old.key.public_key not in [one.public_key for one in network.pinned]
        await network.wait(bob.when_ready())
        carol = await network.client()
        assert await echoed(network, carol, bob) == b"hello"
        assert alice.public_key != carol.public_key


@pytest.mark.parametrize("kind", ["sockets", "fake clock"])
@pytest_twisted.ensureDeferred
async def test_what_is_stopped_may_be_stopped_again(reactor, kind):
    async with make(reactor, kind, relays=2, messaging_relays=1) as network:
        alice, bob = await network.client(), await network.client()
        carol = await network.messaging_client()
        bob.listen(Factory.forProtocol(Echo))
        old = [network.relays[0], network.messaging_relays[0]]
        for _ in range(2):
            await network.stop_client(carol)
            for relay in old:
                await network.stop_relay(relay)
        assert len(network.relays) == 1
        await network.wait(bob.when_ready())
        assert await echoed(network, alice, bob) == b"hello"


@pytest_twisted.ensureDeferred
async def test_a_client_without_a_way_to_find_relays_says_so():
    async with LocalNetwork(MemoryNetwork(), relays=0, discovery=None) as network:
        client = network.new_client()
        client.startService()
        with pytest.raises(DialError, match="there is no discovery, and no server was given"):
            await network.wait(client.dial(SecretKey.generate().public_key))
        await network.wait(client.stopService())


@pytest_twisted.ensureDeferred
async def test_a_stopped_client_cannot_be_dialled(reactor):
    async with LocalNetwork(reactor) as network:
        alice, bob = await network.client(), await network.client()
        await network.stop_client(bob)
        with pytest.raises(DialError) as caught:
            await alice.dial(bob.public_key)
        assert caught.value.reason == "no common server"


@pytest_twisted.ensureDeferred
async def test_discovery_can_be_made_to_fail(reactor):
    async with LocalNetwork(reactor) as network:
        alice, bob = await network.client(), await network.client()
        network.discovery.failure = DiscoveryUnavailable("on purpose")
        with pytest.raises(DialError) as caught:
            await alice.dial(bob.public_key)
        assert "on purpose" in str(caught.value)
        network.discovery.failure = None
        bob.listen(Factory.forProtocol(Echo))
        assert await echoed(network, alice, bob) == b"hello"


@pytest_twisted.ensureDeferred
async def test_the_memory_discovery_checks_what_it_is_given(reactor):
    async with LocalNetwork(reactor, relays=0) as network:
        with pytest.raises(EntryNotFound):
            await network.discovery.get_entry(SecretKey.generate().public_key)
        assert await network.discovery.available_servers() == []


@pytest.mark.parametrize("kind", ["client", "messaging_client"])
@pytest_twisted.ensureDeferred
async def test_clients_of_each_kind_may_be_far_away(kind):
    memory = MemoryNetwork()
    near, far = Link(memory.clock), Link(memory.clock, delay_s=0.1, bits_per_s=8e6)
    async with LocalNetwork(memory, relays=1, messaging_relays=1) as network:
        alice, bob = await getattr(network, kind)(link=near), await getattr(network, kind)(link=far)
        bob.listen(Factory.forProtocol(Echo))
        collector = Collector(10_000)
        await network.wait(alice.connect(Factory.forProtocol(lambda: collector), bob.public_key))
        before = memory.seconds()
        collector.transport.write(bytes(10_000))
        await network.wait(collector.complete)
        # 0.1 s each way, and 0.01 s for the bytes.
        assert 0.21 <= memory.seconds() - before <= 0.24
        assert len(near.pipes) == len(far.pipes) == 1


@pytest_twisted.ensureDeferred
async def test_nothing_is_left_on_a_fake_clock():
    reactor = MemoryNetwork()
    async with LocalNetwork(reactor) as network:
        alice, bob = await network.client(), await network.client()
        bob.listen(Factory.forProtocol(Echo))
        assert await echoed(network, alice, bob) == b"hello"
    assert reactor.getDelayedCalls() == []
    assert reactor.pipes == []


@pytest_twisted.ensureDeferred
async def test_a_test_that_fails_inside_still_leaves_nothing(reactor):
    with pytest.raises(ZeroDivisionError):
        async with LocalNetwork(reactor) as network:
            alice, bob = await network.client(), await network.client()
            bob.listen(Factory.forProtocol(Protocol))
            await alice.connect(Factory.forProtocol(Protocol), bob.public_key)
            raise ZeroDivisionError


@pytest_twisted.ensureDeferred
async def test_waiting_for_what_never_happens_says_so():
    network = LocalNetwork(MemoryNetwork(), relays=0)
    with pytest.raises(AssertionError, match="nothing is left"):
        await network.wait(Deferred())


@pytest_twisted.ensureDeferred
async def test_waiting_on_a_fake_clock_has_a_limit():
    network = LocalNetwork(MemoryNetwork(), relays=0)
    late = network.reactor.callLater(1e6, lambda: None)
    with pytest.raises(AssertionError, match="more than"):
        await network.wait(Deferred())
    late.cancel()


def test_http_does_not_go_with_a_fake_clock():
    with pytest.raises(ValueError, match="fake clock"):
        LocalNetwork(MemoryNetwork(), discovery="http")


@pytest.mark.parametrize("discovery", ["memory", "http", None])
@pytest_twisted.ensureDeferred
async def test_a_network_may_be_used_again(reactor, discovery):
    network = LocalNetwork(reactor, relays=1, messaging_relays=1, discovery=discovery)
    for _ in range(2):
        async with network:
            alice, bob = await network.client(), await network.client()
            bob.listen(Factory.forProtocol(Echo))
            assert await echoed(network, alice, bob) == b"hello"
            assert len(network.pinned) == len(network.messaging_pinned) == 1


@pytest.mark.parametrize("discovery", ["memory", "http"])
@pytest_twisted.ensureDeferred
async def test_a_network_that_is_started_twice_goes_on(reactor, discovery):
    """As by a test that enters it, and starts it as well. Nothing is left of it at the end."""
    network = LocalNetwork(reactor, relays=1, discovery=discovery)
    for _ in range(2):
        async with network:
            found = network.discovery
            await network.start()
            assert network.discovery is found and len(network.relays) == 1
            await network.client()


@pytest_twisted.ensureDeferred
async def test_a_relay_that_cannot_be_made_leaves_no_port(reactor):
    async with LocalNetwork(reactor, relays=0) as network:
        before = set(reactor.getReaders())
        with pytest.raises(TypeError, match="nonsense"):
            await network.add_relay(nonsense=1)
        assert set(reactor.getReaders()) == before


class Fails(Protocol):
    def connectionMade(self) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("broken", ["factory", "server", "client"])
def test_a_program_that_fails_when_it_is_connected_loses_that_connection_only(logged_errors, broken):
    memory = MemoryNetwork()
    server, client = Collector(1), Collector(1)
    made = {"factory": Collector, "server": Fails, "client": lambda: server}[broken]  # a Collector wants a size
    memory.listenTCP(80, Factory.forProtocol(made))
    factory = Factory.forProtocol(Fails if broken == "client" else lambda: client)
    TCP4ClientEndpoint(memory, "127.0.0.1", 80).connect(factory)
    memory.advance(1)
    assert logged_errors.flush(ZeroDivisionError, TypeError)
    assert not memory.pipes and (server if broken == "client" else client).lost.called
