"""Deferreds that wait for one fact."""

from __future__ import annotations

import time

import pytest
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from dmsg.glue.waiters import Waiters


def results(waiter: Deferred[int]) -> list[object]:
    """What ``waiter`` fires with, filled in when it does."""
    found: list[object] = []
    waiter.addCallbacks(found.append, lambda failure: found.append(failure.type))
    return found


def test_all_are_fired_in_order_and_once():
    waiters: Waiters[int] = Waiters()
    order: list[tuple[int, int]] = []
    for number in range(3):
        waiters.wait().addCallback(lambda value, number=number: order.append((number, value)))
    assert len(waiters) == 3
    waiters.fire(7)
    waiters.fire(8)
    assert order == [(0, 7), (1, 7), (2, 7)]
    assert not waiters


def test_all_fail_with_an_error():
    waiters: Waiters[int] = Waiters()
    found = [results(waiters.wait()) for _ in range(2)]
    waiters.fail(LookupError("gone"))
    assert found == [[LookupError], [LookupError]]


def test_a_failure_is_passed_on_as_it_is():
    waiters: Waiters[int] = Waiters()
    seen: list[Failure] = []
    waiters.wait().addErrback(seen.append)
    failure = Failure(LookupError("gone"))
    waiters.fire(failure)
    assert seen[0].value is failure.value


def test_one_that_is_cancelled_leaves_the_others_waiting():
    waiters: Waiters[int] = Waiters()
    first, second = waiters.wait(), waiters.wait()
    found, other = results(first), results(second)
    first.cancel()
    assert found == [CancelledError]
    assert len(waiters) == 1
    waiters.fire(7)
    assert (found, other) == ([CancelledError], [7])


def test_the_last_one_cancelled_abandons_the_fact():
    given_up: list[str] = []
    waiters: Waiters[int] = Waiters(lambda: given_up.append("now"))
    first, second = waiters.wait(), waiters.wait()
    results(first), results(second)
    first.cancel()
    assert given_up == []
    second.cancel()
    assert given_up == ["now"]


def test_one_may_cancel_the_next_while_they_are_fired():
    given_up: list[str] = []
    waiters: Waiters[int] = Waiters(lambda: given_up.append("now"))
    first, second = waiters.wait(), waiters.wait()
    found = results(second)
    first.addCallback(lambda _: second.cancel())
    waiters.fire(7)
    assert found == [CancelledError]
    assert given_up == [], "the fact is there: there is nothing to give up"


def test_one_that_begins_to_wait_meanwhile_waits_for_the_next_time():
    waiters: Waiters[int] = Waiters()
    later: list[list[object]] = []
    waiters.wait().addCallback(lambda _: later.append(results(waiters.wait())))
    waiters.fire(7)
    assert later == [[]]
    waiters.fire(8)
    assert later == [[8]]


def test_the_first_in_line_goes_first():
    waiters: Waiters[int] = Waiters()
    found = [results(waiters.wait()) for _ in range(3)]
    waiters.fire_first(1)
    waiters.fire_first(2)
    assert found == [[1], [2], []]
    waiters.fire_first(3)
    with pytest.raises(StopIteration):
        waiters.fire_first(4)


def test_a_long_line_goes_on_as_fast_as_a_short_one():
    line: Waiters[None] = Waiters()
    for _ in range(100_000):
        line.wait()
    cpu = time.process_time()
    while line:
        line.fire_first(None)
    assert time.process_time() - cpu < 1.0


def test_all_are_cancelled():
    given_up: list[str] = []
    waiters: Waiters[int] = Waiters(lambda: given_up.append("now"))
    found = [results(waiters.wait()) for _ in range(2)]
    waiters.cancel()
    assert found == [[CancelledError], [CancelledError]]
    assert (len(waiters), given_up) == (0, [])


def test_the_wait_may_have_a_limit(clock: Clock):
    waiters: Waiters[int] = Waiters()
    late, soon = results(waiters.wait_at_most(2.0, clock)), results(waiters.wait_at_most(4.0, clock))
    clock.advance(2.0)
    assert (late, soon, len(waiters)) == ([None], [], 1)
    waiters.fire(7)
    assert soon == [7]
    assert not clock.getDelayedCalls()


def test_a_limited_wait_may_be_cancelled(clock: Clock):
    waiters: Waiters[int] = Waiters()
    waiter = waiters.wait_at_most(2.0, clock)
    found = results(waiter)
    waiter.cancel()
    assert found == [CancelledError]
    assert not clock.getDelayedCalls()
