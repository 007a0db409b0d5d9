"""Who asks a Redis again that has said "not now"."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock

from dmsg.rmb.peer.retries import RETRY_S, Retries


def begin(retries: Retries, number: int, turns: list[Any], limit_s: float = 60.0) -> Deferred[None]:
    return ensureDeferred(retries.turn(limit_s)).addCallback(lambda _: turns.append(number))


def test_one_has_its_turn_and_twice_as_many_each_time_while_redis_does_not_say_so_again() -> None:
    clock = Clock()
    retries, turns, counts = Retries(clock), list[Any](), list[int]()
    for number in range(20):
        begin(retries, number, turns)
    for _ in range(5):
        clock.advance(RETRY_S)
        counts.append(len(turns))
    assert counts == [1, 3, 7, 15, 20] and turns == list(range(20))
    assert not clock.getDelayedCalls()


def test_who_is_told_so_again_waits_behind_all_others_and_only_one_asks_next() -> None:
    clock = Clock()
    retries, turns = Retries(clock), list[Any]()
    for number in range(20):
        begin(retries, number, turns)
    for number in range(10):
        clock.advance(RETRY_S)
        assert turns == [number]
        begin(retries, turns.pop(), turns)
    assert len(retries) == 20


def test_nobody_waits_for_longer_than_it_wants_and_nothing_is_left_of_those_that_are_cancelled() -> None:
    clock = Clock()
    retries, turns = Retries(clock), list[Any]()
    begin(retries, 1, turns)
    begin(retries, 2, turns, 0.05)
    clock.advance(0.05)
    assert turns == [2]
    last = begin(retries, 3, turns, -1.0)
    clock.advance(0)
    assert turns == [2, 3] and last.called
    cancelled = [begin(retries, number, turns).addErrback(lambda _: None) for number in (4, 5)]
    clock.advance(RETRY_S)
    assert turns == [2, 3, 1] and len(retries) == 2
    for one in cancelled:
        one.cancel()
    assert not len(retries) and not clock.getDelayedCalls()
