"""Turns of tasks, by key."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred

from dmsg.glue.fair_line import FairLine


class Work:
    """Tasks that run until they are ended; ``running`` and ``began`` are their names."""

    def __init__(self, places: int) -> None:
        self.line: FairLine[str] = FairLine(places)
        self.running: list[str] = []
        self.began: list[str] = []
        self.waiting: dict[str, Deferred[Any]] = {}

    def begin(self, key: str, name: str) -> None:
        async def run() -> None:
            await self.line.turn(key)
            self.waiting.pop(name, None)
            self.running.append(name)
            self.began.append(name)

        self.waiting[name] = task = ensureDeferred(run())
        task.addErrback(lambda failure: failure.trap(CancelledError) and None)
        if task.called:
            self.waiting.pop(name, None)

    def end(self) -> None:
        self.running.pop(0)
        self.line.over()

    def cancel(self, name: str) -> None:
        self.waiting.pop(name).cancel()


def test_keys_take_turns_and_the_tasks_of_one_go_on_in_their_order() -> None:
    work = Work(2)
    for number in range(6):
        work.begin("many", f"many{number}")
    work.begin("few", "few0")
    work.begin("one", "one0")
    work.begin("few", "few1")
    while work.running:
        work.end()
    assert work.began == ["many0", "many1", "many2", "few0", "one0", "many3", "few1", "many4", "many5"]
    assert not work.line._waiting


def test_a_newcomer_does_not_overtake_those_that_wait() -> None:
    work = Work(1)
    for name in ("a", "b"):
        work.begin("x", name)
    work.end()
    work.begin("y", "c")
    work.begin("x", "d")
    work.end()
    work.end()
    assert work.began == ["a", "b", "c", "d"]


def test_turns_that_end_at_once_do_not_recurse() -> None:
    line: FairLine[int] = FairLine(1)
    began: list[int] = []

    async def run(number: int) -> None:
        await line.turn(number % 3)
        began.append(number)
        line.over()

    async def hold() -> None:
        await line.turn(7)

    ensureDeferred(hold())
    for number in range(5_000):
        ensureDeferred(run(number))
    line.over()
    assert sorted(began) == list(range(5_000)) and not line._waiting


@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from("bbbec"), st.sampled_from("xyz")), max_size=60))
def test_there_are_never_more_than_places_and_none_is_left_waiting(places: int, steps: list[tuple[str, str]]) -> None:
    work = Work(places)
    for number, (what, key) in enumerate(steps):
        if what == "b":
            work.begin(key, f"{key}{number}")
        elif what == "e" and work.running:
            work.end()
        elif what == "c" and work.waiting:
            work.cancel(next((name for name in work.waiting if name[0] == key), next(iter(work.waiting))))
        assert len(work.running) == places or not work.waiting
        assert work.line.under_way == len(work.running) <= places
        assert set(work.line._waiting) == {name[0] for name in work.waiting}
    while work.running:
        work.end()
    assert not work.waiting and not work.line._waiting and not work.line.under_way
