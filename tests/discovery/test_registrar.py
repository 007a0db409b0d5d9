"""The registrar against a discovery in memory that can be made to fail in every way the reference stumbles over."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import pytest_twisted
from twisted.internet import defer, task
from twisted.logger import formatEvent, globalLogPublisher
from zope.interface import implementer

from dmsg.address import HostPort
from dmsg.discovery.entry import ClientPart, Entry
from dmsg.discovery.errors import (
    DiscoveryUnavailable,
    EntryNotFound,
    EntryRolledBack,
    NonZeroSequence,
    Unauthorized,
    WrongSequence,
)
from dmsg.discovery.registrar import EntryRegistrar
from dmsg.discovery.stores.memory import MemoryStore
from dmsg.discovery.stores.rules import StoreLimits
from dmsg.interfaces import IDiscovery

START_NS = 1_600_000_000 * 10**9
RELAY = HostPort("10.0.0.1", 8080)


@implementer(IDiscovery)
class FakeDiscovery:
    """A memory store as ``IDiscovery``. ``trouble`` is asked before each call and may raise; ``gate`` holds calls up."""

    def __init__(self, clock: task.Clock) -> None:
        self.clock = clock
        self.store = MemoryStore()
        self.calls: list[tuple[str, Any]] = []
        self.trouble: Callable[[str, Any], None] = lambda call, what: None
        self.after: Callable[[str, Any], None] = lambda call, what: None
        self.gate: defer.Deferred[None] | None = None
        self.hints = True

    def now_ns(self) -> int:
        return START_NS + int(self.clock.seconds() * 10**9)

    async def _begin(self, call: str, what: Any) -> None:
        self.calls.append((call, what))
        if self.gate is not None:
            await self.gate
        self.trouble(call, what)

    async def get_entry(self, public_key: Any) -> Entry:
        await self._begin("get", public_key)
        try:
            return await self.store.get(public_key, self.now_ns())
        except EntryNotFound:
            if self.hints:
                raise
            raise EntryNotFound from None

    async def post_entry(self, entry: Entry) -> None:
        await self._begin("post", entry)
        entry.validate()
        entry.verify()
        await self.store.put(entry, self.now_ns())
        self.after("post", entry)

    async def available_servers(self) -> list[Entry]:
        raise AssertionError("a registrar has no use for that")

    @property
    def posts(self) -> list[Entry]:
        return [what for call, what in self.calls if call == "post"]


class World:
    def __init__(self, key: Any) -> None:
        self.clock = task.Clock()
        self.discovery = FakeDiscovery(self.clock)
        self.key = key
        self.registrars: list[EntryRegistrar] = []
        self.registrar = self.new()

    def new(self, **options: Any) -> EntryRegistrar:
        registrar = EntryRegistrar(
            self.discovery,
            self.key,
            clock=self.clock,
            random=random.Random(5),
            **{"now_ns": self.discovery.now_ns, **options},
        )
        self.registrars.append(registrar)
        return registrar

    async def stored(self) -> Entry:
        return await self.discovery.store.get(self.key.public_key, self.discovery.now_ns())

    def run(self, seconds: float, step: float = 0.1) -> None:
        for _ in range(round(seconds / step)):
            self.clock.advance(step)


@pytest.fixture
def world(key_of: Any) -> Iterator[World]:
    made = World(key_of("me"))
    yield made
    for registrar in made.registrars:
        pytest_twisted.blockon(defer.Deferred.fromCoroutine(registrar.close()))
    assert made.clock.getDelayedCalls() == []


@pytest.fixture
def keys(key_of: Any) -> list[Any]:
    return sorted(key_of(f"relay {n}").public_key for n in range(4))


# --- the ordinary course -----------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_first_entry(world: World, keys: Any) -> None:
    world.registrar.set_client([keys[1], keys[0], keys[1]])
    waiting = defer.Deferred.fromCoroutine(world.registrar.published())
    world.run(0.1)
    assert world.discovery.calls == []
    world.run(0.1)
    await waiting
    entry = await world.stored()
    assert (entry.version, entry.sequence, entry.client) == ("0.0.1", 0, ClientPart((keys[0], keys[1])))
    assert entry.server is None
    assert world.registrar.entry == entry
    assert [call for call, _ in world.discovery.calls] == ["get", "post"]


@pytest.mark.parametrize("is_stored", [True, False])
@pytest_twisted.ensureDeferred
async def test_what_is_changed_and_changed_back_is_published_again_when_a_post_had_no_answer(
    world: World, keys: Any, is_stored: bool
) -> None:
    world.registrar.set_client(keys[:1])
    world.run(1)

    def trouble(call: str, what: Any) -> None:
        if call == "post":
            world.discovery.trouble = world.discovery.after = lambda call, what: None
            raise DiscoveryUnavailable

    setattr(world.discovery, "after" if is_stored else "trouble", trouble)
    world.registrar.set_client(keys[:2])
    world.run(0.3)
    world.registrar.set_client(keys[:1])
    world.run(3)
    await world.registrar.published()
    assert (await world.stored()).client == ClientPart(tuple(keys[:1]))


@pytest_twisted.ensureDeferred
async def test_changes_are_gathered_and_no_change_is_none(world: World, keys: Any) -> None:
    for n in range(1, 4):
        world.registrar.set_client(keys[:n])
        world.run(0.05, 0.05)
    world.run(1)
    assert [entry.client.delegated_servers for entry in world.discovery.posts] == [tuple(keys[:3])]
    world.registrar.set_client(reversed(keys[:3]))
    world.run(5)
    assert len(world.discovery.posts) == 1
    world.registrar.set_client(keys[:1])
    world.registrar.set_client(keys[:3])
    world.run(5)
    await world.registrar.published()
    assert len(world.discovery.posts) == 1  # changed and changed back


@pytest_twisted.ensureDeferred
async def test_constant_change_is_not_put_off_for_ever(world: World, keys: Any) -> None:
    for n in range(40):
        world.registrar.set_client(keys[: 1 + n % 3])
        world.run(0.05, 0.05)
    assert 5 <= len(world.discovery.posts) <= 10


@pytest_twisted.ensureDeferred
async def test_iterations_count_up_and_their_times_too(world: World, keys: Any) -> None:
    for n in range(4):
        world.registrar.set_client(keys[:n])
        world.run(1)
    assert [entry.sequence for entry in world.discovery.posts] == [0, 1, 2, 3]
    times = [entry.timestamp for entry in world.discovery.posts]
    assert times == sorted(set(times))
    assert [call for call, _ in world.discovery.calls].count("get") == 1  # afterwards it knows


@pytest_twisted.ensureDeferred
async def test_times_rise_although_the_clock_was_set_back(world: World, keys: Any) -> None:
    frozen = EntryRegistrar(
        world.discovery, world.key, clock=world.clock, now_ns=lambda: -(10**18), random=random.Random(1)
    )
    world.registrars.append(frozen)
    world.registrar.set_client(keys)
    world.run(1)
    before = await world.stored()
    for n in range(3):
        frozen.set_client(keys[:n])
        world.run(1)
    times = [before.timestamp] + [entry.timestamp for entry in world.discovery.posts[1:]]
    assert times == [before.timestamp + n for n in range(4)]


@pytest_twisted.ensureDeferred
async def test_a_server_is_posted_again_before_it_expires(world: World) -> None:
    world.registrar.set_server(RELAY, 10)
    world.run(1000, 1.0)
    assert 15 <= len(world.discovery.posts) <= 20
    entry = await world.stored()
    assert (entry.server.address, entry.server.available_connections) == ("10.0.0.1:8080", 10)
    world.registrar.set_server(RELAY, 9)
    world.run(1)
    assert (await world.stored()).server.available_connections == 9


@pytest_twisted.ensureDeferred
async def test_a_client_is_looked_at_and_posted_again_only_if_lost(world: World, keys: Any) -> None:
    world.registrar.set_client(keys)
    world.run(1000, 1.0)
    assert len(world.discovery.posts) == 1
    assert 3 <= len(world.discovery.calls) <= 7
    world.discovery.store = MemoryStore()
    world.run(400, 1.0)
    entry = await world.stored()
    assert (entry.sequence, entry.client) == (0, ClientPart(tuple(keys)))
    assert entry.timestamp > world.discovery.posts[0].timestamp


@pytest_twisted.ensureDeferred
async def test_published_waits_for_what_is_wanted_last(world: World, keys: Any) -> None:
    await world.registrar.published()  # nothing is wanted
    world.registrar.set_client(keys[:1])
    world.discovery.gate = defer.Deferred()
    world.run(1)
    world.registrar.set_client(keys[:2])  # while the first is under way
    waiting = defer.Deferred.fromCoroutine(world.registrar.published())
    gate, world.discovery.gate = world.discovery.gate, None
    gate.callback(None)
    assert not waiting.called
    world.run(1)
    await waiting
    assert (await world.stored()).client == ClientPart(tuple(keys[:2]))


@pytest_twisted.ensureDeferred
async def test_the_version_is_a_parameter(world: World, keys: Any) -> None:
    world.registrar.set_client(keys)
    world.run(1)
    secure = world.new(version="0.1.0")
    secure.set_client(keys)
    world.run(1)
    assert ((await world.stored()).version, (await world.stored()).sequence) == ("0.1.0", 1)


# --- several services with one key ---------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_services_with_one_key_publish_the_relays_of_all(world: World, keys: Any) -> None:
    secure, messaging = world.registrar.publisher("0.1.0"), world.registrar.publisher()
    messaging.set_client([keys[2], keys[1]])
    world.run(1)
    assert ((await world.stored()).version, (await world.stored()).delegated_servers) == ("0.0.1", (keys[1], keys[2]))
    secure.set_client([keys[0], keys[1]])
    world.run(1)
    entry = await world.stored()
    assert (entry.version, entry.sequence, entry.delegated_servers) == ("0.1.0", 1, (keys[0], keys[1], keys[2]))
    assert entry == secure.entry == messaging.entry == world.registrar.entry and secure.public_key == entry.static
    messaging.set_client([])
    world.run(1)
    assert (await world.stored()).delegated_servers == (keys[0], keys[1])
    await secure.published()
    for service in (secure, messaging):
        await service.close()


@pytest_twisted.ensureDeferred
async def test_a_service_that_ends_takes_its_part_and_the_last_withdraws_the_entry(world: World, keys: Any) -> None:
    secure, messaging = world.registrar.publisher("0.1.0"), world.registrar.publisher()
    secure.set_client(keys[:2])
    messaging.set_client(keys[2:3])
    world.run(1)
    await secure.close(withdraw=True)
    secure.set_client(keys)  # its sessions end now: it has no say any more
    await secure.close(withdraw=True)
    world.run(1)
    entry = await world.stored()
    assert (entry.version, entry.delegated_servers) == ("0.0.1", (keys[2],))
    await messaging.close(withdraw=True)
    assert (await world.stored()).delegated_servers == ()
    assert world.clock.getDelayedCalls() == []


@pytest_twisted.ensureDeferred
async def test_a_relay_and_a_client_of_one_program_share_an_entry(world: World, keys: Any) -> None:
    client = world.registrar.publisher("0.1.0")
    world.registrar.set_server(RELAY, 5, protocol="messaging")
    client.set_client(keys[:1])
    world.run(1)
    entry = await world.stored()
    assert (entry.version, entry.protocol, entry.server.available_connections) == ("0.1.0+messaging", "messaging", 5)
    await world.registrar.close(withdraw=True)
    world.run(1)
    entry = await world.stored()
    assert entry.server.available_connections == 0 and entry.delegated_servers == (keys[0],)
    await client.close()
    assert await world.stored() == entry, "it was not asked to withdraw"


@pytest_twisted.ensureDeferred
async def test_a_half_of_another_program_keeps_its_part_of_the_version(world: World, keys: Any) -> None:
    """A client that promises end-to-end security and a relay of the messaging system, two programs with one key."""
    client, relay = world.new(version="0.1.0"), world.new()
    client.set_client(keys[:1])
    world.run(1)
    assert (await world.stored()).version == "0.1.0"
    relay.set_server(RELAY, 3, protocol="messaging")
    world.run(1)
    assert (await world.stored()).version == "0.1.0+messaging"
    client.set_client(keys[:2])
    world.run(400)
    assert (await world.stored()).version == "0.1.0+messaging" and (await world.stored()).server is not None
    relay.set_server(None)
    world.run(1)
    assert (await world.stored()).version == "0.1.0"


# --- another program with the same key ----------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_the_other_half_is_kept(world: World, keys: Any) -> None:
    other = world.new()
    other.set_server(RELAY, 3)
    world.run(1)
    world.registrar.set_client(keys)
    world.run(1)
    other.set_server(RELAY, 2)
    world.run(1)
    world.registrar.set_client(keys[:1])
    world.run(1)
    entry = await world.stored()
    assert entry.client == ClientPart(tuple(keys[:1]))
    assert (entry.server.address, entry.server.available_connections) == ("10.0.0.1:8080", 2)
    world.registrar.set_server(None)
    world.run(1)
    assert (await world.stored()).server is None
    other.set_client(keys[:2])
    world.run(1)
    entry = await world.stored()
    assert (entry.server is not None, entry.client) == (True, ClientPart(tuple(keys[:2])))


@pytest.mark.parametrize("withdraw", [True, False])
@pytest_twisted.ensureDeferred
async def test_a_relay_that_is_gone_takes_its_client_half_along_for_a_minute_at_most(
    world: World, keys: Any, withdraw: bool
) -> None:
    """A server half lets an entry expire after five minutes, and it is the client alone that looks after it."""
    relay = world.new()
    relay.set_server(RELAY, 3)
    world.run(1)
    world.registrar.set_client(keys)
    world.run(1)
    await relay.close(withdraw=withdraw)
    missing = 0
    for _ in range(7200):
        world.clock.advance(1.0)
        try:
            await world.stored()
        except EntryNotFound:
            missing += 1
    assert 0 < missing <= 61
    entry = await world.stored()
    assert entry.client == ClientPart(tuple(keys)) and entry.server is None


@pytest.mark.parametrize("address", [RELAY, HostPort("10.0.0.2", 8080)])
@pytest_twisted.ensureDeferred
async def test_a_relay_that_stops_leaves_the_entry_of_the_one_that_runs_in_its_place(
    world: World, address: HostPort
) -> None:
    world.registrar.set_server(RELAY, 5)
    world.run(1)
    later = world.new()
    later.set_server(address, 5)
    world.run(50)
    later.set_server(address, 4)
    world.run(1)
    later.set_server(address, 5)
    world.run(1)
    await world.registrar.close(withdraw=True)
    entry = await world.stored()
    assert (entry.server.address, entry.server.available_connections) == (str(address), 5)


async def replace_client(world: World, keys: Any, relays: int) -> EntryRegistrar:
    """Start a second client with other relays than the first, and then ``relays`` of them; then stop the first."""
    world.registrar.set_client(keys[:1])
    world.run(1)
    later = world.new()
    later.set_client(keys[1:3])
    world.run(1)
    later.set_client(keys[:relays])
    world.run(1)
    await world.registrar.close(withdraw=True)
    return later


@pytest.mark.parametrize("relays", [1, 2])
@pytest_twisted.ensureDeferred
async def test_a_client_that_stops_leaves_the_entry_of_the_one_that_runs_in_its_place(
    world: World, keys: Any, relays: int
) -> None:
    await replace_client(world, keys, relays)
    assert (await world.stored()).client == ClientPart(tuple(keys[:relays]))


@pytest.mark.parametrize("relays", [1, 2])
@pytest_twisted.ensureDeferred
async def test_a_client_that_left_the_entry_alone_publishes_its_own_again_when_it_goes_on(
    world: World, keys: Any, relays: int
) -> None:
    later = await replace_client(world, keys, relays)
    await later.close(withdraw=True)
    assert (await world.stored()).client == ClientPart(())
    world.registrar.reopen()
    world.registrar.set_client(keys[:1])
    published = defer.Deferred.fromCoroutine(world.registrar.published())
    world.run(1)
    await published
    assert (await world.stored()).client == ClientPart(tuple(keys[:1]))


@pytest.mark.parametrize("has_posted", [True, False])
@pytest_twisted.ensureDeferred
async def test_what_goes_on_leaves_the_entry_of_another_alone_until_it_has_something_to_publish(
    world: World, keys: Any, has_posted: bool
) -> None:
    world.registrar.set_client(keys[:1])
    world.run(1 if has_posted else 0)
    world.new().set_client(keys[1:])
    world.run(1)
    await world.registrar.close(withdraw=True)
    world.registrar.reopen()
    world.run(60)
    assert (await world.stored()).client == ClientPart(tuple(keys[1:]))


@pytest.mark.parametrize("is_server", [True, False])
@pytest_twisted.ensureDeferred
async def test_what_goes_on_after_discovery_has_lost_its_entry_publishes_it_at_once(
    world: World, keys: Any, is_server: bool
) -> None:
    """It was closed without a withdrawal, and discovery may have lost the entry meanwhile, or have one of another process."""
    if is_server:
        world.registrar.set_server(RELAY, 5)
    else:
        world.registrar.set_client(keys)
    world.run(1)
    await world.registrar.close()
    world.discovery.store = MemoryStore()
    world.registrar.reopen()
    published = defer.Deferred.fromCoroutine(world.registrar.published())
    world.run(1)
    assert published.called and await world.stored() == world.discovery.posts[-1]


@pytest.mark.parametrize("withdraw", [True, False])
@pytest.mark.parametrize("is_server", [True, False])
@pytest_twisted.ensureDeferred
async def test_what_goes_on_with_nothing_to_offer_keeps_its_entry(
    world: World, is_server: bool, withdraw: bool
) -> None:
    """A relay that is full, or a client that has lost all its relays: what it publishes looks as if it was withdrawn."""

    def publish() -> None:
        if is_server:
            world.registrar.set_server(RELAY, 0)
        else:
            world.registrar.set_client([])

    publish()
    await world.registrar.close(withdraw=withdraw)  # before the first post
    world.registrar.reopen()
    publish()
    published = defer.Deferred.fromCoroutine(world.registrar.published())
    world.run(1)
    assert published.called
    await world.registrar.close(withdraw=withdraw)
    world.registrar.reopen()
    publish()
    world.run(4000, 10)
    assert len(world.discovery.posts) > (60 if is_server else 1)
    assert await world.stored() == world.discovery.posts[-1]


@pytest_twisted.ensureDeferred
async def test_what_is_published_again_by_who_went_on_is_left_by_the_other_one(world: World, keys: Any) -> None:
    world.registrar.set_client(keys)
    world.run(1)
    other = world.new()
    other.set_client(keys)
    world.run(1)
    await world.registrar.close(withdraw=True)
    world.registrar.reopen()
    world.registrar.set_client(keys)
    world.run(1)
    await other.close(withdraw=True)
    assert (await world.stored()).client == ClientPart(tuple(keys))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("is_server", [True, False])
@pytest_twisted.ensureDeferred
async def test_what_stops_leaves_the_entry_of_another_though_its_own_last_post_is_later_and_has_failed(
    world: World, keys: Any, first: bool, is_server: bool
) -> None:
    """Of its successor, or of one that runs on when the new one was not let in."""

    def publish(who: EntryRegistrar, number: int) -> None:
        if is_server:
            who.set_server(RELAY, number)
        else:
            who.set_client(keys[:number])
        world.run(1)

    def trouble(call: str, what: Any) -> None:
        if call == "post":
            raise DiscoveryUnavailable

    other = world.new()
    if first:
        publish(world.registrar, 1)
    publish(other, 2)
    world.discovery.trouble = trouble
    publish(world.registrar, 3)
    world.discovery.trouble = lambda call, what: None
    await world.registrar.close(withdraw=True)
    entry = await world.stored()
    assert (entry.server.available_connections if is_server else len(entry.delegated_servers)) == 2


@pytest.mark.parametrize("failed", [1, 3])
@pytest_twisted.ensureDeferred
async def test_what_stops_withdraws_what_it_has_posted_without_an_answer(world: World, keys: Any, failed: int) -> None:
    """It has posted other things in vain after that."""

    def trouble(call: str, what: Any) -> None:
        if len(world.discovery.posts) > 1 or call == "get":
            raise DiscoveryUnavailable

    def lost(call: str, what: Any) -> None:
        raise DiscoveryUnavailable

    world.discovery.after = lost
    world.registrar.set_client(keys[:1])
    world.run(0.5)
    world.discovery.trouble = trouble
    for number in range(failed):
        world.registrar.set_client(keys[: number + 2])
        world.run(90)
    assert (await world.stored()).delegated_servers == tuple(keys[:1])
    world.discovery.trouble = world.discovery.after = lambda call, what: None
    await world.registrar.close(withdraw=True)
    assert (await world.stored()).client == ClientPart(())


@pytest_twisted.ensureDeferred
async def test_a_relay_that_stops_withdraws_its_half_of_what_its_client_has_published_since(
    world: World, keys: Any
) -> None:
    relay = world.new()
    relay.set_server(RELAY, 3)
    world.run(1)
    world.registrar.set_client(keys)
    world.run(1)
    await relay.close(withdraw=True)
    entry = await world.stored()
    assert (entry.server.available_connections, entry.client) == (0, ClientPart(tuple(keys)))


@pytest.mark.parametrize("stops", ["relay", "client"])
@pytest_twisted.ensureDeferred
async def test_what_stops_withdraws_its_half_though_its_last_post_has_failed_and_the_other_half_was_posted_since(
    world: World, keys: Any, stops: str
) -> None:
    relay = world.new()
    relay.set_server(RELAY, 3)
    world.run(1)
    world.registrar.set_client(keys[:1])
    world.run(1)
    stopping = relay if stops == "relay" else world.registrar

    def trouble(call: str, what: Any) -> None:
        raise DiscoveryUnavailable

    def change(who: EntryRegistrar) -> None:
        if who is relay:
            relay.set_server(RELAY, 2)
        else:
            world.registrar.set_client(keys[:2])
        world.run(0.3)

    world.discovery.trouble = trouble
    change(stopping)
    world.discovery.trouble = lambda call, what: None
    change(world.registrar if stopping is relay else relay)
    await stopping.close(withdraw=True)
    entry = await world.stored()
    expected = (0, ClientPart(tuple(keys[:2]))) if stopping is relay else (2, ClientPart(()))
    assert (entry.server.available_connections, entry.client) == expected


@pytest_twisted.ensureDeferred
async def test_a_relay_that_is_there_again_finds_its_client_half(world: World, keys: Any) -> None:
    relay = world.new()
    relay.set_server(RELAY, 3)
    world.run(1)
    world.registrar.set_client(keys)
    world.run(120)

    def down(call: str, what: Any) -> None:
        raise DiscoveryUnavailable

    world.discovery.trouble = down
    world.run(600, 1.0)
    world.discovery.trouble = lambda call, what: None
    world.run(120)
    entry = await world.stored()
    assert entry.client == ClientPart(tuple(keys)) and entry.server is not None


@pytest_twisted.ensureDeferred
async def test_an_entry_left_by_an_earlier_run_goes_on(world: World, keys: Any) -> None:
    world.registrar.set_client(keys)
    world.run(1)
    again = world.new()
    again.set_client(keys)
    world.run(1)
    await again.published()
    assert (await world.stored()).sequence == 1
    again.set_client(keys[:1])
    world.run(1)
    assert (await world.stored()).sequence == 2


@pytest.mark.parametrize("is_server", [True, False])
@pytest_twisted.ensureDeferred
async def test_an_entry_that_is_there_as_wanted_is_published_though_discovery_takes_no_posts(
    world: World, keys: Any, is_server: bool
) -> None:
    """As while its disk is full, when the program is started again. It is posted once that is possible."""

    def publish(who: EntryRegistrar) -> None:
        if is_server:
            who.set_server(RELAY, 5)
        else:
            who.set_client(keys)
        world.run(1)

    def trouble(call: str, what: Any) -> None:
        if call == "post":
            raise DiscoveryUnavailable

    publish(world.registrar)
    await world.registrar.close()
    world.discovery.trouble = trouble
    again = world.new()
    publish(again)
    published = defer.Deferred.fromCoroutine(again.published())
    assert published.called and again.problem and (await world.stored()).sequence == 0
    world.discovery.trouble = lambda call, what: None
    world.run(5)
    assert not again.problem and (await world.stored()).sequence == 1


@pytest_twisted.ensureDeferred
async def test_an_entry_that_is_there_as_wanted_is_published_while_discovery_does_not_answer_the_post(
    world: World, keys: Any
) -> None:
    """As while its disk hangs."""
    world.registrar.set_client(keys)
    world.run(1)
    again = world.new()
    again.set_client(keys)
    published = defer.Deferred.fromCoroutine(again.published())

    def trouble(call: str, what: Any) -> None:
        world.discovery.gate = world.discovery.gate or defer.Deferred()  # from the next call on

    world.discovery.trouble = trouble
    world.run(1)
    assert [call for call, _ in world.discovery.calls[-2:]] == ["get", "post"]
    assert published.called


@pytest_twisted.ensureDeferred
async def test_who_closes_when_the_entry_is_found_to_be_there_posts_nothing_after_that(world: World, keys: Any) -> None:
    world.registrar.set_client(keys)
    world.run(1)
    again = world.new()
    again.set_client(keys)
    published = defer.Deferred.fromCoroutine(again.published())
    published.addCallback(lambda _: defer.Deferred.fromCoroutine(again.close(withdraw=True)))
    world.run(10)
    await published
    assert [call for call, _ in world.discovery.calls] == ["get", "post", "get"]
    assert await world.stored() == world.discovery.posts[0]


@pytest.mark.parametrize("overlap_s", [1, 1800])
@pytest_twisted.ensureDeferred
async def test_a_client_leaves_the_entry_of_its_successor_that_has_the_same_relays(
    world: World, keys: Any, overlap_s: float
) -> None:
    world.registrar.set_client(keys)
    world.run(60)
    world.new().set_client(keys)
    world.run(overlap_s, step=1.0)
    await world.registrar.close(withdraw=True)
    assert (await world.stored()).client == ClientPart(tuple(keys))


@pytest_twisted.ensureDeferred
async def test_without_any_half_the_entry_offers_nothing(world: World) -> None:
    world.registrar.set_server(RELAY, 3)
    world.run(1)
    world.registrar.set_server(None)
    world.run(1)
    entry = await world.stored()
    assert (entry.server, entry.client) == (None, ClientPart(()))


# --- discoveries in trouble --------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_discovery_that_is_down_is_asked_ever_less_often_and_never_given_up(world: World, keys: Any) -> None:
    down = [True]

    def trouble(call: str, what: Any) -> None:
        if down[0]:
            raise DiscoveryUnavailable

    world.discovery.trouble = trouble
    world.registrar.set_client(keys)
    asked = []
    for _ in range(400):
        before = len(world.discovery.calls)
        world.run(1)
        if len(world.discovery.calls) > before:
            asked.append(world.clock.seconds())
        world.registrar.set_client(keys[: 1 + len(asked) % 3])  # change does not make it ask more often
    pauses = [b - a for a, b in itertools.pairwise(asked)]
    assert max(pauses) <= 61
    assert min(pauses[-4:]) >= 29
    assert len(asked) < 25
    assert world.discovery.posts == []  # no sequence 0 without discovery's word
    down[0] = False
    world.registrar.set_client(keys)
    world.run(61)
    await world.registrar.published()
    assert (await world.stored()).client == ClientPart(tuple(keys))


@pytest.mark.parametrize("error", [DiscoveryUnavailable(), Unauthorized(), EntryRolledBack("no entry in it")])
@pytest_twisted.ensureDeferred
async def test_no_failure_of_get_makes_it_post_sequence_0(world: World, keys: Any, error: Exception) -> None:
    def trouble(call: str, what: Any) -> None:
        if call == "get":
            raise error

    world.discovery.trouble = trouble
    world.registrar.set_client(keys)
    world.run(100)
    assert world.discovery.posts == []


@pytest_twisted.ensureDeferred
async def test_always_wrong_sequence_does_not_spin(world: World, keys: Any) -> None:
    def trouble(call: str, what: Any) -> None:
        if call == "post":
            raise WrongSequence

    world.discovery.trouble = trouble
    world.registrar.set_client(keys)
    world.run(100)
    assert 8 <= len(world.discovery.calls) < 100
    world.discovery.trouble = lambda call, what: None
    world.run(61)
    await world.registrar.published()


@pytest_twisted.ensureDeferred
async def test_an_update_under_way_by_another_program_is_built_upon(world: World, keys: Any) -> None:
    world.registrar.set_client(keys[:1])
    world.run(1)
    rival = world.new()
    rival.set_server(RELAY, 1)
    world.run(1)
    world.registrar.set_client(keys[:2])
    world.run(0.3)
    await world.registrar.published()
    entry = await world.stored()
    assert (entry.sequence, entry.client) == (2, ClientPart(tuple(keys[:2])))
    assert entry.server is not None


@pytest_twisted.ensureDeferred
async def test_an_answer_that_got_lost_is_found_out(world: World, keys: Any) -> None:
    def after(call: str, what: Any) -> None:
        raise DiscoveryUnavailable("the answer got lost")

    world.discovery.after = after
    world.registrar.set_client(keys[:1])
    world.run(0.5)
    world.discovery.after = lambda call, what: None
    world.run(5)
    await world.registrar.published()
    assert [entry.sequence for entry in world.discovery.posts] == [0]
    world.discovery.after = after
    world.registrar.set_client(keys[:2])
    world.run(0.5)
    world.discovery.after = lambda call, what: None
    world.run(5)
    await world.registrar.published()
    assert (await world.stored()).sequence == 1


@pytest.mark.parametrize("hints", [True, False])
@pytest_twisted.ensureDeferred
async def test_after_expiry_it_goes_on_by_its_own_memory(world: World, hints: bool) -> None:
    world.discovery.hints = hints
    world.registrar.set_server(RELAY, 1)
    world.run(1)

    def trouble(call: str, what: Any) -> None:
        raise DiscoveryUnavailable

    world.discovery.trouble = trouble
    world.run(600, 1.0)
    world.discovery.trouble = lambda call, what: None
    with pytest.raises(EntryNotFound):
        await world.stored()
    world.run(61)
    assert (await world.stored()).sequence == 1


@pytest_twisted.ensureDeferred
async def test_after_expiry_and_a_restart_it_goes_on_by_discoverys_hints(world: World) -> None:
    world.registrar.set_server(RELAY, 1)
    world.run(70)
    await world.registrar.close()
    world.clock.advance(1000)
    with pytest.raises(EntryNotFound):
        await world.stored()
    again = world.new()
    again.set_server(RELAY, 1)
    world.run(1)
    await again.published()
    assert (await world.stored()).sequence == 2


@pytest_twisted.ensureDeferred
async def test_a_silent_tombstone_is_met_with_its_own_memory(world: World) -> None:
    """Discovery says "not found", refuses 0, and refuses what it takes to be a jump at first."""
    world.discovery.hints = False
    world.registrar.set_server(RELAY, 1)
    world.run(1)
    refusals: list[type[Exception]] = []

    def trouble(call: str, what: Any) -> None:
        if not refusals:
            raise DiscoveryUnavailable
        if call == "post" and len(refusals) > 1:
            raise refusals.pop()

    world.discovery.trouble = trouble
    world.run(1000, 1.0)
    world.discovery.calls.clear()
    refusals += [WrongSequence, NonZeroSequence]
    world.run(61)
    # Its own memory says 1; told that this is a new key it believes that; and comes back to what it remembers.
    assert [entry.sequence for entry in world.discovery.posts[:3]] == [1, 0, 1]
    assert (await world.stored()).sequence >= 1


@pytest.mark.parametrize(
    ("sequence", "after_ns"), [(2**48, 0), (2**64 - 1, 0), (-1, 0), (5, 2**63 - 1), (5, START_NS + 400 * 86400 * 10**9)]
)
@pytest_twisted.ensureDeferred
async def test_hints_that_would_use_up_sequences_or_time_are_not_followed(
    world: World, keys: Any, sequence: int, after_ns: int
) -> None:
    def trouble(call: str, what: Any) -> None:
        raise EntryNotFound(next_sequence=sequence, after_timestamp=after_ns)

    world.discovery.trouble = trouble
    world.registrar.set_client(keys)
    world.run(50)
    assert world.discovery.posts == []
    assert "not believed" in world.registrar.problem


@pytest_twisted.ensureDeferred
async def test_an_entry_of_a_clock_that_was_years_ahead_is_posted_again_once_the_clock_is_right(
    world: World, keys: Any
) -> None:
    """It has expired. What discovery remembers of it is far in the future, and the registrar remembers it, too."""
    world.discovery.store = MemoryStore(limits=StoreLimits(base_client_ttl_s=600.0))
    ahead_ns = 800 * 86400 * 10**9
    registrar = world.new(now_ns=lambda: world.discovery.now_ns() + ahead_ns)
    registrar.set_client(keys)
    world.run(1)
    assert (await world.stored()).timestamp > START_NS + ahead_ns
    ahead_ns = 0

    def trouble(call: str, what: Any) -> None:
        raise DiscoveryUnavailable

    world.discovery.trouble = trouble
    world.run(1000, 1.0)
    world.discovery.trouble = lambda call, what: None
    with pytest.raises(EntryNotFound):
        await world.stored()
    world.run(61)
    assert (await world.stored()).sequence == 1


@pytest_twisted.ensureDeferred
async def test_a_discovery_restored_from_a_backup(world: World, keys: Any) -> None:
    other = world.new()
    other.set_server(RELAY, 1)
    world.run(1)
    backup = await world.stored()
    world.registrar.set_client(keys)
    world.run(1)
    world.discovery.store = MemoryStore()
    await world.discovery.store.put(backup, world.discovery.now_ns())

    def trouble(call: str, what: Any) -> None:
        if call == "get":
            raise EntryRolledBack(entry=backup)

    world.discovery.trouble = trouble
    world.registrar.set_client(keys[:2])
    world.run(3)
    await world.registrar.published()
    entry = await world.stored()
    assert (entry.sequence, entry.client, entry.server) == (1, ClientPart(tuple(keys[:2])), backup.server)


@pytest.mark.parametrize("has_seen_it", [True, False])
@pytest_twisted.ensureDeferred
async def test_a_client_of_which_a_restored_discovery_has_an_older_entry_posts_again_at_the_next_look(
    world: World, keys: Any, has_seen_it: bool
) -> None:
    """Others refuse the older entry, whatever is in it: an HTTP client, if it has seen the newer one itself."""
    world.registrar.set_client(keys[: 2 if has_seen_it else 1])
    world.run(1)
    backup = await world.stored()
    for number in (2, 1):
        world.registrar.set_client(keys[:number])
        world.run(1)
    posted = len(world.discovery.posts)
    world.discovery.store = MemoryStore()
    await world.discovery.store.put(backup, world.discovery.now_ns())

    def trouble(call: str, what: Any) -> None:
        if has_seen_it and call == "get":
            raise EntryRolledBack(entry=backup)

    world.discovery.trouble = trouble
    world.run(301, 1.0)
    entry = await world.stored()
    assert (entry.sequence, entry.client) == (1, ClientPart(tuple(keys[:1])))
    assert world.discovery.posts[posted:] == [entry]


@pytest_twisted.ensureDeferred
async def test_a_discovery_that_lost_everything(world: World, keys: Any) -> None:
    for n in range(3):
        world.registrar.set_client(keys[:n])
        world.run(1)
    world.discovery.store = MemoryStore(limits=StoreLimits())
    world.registrar.set_client(keys)
    world.run(1)
    await world.registrar.published()
    assert (await world.stored()).sequence == 0


@pytest_twisted.ensureDeferred
async def test_a_bug_is_logged_and_tried_again(world: World, keys: Any, logged_errors: Any) -> None:
    bugs = [ZeroDivisionError()]

    def trouble(call: str, what: Any) -> None:
        if bugs:
            raise bugs.pop()

    world.discovery.trouble = trouble
    world.registrar.set_client(keys)
    world.run(5)
    await world.registrar.published()
    assert len(logged_errors.flush(ZeroDivisionError)) == 1


# --- the end -----------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_closing_ends_what_is_under_way(world: World, keys: Any) -> None:
    world.discovery.gate = defer.Deferred()
    world.registrar.set_client(keys)
    waiting = defer.Deferred.fromCoroutine(world.registrar.published())
    world.run(1)
    await world.registrar.close()
    with pytest.raises(DiscoveryUnavailable):
        await waiting
    with pytest.raises(DiscoveryUnavailable):
        await world.registrar.published()
    world.registrar.set_client([])
    world.run(100)
    assert world.discovery.posts == []
    await world.registrar.close()


@pytest_twisted.ensureDeferred
async def test_withdrawing(world: World, keys: Any) -> None:
    world.registrar.set_client(keys)
    world.registrar.set_server(RELAY, 5)
    world.run(1)
    await world.registrar.close(withdraw=True)
    entry = await world.stored()
    assert entry.client == ClientPart(())
    assert (entry.server.address, entry.server.available_connections) == ("10.0.0.1:8080", 0)
    assert await world.discovery.store.available_servers(5, world.discovery.now_ns()) == []


@pytest_twisted.ensureDeferred
async def test_withdrawing_does_not_take_for_ever(world: World, keys: Any) -> None:
    world.registrar.set_client(keys)
    world.run(1)
    world.discovery.gate = defer.Deferred()
    said: list[Any] = []
    globalLogPublisher.addObserver(said.append)
    try:
        closing = defer.Deferred.fromCoroutine(world.registrar.close(withdraw=True))
        world.run(4.5)
        assert not closing.called
        world.run(1)
        await closing
    finally:
        globalLogPublisher.removeObserver(said.append)
    assert "no answer within 5 s" in formatEvent(said[-1])


@pytest.mark.parametrize("arrived", [True, False])
@pytest_twisted.ensureDeferred
async def test_a_post_that_was_given_up_is_withdrawn_if_it_arrived(world: World, keys: Any, arrived: bool) -> None:
    if arrived:
        answer: defer.Deferred[None] = defer.Deferred()
        put = world.discovery.store.put
        world.discovery.store.put = lambda *what: put(*what).addCallback(lambda _: answer)
    else:
        world.discovery.gate = defer.Deferred()
    world.registrar.set_client(keys)
    world.run(1)
    world.discovery.gate = None
    if arrived:
        world.discovery.store.put = put
        assert (await world.stored()).delegated_servers
    await world.registrar.close(withdraw=True)
    if arrived:
        assert not (await world.stored()).delegated_servers
    else:
        assert world.discovery.posts == []


@pytest_twisted.ensureDeferred
async def test_what_was_never_published_is_not_withdrawn(world: World, keys: Any) -> None:
    world.registrar.set_client(keys)
    await world.registrar.close(withdraw=True)
    assert world.discovery.calls == []


@pytest.mark.parametrize("withdraw", [True, False])
@pytest_twisted.ensureDeferred
async def test_a_registrar_that_is_reopened_goes_on(world: World, keys: Any, withdraw: bool) -> None:
    world.registrar.reopen()
    assert world.clock.getDelayedCalls() == [], "it was not closed"
    world.registrar.set_client(keys[:2])
    world.run(1)
    await world.registrar.close(withdraw=withdraw)
    world.registrar.set_client(keys)
    world.registrar.reopen()
    world.registrar.set_client(keys[:2])
    world.run(1)
    await world.registrar.published()
    assert (await world.stored()).delegated_servers == tuple(keys[:2])
    before = len(world.discovery.posts)
    world.run(2 * 86_400, step=60.0)
    assert (await world.stored()).delegated_servers == tuple(keys[:2]) and len(world.discovery.posts) > before


@pytest_twisted.ensureDeferred
async def test_a_registrar_that_never_wanted_anything_publishes_nothing_when_it_is_reopened(world: World) -> None:
    await world.registrar.close(withdraw=True)
    world.registrar.reopen()
    world.run(1)
    assert world.discovery.calls == []


@pytest_twisted.ensureDeferred
async def test_one_service_of_several_that_comes_back_has_its_say_again(world: World, keys: Any) -> None:
    secure, messaging = world.registrar.publisher("0.1.0"), world.registrar.publisher()
    secure.set_client(keys[:2])
    messaging.set_client(keys[2:3])
    world.run(1)
    await secure.close(withdraw=True)
    world.run(1)
    secure.reopen()
    secure.set_client(keys[:1])
    world.run(1)
    entry = await world.stored()
    assert (entry.version, entry.delegated_servers) == ("0.1.0", (keys[0], keys[2]))
    for service in (secure, messaging):
        await service.close()


@pytest_twisted.ensureDeferred
async def test_a_service_that_comes_back_goes_on_though_the_others_end_before_it_publishes_anything(
    world: World, keys: Any
) -> None:
    """A client that is started again while another stops, and finds its relays only then."""
    one, other = world.registrar.publisher(), world.registrar.publisher()
    one.set_client(keys[:1])
    other.set_client(keys[1:])
    world.run(1)
    await one.close(withdraw=True)
    one.reopen()
    await other.close(withdraw=True)
    world.run(1)
    assert (await world.stored()).delegated_servers == ()
    one.set_client(keys[:2])
    published = defer.Deferred.fromCoroutine(one.published())
    world.run(1)
    await published
    assert (await world.stored()).delegated_servers == tuple(keys[:2])
    await one.close(withdraw=True)
    assert (await world.stored()).delegated_servers == ()


@pytest_twisted.ensureDeferred
async def test_services_that_have_ended_are_forgotten_while_others_go_on(world: World, keys: Any) -> None:
    """Such as clients that a program makes for one dial each."""
    other = world.registrar.publisher()
    other.set_client(keys[:1])
    ended = []
    for _ in range(3):
        one = world.registrar.publisher()
        one.set_client(keys)
        await one.close()
        ended.append(weakref.ref(one))
    del one
    gc.collect()
    assert [each() for each in ended] == [None] * 3
    await other.close()


@pytest_twisted.ensureDeferred
async def test_one_that_waits_again_for_a_service_that_ends_is_told_again(world: World, keys: Any) -> None:
    one, other = world.registrar.publisher(), world.registrar.publisher()
    other.set_client(keys[:1])

    async def published() -> None:
        with pytest.raises(DiscoveryUnavailable):
            await one.published()
        await one.published()

    waiting = defer.Deferred.fromCoroutine(published())
    await one.close()
    assert waiting.called
    with pytest.raises(DiscoveryUnavailable):
        await waiting
    await other.close()


@pytest_twisted.ensureDeferred
async def test_a_service_that_ends_waits_for_nothing_that_others_publish(world: World, keys: Any) -> None:
    one, other = world.registrar.publisher(), world.registrar.publisher()
    world.discovery.gate = defer.Deferred()
    one.set_client(keys[:1])
    other.set_client(keys[1:])
    waiting = [defer.Deferred.fromCoroutine(each.published()) for each in (one, one, other)]
    await one.close(withdraw=True)
    assert [each.called for each in waiting] == [True, True, False]
    waiting.insert(2, defer.Deferred.fromCoroutine(one.published()))
    for each in waiting[:3]:
        with pytest.raises(DiscoveryUnavailable):
            await each
    world.discovery.gate.callback(None)
    world.run(1)
    await waiting[3]
    assert (await world.stored()).delegated_servers == tuple(keys[1:])
    await other.close()


@pytest_twisted.ensureDeferred
async def test_what_is_reopened_while_it_withdraws_is_published_in_the_end(world: World, keys: Any) -> None:
    world.registrar.set_client(keys[:1])
    world.run(1)
    world.discovery.gate = gate = defer.Deferred()
    closing = defer.Deferred.fromCoroutine(world.registrar.close(withdraw=True))
    world.registrar.reopen()
    world.registrar.set_client(keys[:2])
    world.discovery.gate = None
    gate.callback(None)
    world.run(10)
    await closing
    assert (await world.stored()).delegated_servers == tuple(keys[:2])


@pytest_twisted.ensureDeferred
async def test_waiting_can_be_cancelled(world: World, keys: Any) -> None:
    world.registrar.set_client(keys)
    waiting = defer.Deferred.fromCoroutine(world.registrar.published())
    waiting.cancel()
    with pytest.raises(defer.CancelledError):
        await waiting
    world.run(1)
    await world.registrar.published()


# --- events ------------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_one_event_for_each_post(world: World, keys: Any) -> None:
    class Events:
        seen: list[Any] = []  # noqa: RUF012

        def emit(self, event: Any) -> None:
            self.seen.append(event)

    registrar = world.new(events=Events())
    refusals = [WrongSequence]

    def trouble(call: str, what: Any) -> None:
        if call == "post" and refusals:
            raise refusals.pop()

    world.discovery.trouble = trouble
    registrar.set_client(keys)
    world.run(1)
    registrar.set_server(RELAY, 1)
    world.run(1)
    assert [(e.sequence, e.kind, e.ok, e.reason) for e in Events.seen] == [
        (0, "client", False, WrongSequence.text),
        (0, "client", True, ""),
        (1, "server", True, ""),
    ]


def test_a_discovery_that_cannot_be_asked_is_an_event(world: World) -> None:
    seen: list[Any] = []

    class Events:
        def emit(self, event: Any) -> None:
            seen.append((event.sequence, event.kind, event.ok, event.reason))

    def trouble(call: str, what: Any) -> None:
        raise DiscoveryUnavailable("connection refused")

    registrar = world.new(events=Events())
    world.discovery.trouble = trouble
    registrar.set_server(RELAY, 1)
    world.run(1)
    assert world.discovery.posts == []
    assert seen == [(0, "server", False, DiscoveryUnavailable.text)] * len(world.discovery.calls)
    assert seen

    world.discovery.trouble = lambda call, what: None
    world.run(60)
    assert next(one for one in seen if one[2]) == (0, "server", True, "")


# --- entries that expire -----------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_client_is_posted_again_long_before_it_expires(world: World, keys: Any) -> None:
    registrar = world.new(version="0.1.0")
    registrar.set_client(keys[:1])
    world.run(1.0)
    life_s = StoreLimits().client_ttl_s
    assert life_s is not None
    world.run(3 * life_s, step=10.0)
    assert (await world.stored()).client == ClientPart((keys[0],))
    # Once an hour at the latest, and hardly more often: a look costs less than a post.
    posts = len(world.discovery.posts)
    assert 3 * life_s / 3900 <= posts <= 3 * life_s / 2700 + 1
    gaps = [later.timestamp - earlier.timestamp for earlier, later in itertools.pairwise(world.discovery.posts)]
    assert len(set(gaps)) > 3  # no two clients stay in step
    assert max(gaps) <= life_s * 10**9 / 5


@pytest_twisted.ensureDeferred
async def test_five_posts_in_a_row_may_fail(world: World, keys: Any) -> None:
    registrar = world.new(version="0.1.0")
    registrar.set_client(keys[:1])
    world.run(1.0)

    def no_posts(call: str, what: Any) -> None:
        if call == "post":
            raise DiscoveryUnavailable("down")

    world.discovery.trouble = no_posts
    world.run(5.0 * 3600, step=10.0)
    world.discovery.trouble = lambda call, what: None
    world.run(600.0, step=10.0)
    assert (await world.stored()).client == ClientPart((keys[0],))


@pytest_twisted.ensureDeferred
async def test_an_entry_of_an_earlier_process_is_renewed_once(world: World, keys: Any) -> None:
    for age_s in (600, 5 * 3600, -10 * 3600):  # the last one: from a clock that was ahead
        world.discovery.store = MemoryStore()
        timestamp = world.discovery.now_ns() - age_s * 10**9
        entry = Entry("0.1.0", 0, timestamp, world.key.public_key, ClientPart((keys[0],))).sign(world.key)
        await world.discovery.store.put(entry, world.discovery.now_ns())
        before = len(world.discovery.posts)
        registrar = world.new(version="0.1.0")
        registrar.set_client(keys[:1])
        world.run(900.0, step=1.0)
        assert len(world.discovery.posts) - before == 1
        await registrar.close()
