"""Expensive work leaves every second turn of the reactor to others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import Clock

from dmsg.glue.pacer import Pacer


class Turns(Clock):
    """A clock on which "in the next turn" takes a second: a plain Clock would go through all turns in one advance."""

    def callLater(self, delay: float, callable: Any, *args: object, **kw: object) -> IDelayedCall:
        return super().callLater(delay or 1.0, callable, *args, **kw)


def noting(done: list[str], name: str, *, expensive: bool) -> Callable[[], bool]:
    def work() -> bool:
        done.append(name)
        return expensive

    return work


def test_first_work_is_done_at_once_and_the_rest_every_second_turn() -> None:
    clock, done = Turns(), list[str]()
    pacer = Pacer(clock)
    assert pacer.submit(noting(done, "first", expensive=True))
    assert not pacer.submit(noting(done, "second", expensive=True))
    assert not pacer.submit(noting(done, "third", expensive=True))
    progress = [list(done)]
    for _ in range(6):
        clock.advance(1)
        progress.append(list(done))
    assert [len(one) for one in progress] == [1, 1, 2, 2, 3, 3, 3]
    assert done == ["first", "second", "third"]
    assert clock.getDelayedCalls() == []
    assert pacer.submit(noting(done, "later", expensive=True))  # rested: at once again


def test_cheap_work_takes_no_turn() -> None:
    clock, done = Turns(), list[str]()
    pacer = Pacer(clock)
    assert pacer.submit(noting(done, "cheap", expensive=False))
    assert pacer.submit(noting(done, "expensive", expensive=True))
    for name in ("a", "b", "c"):
        assert not pacer.submit(noting(done, name, expensive=name == "c"))
    clock.advance(1)
    clock.advance(1)
    assert done == ["cheap", "expensive", "a", "b", "c"]


def test_work_that_is_put_off_has_one_series_of_turns_however_much_there_is() -> None:
    clock, done = Turns(), list[str]()
    pacer = Pacer(clock)
    for number in range(3):
        pacer.later(noting(done, f"{number}", expensive=True))
    assert done == [] and len(clock.getDelayedCalls()) == 1
    progress = []
    for _ in range(6):
        clock.advance(1)
        progress.append(len(done))
    assert progress == [1, 1, 2, 2, 3, 3]


def test_what_waited_when_it_was_stopped_is_forgotten() -> None:
    clock, done = Turns(), list[str]()
    pacer = Pacer(clock)
    pacer.submit(noting(done, "first", expensive=True))
    pacer.submit(noting(done, "waits", expensive=True))
    pacer.stop()
    pacer.submit(noting(done, "new", expensive=True))
    for _ in range(4):
        clock.advance(1)
    assert done == ["first", "new"]


def test_nothing_happens_after_stop() -> None:
    clock, done = Turns(), list[str]()
    pacer = Pacer(clock)
    pacer.submit(noting(done, "done", expensive=True))
    pacer.submit(noting(done, "forgotten", expensive=True))
    pacer.stop()
    assert clock.getDelayedCalls() == []
    clock.advance(1)
    assert done == ["done"]


def test_later_work_has_a_turn_of_its_own_even_when_asked_for_in_the_middle_of_work() -> None:
    clock, done = Turns(), list[str]()
    pacer = Pacer(clock)

    def work() -> bool:
        pacer.later(noting(done, "answer", expensive=True))
        done.append("question")
        return True

    assert pacer.submit(work)
    assert done == ["question"]
    clock.advance(1)
    assert done == ["question"], "a free turn comes between"
    clock.advance(1)
    assert done == ["question", "answer"]
    clock.advance(1)
    clock.advance(1)
    assert clock.getDelayedCalls() == []
    pacer.later(noting(done, "alone", expensive=True))
    clock.advance(1)
    assert done[-1] == "alone"


def asking(pacer: Pacer, done: list[str], name: str) -> Callable[[], bool]:
    """A question whose answer takes a turn of its own, as the first message of a handshake."""

    def work() -> bool:
        done.append(name)
        pacer.later(noting(done, f"answer to {name}", expensive=True))
        return True

    return work


def test_answers_asked_for_in_a_turn_wait_for_theirs_as_everything_else() -> None:
    """Each such question began a second row of turns, and these became more until all was done in one of them."""
    clock, done = Turns(), list[str]()
    pacer = Pacer(clock)
    for number in range(20):
        pacer.submit(asking(pacer, done, str(number)))
    for turns in range(1, 39):
        clock.advance(1)
        clock.advance(1)
        assert len(done) == 1 + turns
    clock.advance(1)
    clock.advance(1)
    assert len(done) == 40
    clock.advance(1)
    clock.advance(1)
    assert clock.getDelayedCalls() == []


def test_of_a_large_crowd_more_is_done_in_a_turn() -> None:
    clock, done = Turns(), list[str]()
    pacer = Pacer(clock)
    for number in range(1 + 512):
        pacer.submit(noting(done, str(number), expensive=True))
    progress = []
    while len(done) < 1 + 512:
        before = len(done)
        clock.advance(1)
        clock.advance(1)
        progress.append(len(done) - before)
    assert progress[0] == 9 and progress[-1] == 1 and progress == sorted(progress, reverse=True)
    assert len(progress) < 200


def test_work_that_fails_keeps_nothing_else_from_its_turn() -> None:
    clock, done = Turns(), list[str]()
    pacer = Pacer(clock)

    def fails() -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pacer.submit(fails)
    for work in (fails, noting(done, "next", expensive=True)):
        pacer.submit(work)
    clock.advance(1)
    with pytest.raises(ZeroDivisionError):
        clock.advance(1)
    clock.advance(1)
    clock.advance(1)
    assert done == ["next"]


def test_a_crowd_of_cheap_things_takes_many_turns() -> None:
    clock, done = Turns(), list[str]()
    pacer = Pacer(clock)
    pacer.submit(noting(done, "expensive", expensive=True))
    for number in range(20):
        pacer.submit(noting(done, str(number), expensive=False))
    progress = []
    for _ in range(5):
        clock.advance(1)
        progress.append(len(done) - 1)
    assert progress == [0, 8, 16, 20, 20]
