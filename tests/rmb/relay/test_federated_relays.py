"""Whole relays and clients on loopback: calls from one relay to another, and between processes that share a Redis."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred, ensureDeferred, gatherResults
from twisted.internet.protocol import Factory, Protocol

from dmsg.crypto.ed25519 import SigningKey
from dmsg.rmb.client.errors import CallRefused
from dmsg.rmb.client.service import RmbClient
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.key_file import make_twin_key
from dmsg.rmb.twins.table import SqliteRegistry, TwinTable
from dmsg.taps.rmb_relay import RmbRelayService
from dmsg.taps.settings import Posters, RmbRelaySettings
from dmsg.testing.process import free_port

pytestmark = pytest.mark.system


class Network:
    """Relays and clients of one registry; all of it ends with the test."""

    def __init__(self, reactor: Any, folder: Path) -> None:
        self.reactor = reactor
        self.folder = folder
        self.path = str(folder / "twins")
        self.running: list[Any] = []

    def relay(self, name: str, *, trust: tuple[str, ...] = (), **settings: Any) -> RmbRelayService:
        """A relay that the registry knows as ``name``, with a key of its own."""
        key = self.folder / f"{name.replace(':', '-')}.key"
        if not key.exists():
            seed = hashlib.sha256(name.encode()).digest()
            make_twin_key(key, KeyType.ED25519, lambda size: seed)
        options: dict[str, Any] = {
            "listen": f"tcp:{name.partition(':')[2]}:interface=127.0.0.1",
            "domain": (name,),
            "registry": self.path,
            "relay_key": key,
            "trust": trust,
            **settings,
        }
        service = RmbRelayService(self.reactor, RmbRelaySettings(**options))
        service.startService()
        self.running.append(service)
        return service

    def twin(self, seed: str, *, named: tuple[str, ...]) -> int:
        """The number of the twin with the key of ``seed``, whose relays in the registry are ``named``."""
        key = TwinKey(hashlib.sha256(seed.encode()).digest(), KeyType.ED25519)
        table = TwinTable(self.path)
        number = table.create(key, named, EncryptionKey(key.secret).public_key)
        table.close()
        return number

    async def client(self, seed: str, relay: str, *, named: tuple[str, ...]) -> RmbClient:
        """A client of that twin at ``relay``, connected."""
        self.twin(seed, named=named)
        key = TwinKey(hashlib.sha256(seed.encode()).digest(), KeyType.ED25519)
        registry = SqliteRegistry(self.path)
        client = RmbClient(self.reactor, key, registry, [f"ws://{relay}"], publish=False)

        @client.service("echo")
        async def echo(request: Any) -> bytes:
            return bytes(request.data)

        client.startService()
        self.running.append(client)
        self.running.append(registry)
        await client.when_ready()
        return client

    async def stop(self, one: Any) -> None:
        self.running.remove(one)
        await (one.close() if isinstance(one, SqliteRegistry) else one.stopService())


async def echoes(client: RmbClient, twin: int, count: int) -> list[bytes]:
    """What ``count`` calls at once give."""
    calls = [ensureDeferred(client.call(twin, "echo", b"%d" % number, timeout=20)) for number in range(count)]
    return [answer.data for answer in await gatherResults(calls, consumeErrors=True)]


class ShutDoor(Protocol):
    """Ends every connection, and tells of the first one."""

    factory: Any

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.loseConnection()
        if not self.factory.knocked.called:
            self.factory.knocked.callback(None)


def trusted(name: str) -> str:
    """What another relay gives as --trust for the relay called ``name``."""
    return f"{name}={SigningKey(hashlib.sha256(name.encode()).digest()).public_key.hex()}"


@pytest.fixture
def names() -> tuple[str, str]:
    return f"localhost:{free_port()}", f"localhost:{free_port()}"


@pytest.fixture
def network(reactor: Any, tmp_path: Path) -> Any:
    made = Network(reactor, tmp_path)
    yield made
    for one in sorted(made.running, key=lambda one: [RmbClient, SqliteRegistry, RmbRelayService].index(type(one))):
        pytest_twisted.blockon(ensureDeferred(made.stop(one)))


@pytest_twisted.ensureDeferred
async def test_twins_of_relays_that_know_each_other_call_each_other(network: Network, names: Any) -> None:
    a, b = names
    first = network.relay(a, trust=(trusted(b),))
    network.relay(b, trust=(trusted(a),))
    alice = await network.client("alice", a, named=(a,))
    bob = await network.client("bob", b, named=(b,))
    assert await echoes(alice, bob.twin, 300) == [b"%d" % number for number in range(300)]
    assert (await bob.call(alice.twin, "echo", b"back", timeout=20)).data == b"back"
    assert first.federation is not None
    assert first.federation.accepted >= 300


@pytest.mark.parametrize("federation", [Posters.KNOWN, Posters.OPEN])
@pytest_twisted.ensureDeferred
async def test_a_relay_takes_posts_of_strangers_only_if_it_is_open(
    network: Network, names: Any, federation: Posters
) -> None:
    a, b = names
    network.relay(a, federation=federation)
    network.relay(b, federation=federation)
    alice = await network.client("alice", a, named=(a,))
    bob = await network.client("bob", b, named=(b,))
    if federation is Posters.OPEN:
        assert (await alice.call(bob.twin, "echo", b"x", timeout=20)).data == b"x"
    else:
        with pytest.raises(CallRefused) as caught:
            await alice.call(bob.twin, "echo", b"x", timeout=20)
        assert caught.value.code == 127


@pytest_twisted.ensureDeferred
async def test_a_twin_is_found_at_the_one_of_its_relays_that_it_is_connected_to(network: Network, names: Any) -> None:
    a, b = names
    network.relay(a, trust=(trusted(b),))
    network.relay(b, trust=(trusted(a),))
    alice = await network.client("alice", a, named=(a, b))
    bob = await network.client("bob", b, named=(a, b))
    assert (await alice.call(bob.twin, "echo", b"x", timeout=20)).data == b"x"
    assert (await alice.call(bob.twin, "echo", b"x", timeout=20, tags="fail-fast")).data == b"x"
    with pytest.raises(CallRefused) as caught:
        await alice.call(bob.twin, "echo", b"x", timeout=20, tags="fail-fast", session="nowhere")
    assert caught.value.code == 125


@pytest_twisted.ensureDeferred
async def test_a_twin_of_two_relays_is_found_by_a_third_one_at_the_one_it_is_connected_to(
    network: Network, names: Any
) -> None:
    a, b, c = *names, f"localhost:{free_port()}"
    for name in (a, b, c):
        network.relay(name, trust=tuple(trusted(other) for other in (a, b, c) if other != name))
    alice = await network.client("alice", c, named=(c,))
    bob = await network.client("bob", b, named=(a, b))
    assert await echoes(alice, bob.twin, 40) == [b"%d" % number for number in range(40)]


@pytest_twisted.ensureDeferred
async def test_a_call_waits_for_a_relay_that_does_not_answer_yet(network: Network, names: Any, reactor: Any) -> None:
    a, b = names
    door = Factory.forProtocol(ShutDoor)
    door.knocked = Deferred()  # type: ignore[attr-defined]
    port = reactor.listenTCP(int(b.partition(":")[2]), door, interface="127.0.0.1")
    network.relay(a, trust=(trusted(b),))
    alice = await network.client("alice", a, named=(a,))
    number = network.twin("bob", named=(b,))
    called = ensureDeferred(alice.call(number, "echo", b"x", timeout=25))
    await door.knocked  # type: ignore[attr-defined]
    await port.stopListening()
    network.relay(b, trust=(trusted(a),))
    bob = await network.client("bob", b, named=(b,))
    assert bob.twin == number
    assert (await called).data == b"x"


@pytest_twisted.ensureDeferred
async def test_sessions_of_two_processes_with_one_redis_reach_each_other(
    network: Network, names: Any, redis_url: str
) -> None:
    a, b = names
    for name in names:
        network.relay(name, domain=("localhost",), redis=redis_url)
    alice = await network.client("alice", a, named=("localhost",))
    bob = await network.client("bob", b, named=("localhost",))
    assert await echoes(alice, bob.twin, 100) == [b"%d" % number for number in range(100)]
    with pytest.raises(CallRefused) as caught:
        await alice.call(bob.twin, "echo", b"x", timeout=20, tags="fail-fast", session="nowhere")
    assert caught.value.code == 125
