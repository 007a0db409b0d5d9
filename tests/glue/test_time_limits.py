"""Time limits with one timed call for all of them."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock

from dmsg.glue.time_limits import TimeLimits


class TooLate(Exception):
    """A limit has passed."""


def late() -> Any:
    raise TooLate


def outcome(waiting: Deferred[Any]) -> list[Any]:
    found: list[Any] = []
    waiting.addBoth(lambda result: found.append(getattr(result, "value", result)))
    return found


def test_what_comes_in_time_is_given_and_leaves_one_timed_call_for_any_number_of_waits():
    clock = Clock()
    limits = TimeLimits(clock)
    for number in range(100):
        waiting: Deferred[int] = Deferred()
        found = outcome(limits.limit(waiting, 60.0, late))
        waiting.callback(number)
        assert found == [number]
        clock.advance(0.01)
    assert len(clock.getDelayedCalls()) == 1
    clock.advance(60)
    assert clock.getDelayedCalls() == []


def test_each_wait_has_a_limit_of_its_own():
    clock = Clock()
    limits = TimeLimits(clock)
    found = {limit_s: outcome(limits.limit(Deferred(), limit_s, late)) for limit_s in (3.0, 1.0, 2.0, 0.0)}
    for now in range(4):
        clock.advance(1.0 if now else 0.0)
        assert {limit_s for limit_s, results in found.items() if results} == {
            limit_s for limit_s in found if limit_s <= now
        }
    assert all(isinstance(result, TooLate) for [result] in found.values())
    assert clock.getDelayedCalls() == []


def test_a_wait_that_begins_later_is_not_ended_by_the_call_of_one_before():
    clock = Clock()
    limits = TimeLimits(clock)
    first: Deferred[None] = Deferred()
    limits.limit(first, 1.0, late)
    clock.advance(0.9)
    first.callback(None)
    found = outcome(limits.limit(Deferred(), 1.0, lambda: "enough"))
    clock.advance(0.5)
    assert not found
    clock.advance(0.5)
    assert found == ["enough"]


def test_who_is_late_may_begin_to_wait_again_and_end_another_wait():
    clock = Clock()
    limits = TimeLimits(clock)
    other: Deferred[None] = Deferred()
    again: list[Any] = []

    def wait_again() -> None:
        other.callback(None)
        again.append(outcome(limits.limit(Deferred(), 1.0, late)))

    limits.limit(Deferred(), 1.0, wait_again)
    found = outcome(limits.limit(other, 1.0, late))
    clock.advance(1.0)
    assert found == [None] and again == [[]]
    clock.advance(1.0)
    assert isinstance(again[0][0], TooLate)


def test_who_is_late_and_waits_again_for_long_does_not_put_off_the_limits_of_others():
    clock = Clock()
    limits = TimeLimits(clock)
    limits.limit(Deferred(), 1.0, lambda: outcome(limits.limit(Deferred(), 60.0, late)))
    found = outcome(limits.limit(Deferred(), 5.0, late))
    clock.advance(1.0)
    assert not found
    clock.advance(4.0)
    assert found and isinstance(found[0], TooLate)
    clock.advance(56.0)
    assert clock.getDelayedCalls() == []


def test_a_wait_that_is_cancelled_by_others_is_not_late():
    clock = Clock()
    waiting: Deferred[None] = Deferred()
    found = outcome(TimeLimits(clock).limit(waiting, 1.0, late))
    waiting.cancel()
    assert isinstance(found[0], CancelledError)


def test_what_has_happened_already_needs_no_call():
    clock = Clock()
    waiting: Deferred[str] = Deferred()
    waiting.callback("there")
    assert outcome(TimeLimits(clock).limit(waiting, 1.0, late)) == ["there"]
    assert clock.getDelayedCalls() == []


@pytest.mark.parametrize("waits", [0, 1])
def test_stopping_leaves_no_call(waits):
    clock = Clock()
    limits = TimeLimits(clock)
    for _ in range(waits):
        limits.limit(Deferred(), 1.0, late)
    limits.stop()
    assert clock.getDelayedCalls() == []
