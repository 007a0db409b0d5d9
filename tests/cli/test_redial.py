"""Dials that wait for their turn, and try again while the other side is busy."""

from __future__ import annotations

import pytest
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock

from dmsg.cli.redial import DIALS_AT_ONCE, MOVE_S, Redialer, is_busy
from dmsg.crypto.keys import SecretKey
from dmsg.errors import Attempt, DialError
from dmsg.messaging.core.errors import ChannelRefused, NoFreeChannel
from dmsg.mux.core.errors import AccessDenied, Busy, RateLimited
from dmsg.relays.errors import SessionTimeout

PEER = SecretKey.generate().public_key


def failure(*errors):
    return DialError(str(PEER), [Attempt("accept", "02ab", 1.0, str(error), error) for error in errors])


class Client:
    """Gives one Deferred for each dial, and notes the time each may take."""

    def __init__(self):
        self.dials = []
        self.timeouts = []

    async def dial(self, peer, service, *, timeout_s):
        assert (peer, service) == (PEER, "web")
        self.timeouts.append(timeout_s)
        self.dials.append(Deferred())
        return await self.dials[-1]


class StrictClock(Clock):
    """Refuses what a reactor refuses."""

    def callLater(self, delay, callable, *args, **kw):
        assert delay >= 0
        return super().callLater(delay, callable, *args, **kw)


class Stage:
    def __init__(self, timeout_s=10.0):
        self.clock = StrictClock()
        self.client = Client()
        self.redialer = Redialer(
            self.client,
            PEER,
            "web",
            timeout_s=timeout_s,
            clock=self.clock,
            random=lambda size: b"\x80" + bytes(size - 1),
        )
        self.outcomes = []

    def start(self):
        dialling = Deferred.fromCoroutine(self.redialer.dial())
        dialling.addCallbacks(self.outcomes.append, lambda failure: self.outcomes.append(failure.value))
        return dialling


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([Busy("", by="local")], True),
        ([RateLimited("", by="peer")], True),
        ([NoFreeChannel()], True),
        ([ChannelRefused()], False),
        ([AccessDenied("", by="peer")], False),
        ([AccessDenied("", by="peer"), Busy("", by="peer")], True),
        ([], False),
    ],
)
def test_what_passes_by_itself(errors, expected):
    assert is_busy(failure(*errors)) is expected


def test_it_dials_again_with_longer_pauses_for_as_long_as_there_is_time():
    stage = Stage()
    stage.start()
    at = []
    while not stage.outcomes:
        at.append(stage.clock.seconds())
        stage.client.dials[-1].errback(failure(Busy("", by="peer")))
        calls = stage.clock.getDelayedCalls()
        if calls:
            stage.clock.advance(calls[0].getTime() - stage.clock.seconds())
    assert [round(one, 6) for one in at[:6]] == [0.0, 0.1, 0.3, 0.7, 1.5, 2.5]
    assert 9.0 < at[-1] < 10.0
    assert isinstance(stage.outcomes[0], DialError) and stage.outcomes[0].reason == "busy"
    assert stage.client.timeouts == pytest.approx([10.0 - one for one in at])
    assert not stage.clock.getDelayedCalls()


def test_it_gets_through_in_the_end():
    stage = Stage()
    stage.start()
    stage.client.dials[0].errback(failure(RateLimited("", by="peer")))
    stage.clock.advance(0.1)
    stage.client.dials[1].callback("a transport")
    assert stage.outcomes == ["a transport"] and not stage.clock.getDelayedCalls()


def test_what_does_not_pass_by_itself_is_told_at_once():
    stage = Stage()
    stage.start()
    stage.client.dials[0].errback(failure(AccessDenied("", by="peer")))
    assert [type(one) for one in stage.outcomes] == [DialError] and len(stage.client.dials) == 1


def test_a_refusal_without_a_reason_passes_by_itself_if_the_peer_has_accepted_before():
    stage = Stage()
    stage.start()
    stage.client.dials[0].errback(failure(ChannelRefused()))
    assert isinstance(stage.outcomes.pop(), DialError)
    stage.start()
    stage.client.dials[1].callback("first")
    stage.start()
    stage.client.dials[2].errback(failure(ChannelRefused()))
    stage.clock.advance(0.1)
    stage.client.dials[3].callback("second")
    assert stage.outcomes == ["first", "second"]


def lost(stage="accept", reason="unknown_peer"):
    return DialError(str(PEER), [Attempt(stage, "02ab", 1.0, reason)])


@pytest.mark.parametrize("error", [lost(), lost("connect", "connection refused"), lost("handshake", "timeout")])
def test_a_peer_that_was_there_is_looked_for_as_long_as_it_may_be_moving(error):
    stage = Stage()
    stage.start()
    stage.client.dials[0].errback(error)
    assert stage.outcomes == [error]  # it never was there
    stage.start()
    stage.client.dials[1].callback("open")
    stage.start()
    began = stage.clock.seconds()
    while len(stage.outcomes) < 3:
        stage.client.dials[-1].errback(error)
        stage.clock.pump([0.0, 1.0] if len(stage.outcomes) < 3 else [])
    assert stage.outcomes[2] is error and MOVE_S <= stage.clock.seconds() - began < MOVE_S + 2
    assert len(stage.client.dials) > 4
    # it is away: those that come now are told at once
    dials = len(stage.client.dials)
    stage.start()
    stage.client.dials[dials].errback(error)
    assert stage.outcomes[3] is error and not stage.clock.getDelayedCalls()
    # until it is back
    for outcome in ("open", None):
        stage.start()
        if outcome:
            stage.client.dials[-1].callback(outcome)
    stage.client.dials[-1].errback(error)
    stage.clock.advance(0.1)
    stage.client.dials[-1].callback("found")
    assert stage.outcomes[4:] == ["open", "found"]


def unanswered():
    """By the entry of before, because discovery has not said anything for a second."""
    attempts = [
        Attempt("discovery", "", 1000.0, "unavailable"),
        Attempt("connect", "02ab", 1001.0, "connection refused"),
    ]
    return DialError(str(PEER), attempts)


def test_the_time_that_a_peer_has_to_move_begins_when_discovery_answers():
    stage = Stage()
    stage.start()
    stage.client.dials[0].callback("open")
    stage.start()
    stage.client.dials[1].errback(unanswered())
    stage.clock.pump([0.1, MOVE_S])
    stage.start()
    for dial in (2, 3):
        stage.client.dials[dial].errback(unanswered())
    stage.clock.advance(0.3)
    for dial in (4, 5):
        stage.client.dials[dial].errback(lost())
    stage.clock.advance(0.6)
    for dial in (6, 7):
        stage.client.dials[dial].callback("found")
    assert stage.outcomes == ["open", "found", "found"]


def test_a_peer_that_is_away_is_not_looked_for_because_discovery_has_no_answer():
    stage = Stage()
    stage.start()
    stage.client.dials[0].callback("open")
    stage.start()
    while len(stage.outcomes) < 2:
        stage.client.dials[-1].errback(lost())
        stage.clock.pump([1.0, 1.0] if len(stage.outcomes) < 2 else [])
    error = unanswered()
    stage.start()
    stage.client.dials[-1].errback(error)
    assert stage.outcomes[2] is error and not stage.clock.getDelayedCalls()


def cut_short(timeout_s):
    late = SessionTimeout("the dial", timeout_s)
    return DialError(str(PEER), [Attempt("discovery", "", timeout_s * 1000, "timeout", late)])


@pytest.mark.parametrize(("at_s", "told"), [(9.9, "before"), (3.0, "last")])
def test_a_dial_that_is_cut_short_because_the_time_is_over_does_not_hide_why_the_one_before_failed(at_s, told):
    """One that had most of the time does: the peer was busy at first, and later nothing answered."""
    stage = Stage()
    stage.start()
    stage.client.dials[0].callback("open")
    stage.start()
    stage.clock.advance(at_s - 0.1)
    reasons = {"before": unanswered(), "last": cut_short(10.0 - at_s)}
    stage.client.dials[1].errback(reasons["before"])
    stage.clock.advance(0.1)
    assert stage.client.timeouts[2] == pytest.approx(10.0 - at_s)
    stage.clock.advance(10.0 - at_s)
    stage.client.dials[2].errback(reasons["last"])
    assert stage.outcomes == ["open", reasons[told]]
    assert not stage.clock.getDelayedCalls()


def test_what_a_late_dial_says_before_the_time_is_over_is_told():
    stage = Stage()
    stage.start()
    stage.client.dials[0].callback("open")
    stage.start()
    stage.clock.advance(9.0)
    stage.client.dials[1].errback(unanswered())
    stage.clock.advance(0.1)
    said = failure(AccessDenied("", by="peer"))
    stage.client.dials[2].errback(said)
    assert stage.outcomes == ["open", said]


def test_a_peer_that_says_no_has_not_moved():
    stage = Stage()
    stage.start()
    stage.client.dials[0].callback("open")
    stage.start()
    stage.client.dials[1].errback(failure(AccessDenied("", by="peer")))
    assert len(stage.outcomes) == 2 and not stage.clock.getDelayedCalls()
    stage.start()
    stage.client.dials[2].errback(lost())
    stage.clock.advance(0.1)
    stage.client.dials[3].errback(failure(AccessDenied("", by="peer")))
    assert len(stage.outcomes) == 3 and not stage.clock.getDelayedCalls()


def test_only_so_many_dial_at_one_time():
    stage = Stage()
    for _ in range(DIALS_AT_ONCE + 2):
        stage.start()
    assert len(stage.client.dials) == DIALS_AT_ONCE
    stage.client.dials[0].callback("first")
    stage.client.dials[1].errback(failure(Busy("", by="peer")))
    assert len(stage.client.dials) == DIALS_AT_ONCE + 2, "one that waits to dial again keeps no turn"


def test_waiting_for_a_turn_takes_time_too():
    stage = Stage(timeout_s=3.0)
    for _ in range(DIALS_AT_ONCE + 1):
        stage.start()
    stage.clock.advance(3.0)
    (late,) = stage.outcomes
    assert isinstance(late, DialError) and isinstance(late.attempts[0].error, Busy)
    stage.client.dials[0].errback(DialError(str(PEER), [Attempt("accept", "", 1.0, "x", SessionTimeout("x", 3.0))]))
    assert len(stage.client.dials) == DIALS_AT_ONCE


def test_a_turn_that_comes_when_the_time_is_over_is_no_dial():
    stage = Stage(timeout_s=3.0)
    for _ in range(DIALS_AT_ONCE):
        stage.start()
    stage.clock.callLater(3.0, lambda: stage.client.dials[0].callback("first"))
    stage.start()
    stage.clock.advance(3.0)
    assert stage.outcomes[1] == "first" and len(stage.client.dials) == DIALS_AT_ONCE
    assert isinstance(stage.outcomes[0].attempts[0].error, Busy)


def test_a_pause_that_ends_when_the_time_is_over_costs_no_turn():
    stage = Stage(timeout_s=3.0)
    stage.start()
    stage.client.dials[0].errback(failure(Busy("", by="peer")))
    for _ in range(DIALS_AT_ONCE):
        stage.start()
    stage.clock.advance(3.5)  # in one step: the process was held up
    (late,) = stage.outcomes
    assert isinstance(late, DialError) and isinstance(late.attempts[0].error, Busy)
    for dialling in stage.client.dials[1:]:
        dialling.callback("a transport")
    for _ in range(DIALS_AT_ONCE):
        stage.start()
    assert len(stage.client.dials) == 1 + 2 * DIALS_AT_ONCE


def test_it_can_be_cancelled_at_any_time():
    stage = Stage()
    running = [stage.start() for _ in range(DIALS_AT_ONCE + 1)]
    stage.client.dials[1].errback(failure(Busy("", by="peer")))
    for number in (0, 1, DIALS_AT_ONCE):
        running[number].cancel()
        assert isinstance(stage.outcomes[-1], CancelledError)
    assert not stage.clock.getDelayedCalls()
    stage.start()
    assert len(stage.client.dials) == DIALS_AT_ONCE + 2
