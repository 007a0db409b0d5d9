"""Turns at a given rate."""

from __future__ import annotations

from twisted.internet.defer import CancelledError
from twisted.internet.task import Clock

from dmsg.glue.turns import Turns


def test_a_second_has_as_many_as_its_rate_then_one_waits_in_line(clock: Clock) -> None:
    turns = Turns(clock, 3)
    assert [turns.take() for _ in range(3)] == [None, None, None]
    order: list[int] = []
    for number in range(4):
        turn = turns.take()
        assert turn is not None
        turn.addCallback(lambda _, number=number: order.append(number))
    for _ in range(100):
        clock.advance(0.01)
    assert order in ([0, 1], [0, 1, 2])
    assert turns.take() is not None, "a new one does not overtake those in line"
    clock.pump([0.01] * 100)
    assert order == [0, 1, 2, 3]


def test_a_turn_given_up_costs_the_others_no_time(clock: Clock) -> None:
    turns = Turns(clock, 1)
    assert turns.take() is None
    first, second = turns.take(), turns.take()
    assert first is not None
    assert second is not None
    failed = []
    first.addErrback(failed.append)
    first.cancel()
    assert failed[0].check(CancelledError)
    clock.advance(1.01)
    assert second.called


def test_stopping_lets_all_that_wait_go(clock: Clock) -> None:
    turns = Turns(clock, 1)
    assert turns.take() is None
    waiting = [turns.take() for _ in range(3)]
    turns.stop()
    assert all(one is not None and one.called for one in waiting)
    assert not clock.getDelayedCalls()
    late = turns.take()
    assert late is not None
    clock.advance(1.01)
    assert late.called


def test_nobody_overtakes_a_line_that_the_reactor_is_late_for(clock: Clock) -> None:
    turns = Turns(clock, 1)
    assert turns.take() is None
    first = turns.take()
    clock.rightNow += 5.0  # no call was made yet
    second = turns.take()
    assert first is not None and second is not None
    clock.advance(0)
    assert first.called and not second.called
    clock.advance(1.01)
    assert second.called


def test_a_rate_that_does_not_add_up_exactly_does_not_spin(clock: Clock) -> None:
    """A tenth of a second, ten times over, is not a second in floating point."""
    turns = Turns(clock, 10)
    waiting = [turns.take() for _ in range(60)]
    looked = 0
    while clock.getDelayedCalls():
        looked += 1
        assert looked < 200
        due = min(call.getTime() for call in clock.getDelayedCalls())
        clock.advance(due - clock.seconds())
    assert all(one is None or one.called for one in waiting)
