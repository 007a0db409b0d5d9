"""Which relays a client tries: groups first, three at once, slow ones overtaken; and how many sessions it keeps."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import pytest_twisted
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, fail
from twisted.internet.error import ConnectionRefusedError
from zope.interface import implementer

from dmsg.address import HostPort, PinnedServer, network_group
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.entry import Entry, ServerPart
from dmsg.interfaces import IDiscovery
from dmsg.relays.candidates import Candidate, alternate, spread
from dmsg.relays.pool import PoolConfig, SessionPool
from dmsg.relays.race import Race, RaceConfig
from tests.worlds import ScatteredRelays

KEYS = [SecretKey.generate() for _ in range(12)]
RELAYS = [key.public_key for key in KEYS]


def at(number, host):
    return Candidate(RELAYS[number], HostPort(host, 80))


# --- the order -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), max_size=12), st.randoms(use_true_random=False))
def test_a_second_relay_of_a_group_comes_after_the_first_of_every_group(groups, random):
    candidates = [at(number, f"192.0.{group}.{number}") for number, group in enumerate(groups)]

    def draw(keys):
        keys = list(keys)
        return random.sample(keys, len(keys))

    order = spread(candidates, draw, min)
    assert sorted(order, key=lambda one: one.public_key) == sorted(candidates, key=lambda one: one.public_key)
    seen = Counter()
    rounds = []
    for one in order:
        rounds.append(seen[one.group])
        seen[one.group] += 1
    assert rounds == sorted(rounds)


def test_two_remembered_relays_come_before_each_new_one():
    kept, new = [at(number, "192.0.2.1") for number in range(5)], [at(number, "192.0.3.1") for number in range(5, 8)]
    assert alternate(kept, new) == [*kept[:2], new[0], *kept[2:4], new[1], kept[4], new[2]]
    assert alternate([], new) == new and alternate(kept, []) == kept


def test_a_relay_whose_address_is_unknown_is_a_group_of_its_own():
    assert Candidate(RELAYS[0]).group != Candidate(RELAYS[1]).group
    assert at(0, "192.0.2.1").group == at(1, "192.0.2.9").group == network_group("192.0.2.77")


# --- the race --------------------------------------------------------------------------------------------------------


def rooms(race, now_s, *, hurried=False):
    """How many of different groups may start at ``now_s``."""
    for started in range(100):
        key = SecretKey.generate().public_key
        if not race.room(str(key), now_s, of_a_group=1, hurried=hurried):
            return started
        race.start(key, str(key), now_s)
    raise AssertionError("there is no limit")


def test_three_start_at_once_and_three_more_when_they_are_overtaken():
    race = Race(RaceConfig())
    assert rooms(race, 10.0) == 3
    assert race.next_s(10.0) == 11.0
    assert rooms(race, 10.9) == 0
    assert rooms(race, 11.0) == 3
    assert [race.overtaken(key, 11.0) for key in race.all()] == [True] * 3 + [False] * 3
    race.end(race.all()[4])
    assert rooms(race, 11.0) == 1


def test_a_client_without_a_session_hurries_once_three_were_overtaken():
    race = Race(RaceConfig())
    assert rooms(race, 0.0, hurried=True) == 3
    assert rooms(race, 1.0, hurried=True) == 6


def test_relays_of_one_group_do_not_run_side_by_side_unless_they_are_overtaken():
    race = Race(RaceConfig())
    race.start(RELAYS[0], "group", 0.0)
    assert not race.room("group", 0.5, of_a_group=1, hurried=True)
    assert race.room("group", 1.0, of_a_group=1, hurried=True)
    assert race.room("group", 0.5, of_a_group=2, hurried=True)
    assert race.unwanted({"group"}) == [RELAYS[0]]


def test_the_oldest_of_too_many_is_surplus():
    race = Race(RaceConfig(attempts=2))
    race.start(RELAYS[0], "one", 0.0)
    assert race.surplus() is None
    race.start(RELAYS[1], "two", 0.0)
    assert race.surplus() == RELAYS[0]
    race.end(RELAYS[0])
    race.end(RELAYS[0])
    assert len(race) == 1 and RELAYS[1] in race and RELAYS[0] not in race


# --- the pool's side of it -------------------------------------------------------------------------------------------


class Place:
    """Where one relay is: fails, stays silent, or (``answer``) fails when it is told to."""

    def __init__(self, refuses=False):
        self.refuses = refuses
        self.asked = 0
        self.cancelled = 0

    def connect(self, factory):
        self.asked += 1
        if self.refuses:
            return fail(ConnectionRefusedError())
        return Deferred(lambda _: self.note())

    def note(self):
        self.cancelled += 1


@implementer(IDiscovery)
class Listing:
    """Lists relays by host, and counts how often it is asked."""

    def __init__(self, *hosts):
        self.asked_at = []
        self.looked_up = 0
        self.hosts = list(hosts)

    async def available_servers(self, protocol="dmsg"):
        self.asked_at.append(self.clock.seconds())
        return [
            Entry("0.0.1", 0, 1, key.public_key, None, ServerPart(f"{host}:80", 5)).sign(key)
            for key, host in zip(KEYS, self.hosts, strict=False)
        ]

    async def get_entry(self, public_key):
        self.looked_up += 1
        return next(entry for entry in await self.available_servers() if entry.static == public_key)


@pytest.fixture
def make_pool(clock):
    pools = []

    def make(listing, places, *, goal=None):
        listing.clock = clock
        pool = SessionPool(
            clock,
            lambda server: None,
            lambda address: places[address.host],
            discovery=listing,
            pinned=[],
            goal=goal,
            config=PoolConfig(),
            uniform=Random(1).random,
            changed=lambda: None,
            went_down=lambda server, reason, attempt: pool.told.append((server, reason)),
        )
        pool.told = []
        pools.append(pool)
        pool.start()
        return pool

    yield make
    for pool in pools:
        assert Deferred.fromCoroutine(pool.stop()).called
    assert not clock.getDelayedCalls()


def test_what_is_listed_is_connected_without_being_looked_up(make_pool):
    places = {"192.0.2.1": Place()}
    make_pool(listing := Listing(*places), places)
    assert places["192.0.2.1"].asked == 1 and listing.looked_up == 0


class Silent(Listing):
    """Takes questions and never answers."""

    async def available_servers(self, protocol="dmsg"):
        self.asked_at.append(self.clock.seconds())
        await Deferred()


def test_a_client_sleeps_while_discovery_does_not_answer(make_pool, clock):
    make_pool(listing := Silent(), {})
    woken = 0
    while (due := min((call.getTime() for call in clock.getDelayedCalls()), default=60.0)) < 60.0:
        clock.advance(due - clock.seconds())
        woken += 1
    assert len(listing.asked_at) == 1
    assert woken < 20


def test_a_stalling_relay_is_overtaken_and_runs_on(make_pool, clock):
    places = {f"192.0.{number}.1": Place() for number in range(8)}
    pool = make_pool(Listing(*places), places)
    assert sum(place.asked for place in places.values()) == 3
    clock.advance(0.5)
    assert sum(place.asked for place in places.values()) == 3
    clock.advance(0.5)
    assert sum(place.asked for place in places.values()) == 8  # hurried: six at a time, of which five are left
    assert not any(place.cancelled for place in places.values())
    assert pool.told == []


def test_a_refusal_makes_room_at_once(make_pool):
    places = {f"192.0.{number}.1": Place(refuses=number < 5) for number in range(8)}
    pool = make_pool(Listing(*places), places)
    assert sum(place.asked for place in places.values() if not place.refuses) == 3
    assert all(reason == "connection refused" for _, reason in pool.told)


def test_losers_a_dial_waits_for_run_on_and_the_others_end_without_blame(make_pool, clock):
    places = {f"192.0.{number}.1": Place() for number in range(3)}
    pool = make_pool(Listing(*places), places)
    wanted = RELAYS[0]
    outcome = []
    pool.get(wanted).addErrback(outcome.append)
    pool._goal.give_up(pool._goal._race.all())
    assert [place.cancelled for place in places.values()] == [0, 1, 1]
    assert list(pool._flights)[:1] == [wanted] and not outcome
    assert pool.told == []  # the others were faster: that says nothing against these


def test_an_attempt_that_had_been_overtaken_counts_as_a_failure_when_it_is_given_up(make_pool, clock):
    places = {"192.0.2.1": Place()}
    pool = make_pool(Listing(*places), places)
    clock.advance(1.5)
    before = pool.scores.score(RELAYS[0], clock.seconds())
    pool._goal.give_up(pool._goal._race.all())
    assert pool.told == [(RELAYS[0], "given up")]
    assert pool.scores.score(RELAYS[0], clock.seconds()) < before


# --- how many sessions -----------------------------------------------------------------------------------------------


class World(ScatteredRelays):
    """Relays at given hosts, all of them listed."""

    def __init__(self, *hosts):
        super().__init__(Listing())
        self.listing.clock = self.memory
        for host in hosts:
            self.add(host)

    def add(self, host):
        self.start_relay(KEYS[len(self.network.relays)], host)
        self.listing.hosts.append(host)

    async def client(self, **options):
        client = self.start_client(**options)
        await self.network.wait(client.when_ready())
        return client


@pytest.mark.parametrize(
    ("hosts", "asked_for", "held"),
    [
        (["192.0.2.1"], None, 1),
        (["192.0.2.1", "192.0.2.2", "192.0.2.3"], None, 1),
        (["192.0.2.1", "192.0.2.2", "192.0.3.1"], None, 2),
        (["192.0.2.1", "192.0.3.1", "192.0.4.1", "192.0.5.1"], None, 2),
        (["192.0.2.1", "192.0.3.1"], 1, 1),
        (["192.0.2.1", "192.0.2.2", "192.0.2.3"], 2, 2),
        (["192.0.2.1", "192.0.3.1", "192.0.4.1"], 3, 3),
    ],
)
@pytest_twisted.ensureDeferred
async def test_sessions_are_held_with_two_groups_where_there_are_two(hosts, asked_for, held):
    async with World(*hosts) as world:
        options = {} if asked_for is None else {"min_servers": asked_for}
        client = await world.client(**options)
        assert len(client.pool.sessions) >= (asked_for or 1)
        world.memory.advance(30)
        assert len(client.pool.sessions) == held
        assert len(world.memory.pipes) == held
        if asked_for is None:
            assert len({client.pool.group_of(server) for server in client.pool.sessions}) == held


@pytest_twisted.ensureDeferred
async def test_a_number_that_was_asked_for_is_taken_from_different_groups_first():
    async with World("192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.3.1") as world:
        for _ in range(5):
            client = await world.client(min_servers=2)
            world.memory.advance(5)
            assert len(client.pool.sessions) == 2
            await world.network.stop_client(client)


@pytest_twisted.ensureDeferred
async def test_a_client_with_one_group_asks_discovery_less_and_less_and_takes_a_second_one_when_it_comes():
    async with World("192.0.2.1", "192.0.2.2") as world:
        client = await world.client()
        world.memory.advance(3600)
        pauses = [b - a for a, b in zip(world.listing.asked_at, world.listing.asked_at[1:], strict=False)]
        assert len(pauses) < 30
        assert max(pauses[:3]) < 60 and min(pauses[-3:]) >= 0.75 * PoolConfig().poll_limit_s
        world.add("192.0.3.1")
        world.memory.advance(1.25 * PoolConfig().poll_limit_s + 1)
        assert len(client.pool.sessions) == 2


@pytest_twisted.ensureDeferred
async def test_a_lost_group_is_replaced_and_a_third_one_is_not_kept():
    async with World("192.0.2.1", "192.0.3.1", "192.0.4.1") as world:
        client = await world.client()
        world.memory.advance(10)
        (lost, _) = client.pool.sessions
        for pipe in world.memory.pipes_to(80, world.listing.hosts[RELAYS.index(lost)]):
            pipe.cut()
        world.memory.advance(15)
        assert len(client.pool.sessions) == 2


@pytest_twisted.ensureDeferred
async def test_relays_that_only_dials_led_to_do_not_take_the_place_of_lost_ones():
    """A peer says itself on which relays it is: its own must not be all that is left when the others were away for a moment."""
    async with World("192.0.2.1", "192.0.3.1", "192.0.4.1", "192.0.5.1") as world:
        listed, world.listing.hosts = world.listing.hosts, world.listing.hosts[:2]
        client = await world.client()
        world.memory.advance(10)
        world.listing.hosts = listed
        for relay in RELAYS[2:4]:
            client.pool.get(relay)
            world.memory.advance(1)
        world.listing.hosts = listed[:2]
        assert set(client.pool.sessions) == {*RELAYS[:4]}
        for host in listed[:2]:
            for pipe in world.memory.pipes_to(80, host):
                pipe.cut()
        world.memory.advance(15)
        assert set(client.pool.sessions) == {*RELAYS[:4]}


@pytest_twisted.ensureDeferred
async def test_a_session_that_a_dial_made_is_taken_for_one_that_is_wanted_if_its_relay_is_listed():
    async with World("192.0.2.1", "192.0.3.1", "192.0.4.1") as world:
        client = world.start_client()
        for relay in RELAYS[:2]:
            client.pool.get(relay)
        world.memory.advance(30)
        assert set(client.pool.sessions) >= {*RELAYS[:2]}
        assert len(client.pool.sessions) <= 3
        assert len({client.pool.group_of(one) for one in client.pool.chosen}) == 2


@pytest_twisted.ensureDeferred
async def test_a_pinned_relay_is_enough():
    """A user who names a relay has chosen it: none of discovery's is added."""
    async with World("192.0.2.1", "192.0.3.1") as world:
        pinned = PinnedServer(RELAYS[0], HostPort("192.0.2.1", 80))
        client = await world.client(servers=[pinned])
        world.memory.advance(30)
        assert list(client.pool.sessions) == [RELAYS[0]]
        assert world.listing.asked_at == []
