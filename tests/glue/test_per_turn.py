"""How many tasks go on in one turn of the reactor."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock

from dmsg.glue.per_turn import PerTurn


class Turns:
    """Writes down in which turn of the reactor a task goes on."""

    def __init__(self, clock: Clock) -> None:
        self.per_turn = PerTurn(2, clock)
        self.clock = clock
        self.now = 0
        self.went_on: list[tuple[int, str]] = []

    def ask(self, name: str) -> Deferred[None]:
        waiter = self.per_turn.wait()
        waiter.addCallback(lambda _: self.went_on.append((self.now, name)))
        return waiter

    def run(self) -> None:
        """Count turns, as long as something is left to be called in this second."""
        self.now += 1
        if len(self.clock.getDelayedCalls()) > 0:
            self.clock.callLater(0, self.run)


def test_so_many_go_on_in_a_turn_in_their_order(clock: Clock) -> None:
    turns = Turns(clock)
    for name in "abcde":
        turns.ask(name)
    assert turns.went_on == []
    turns.run()
    clock.advance(0)
    assert turns.went_on == [(1, "a"), (1, "b"), (2, "c"), (2, "d"), (3, "e")]
    assert not clock.getDelayedCalls()


def test_one_that_waits_again_lets_the_others_go_on_first(clock: Clock) -> None:
    turns = Turns(clock)
    turns.ask("a").addCallback(lambda _: turns.ask("a again"))
    turns.run()
    turns.ask("b")
    turns.ask("c")
    clock.advance(0)
    assert [name for _, name in turns.went_on] == ["a", "b", "c", "a again"]
    assert [turn for turn, _ in turns.went_on] == [1, 1, 2, 2]


def test_one_that_was_cancelled_takes_no_place(clock: Clock) -> None:
    turns = Turns(clock)
    first, second, _ = turns.ask("a"), turns.ask("b"), turns.ask("c")
    first.addCallback(lambda _: second.cancel())
    second.addErrback(lambda failure: failure.trap(CancelledError))
    clock.advance(0)
    assert [name for _, name in turns.went_on] == ["a", "c"] and not clock.getDelayedCalls()


def test_all_may_be_cancelled(clock: Clock) -> None:
    turns = Turns(clock)
    first, second = turns.ask("a"), turns.ask("b")
    first.addCallback(lambda _: second.cancel())
    second.addErrback(lambda failure: failure.trap(CancelledError))
    clock.advance(0)
    assert [name for _, name in turns.went_on] == ["a"] and not clock.getDelayedCalls()
