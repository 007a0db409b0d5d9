"""How a dial ends: with a stream, when its time is up, or because it was cancelled, whatever it waits for by then."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from dmsg.clients.dial import DialConfig, OpenedStream, StreamRequest
from dmsg.clients.dialer import Dialer
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.entry import BASE_VERSION, SECURE_VERSION, ClientPart, Entry
from dmsg.discovery.errors import DiscoveryUnavailable
from dmsg.errors import Attempt, DialError, StageError
from dmsg.relays.scores import RelayScores

PEER, ONE, TWO, THREE = (SecretKey(bytes((n,)) * 32).public_key for n in (1, 2, 3, 4))
LIMIT_S = 5.0
WAIT_S = DialConfig().look_up_s
DIAL = StreamRequest(PEER)
#: Another path of a transport that is looked for; a relay has ended an earlier one.
MOVE = StreamRequest(PEER, moves=True, ended_by=(THREE,))


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

    def begin(self, request: StreamRequest = DIAL) -> None:
        self.dial = ensureDeferred(self.dialer.dial(request, LIMIT_S, self.attempts))
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


# --- with a discovery that answers when it is told to -----------------------------------------------------------------


class Asking(World):
    """A dial over ``relays``, which are pinned, that asks discovery first, and for :data:`WAIT_S` nothing else."""

    def __init__(self, *relays: PublicKey, request: StreamRequest = DIAL) -> None:
        self.asked: list[Deferred[Entry]] = []
        super().__init__(*relays)
        self.dial.cancel()
        self.ended.clear()
        self.attempts.clear()
        self.pool.wanted.clear()
        self.dialer = Dialer(self.clock, self.pool, self, DialConfig(), lambda: 0.5)  # type: ignore[arg-type]
        self.begin(request)

    async def get_entry(self, _: PublicKey) -> Entry:
        self.asked.append(Deferred())
        return await self.asked[-1]

    def answer(self, *relays: PublicKey, version: str = SECURE_VERSION) -> None:
        """Discovery says that the peer is on ``relays``."""
        self.asked[-1].callback(Entry(version, 0, 1, PEER, ClientPart(relays), None))

    def begun_after(self, seconds: float) -> list[PublicKey]:
        """What was begun with that long after discovery was waited for no longer; call it with ever larger numbers."""
        while self.clock.seconds() < WAIT_S + seconds - 0.025:
            self.clock.advance(0.05)
        return list(self.pool.wanted)

    def fail(self, *relays: PublicKey, stage: str = "connect", reason: str = "connection refused") -> None:
        for relay in relays:
            self.pool.wanted.pop(relay).errback(StageError(stage, reason))

    def open(self, relay: PublicKey) -> None:
        """The dial gets through over ``relay``."""
        session = Session()
        self.pool.wanted.pop(relay).callback(session)
        session.asked[0].callback(OpenedStream(session, object(), 1.0))

    def found_over(self, relay: PublicKey) -> None:
        """A transport with the peer goes on over ``relay``."""
        self.dialer._lookups.reached(PEER, relay)

    def tried(self) -> list[tuple[str, str]]:
        return [(one.stage, one.reason) for one in self.attempts]


def test_a_relay_that_has_ended_a_path_is_not_begun_with_when_another_fails_and_a_third_may_still_answer() -> None:
    world = Asking(ONE, TWO, request=MOVE)
    world.answer(ONE, TWO, THREE)
    world.clock.advance(0.25)
    world.fail(TWO)
    world.clock.advance(0.9)
    assert THREE not in world.pool.wanted
    world.clock.advance(0.1)
    assert THREE in world.pool.wanted
    world.dial.cancel()


def test_nor_sooner_when_discovery_names_it_late() -> None:
    world = Asking(ONE, TWO, request=MOVE)
    assert world.begun_after(0.1) == [ONE]
    world.answer(ONE, THREE)
    assert world.begun_after(0.95) == [ONE]
    assert world.begun_after(1.05) == [ONE, THREE]
    world.dial.cancel()


def test_nor_when_all_others_were_begun_with_before() -> None:
    world = Asking(ONE, TWO, request=MOVE)
    assert world.begun_after(0.6) == [ONE, TWO]
    world.answer(ONE, TWO, THREE)
    assert world.begun_after(1.2) == [ONE, TWO]
    assert world.begun_after(1.3) == [ONE, TWO, THREE]
    world.dial.cancel()


def test_it_is_begun_with_at_once_when_all_others_have_failed() -> None:
    world = Asking(ONE, TWO, request=MOVE)
    assert world.begun_after(0.3) == [ONE, TWO]
    world.answer(THREE)
    world.fail(ONE, TWO)
    assert world.begun_after(0.3) == [THREE]
    world.dial.cancel()


def test_of_relays_that_have_ended_paths_the_one_that_did_so_last_is_last() -> None:
    assert World().dialer.order([ONE, TWO, THREE], (THREE, ONE)) == [TWO, THREE, ONE]


# --- what comes late, and what was said a moment ago ------------------------------------------------------------------


@pytest.mark.parametrize("found", [True, False])
def test_a_dial_ends_when_nothing_is_left_to_try_and_discovery_has_said_so(found: bool) -> None:
    world = Asking(ONE, TWO)
    world.begun_after(0.3)
    world.fail(ONE, TWO)
    assert not world.ended
    if found:
        world.answer()
    else:
        world.asked[0].errback(DiscoveryUnavailable("HTTP status 500"))
    assert isinstance(world.error, DialError) and not world.clock.getDelayedCalls()
    assert world.tried()[-1] == ("discovery", "no common server" if found else "unavailable")


def test_what_was_taken_back_since_the_peer_has_to_be_spoken_to_in_another_way_is_not_owed() -> None:
    world = Asking(ONE, TWO, request=StreamRequest(PEER, heeds_promise=True))
    assert world.begun_after(LIMIT_S / 2 - WAIT_S + 0.5) == [ONE, TWO]
    world.answer(THREE, version=BASE_VERSION)
    world.clock.advance(LIMIT_S)
    assert world.timed_out() == [("connect", str(THREE))]


def test_a_search_does_not_wait_anew_for_a_question_that_goes_on() -> None:
    world = Asking(ONE, request=MOVE)
    with world.dialer.searching(PEER):
        assert world.begun_after(0.1) == [ONE]
        world.fail(ONE)
        assert isinstance(world.error, DialError)
        world.ended.clear()
        world.clock.advance(0.2)
        world.begin(MOVE)
        world.clock.advance(0.0)
        assert list(world.pool.wanted) == [ONE] and len(world.asked) == 1
        world.answer(TWO)
        world.clock.advance(DialConfig().stagger_s)
        assert list(world.pool.wanted) == [ONE, TWO]
        world.dial.cancel()


def dialled_before(*relays: PublicKey, request: StreamRequest = DIAL) -> Asking:
    """A second dial to a peer that discovery has just found on ``relays``."""
    world = Asking(request=request)
    world.answer(*relays)
    world.open(relays[0])
    world.ended.clear()
    world.begin(request)
    assert list(world.pool.wanted) == list(relays[:1]) and len(world.asked) == 1
    return world


def test_discovery_is_not_asked_again_when_the_peer_has_said_no() -> None:
    world = dialled_before(ONE)
    world.fail(ONE, stage="accept", reason="access_denied")
    assert isinstance(world.error, DialError) and len(world.asked) == 1


def test_a_dial_that_begins_while_discovery_is_asked_again_waits_for_the_answer() -> None:
    world = dialled_before(ONE)
    world.fail(ONE, stage="accept", reason="unknown_peer")
    first = world.dial
    world.begin()
    assert not world.pool.wanted and len(world.asked) == 2
    world.answer(TWO)
    assert list(world.pool.wanted) == [TWO] and len(world.asked) == 2
    for dial in (first, world.dial):
        dial.cancel()


def test_a_peer_that_is_still_there_is_dialled_again_if_it_has_to_be_spoken_to_in_another_way() -> None:
    world = dialled_before(ONE, request=StreamRequest(PEER, heeds_promise=True))
    world.fail(ONE, stage="accept", reason="unknown_peer")
    world.answer(ONE, version=BASE_VERSION)
    assert list(world.pool.wanted) == [ONE]
    world.dial.cancel()


# --- where a transport has found the peer -----------------------------------------------------------------------------


def test_where_a_transport_finds_the_peer_while_discovery_is_asked_again_the_dial_goes_too() -> None:
    """Over the relay that has just not led to it: the peer has come back there."""
    world = dialled_before(ONE)
    world.fail(ONE, stage="accept", reason="unknown_peer")
    assert not world.pool.wanted and not world.ended
    world.found_over(ONE)
    assert not world.ended
    world.open(ONE)
    assert isinstance(world.ended[0], OpenedStream) and not world.clock.getDelayedCalls()


def test_the_answer_of_discovery_counts_also_behind_that() -> None:
    world = dialled_before(ONE)
    world.fail(ONE, stage="accept", reason="unknown_peer")
    world.found_over(ONE)
    world.fail(ONE, stage="accept", reason="unknown_peer")
    assert not world.ended
    world.answer(TWO)
    world.open(TWO)
    assert isinstance(world.ended[0], OpenedStream) and len(world.asked) == 2


def test_so_it_does_for_a_dial_that_had_nothing_else_to_go_by() -> None:
    world = Asking()
    world.found_over(ONE)
    world.fail(ONE, stage="accept", reason="unknown_peer")
    assert not world.ended
    world.answer(TWO)
    world.open(TWO)
    assert isinstance(world.ended[0], OpenedStream) and not world.clock.getDelayedCalls()


def test_so_it_does_for_one_that_had_begun_with_something_else() -> None:
    world = Asking(ONE)
    assert world.begun_after(0.1) == [ONE]
    world.fail(ONE)
    for _ in range(2):
        world.found_over(TWO)
        world.fail(TWO, stage="accept", reason="unknown_peer")
        assert not world.ended
    world.answer(THREE)
    world.open(THREE)
    assert isinstance(world.ended[0], OpenedStream) and not world.clock.getDelayedCalls()
