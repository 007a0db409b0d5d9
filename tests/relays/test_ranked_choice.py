"""Which relays a client connects to and in which order it dials: by ranks, by what it measured, and never without one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred, fail
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from zope.interface import implementer

from dmsg.clients.dial import DialConfig
from dmsg.clients.dialer import Dialer
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.entry import ClientPart, Entry, ServerPart
from dmsg.discovery.errors import DiscoveryUnavailable, RanksError
from dmsg.discovery.ranks import Ranks, sign_ranks
from dmsg.errors import DialError, StageError
from dmsg.interfaces import IDiscovery, IRankedDiscovery
from dmsg.mux.client.dial import DialRequest
from dmsg.mux.client.service import ClientConfig
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.relays.pool import PoolConfig, SessionPool
from dmsg.relays.rankwatch import FIRST_WAIT_S, LOOK_S, RankWatch
from dmsg.relays.scores import RelayScores, ScoreConfig
from dmsg.testing.memory import MemoryNetwork, Path
from dmsg.testing.network import LocalNetwork, MemoryDiscovery

OPERATOR = SecretKey.generate()
KEYS = [SecretKey.generate() for _ in range(10)]
RELAYS = [key.public_key for key in KEYS]
PEER = SecretKey.generate()


def server_entry(key):
    return Entry("0.0.1", 0, 1, key.public_key, None, ServerPart(f"10.0.0.1:{1 + KEYS.index(key)}", 5)).sign(key)


def ranks_for(scores, now_s=0, **members):
    names = ("score", "success", "latency", "capacity", "drops")
    document = {
        "format": "dmsg-relay-ranks",
        "version": 1,
        "issued": int(now_s),
        "lifetime_s": 10_000,
        "window_s": 100,
        "relays": {str(key): dict.fromkeys(names, score) | {"dials": 1, "clients": 1} for key, score in scores.items()},
        "excluded": {"clients": 0, "events": 0},
        **members,
    }
    return Ranks.parse(sign_ranks(document, OPERATOR), {OPERATOR.public_key}, now_s)


@implementer(IRankedDiscovery)
class Listing:
    """Lists the relays in the order of their numbers, and has the ranks it is given."""

    def __init__(self, ranks=None):
        self.ranks = ranks
        self.asked = 0
        self.entries = [server_entry(key) for key in KEYS]

    async def get_entry(self, public_key):
        return next(entry for entry in self.entries if entry.static == public_key)

    async def available_servers(self, protocol="dmsg"):
        return self.entries

    async def relay_ranks(self):
        self.asked += 1
        if isinstance(self.ranks, Exception):
            raise self.ranks
        return await self.ranks if isinstance(self.ranks, Deferred) else self.ranks


class Unreachable:
    """An endpoint that refuses every connection."""

    def connect(self, factory):
        return fail(ConnectionRefusedError())


class Silent:
    """An endpoint from which no answer comes."""

    def connect(self, factory):
        return Deferred()


def pool_of(clock, connect, endpoint, discovery, seed=1, scores=None):
    """The pool of a client that wants one session; ``connect`` is told each relay it tries, all are at ``endpoint``."""

    def endpoint_for(address):
        connect(RELAYS[address.port - 1])
        return endpoint

    return SessionPool(
        clock,
        lambda relay: None,
        endpoint_for,
        discovery=discovery,
        pinned=[],
        goal=1,
        config=PoolConfig(),
        uniform=Random(seed).random,
        changed=lambda: None,
        went_down=lambda server, reason, attempt: None,
        scores=scores,
        now_s=clock.seconds,
    )


@pytest.fixture
def first_choice(clock):
    """``first_choice(discovery, seed) -> key``: which relay a new client tries first."""

    def choose(discovery, seed=0, scores=None):
        told = []
        pool = pool_of(clock, told.append, Silent(), discovery, seed, scores)
        pool.start()
        assert Deferred.fromCoroutine(pool.stop()).called
        return told[0]

    return choose


# --- connecting ------------------------------------------------------------------------------------------------------


def test_a_better_ranked_relay_is_chosen_more_often_and_a_worse_one_at_all(first_choice):
    discovery = Listing(ranks_for({RELAYS[9]: 1000, **dict.fromkeys(RELAYS[:9], 200)}))
    chosen = Counter(first_choice(discovery, seed) for seed in range(300))
    assert chosen[RELAYS[9]] / 300 == pytest.approx(8 / (8 + 9 / 8), abs=0.1)
    assert len(chosen) > 3


def test_without_a_key_discoverys_order_is_a_hint(first_choice):
    discovery = Listing()
    chosen = Counter(first_choice(discovery, seed) for seed in range(300))
    halves = sum(chosen[relay] for relay in RELAYS[:5]), sum(chosen[relay] for relay in RELAYS[5:])
    assert halves[0] > 2 * halves[1] > 0
    assert max(chosen.values()) < 150


def test_a_discovery_of_the_old_kind_is_no_less_good(first_choice):
    listing = Listing()

    @implementer(IDiscovery)
    class Plain:
        get_entry, available_servers = listing.get_entry, listing.available_servers

    assert first_choice(Plain()) in RELAYS


def test_own_failures_send_a_client_elsewhere(first_choice, clock):
    scores = RelayScores()
    for relay in RELAYS[:9]:
        for _ in range(20):
            scores.failed(relay, 0)
    chosen = Counter(first_choice(Listing(), seed, scores) for seed in range(300))
    assert chosen[RELAYS[9]] > 40  # listed last, and yet
    clock.rightNow += 50 * scores.config.half_life_s
    chosen = Counter(first_choice(Listing(), seed, scores) for seed in range(300))
    assert chosen[RELAYS[9]] < 20  # they may have healed


@pytest.mark.parametrize(
    "ranks",
    [
        None,
        DiscoveryUnavailable("gone"),
        ranks_for({}),
        ranks_for(dict.fromkeys(RELAYS, 0)),
        ranks_for({SecretKey.generate().public_key: 1000 for _ in range(50)}),
        ranks_for({RELAYS[0]: 1000, **dict.fromkeys(RELAYS[1:], 0)}),
    ],
)
def test_whatever_the_ranks_say_every_relay_is_tried_in_the_end(clock, ranks):
    tried = []
    pool = pool_of(clock, tried.append, Unreachable(), Listing(ranks))
    pool.start()
    for _ in range(300):
        clock.advance(0.5)
    assert set(tried) == set(RELAYS)
    assert Deferred.fromCoroutine(pool.stop()).called
    assert not clock.getDelayedCalls()


def test_ranks_that_do_not_come_delay_no_dial(first_choice, clock):
    tried = []
    pool = pool_of(clock, tried.append, Unreachable(), Listing(Deferred()))
    pool.start()
    assert not tried
    clock.advance(FIRST_WAIT_S)
    assert tried
    assert Deferred.fromCoroutine(pool.stop()).called
    assert not clock.getDelayedCalls()


# --- the watch -------------------------------------------------------------------------------------------------------


def test_newer_ranks_take_the_place_of_older_ones_and_fade(clock):
    discovery, scores = Listing(), RelayScores()
    watch = RankWatch(clock, discovery, scores, clock.seconds)
    watch.start()
    assert scores.ranks is None
    discovery.ranks = ranks_for({RELAYS[0]: 900})
    clock.advance(LOOK_S)
    assert scores.score(RELAYS[0], 0) == 900
    discovery.ranks = DiscoveryUnavailable("gone")
    clock.advance(LOOK_S)
    assert scores.score(RELAYS[0], 0) == 900
    clock.advance(7500 - 2 * LOOK_S)
    assert scores.score(RELAYS[0], 0) == pytest.approx(700)
    discovery.ranks = ranks_for({RELAYS[0]: 100}, now_s=7500)
    clock.advance(LOOK_S)
    assert scores.score(RELAYS[0], 0) == 100
    watch.stop()
    assert not clock.getDelayedCalls()


def test_a_watch_that_is_started_again_goes_on_looking(clock):
    discovery = Listing()
    watch = RankWatch(clock, discovery, RelayScores(), clock.seconds)
    watch.start()
    watch.stop()
    watch.start()
    for asked in (2, 3, 4):
        assert discovery.asked == asked
        clock.advance(LOOK_S)
    watch.stop()
    assert not clock.getDelayedCalls()


def test_a_discovery_that_breaks_is_logged_and_asked_again(clock, logged_errors):
    discovery, scores = Listing(RanksError("not_json")), RelayScores()
    watch = RankWatch(clock, discovery, scores, clock.seconds)
    watch.start()
    assert any("cannot be used" in text for text in logged_errors.texts())
    logged_errors.flush()
    discovery.ranks = ranks_for({RELAYS[0]: 900})
    clock.advance(LOOK_S)
    assert discovery.asked == 2 and scores.score(RELAYS[0], 0) == 900
    watch.stop()


# --- dialling --------------------------------------------------------------------------------------------------------


class Pool:
    """Notes which servers a dialer tries; none can be had."""

    def __init__(self, sessions=()):
        self.sessions = dict.fromkeys(sessions)
        self.pinned = {}
        self.scores = RelayScores()
        self.tried = []

    def get(self, server):
        self.tried.append(server)
        return fail(StageError("connect", "connection refused"))


@implementer(IDiscovery)
class OnePeer:
    def __init__(self, relays):
        self.entry = Entry("0.1.0", 0, 1, PEER.public_key, ClientPart(tuple(relays)), None).sign(PEER)

    async def get_entry(self, public_key):
        return self.entry


def tried(pool, relays, seed=1):
    dialer = Dialer(Clock(), pool, OnePeer(relays), DialConfig(), Random(seed).random)
    dialled = Deferred.fromCoroutine(dialer.dial(DialRequest(PEER.public_key), None, []))
    dialled.addErrback(lambda failure: failure.trap(DialError))
    assert dialled.called
    done, pool.tried = pool.tried, []
    return done


def test_a_dial_races_the_best_first():
    pool = Pool(sessions=[RELAYS[2]])
    told = {RELAYS[0]: 300.0, RELAYS[1]: 900.0, RELAYS[2]: 500.0, RELAYS[3]: 100.0}
    pool.scores.ranks = told.__getitem__
    assert tried(pool, told) == [RELAYS[2], RELAYS[1], RELAYS[0], RELAYS[3]]


def test_of_too_many_some_are_drawn_and_none_is_always_left_out():
    pool = Pool()
    pool.scores.ranks = lambda relay: 0.0 if relay == RELAYS[0] else 1000.0
    seen = Counter()
    for seed in range(200):
        order = tried(pool, RELAYS, seed)
        assert len(order) == DialConfig().servers == 8
        seen.update(order)
    assert 0 < seen[RELAYS[0]] < 30
    assert min(seen[relay] for relay in RELAYS[1:]) > 150


# --- with real clients -----------------------------------------------------------------------------------------------


class Sink(Protocol):
    """Takes what comes."""


@pytest_twisted.ensureDeferred
async def test_a_client_learns_which_of_two_relays_is_slow_and_that_it_has_healed():
    memory = MemoryNetwork(delay_s=0.01, random=Random(1))
    async with LocalNetwork(memory, relays=2, random=Random(2).randbytes) as network:
        slow, fast = network.pinned
        config = replace(ClientConfig(), scores=ScoreConfig(half_life_s=30.0))
        here = await network.client(min_servers=2, config=config)
        there = await network.client(min_servers=2)
        there.listen(Factory.forProtocol(Sink))
        await network.wait(there.when_ready())

        async def used(count=20):
            relays = Counter()
            for _ in range(count):
                transport = await network.wait(here.dial(there.public_key, security=Security.HOP))
                relays[transport.getHost().server_public_key] += 1
                transport.abortConnection()
                memory.advance(0.5)
            return relays

        memory.advance(300)
        assert len(await used()) == 2
        memory.set_path(slow.address.host, slow.address.port, Path(delay_s=0.4))
        await used(10)
        assert await used() == {fast.public_key: 20}
        memory.set_path(slow.address.host, slow.address.port, Path(delay_s=0.01))
        memory.advance(600)
        assert len(await used(40)) == 2


@pytest_twisted.ensureDeferred
async def test_a_relay_that_breaks_connections_is_left_for_another_one():
    memory = MemoryNetwork(delay_s=0.01, random=Random(3))
    async with LocalNetwork(memory, relays=6, random=Random(4).randbytes) as network:
        bad = network.pinned[0]
        client = await network.client(min_servers=1)
        lost = 0
        for _ in range(200):
            for pipe in memory.pipes_to(bad.address.port):
                pipe.cut()
                lost += 1
            memory.advance(5)
        # it was chosen again now and then, as a relay that may have healed, but not all the time
        assert lost < 20
        assert set(client.pool.sessions) - {bad.public_key}


@pytest_twisted.ensureDeferred
async def test_ranks_steer_real_clients_through_a_real_discovery_object():
    memory = MemoryNetwork(delay_s=0.01, random=Random(5))

    @implementer(IRankedDiscovery)
    class Ranked(MemoryDiscovery):
        ranks = None

        async def relay_ranks(self):
            return self.ranks

    async with LocalNetwork(memory, relays=5, random=Random(6).randbytes) as network:
        discovery = Ranked(network.now_ns, network.discovery.store)
        best = network.pinned[3].public_key
        discovery.ranks = ranks_for({one.public_key: 1000 if one.public_key == best else 0 for one in network.pinned})
        clients = [await network.client(discovery=discovery) for _ in range(12)]
        chosen = Counter(server for client in clients for server in client.pool.sessions)
        assert chosen[best] >= 10
