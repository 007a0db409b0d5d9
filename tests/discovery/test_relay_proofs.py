"""Proving relays, over every store: what is listed, when it leaves, and what a restart brings back."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock, deferLater
from twisted.logger import capturedLogs, formatEvent
from zope.interface import implementer

from dmsg.address import HostPort
from dmsg.discovery.errors import DiscoveryUnavailable, ProofFailed
from dmsg.discovery.listing import NETWORK_LIMIT, ServerListing
from dmsg.discovery.proofs.limits import ProofLimits
from dmsg.discovery.proofs.prover import RESULTS, RelayProofs
from dmsg.discovery.ranks import Ranks
from dmsg.discovery.relay_addresses import RelayAddresses
from dmsg.discovery.stores.memory import MemoryStore
from dmsg.discovery.stores.rules import StoreLimits
from dmsg.interfaces import IEntryStore, IRelayProver

pytestmark = pytest.mark.usefixtures("logged_errors")
sync = pytest_twisted.ensureDeferred
NS = 10**9
HONEST, NETWORKS = 10, 50


@implementer(IRelayProver)
class FakeProver:
    """Answers by address: ``fates`` has a reason to fail, an exception, or ``None`` for silence; all others succeed."""

    def __init__(self) -> None:
        self.fates: dict[str, Any] = {}
        self.names: dict[str, Any] = {}
        self.asked: Counter[str] = Counter()

    def resolve(self, host: str) -> Deferred[list[str]]:
        found = self.names[host]
        return found if isinstance(found, Deferred) else succeed(found)

    def prove(self, public_key: Any, address: HostPort) -> Deferred[None]:
        self.asked[address.host] += 1
        fate = self.fates.get(address.host, "ok")
        if fate is None:
            return Deferred()
        if isinstance(fate, str):
            return succeed(None) if fate == "ok" else fail(ProofFailed(fate))
        return fail(fate)


class World:
    """A store, and discoveries over it on a fake clock."""

    def __init__(self, reactor: Any, store: Any, now_ns: int) -> None:
        self.reactor, self.store, self._start_ns = reactor, store, now_ns
        self.clock = Clock()
        self.prover = FakeProver()
        self.provers = {"dmsg": self.prover}
        self.running: list[RelayProofs] = []

    def now_ns(self) -> int:
        return self._start_ns + int(self.clock.seconds() * NS)

    def discovery(self, **limits: Any) -> RelayProofs:
        proofs = RelayProofs(
            self.store,
            self.provers,
            self.clock,
            now_ns=self.now_ns,
            random=random.Random(1),
            addresses=RelayAddresses(),
            limits=ProofLimits(**limits),
        )
        self.running.append(proofs)
        proofs.start()
        return proofs

    async def quiet(self, proofs: RelayProofs) -> None:
        """Move the clock on until first proofs are over."""
        done = proofs.quiet()
        for _ in range(20_000):
            if done.called:
                return
            await self._settle()
            self.clock.advance(0.05)
        raise AssertionError("first proofs do not come to an end")

    async def _settle(self) -> None:
        """Let threads and sockets catch up with the fake clock."""
        await deferLater(self.reactor, 0)
        while any(proofs._syncing is not None for proofs in self.running):
            await deferLater(self.reactor, 0.001)

    async def advance(self, seconds: float, step_s: float = 1.0) -> None:
        for _ in range(int(seconds / step_s)):
            self.clock.advance(step_s)
            await self._settle()

    async def until(self, condition: Any, step_s: float = 0.5) -> None:
        for _ in range(2000):
            if condition():
                return
            await self.advance(step_s, step_s)
        raise AssertionError("it does not come to be")

    async def register(self, proofs: RelayProofs, entry: Any, source: str = "") -> None:
        await self.store.put(entry, self.now_ns())
        proofs.offer(entry, source)

    def listing(self, proofs: RelayProofs | None, ranks: Any = None, protocol: str = "dmsg") -> ServerListing:
        return ServerListing(self.store, random.Random(2), lambda: ranks, proofs, protocol)

    async def listed(self, proofs: RelayProofs, protocol: str = "dmsg") -> list[str]:
        listing = self.listing(proofs, protocol=protocol)
        return sorted(one.server.address for one in await listing.servers(64, self.now_ns()))


@pytest.fixture
def world(reactor: Any, store: Any, now_ns: int) -> Any:
    made = World(reactor, store, now_ns)
    yield made
    for proofs in made.running:
        pytest_twisted.blockon(Deferred.fromCoroutine(proofs.stop()))
    assert not made.clock.getDelayedCalls()


@pytest.fixture
def memory_world(reactor: Any, now_ns: int) -> Any:
    made = World(reactor, MemoryStore(random=random.Random(7)), now_ns)
    yield made
    for proofs in made.running:
        pytest_twisted.blockon(Deferred.fromCoroutine(proofs.stop()))
    assert not made.clock.getDelayedCalls()


# --- the attack --------------------------------------------------------------------------------------------------------


@pytest.mark.time_limit(90)
@sync
async def test_ten_thousand_sybils_in_fifty_networks_leave_ten_honest_relays_on_every_list(
    world: World, make_entry: Any, store_url: str
) -> None:
    """All are relays that answer: what they have not is more networks. Each list of 64 has all ten honest ones."""
    sybils = 2000 if store_url.startswith("redis") else 10_000
    honest = [make_entry(f"honest {at}", address=f"20.{at}.7.1:80") for at in range(HONEST)]
    await world.store.put(honest[0], world.now_ns())
    puts = [world.store.put(entry, world.now_ns()) for entry in honest[1:]]
    template = make_entry("sybil", address="30.0.0.1:80").to_json()
    for at in range(sybils):
        puts.append(world.store.put(_sybil(template, at), world.now_ns()))
        if len(puts) >= 1000:
            for put in puts:
                await put
            puts.clear()
    for put in puts:
        await put
    proofs = world.discovery(proofs_per_s=5000.0, proof_burst=5000.0, interval_s=3600.0)
    await world.quiet(proofs)
    assert proofs.stats()["relays_listed"] == sybils + HONEST
    listing = world.listing(proofs)
    wanted = {entry.static for entry in honest}
    for _ in range(20):
        listed = await listing.servers(64, world.now_ns())
        assert len(listed) == len({entry.static for entry in listed}) == 64
        assert wanted <= {entry.static for entry in listed}
        networks = Counter(entry.server.host_port.host.rpartition(".")[0] for entry in listed)
        assert max(networks.values()) <= 2, "one of each network before a second of any"


def _sybil(template: bytes, at: int) -> Any:
    """An entry of a key that exists, with a signature that is not checked here."""
    from dmsg.crypto.keys import SecretKey
    from dmsg.discovery.entry import Entry

    secret = SecretKey((at + 1).to_bytes(32, "big"))
    address = f"30.0.{at % NETWORKS}.{at // NETWORKS}:80".encode()
    known = Entry.parse(template)
    text = template.replace(b"30.0.0.1:80", address).replace(
        str(known.static).encode(), str(secret.public_key).encode()
    )
    return Entry.parse(text)


@sync
async def test_entries_of_one_address_do_not_take_the_list(world: World, make_entry: Any) -> None:
    """180 entries at a host that does not answer for their keys: the list has the honest relays, the host few visits."""
    proofs = world.discovery()
    world.prover.fates["66.66.66.66"] = "wrong_key"
    for at in range(180):
        await world.register(proofs, make_entry(f"sybil {at}", address=f"66.66.66.66:{443 + at}"), "66.1.1.1")
    for at in range(3):
        await world.register(proofs, make_entry(f"honest {at}", address=f"20.0.{at}.1:80"), f"20.0.{at}.1")
    await world.advance(40)
    assert await world.listed(proofs) == [f"20.0.{at}.1:80" for at in range(3)]
    assert world.prover.asked["66.66.66.66"] <= 4
    assert proofs.results["wrong_key"] <= 4 and proofs.results["ok"] == 3
    assert set(proofs.stats()) == {"relays_listed", "relays_known", "proofs_waiting", *(f"proofs_{r}" for r in RESULTS)}


@sync
async def test_one_address_with_180_relays_that_answer_gets_eight_places(memory_world: World, make_entry: Any) -> None:
    world = memory_world
    proofs = world.discovery()
    for at in range(180):
        await world.register(proofs, make_entry(f"sybil {at}", address=f"66.66.66.66:{443 + at}"), "66.66.66.66")
    await world.register(proofs, make_entry("honest", address="20.0.0.1:80"), "20.0.0.1")
    await world.quiet(proofs)
    firsts: Counter[str] = Counter()
    for _ in range(100):
        listed = await world.listing(proofs).servers(64, world.now_ns())
        assert len(listed) == NETWORK_LIMIT + 1
        firsts[listed[0].server.address] += 1
        assert "20.0.0.1:80" in [entry.server.address for entry in listed[:2]], "one of each network comes first"
    assert proofs.stats()["relays_listed"] == 181


# --- from registration to its end ----------------------------------------------------------------------------------------


@sync
async def test_a_relay_that_loses_its_proof_is_gone_in_the_same_moment(world: World, make_entry: Any) -> None:
    """One listing, asked all the time, so that it has the entry in mind."""
    proofs = world.discovery(interval_s=5.0)
    entries = [make_entry(f"relay {at}", address=f"20.0.{at}.1:80") for at in range(2)]
    for entry in entries:
        await world.register(proofs, entry)
    await world.quiet(proofs)
    listing = world.listing(proofs)
    assert len(await listing.servers(64, world.now_ns())) == 2
    world.prover.fates["20.0.0.1"] = "refused"
    while proofs.is_proved(entries[0].static):
        assert entries[0] in await listing.servers(64, world.now_ns())
        world.clock.advance(0.1)
    assert await listing.servers(64, world.now_ns()) == [entries[1]]


@sync
async def test_a_relay_is_listed_right_after_its_registration(world: World, make_entry: Any) -> None:
    proofs = world.discovery()
    assert await world.listed(proofs) == []
    entry = make_entry("relay", address="20.0.0.1:80")
    await world.register(proofs, entry, "20.0.0.1")
    assert await world.listed(proofs) == ["20.0.0.1:80"]
    assert proofs.is_proved(entry.static)
    await world.register(proofs, make_entry("relay", 1, address="20.0.0.1:80", available=0), "20.0.0.1")
    assert await world.listed(proofs) == [] and not proofs.is_proved(entry.static)
    await world.register(proofs, make_entry("client"))
    await world.register(proofs, make_entry("private", address="10.0.0.1:80"))
    assert world.prover.asked == {"20.0.0.1": 1}


@sync
async def test_a_discovery_without_descriptors_keeps_its_list(memory_world: World, make_entry: Any) -> None:
    world = memory_world
    world.store = MemoryStore(random=random.Random(1), limits=StoreLimits(server_ttl_s=None))
    proofs = world.discovery(interval_s=20.0)
    for at in range(4):
        await world.register(proofs, make_entry(f"relay {at}", address=f"20.0.{at}.1:80"))
    await world.quiet(proofs)
    for at in range(1, 6):
        world.prover.fates[f"20.0.{at}.1"] = "not_tried"
    await world.register(proofs, make_entry("relay 5", address="20.0.5.1:80"))
    await world.advance(100)
    assert len(await world.listed(proofs)) == 4
    world.prover.fates = {"20.0.1.1": "refused"}
    await world.advance(100)
    assert await world.listed(proofs) == [f"20.0.{at}.1:80" for at in (0, 2, 3, 5)]


@sync
async def test_a_dead_relay_leaves_the_list_at_its_next_proof(memory_world: World, make_entry: Any) -> None:
    world = memory_world
    world.store = MemoryStore(random=random.Random(1), limits=StoreLimits(server_ttl_s=None))
    proofs = world.discovery(interval_s=60.0)
    for at in range(4):
        await world.register(proofs, make_entry(f"relay {at}", address=f"20.0.{at}.1:80"))
    world.prover.fates |= {"20.0.1.1": "refused", "20.0.2.1": "closed", "20.0.3.1": None}
    await world.advance(60 * 1.2 + 3 * (proofs.limits.timeout_s + 1.2 * proofs.limits.attempt_pause_s))
    assert await world.listed(proofs) == ["20.0.0.1:80"]
    assert all(world.prover.asked[f"20.0.{at}.1"] >= 4 for at in (2, 3)), "one good proof, and three attempts"
    world.prover.fates.clear()
    await world.until(lambda: proofs.stats()["relays_listed"] == 4)
    assert len(await world.listed(proofs)) == 4


@sync
async def test_a_restart_brings_the_list_back_at_once(world: World, make_entry: Any) -> None:
    for at in range(70):
        await world.store.put(make_entry(f"relay {at}", address=f"20.0.{at}.1:80"), world.now_ns())
    proofs = world.discovery(proof_burst=100.0)
    asked = Deferred.fromCoroutine(world.listed(proofs))  # before the store was read: the answer waits for it
    for _ in range(1000):
        if asked.called:
            break
        await deferLater(world.reactor, 0)
    assert len(await asked) == 64


@sync
async def test_each_process_over_one_store_proves_for_itself(world: World, make_entry: Any) -> None:
    first, second = world.discovery(), world.discovery()
    await world.quiet(second)
    await world.register(first, make_entry("relay", address="20.0.0.1:80"), "20.0.0.1")
    assert await world.listed(first) == ["20.0.0.1:80"]
    await world.until(lambda: second.stats()["relays_listed"] == 1, step_s=1.0)
    assert world.prover.asked["20.0.0.1"] == 2
    # another address, taken by the first: the second lists it no more until it has proved that
    world.prover.fates["20.0.1.1"] = "refused"
    await world.register(first, make_entry("relay", 1, address="20.0.1.1:80"), "20.0.0.1")
    assert await world.listed(second) == await world.listed(first) == []
    assert world.prover.asked["20.0.1.1"] == 2
    await world.register(first, make_entry("relay", 2, address="20.0.1.1:80", available=0), "20.0.0.1")
    await world.until(lambda: second.stats()["relays_known"] == 0, step_s=10.0)


@sync
async def test_a_relay_that_fails_is_found_where_it_moved_by_each_process(world: World, make_entry: Any) -> None:
    first, second = world.discovery(), world.discovery()
    world.prover.fates["20.0.0.1"] = "refused"
    await world.register(first, make_entry("relay", address="20.0.0.1:80"), "20.0.0.1")
    await world.advance(40.0)
    await world.register(first, make_entry("relay", 1, address="20.0.1.1:80"), "20.0.1.1")
    await world.advance(12.0)
    assert await world.listed(first) == await world.listed(second) == ["20.0.1.1:80"]
    # one that stays where it is has no more proofs for that
    world.prover.fates["20.0.2.1"] = "refused"
    await world.register(first, make_entry("another", address="20.0.2.1:80"), "20.0.2.1")
    await world.advance(250.0)
    assert world.prover.asked["20.0.2.1"] <= 2 * 6
    # at an address that may not be proved
    await world.register(first, make_entry("another", 1, address="127.0.0.1:80"), "20.0.2.1")
    await world.advance(30.0)
    assert await world.listed(second) == ["20.0.1.1:80"]


@implementer(IEntryStore)
class PlainStore:
    """An embedder's, which knows of no ranks."""

    def __init__(self, inner: MemoryStore) -> None:
        self.available_servers, self.put = inner.available_servers, inner.put


@sync
async def test_a_plain_store_will_do(memory_world: World, make_entry: Any) -> None:
    world = memory_world
    world.store = PlainStore(world.store)
    await world.store.put(make_entry("early", address="20.0.0.1:80"), world.now_ns())
    proofs = world.discovery()
    await world.quiet(proofs)
    await world.register(proofs, make_entry("late", address="20.0.1.1:80"))
    assert await world.listed(proofs) == ["20.0.0.1:80", "20.0.1.1:80"]
    await world.advance(301)
    assert await world.listed(proofs) == []


# --- what can go wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [one for one in RESULTS if one != "ok"])
@sync
async def test_each_failure_is_counted_by_its_word(memory_world: World, make_entry: Any, reason: str) -> None:
    world = memory_world
    proofs = world.discovery()
    world.prover.fates["20.0.0.1"] = reason
    await world.register(proofs, make_entry("relay", address="20.0.0.1:80"))
    assert proofs.stats()[f"proofs_{reason}"] == 1 and await world.listed(proofs) == []


@sync
async def test_a_silent_host_costs_its_time_and_no_more(memory_world: World, make_entry: Any) -> None:
    world = memory_world
    proofs = world.discovery(timeout_s=3.0)
    world.prover.fates["20.0.0.1"] = None
    await world.register(proofs, make_entry("relay", address="20.0.0.1:80"))
    await world.advance(4)
    assert proofs.results["timeout"] == 1


@sync
async def test_a_prover_with_a_fault_costs_one_proof(memory_world: World, make_entry: Any, logged_errors: Any) -> None:
    world = memory_world
    proofs = world.discovery()
    world.prover.fates["20.0.0.1"] = ValueError("a fault")
    await world.register(proofs, make_entry("relay", address="20.0.0.1:80"))
    await world.register(proofs, make_entry("other", address="20.0.1.1:80"))
    assert await world.listed(proofs) == ["20.0.1.1:80"]
    assert len(logged_errors.flush(ValueError)) == 1


@sync
async def test_names_are_proved_where_they_lead(memory_world: World, make_entry: Any) -> None:
    world = memory_world
    proofs = world.discovery()
    world.prover.names = {
        "good.example": ["20.0.0.1"],
        "inside.example": ["10.0.0.1"],
        "mixed.example": ["20.0.0.2", "127.0.0.1"],
        "nowhere.example": [],
        "slow.example": Deferred(),
    }
    for name in world.prover.names:
        await world.register(proofs, make_entry(name, address=f"{name}:80"))
    await world.advance(5)
    assert await world.listed(proofs) == ["good.example:80"]
    assert list(proofs.networks("dmsg")) == ["20.0.0.0/24"]
    assert proofs.results == {"ok": 1, "not_global": 2, "no_address": 1, "timeout": 1}
    assert world.prover.asked == {"20.0.0.1": 1}
    world.prover.names["slow.example"].errback(OSError("late, after the proof has ended"))


@sync
async def test_a_name_with_several_addresses_is_tried_at_each_in_turn(memory_world: World, make_entry: Any) -> None:
    world = memory_world
    proofs = world.discovery()
    world.prover.names["two.example"] = ["20.0.0.1", "20.0.1.1"]
    world.prover.fates["20.0.0.1"] = "unreachable"
    await world.register(proofs, make_entry("relay", address="two.example:80"), "20.0.1.1")
    await world.until(lambda: proofs.stats()["relays_listed"] == 1)
    assert list(proofs.networks("dmsg")) == ["20.0.1.0/24"]


@sync
@pytest.mark.parametrize("fate", ["refused", "unreachable"])
async def test_a_relay_stays_listed_where_one_address_of_its_name_leads_to_it(
    memory_world: World, make_entry: Any, fate: str
) -> None:
    """A name with an address of IPv6, say, and a relay behind it that listens with IPv4 only."""
    world = memory_world
    proofs = world.discovery()
    world.prover.names["two.example"] = ["20.0.0.1", "20.0.1.1"]
    world.prover.fates["20.0.0.1"] = fate
    await world.register(proofs, make_entry("relay", address="two.example:80"))
    await world.until(lambda: proofs.stats()["relays_listed"] == 1)
    for sequence in range(1, 4):
        for _ in range(200):
            await world.advance(1)
            assert list(proofs.networks("dmsg")) == ["20.0.1.0/24"]
        await world.register(proofs, make_entry("relay", sequence, address="two.example:80"))
    assert world.prover.asked["20.0.0.1"] == 1 and world.prover.asked["20.0.1.1"] >= 3
    world.prover.fates |= {"20.0.0.1": "ok", "20.0.1.1": "refused"}
    await world.until(lambda: list(proofs.networks("dmsg")) == ["20.0.0.0/24"])


@sync
async def test_an_address_that_another_discovery_takes_is_not_listed_here(memory_world: World, make_entry: Any) -> None:
    """Two discoveries with one store, of which one takes private addresses: the other has not proved such an address."""
    world = memory_world
    proofs = world.discovery()
    await world.register(proofs, make_entry("relay", address="20.0.0.1:80"))
    assert await world.listed(proofs) == ["20.0.0.1:80"]
    await world.store.put(make_entry("relay", 1, address="10.0.0.1:80"), world.now_ns())
    assert await world.listed(proofs) == []


@sync
async def test_a_relay_stays_listed_when_its_name_s_addresses_come_in_another_order(
    memory_world: World, make_entry: Any
) -> None:
    world = memory_world
    proofs = world.discovery()
    names = world.prover.names["two.example"] = ["20.0.0.1", "20.0.1.1"]
    world.prover.fates["20.0.0.1"] = "refused"
    await world.register(proofs, make_entry("relay", address="two.example:80"))
    await world.until(lambda: proofs.stats()["relays_listed"] == 1)
    names.reverse()
    for _ in range(250):
        await world.advance(1)
        assert list(proofs.networks("dmsg")) == ["20.0.1.0/24"]
    assert world.prover.asked["20.0.0.1"] == 1 and world.prover.asked["20.0.1.1"] >= 2


@sync
async def test_each_protocol_has_a_prover_and_a_list_of_its_own(world: World, make_entry: Any) -> None:
    """Relays at good and bad places, of two protocols with a prover and one without: proved by their own, or never."""
    other = FakeProver()
    other.fates["20.0.4.1"] = "wrong_key"
    world.provers["messaging"] = other
    for n, version in enumerate(("0.0.1", "0.0.1", "0.0.1+messaging", "0.1.0+messaging", "0.0.1+messaging", "0.0.1+x")):
        await world.store.put(make_entry(f"relay {n}", address=f"20.0.{n}.1:80", version=version), world.now_ns())
    world.prover.fates["20.0.1.1"] = "refused"
    proofs = world.discovery()
    await world.until(lambda: proofs.stats()["relays_known"] == 5 and proofs.stats()["proofs_waiting"] == 0)
    await world.quiet(proofs)
    assert set(world.prover.asked) == {"20.0.0.1", "20.0.1.1"} and set(other.asked) == {
        f"20.0.{n}.1" for n in (2, 3, 4)
    }
    assert await world.listed(proofs) == ["20.0.0.1:80"]
    assert await world.listed(proofs, "messaging") == ["20.0.2.1:80", "20.0.3.1:80"]
    assert await world.listed(proofs, "x") == []
    assert proofs.stats()["relays_listed"] == 3


@sync
async def test_a_relay_that_speaks_something_else_is_proved_anew(memory_world: World, make_entry: Any) -> None:
    world = memory_world
    other = world.provers["messaging"] = FakeProver()
    proofs = world.discovery()
    await world.register(proofs, make_entry("relay", address="20.0.0.1:80"))
    await world.quiet(proofs)
    other.fates["20.0.0.1"] = "wrong_key"
    await world.register(proofs, make_entry("relay", 1, address="20.0.0.1:80", version="0.0.1+messaging"))
    await world.quiet(proofs)
    assert other.asked == {"20.0.0.1": 1}
    assert await world.listed(proofs) == await world.listed(proofs, "messaging") == []
    await world.register(proofs, make_entry("relay", 2, address="20.0.0.1:80", version="0.0.1+unknown"))
    assert not proofs.is_proved(make_entry("relay").static)
    await world.register(proofs, make_entry("relay", 3, address="20.0.0.1:80"))
    await world.until(lambda: proofs.is_proved(make_entry("relay").static))
    assert await world.listed(proofs) == ["20.0.0.1:80"]


class Failing(MemoryStore):
    failing = True

    def available_keys(self, limit: int, now_ns: int, protocol: str = "dmsg") -> Any:
        if self.failing:
            return fail(DiscoveryUnavailable("down"))
        return super().available_keys(limit, now_ns, protocol)


@sync
async def test_a_store_that_fails_is_read_later(reactor: Any, memory_world: World, make_entry: Any) -> None:
    world = memory_world
    world.store = Failing(random=random.Random(1))
    await world.store.put(make_entry("relay", address="20.0.0.1:80"), world.now_ns())
    proofs = world.discovery()
    await world.advance(1)
    with pytest.raises(DiscoveryUnavailable):  # not an empty list: clients would forget the relays they know
        await world.listed(proofs)
    world.store.failing = False
    await world.until(lambda: proofs.stats()["relays_listed"] == 1)
    world.store.failing = True
    await world.register(proofs, make_entry("relay", 1, address="20.0.0.1:80", available=0))
    assert await world.listed(proofs) == [], "now it is known that there is none"


@sync
async def test_why_the_store_cannot_be_read_at_the_start_is_logged_once(memory_world: World) -> None:
    world = memory_world
    world.store = Failing(random=random.Random(1))
    with capturedLogs() as lines:
        proofs = world.discovery()
        await world.advance(60)
        with pytest.raises(DiscoveryUnavailable):
            await world.listed(proofs)
    assert [formatEvent(line) for line in lines] == ["relays could not be read from the store: down"]


@sync
async def test_stopping_gives_up_what_is_under_way(memory_world: World, make_entry: Any) -> None:
    world = memory_world
    proofs = world.discovery()
    world.prover.fates["20.0.0.1"] = None
    await world.register(proofs, make_entry("relay", address="20.0.0.1:80"))
    answer = Deferred.fromCoroutine(world.listed(proofs))  # waits for the first proof
    assert not answer.called
    gone = proofs.quiet()
    gone.addErrback(lambda _: None).cancel()
    await proofs.stop()
    assert await answer == []
    proofs.offer(make_entry("late", address="20.0.1.1:80"))
    assert not world.clock.getDelayedCalls()


# --- with ranks --------------------------------------------------------------------------------------------------------


def _ranks(scores: dict[bytes, int], now_ns: int) -> Ranks:
    issuer: Any = None
    return Ranks(now_ns // NS, 1000, 500, issuer, scores, b"", b"")


@pytest.mark.parametrize("proving", [True, False])
@sync
async def test_relays_without_a_rank_share_a_quarter_of_the_list(
    memory_world: World, make_entry: Any, proving: bool
) -> None:
    world = memory_world
    proofs = world.discovery(proof_burst=1000.0)
    ranked = [make_entry(f"ranked {at}", address=f"20.{at}.0.1:80") for at in range(60)]
    others = [make_entry(f"other {at}", address=f"30.{at}.0.1:80") for at in range(200)]
    crowd = [make_entry(f"crowd {at}", address=f"40.0.0.{at + 1}:80") for at in range(20)]
    for entry in (*ranked, *others, *crowd):
        await world.register(proofs, entry, entry.server.host_port.host)
    document = _ranks({entry.static.raw: 600 for entry in (*ranked, *crowd)}, world.now_ns())
    listing = world.listing(proofs if proving else None, document)
    for _ in range(20):
        listed = [entry.server.host_port.host for entry in await listing.servers(64, world.now_ns())]
        assert len(listed) == 64
        assert sum(host.startswith("30.") for host in listed) == 16
        assert sum(host.startswith("40.") for host in listed) <= NETWORK_LIMIT
    few = _ranks({ranked[0].static.raw: 600}, world.now_ns())
    listed = await world.listing(proofs if proving else None, few).servers(64, world.now_ns())
    assert len(listed) == 17 and ranked[0] in listed
    nothing = _ranks({b"\x02" + bytes(32): 600}, world.now_ns())
    listed = await world.listing(proofs if proving else None, nothing).servers(64, world.now_ns())
    assert len(listed) == 64, "ranks of unlisted relays change nothing"


@sync
async def test_without_proofs_the_rule_of_networks_holds_too(world: World, make_entry: Any) -> None:
    for at in range(30):
        await world.store.put(make_entry(f"sybil {at}", address=f"66.66.66.{at}:80"), world.now_ns())
        await world.store.put(make_entry(f"named {at}", address=f"r{at}.example:80"), world.now_ns())
    for at in range(5):
        await world.store.put(make_entry(f"honest {at}", address=f"20.0.{at}.1:80"), world.now_ns())
    listed = [entry.server.address for entry in await world.listing(None).servers(64, world.now_ns())]
    assert sum(one.startswith("66.") for one in listed) == sum("example" in one for one in listed) == NETWORK_LIMIT
    assert sum(one.startswith("20.") for one in listed) == 5


@sync
async def test_a_long_ranked_store_is_sampled_without_proofs(memory_world: World, make_entry: Any) -> None:
    world = memory_world
    template = make_entry("sybil", address="30.0.0.1:80").to_json()
    for at in range(1200):
        await world.store.put(_sybil(template, at), world.now_ns())
    best = make_entry("best", address="20.0.0.1:80")
    await world.store.put(best, world.now_ns())
    listing = world.listing(None, _ranks({best.static.raw: 1000}, world.now_ns()))
    for _ in range(3):  # made once, then used again
        listed = await listing.servers(64, world.now_ns())
        assert best in listed and len(listed) == 17
