"""How a dial ends: with a stream, when its time is up, or because it was cancelled, whatever it waits for by then."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from dmsg.clients.dialer import DialConfig, Dialer, OpenedStream, StreamRequest
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.entry import ClientPart, Entry
from dmsg.errors import Attempt, DialError, StageError
from dmsg.relays.scores import RelayScores

PEER, ONE, TWO, THREE = (SecretKey(bytes((n,)) * 32).public_key for n in (1, 2, 3, 4))
LIMIT_S = 5.0


class Session:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[Deferred[Any]] = []
        self.given_up = 0

    def request(self, target: PublicKey, service: str) -> Deferred[Any]:
        self.asked.append(Deferred(self._give_up))
        return self.asked[-1]

    def _give_up(self, _: object) -> None:
        self.given_up += 1


@dataclass
class Pool:
    """Sessions that come up when they are told to."""

    pinned: list[PublicKey]
    sessions: dict[PublicKey, Any] = field(default_factory=dict)
    scores: RelayScores = field(default_factory=RelayScores)
    wanted: dict[PublicKey, Deferred[Any]] = field(default_factory=dict)

    def stage(self, relay: PublicKey) -> str:
        return "connect"

    def get(self, relay: PublicKey) -> Deferred[Any]:
        self.wanted[relay] = Deferred()
        return self.wanted[relay]


class World:
    """A dial over ``relays``, and what became of it."""

    def __init__(self, *relays: PublicKey) -> None:
        self.clock = Clock()
        self.pool = Pool(list(relays))
        self.attempts: list[Attempt] = []
        self.dialer: Any = Dialer(self.clock, self.pool, None, DialConfig(), lambda: 0.5)  # type: ignore[arg-type]
        self.ended: list[Any] = []
        self.begin()

    def begin(self) -> None:
        self.dial = ensureDeferred(self.dialer.dial(StreamRequest(PEER), LIMIT_S, self.attempts))
        self.dial.addBoth(self.ended.append)

    def come_up(self, relay: PublicKey) -> Session:
        session = Session()
        self.pool.wanted[relay].callback(session)
        return session

    @property
    def error(self) -> BaseException:
        [failure] = self.ended
        assert isinstance(failure, Failure)
        return failure.value

    def timed_out(self) -> list[tuple[str, str]]:
        """Stage and relay of what had come to nothing when the time was up."""
        assert isinstance(self.error, DialError)
        assert not self.clock.getDelayedCalls()
        return [(one.stage, one.server) for one in self.attempts if one.reason == "timeout"]


def test_a_dial_gives_what_the_session_gives_and_leaves_no_timer() -> None:
    world = World(ONE)
    session = world.come_up(ONE)
    opened = OpenedStream(session, object(), 1.0)
    session.asked[0].callback(opened)
    assert world.ended == [opened] and not world.clock.getDelayedCalls()


def test_the_time_is_up_while_the_relay_is_connected_to() -> None:
    world = World(ONE)
    world.clock.advance(LIMIT_S)
    assert world.timed_out() == [("connect", str(ONE))]


def test_the_time_is_up_while_the_peer_is_waited_for() -> None:
    world = World(ONE)
    session = world.come_up(ONE)
    world.clock.advance(LIMIT_S - 0.1)
    assert not world.ended
    world.clock.advance(0.1)
    assert world.timed_out() == [("accept", str(ONE))] and session.given_up == 1


def test_the_time_is_up_for_all_relays_of_a_race() -> None:
    world = World(ONE, TWO)
    world.clock.advance(DialConfig().stagger_s)
    first, second = world.pool.wanted
    session = world.come_up(first)
    world.clock.advance(LIMIT_S)
    assert sorted(world.timed_out()) == sorted([("accept", str(first)), ("connect", str(second))])
    assert session.given_up == 1


@pytest.mark.parametrize("relays", [(ONE,), (ONE, TWO)])
def test_a_dial_that_is_cancelled_gives_up_what_it_waits_for(relays: tuple[PublicKey, ...]) -> None:
    world = World(*relays)
    session = world.come_up(next(iter(world.pool.wanted)))
    world.dial.cancel()
    assert isinstance(world.error, CancelledError) and session.given_up == 1
    assert not world.clock.getDelayedCalls() and not world.attempts


@pytest.mark.parametrize("relays", [(ONE,), (ONE, TWO)])
def test_a_dialer_that_is_stopped_ends_its_dials_and_begins_no_others(relays: tuple[PublicKey, ...]) -> None:
    world = World(*relays)
    session = world.come_up(next(iter(world.pool.wanted)))
    world.dialer.stop()
    assert isinstance(world.error, DialError) and session.given_up == 1
    assert [(one.stage, one.reason) for one in world.attempts] == [("accept", "stopped")]
    assert not world.clock.getDelayedCalls() and len(world.pool.wanted) == 1
    world.pool.wanted.clear()
    world.begin()
    assert isinstance(world.ended[-1].value, DialError) and not world.pool.wanted
    world.dialer.start()
    world.begin()
    assert world.pool.wanted
    world.dial.cancel()


def test_a_dial_that_fails_leaves_no_timer() -> None:
    world = World(ONE)
    world.come_up(ONE).asked[0].errback(StageError("accept", "no"))
    assert isinstance(world.error, DialError) and not world.clock.getDelayedCalls()
    assert [(one.stage, one.reason) for one in world.attempts] == [("accept", "no")]


# --- relays that have ended earlier paths -----------------------------------------------------------------------------


@dataclass
class Moving(World):
    """A transport on ``ONE`` and ``TWO`` looks for another path; ``THREE`` has ended an earlier one."""

    found: Deferred[Entry] = field(default_factory=Deferred)

    def __post_init__(self) -> None:
        super().__init__(ONE, TWO)
        self.dial.cancel()
        self.pool.wanted.clear()
        self.dialer = Dialer(self.clock, self.pool, self, DialConfig(), lambda: 0.5)  # type: ignore[arg-type]
        request = StreamRequest(PEER, moves=True, ended_by=(THREE,))
        self.dial = ensureDeferred(self.dialer.dial(request, LIMIT_S, self.attempts))

    async def get_entry(self, _: PublicKey) -> Entry:
        return await self.found

    def find(self, *relays: PublicKey) -> None:
        """Discovery says that the peer is on ``relays``."""
        self.found.callback(Entry("0.1.0", 0, 1, PEER, ClientPart(relays), None))

    def after(self, seconds: float) -> list[PublicKey]:
        """What was begun with that long after discovery was waited for no longer; call it with ever larger numbers."""
        while self.clock.seconds() < DialConfig().look_up_s + seconds - 0.025:
            self.clock.advance(0.05)
        return list(self.pool.wanted)


def test_a_relay_that_has_ended_a_path_is_not_begun_with_when_another_fails_and_a_third_may_still_answer() -> None:
    world = Moving()
    world.find(ONE, TWO, THREE)
    world.pool.wanted[ONE].callback(Session())
    world.clock.advance(0.25)
    world.pool.wanted[TWO].errback(StageError("connect", "connection refused"))
    world.clock.advance(0.9)
    assert THREE not in world.pool.wanted
    world.clock.advance(0.1)
    assert THREE in world.pool.wanted
    world.dial.addErrback(lambda _: None).cancel()


def test_nor_sooner_when_discovery_names_it_late() -> None:
    world = Moving()
    assert world.after(0.1) == [ONE]
    world.find(ONE, THREE)
    assert world.after(0.95) == [ONE]
    assert world.after(1.05) == [ONE, THREE]
    world.dial.addErrback(lambda _: None).cancel()


def test_nor_when_all_others_were_begun_with_before() -> None:
    world = Moving()
    assert world.after(0.6) == [ONE, TWO]
    world.find(ONE, TWO, THREE)
    assert world.after(1.2) == [ONE, TWO]
    assert world.after(1.3) == [ONE, TWO, THREE]
    world.dial.addErrback(lambda _: None).cancel()


def test_it_is_begun_with_at_once_when_all_others_have_failed() -> None:
    world = Moving()
    assert world.after(0.3) == [ONE, TWO]
    world.find(THREE)
    for relay in (ONE, TWO):
        world.pool.wanted[relay].errback(StageError("connect", "connection refused"))
    assert world.after(0.3) == [ONE, TWO, THREE]
    world.dial.addErrback(lambda _: None).cancel()
