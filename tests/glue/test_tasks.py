"""Coroutines that run beside each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.task import Clock

from dmsg.glue.tasks import Tasks


async def until(gate: Deferred[None], done: Callable[[str], None]) -> None:
    try:
        await gate
        done("done")
    except CancelledError:
        done("cancelled")
        raise


def test_what_is_over_at_once_does_not_count() -> None:
    tasks, told = Tasks(), []
    gate: Deferred[None] = Deferred()
    gate.callback(None)
    tasks.begin(until(gate, told.append))
    assert (len(tasks), told) == (0, ["done"])


def test_one_that_waits_returns_when_none_runs_also_of_those_begun_meanwhile(clock: Clock) -> None:
    tasks, told = Tasks(), []
    first, second = Deferred[None](), Deferred[None]()
    tasks.begin(until(first, lambda _: tasks.begin(until(second, told.append))))  # type: ignore[arg-type, return-value]
    waiting = ensureDeferred(tasks.when_idle(5.0, clock))
    first.callback(None)
    assert len(tasks) == 1 and not waiting.called
    second.callback(None)
    assert waiting.called and told == ["done"]
    assert clock.getDelayedCalls() == []


def test_one_that_waits_returns_after_its_time_and_they_go_on(clock: Clock) -> None:
    tasks, told = Tasks(), []
    gate: Deferred[None] = Deferred()
    tasks.begin(until(gate, told.append))
    waiting = ensureDeferred(tasks.when_idle(5.0, clock))
    clock.advance(5.0)
    assert waiting.called and len(tasks) == 1
    gate.callback(None)
    assert told == ["done"]


def test_what_does_not_end_in_time_is_cancelled(clock: Clock) -> None:
    tasks = Tasks()
    told: list[Any] = []
    tasks.begin(until(Deferred(), told.append))
    ending = ensureDeferred(tasks.end(2.0, clock))
    clock.advance(1.9)
    assert told == []
    clock.advance(0.1)
    assert ending.called and told == ["cancelled"] and len(tasks) == 0


def test_an_end_does_not_wait_for_nothing(clock: Clock) -> None:
    assert ensureDeferred(Tasks().end(2.0, clock)).called
    assert clock.getDelayedCalls() == []


def test_that_one_was_cancelled_is_no_failure_and_any_other_error_is() -> None:
    tasks = Tasks()
    found: list[Any] = []

    async def fail(gate: Deferred[None]) -> None:
        await gate
        raise ZeroDivisionError

    gate: Deferred[None] = Deferred()
    tasks.begin(fail(gate)).addErrback(lambda failure: found.append(failure.type))
    gate.callback(None)
    tasks.begin(fail(Deferred())).addBoth(found.append)
    tasks.cancel()
    assert found == [ZeroDivisionError, None] and len(tasks) == 0
