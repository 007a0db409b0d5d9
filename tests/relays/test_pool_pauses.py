"""How long a pool waits before it asks a server again, and for whom it does not."""

from __future__ import annotations

import errno

import pytest
from twisted.internet.defer import Deferred, fail
from twisted.internet.error import ConnectBindError, ConnectionRefusedError

from dmsg.address import HostPort
from dmsg.crypto.keys import SecretKey
from dmsg.errors import StageError
from dmsg.relays.candidates import Candidate
from dmsg.relays.pool import RESTING_LIMIT, PoolConfig, SessionPool

SERVER = SecretKey.generate().public_key
CONFIG = PoolConfig(backoff_first_s=3.0, backoff_limit_s=60.0, urgent_backoff_s=1.0, poll_s=5.0)


class Refusing:
    """An endpoint that refuses every connection; notes when it was asked."""

    def __init__(self, clock):
        self.clock = clock
        self.error = ConnectionRefusedError()
        self.asked_at = []

    def connect(self, factory):
        self.asked_at.append(self.clock.seconds())
        return fail(self.error)


@pytest.fixture
def network(clock):
    return Refusing(clock)


@pytest.fixture
def make_pool(clock, network):
    pools = []

    def make(*, urgent=False):
        pool = SessionPool(
            clock,
            lambda server: None,
            lambda address: network,
            discovery=None,
            pinned=[(SERVER, HostPort("127.0.0.1", 1))],
            goal=1,
            config=CONFIG,
            uniform=lambda: 0.5,
            changed=lambda: None,
            went_down=lambda server, reason, attempt: failures.append(attempt),
            urgent=lambda: urgent,
        )
        failures = pool.told = []
        pool.start()
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        assert Deferred.fromCoroutine(pool.stop()).called


def advance(clock, seconds):
    for _ in range(int(seconds * 20)):
        clock.advance(0.05)


@pytest.mark.parametrize(
    ("error", "counts"), [(ConnectionRefusedError(), True), (ConnectBindError(errno.EMFILE, "none"), False)]
)
def test_a_relay_is_not_held_to_be_worse_because_we_have_no_descriptor(clock, network, make_pool, error, counts):
    network.error = error
    pool = make_pool()
    before = pool.scores.score(SERVER, clock.seconds())
    advance(clock, 10)
    assert pool.told
    assert (pool.scores.score(SERVER, clock.seconds()) < before) is counts


def test_pauses_grow_with_each_failure(clock, network, make_pool):
    make_pool()
    advance(clock, 120)
    pauses = [later - earlier for earlier, later in zip(network.asked_at, network.asked_at[1:], strict=False)]
    assert len(pauses) >= 4
    assert pauses == sorted(pauses) and pauses[0] >= 1.5 and pauses[-1] > 20


def test_dials_in_a_pause_do_not_make_it_longer(clock, network, make_pool):
    quiet = make_pool()
    advance(clock, 100)
    alone, network.asked_at = network.asked_at, []
    start = clock.seconds()
    assert Deferred.fromCoroutine(quiet.stop()).called
    busy = make_pool()
    dialled = []
    for _ in range(100):
        advance(clock, 1)
        dialled.append(clock.seconds())
        busy.get(SERVER).addErrback(lambda failure: failure.trap(StageError))
    by_goal = [at - start for at in network.asked_at if at not in dialled]
    # a dial may come when the pause is over and the goal has not woken yet: then it counts as the goal's own
    assert len(by_goal) >= len(alone) - 2
    assert max(busy.told) <= len(alone) + 1


def test_while_something_waits_for_a_session_no_pause_is_long(clock, network, make_pool):
    make_pool(urgent=True)
    advance(clock, 30)
    pauses = [later - earlier for earlier, later in zip(network.asked_at, network.asked_at[1:], strict=False)]
    assert len(pauses) > 20 and max(pauses) <= 1.25 * CONFIG.urgent_backoff_s


def test_pauses_are_remembered_of_the_last_that_failed_only(clock, network, make_pool):
    """A discovery may list other relays each time it is asked, and entries of peers may name any."""
    pool = make_pool()
    relays = [SecretKey.generate().public_key for _ in range(RESTING_LIMIT + 10)]
    for relay in [*relays, relays[20]]:
        pool.get(relay, Candidate(relay, HostPort("192.0.2.1", 1))).addErrback(lambda failure: failure.trap(StageError))
    assert not any(pool.rested_at(relay) for relay in relays[:10])
    assert all(pool.rested_at(relay) > clock.seconds() for relay in relays[20:])
