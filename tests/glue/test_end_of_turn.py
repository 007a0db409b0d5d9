"""What is done at the end of a turn of a reactor, of Twisted's here."""

from __future__ import annotations

from twisted.internet.task import Clock

from dmsg.glue.end_of_turn import AtEndOfTurn


def test_it_is_done_once_however_often_it_is_asked_for() -> None:
    clock, done = Clock(), []
    soon = AtEndOfTurn(clock)
    for _ in range(3):
        soon.ask(lambda: done.append(1))
    assert not done
    clock.advance(0)
    assert done == [1]
    clock.advance(1)
    soon.ask(lambda: done.append(1))
    clock.advance(0)
    assert done == [1, 1] and not clock.getDelayedCalls()


def test_it_is_not_done_after_all_and_leaves_no_timed_call() -> None:
    clock, done = Clock(), []
    soon = AtEndOfTurn(clock)
    soon.cancel()
    soon.ask(lambda: done.append(1))
    soon.cancel()
    assert not clock.getDelayedCalls()
    soon.ask(lambda: done.append(1))
    clock.advance(0)
    assert done == [1]


def test_a_reactor_that_knows_ends_of_turns_is_asked() -> None:
    class Turning(Clock):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[object] = []

        def at_end_of_turn(self, call: object) -> None:
            self.asked.append(call)

    clock, done = Turning(), []
    soon = AtEndOfTurn(clock)
    soon.ask(lambda: done.append(1))
    soon.ask(lambda: done.append(1))
    (call,) = clock.asked
    soon.cancel()
    call()  # type: ignore[operator]
    assert not done
    soon.ask(lambda: done.append(1))
    clock.asked[-1]()  # type: ignore[operator]
    assert done == [1] and not clock.getDelayedCalls()
