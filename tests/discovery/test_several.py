"""Several discoveries as one: reads come from the first that has an answer, and an entry gets to all of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_twisted
from twisted.internet import defer, task
from zope.interface import implementer
from zope.interface.verify import verifyObject

from dmsg.discovery.client import HttpDiscovery
from dmsg.discovery.errors import DiscoveryUnavailable, EntryNotFound, Unauthorized, WrongSequence
from dmsg.discovery.registrar import EntryRegistrar
from dmsg.discovery.several import PATIENCE_S, REST_S, DiscoveryList
from dmsg.errors import ConfigError
from dmsg.interfaces import IRankedDiscovery
from dmsg.testing.network import MemoryDiscovery

pytestmark = pytest.mark.usefixtures("logged_errors")
sync = pytest_twisted.ensureDeferred


@dataclass(frozen=True)
class Ranks:
    """As much of a document as matters here: when it was issued. It counts less and less from 10 to 20 s after that."""

    issued: float

    def freshness(self, now_s: float) -> float:
        return min(1.0, max(0.0, 2.0 - (now_s - self.issued) / 10))


class Counting(MemoryDiscovery):
    """Notes what it is asked."""

    def __init__(self, now_ns: Any) -> None:
        super().__init__(now_ns)
        self.asked: list[str] = []

    async def get_entry(self, public_key: Any) -> Any:
        self.asked.append("get")
        return await super().get_entry(public_key)

    async def post_entry(self, entry: Any) -> None:
        self.asked.append("post")
        await super().post_entry(entry)


@implementer(IRankedDiscovery)
class Ranked(Counting):
    ranks: Any = None

    async def relay_ranks(self) -> Any:
        return self.ranks


class World:
    def __init__(self, now_ns: int) -> None:
        self.clock = task.Clock()
        self.now_ns = lambda: now_ns + int(self.clock.seconds() * 10**9)
        self.first, self.second, self.third = Counting(self.now_ns), Ranked(self.now_ns), Ranked(self.now_ns)
        self.all = (self.first, self.second, self.third)
        self.list = DiscoveryList(self.all, self.clock, self.clock.seconds)

    def asked(self) -> list[int]:
        """How often each was asked since the last time."""
        counts = [len(one.asked) for one in self.all]
        for one in self.all:
            one.asked.clear()
        return counts

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)


@pytest.fixture
def world(now_ns: int) -> World:
    return World(now_ns)


@sync
async def test_the_preferred_one_is_asked_alone_while_it_answers(world: World, make_entry: Any) -> None:
    verifyObject(IRankedDiscovery, world.list)
    alice = make_entry("alice")
    await world.first.post_entry(alice)
    world.asked()
    assert await world.list.get_entry(alice.static) == alice
    assert world.asked() == [1, 0, 0]


@pytest.mark.parametrize("failure", [DiscoveryUnavailable("down"), Unauthorized("forged")])
@sync
async def test_the_next_one_is_asked_when_one_fails(world: World, make_entry: Any, failure: Exception) -> None:
    alice = make_entry("alice")
    await world.second.post_entry(alice)
    world.asked()
    world.first.failure = failure
    assert await world.list.get_entry(alice.static) == alice
    assert world.asked() == [1, 1, 0]


@sync
async def test_one_that_cannot_be_reached_is_asked_last_for_a_while(world: World, make_entry: Any) -> None:
    alice = make_entry("alice")
    for one in world.all:
        await one.post_entry(alice)
    world.first.failure = DiscoveryUnavailable("down")
    await world.list.get_entry(alice.static)
    world.asked()
    await world.list.get_entry(alice.static)
    assert world.asked() == [0, 1, 0]
    world.first.failure = None
    world.clock.advance(REST_S)
    await world.list.get_entry(alice.static)
    assert world.asked() == [1, 0, 0]


class Silent(Counting):
    """Does not answer before it is told to."""

    answer: Any = None

    async def get_entry(self, public_key: Any) -> Any:
        self.asked.append("get")
        self.answer = defer.Deferred()
        await self.answer
        return await MemoryDiscovery.get_entry(self, public_key)


@sync
async def test_one_that_is_silent_does_not_hold_up_the_next(world: World, make_entry: Any) -> None:
    silent, alice = Silent(world.now_ns), make_entry("alice")
    both = DiscoveryList([silent, world.second], world.clock)
    await world.second.post_entry(alice)
    found = defer.Deferred.fromCoroutine(both.get_entry(alice.static))
    assert not found.called
    world.clock.advance(PATIENCE_S)
    assert found.called and await found == alice
    assert await both.get_entry(alice.static) == alice
    assert len(silent.asked) == 1, "it is asked last for a while"
    assert world.clock.getDelayedCalls() == []


class SlowToAsk(Silent):
    """The same, and to ask it takes a moment, as making an HTTP request does."""

    def __init__(self, world: World) -> None:
        super().__init__(world.now_ns)
        self.clock = world.clock

    async def get_entry(self, public_key: Any) -> Any:
        self.clock.rightNow += 0.002
        return await super().get_entry(public_key)


@sync
async def test_one_that_is_silent_is_asked_last_whatever_asking_it_takes(world: World, make_entry: Any) -> None:
    silent, alice = SlowToAsk(world), make_entry("alice")
    both = DiscoveryList([silent, world.second], world.clock)
    await world.second.post_entry(alice)
    found = defer.Deferred.fromCoroutine(both.get_entry(alice.static))
    world.clock.advance(PATIENCE_S - 0.002)  # the time that the reactor counts is over
    assert await found == alice
    assert await both.get_entry(alice.static) == alice
    assert len(silent.asked) == 1


@sync
async def test_one_that_is_slow_is_waited_for_when_the_others_have_no_answer(world: World, make_entry: Any) -> None:
    silent, alice = Silent(world.now_ns), make_entry("alice")
    both = DiscoveryList([silent, world.second], world.clock)
    await silent.post_entry(alice)
    found = defer.Deferred.fromCoroutine(both.get_entry(alice.static))
    world.clock.advance(PATIENCE_S)
    assert world.second.asked == ["get"] and not found.called
    silent.answer.callback(None)
    assert await found == alice


@sync
async def test_one_that_was_waited_for_until_the_question_was_given_up_is_asked_last(
    world: World, make_entry: Any
) -> None:
    silent, alice = Silent(world.now_ns), make_entry("alice")
    both = DiscoveryList([silent, world.second], world.clock)
    await world.second.post_entry(alice)
    for waited_s, asked in ((PATIENCE_S / 2, 1), (PATIENCE_S, 2)):
        found = defer.Deferred.fromCoroutine(both.get_entry(alice.static))
        world.clock.rightNow += waited_s  # it is given up in the moment in which the next would be asked
        found.cancel()
        with pytest.raises(defer.CancelledError):
            await found
        assert len(silent.asked) == asked
    assert await both.get_entry(alice.static) == alice
    assert world.clock.getDelayedCalls() == []


@sync
async def test_a_fault_of_one_is_told(world: World, make_entry: Any) -> None:
    world.first.failure = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        await world.list.get_entry(make_entry("alice").static)
    assert world.clock.getDelayedCalls() == []


@sync
async def test_a_key_is_unknown_when_none_knows_it(world: World, make_entry: Any) -> None:
    alice = make_entry("alice")
    world.first.failure = DiscoveryUnavailable("down")
    with pytest.raises(EntryNotFound):
        await world.list.get_entry(alice.static)
    assert world.asked() == [1, 1, 1]
    for one in world.all:
        one.failure = DiscoveryUnavailable("down")
    with pytest.raises(DiscoveryUnavailable):
        await world.list.get_entry(alice.static)
    with pytest.raises(DiscoveryUnavailable):
        await world.list.available_servers()


@sync
async def test_servers_come_from_the_first_that_has_some_of_the_protocol(world: World, make_entry: Any) -> None:
    assert await world.list.available_servers() == []
    relay = make_entry("relay", address="10.0.0.1:80", version="0.0.1+messaging")
    await world.first.post_entry(make_entry("other", address="10.0.0.2:80"))
    await world.third.post_entry(relay)
    assert await world.list.available_servers("messaging") == [relay]
    assert len(await world.list.available_servers()) == 1


@sync
async def test_ranks_come_from_the_first_that_has_some(world: World) -> None:
    assert await world.list.relay_ranks() is None
    world.third.ranks = Ranks(0)
    assert await world.list.relay_ranks() is world.third.ranks
    world.second.ranks = Ranks(0)
    assert await world.list.relay_ranks() is world.second.ranks


@sync
async def test_ranks_that_fade_give_way_to_those_of_the_next_one(world: World) -> None:
    """The preferred one is away, or nobody gives it new ones any more."""
    world.second.ranks, world.third.ranks = Ranks(0), Ranks(5)
    world.clock.advance(10)
    assert await world.list.relay_ranks() is world.second.ranks
    world.clock.advance(1)
    assert await world.list.relay_ranks() is world.third.ranks
    world.clock.advance(50)  # neither says anything
    assert await world.list.relay_ranks() is world.second.ranks
    world.third.ranks = Ranks(60)
    assert await world.list.relay_ranks() is world.third.ranks


@sync
async def test_a_post_goes_to_all_and_succeeds_when_one_takes_it(world: World, make_entry: Any) -> None:
    await world.third.post_entry(make_entry("alice"))
    world.second.failure = DiscoveryUnavailable("down")
    await world.list.post_entry(make_entry("alice"))
    assert await world.first.get_entry(make_entry("alice").static) == make_entry("alice")
    world.first.failure = WrongSequence()
    with pytest.raises(WrongSequence):
        await world.list.post_entry(make_entry("alice", 5))


def test_an_empty_list_is_refused(world: World) -> None:
    with pytest.raises(ConfigError):
        DiscoveryList([], world.clock)


@sync
async def test_a_registrar_keeps_every_discovery_and_one_that_was_away_catches_up(world: World, key_of: Any) -> None:
    key, relays = key_of("me"), sorted(key_of(f"relay {n}").public_key for n in range(3))
    registrar = EntryRegistrar(world.list, key, clock=world.clock, now_ns=world.now_ns, random=random.Random(1))
    world.first.failure = DiscoveryUnavailable("down")
    registrar.set_client(relays[:1])
    published = defer.Deferred.fromCoroutine(registrar.published())
    world.run(1)
    await published
    registrar.set_client(relays[:2])
    world.run(1)
    assert (await world.second.get_entry(key.public_key)).sequence == 1
    assert registrar.entry is not None and registrar.entry.delegated_servers == tuple(relays[:2])
    world.first.failure = None
    world.run(10)
    late = await world.first.get_entry(key.public_key)
    assert (late.sequence, late.delegated_servers) == (0, tuple(relays[:2]))
    registrar.set_client(relays)
    world.run(1)
    for one in world.all:
        assert (await one.get_entry(key.public_key)).delegated_servers == tuple(relays)
    await registrar.close(withdraw=True)
    for one in world.all:
        assert (await one.get_entry(key.public_key)).delegated_servers == ()
    assert world.clock.getDelayedCalls() == []


@sync
async def test_waiting_for_the_entry_fails_when_the_registrar_is_closed_before(world: World, key_of: Any) -> None:
    for one in world.all:
        one.failure = DiscoveryUnavailable("down")
    registrar = EntryRegistrar(
        world.list, key_of("me"), clock=world.clock, now_ns=world.now_ns, random=random.Random(1)
    )
    registrar.set_client([])
    waiting = defer.Deferred.fromCoroutine(registrar.published())
    world.run(1)
    await registrar.close(withdraw=True)
    with pytest.raises(DiscoveryUnavailable):
        await waiting


@sync
async def test_closing_the_list_closes_what_can_be_closed(world: World, reactor: Any) -> None:
    both = DiscoveryList([HttpDiscovery.connect("http://127.0.0.1:9", reactor), world.first], world.clock)
    await both.close()
