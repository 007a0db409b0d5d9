"""Whose turn it is to have a twin looked up."""

from __future__ import annotations

from itertools import pairwise

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.task import Clock

from dmsg.rmb.core.twin import Twin
from dmsg.rmb.relay.lookups import LookUps


class Registry:
    """Answers when it is told to; at once if it is ``quick``."""

    def __init__(self) -> None:
        self.open: list[tuple[int, Deferred[None]]] = []
        self.quick = False

    async def get(self, number: int) -> Twin | None:
        if not self.quick:
            asked: Deferred[None] = Deferred()
            self.open.append((number, asked))
            await asked
        return Twin(number, bytes(32), ())

    def answer(self) -> None:
        self.open.pop(0)[1].callback(None)


def ask(look_ups: LookUps, *numbers: int, network: str = "a") -> list[Deferred[Twin | None]]:
    return [ensureDeferred(look_ups.get(number, network)) for number in numbers]


def test_one_network_has_so_many_at_a_time_and_another_does_not_wait_for_it() -> None:
    registry = Registry()
    look_ups = LookUps(registry, 2)  # type: ignore[arg-type]
    answers = ask(look_ups, 1, 2, 3, 4)
    others = ask(look_ups, 7, network="b")
    assert [number for number, _ in registry.open] == [1, 2, 7]
    registry.answer()
    assert [number for number, _ in registry.open] == [2, 7, 3]
    while registry.open:
        registry.answer()
    assert [one.result.id for one in answers + others] == [1, 2, 3, 4, 7]
    assert len(look_ups) == 0


def test_callers_that_ask_for_the_same_twin_go_on_in_their_order(clock: Clock) -> None:
    registry = Registry()
    look_ups = LookUps(registry, 2, clock=clock)  # type: ignore[arg-type]
    order: list[int] = []
    for number, answer in enumerate(ask(look_ups, 1, 1, 1, 1, 1)):
        answer.addCallback(lambda _, number=number: order.append(number))
    assert [number for number, _ in registry.open] == [1, 1]
    registry.quick = True
    while registry.open:
        registry.answer()
    for answer in ask(look_ups, 1):
        answer.addCallback(lambda _: order.append(5))
    clock.advance(0)
    assert order == [0, 1, 2, 3, 4, 5] and len(look_ups) == 0


def test_a_long_line_for_a_twin_that_is_known_by_now_goes_on_in_a_few_turns_of_the_reactor(clock: Clock) -> None:
    """Otherwise a network whose look-ups once had to wait would wait for good, if it asks more in a turn than it has places."""
    registry = Registry()
    look_ups = LookUps(registry, 2, clock=clock)  # type: ignore[arg-type]
    order: list[int] = []
    progress = [0]

    def look() -> None:
        progress.append(len(order))
        if len(order) < 1_000 and len(progress) < 1_000:
            clock.callLater(0, look)

    for number, answer in enumerate(ask(look_ups, *[1] * 1_000)):
        answer.addCallback(lambda _, number=number: order.append(number))
    registry.quick = True
    while registry.open:
        registry.answer()
    clock.callLater(0, look)
    clock.advance(0)
    assert order == list(range(1_000)) and len(look_ups) == 0
    assert 10 < len(progress) < 60
    assert max(after - before for before, after in pairwise(progress)) < 100, "others have their turns in between"


def test_a_long_line_is_answered_at_once_when_the_registry_knows_all_of_it() -> None:
    registry = Registry()
    look_ups = LookUps(registry, 1)  # type: ignore[arg-type]
    answers = ask(look_ups, *range(1, 5_001))
    registry.quick = True
    registry.answer()
    assert [one.result.id for one in answers] == list(range(1, 5_001))
    assert len(look_ups) == 0


def test_who_leaves_the_line_or_fails_takes_no_place_from_others() -> None:
    registry = Registry()
    look_ups = LookUps(registry, 1)  # type: ignore[arg-type]
    first, second, third = ask(look_ups, 1, 2, 3)
    second.cancel()
    first.cancel()
    for one in (first, second):
        one.addErrback(lambda failure: failure.trap(CancelledError))
    assert [number for number, _ in registry.open] == [1, 3]
    registry.open.pop(0)
    registry.answer()
    assert third.result.id == 3 and len(look_ups) == 0
