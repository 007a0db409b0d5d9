"""The order in which a plan tries files, beside a simple plan that looks at all of them, and what an attempt costs."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.sansio.backoff import Backoff
from dmsg.shipping.plan import FILE_REASONS, OWN_PAUSES, Plan, Waiting

from .test_plan import make


class Simple:
    """What :class:`Plan` promises of the order, said without any care for what it costs: it looks at every file."""

    def __init__(self, *, parallel: int, backoff: Backoff, uniform: Callable[[], float], give_up_after: int | None):
        self.parallel, self.backoff, self.uniform, self.limit = parallel, backoff, uniform, give_up_after or math.inf
        self.own_backoff = Backoff(backoff.first_s, OWN_PAUSES * backoff.limit_s)
        self.files: dict[str, Waiting] = {}
        self.running: dict[str, int] = {}
        self.settled_since: set[str] = set()
        self.tries: dict[str, tuple[int, float]] = {}  # failures, and when the next attempt is due
        self.own: dict[str, int] = {}  # failures for a reason of the file's own
        self.target_failures, self.target_due = 0, 0.0

    def scan_begins(self) -> None:
        self.settled_since.clear()

    def scanned(self, files: list[Waiting]) -> None:
        running = {path: self.files[path] for path in self.running}
        self.files = {one.path: one for one in files if one.path not in self.settled_since} | running
        self.tries = {path: tries for path, tries in self.tries.items() if path in self.files}
        self.own = {path: own for path, own in self.own.items() if path in self.files}

    def may(self) -> bool:
        limit = 1 if self.target_failures else self.parallel
        return len(self.running) < limit and self.target_failures < self.limit

    def idle(self) -> list[str]:
        return sorted(self.files.keys() - self.running, key=lambda path: (self.files[path].modified_at, path))

    def take(self, now: float) -> Waiting | None:
        fresh = [path for path in self.idle() if path not in self.tries]
        due = [path for path in self.idle() if path in self.tries and self.tries[path][1] <= now]
        if self.target_failures:
            due.sort(key=lambda path: self.tries[path][0])
        order = fresh + due if self.target_failures else due + fresh
        if not self.may() or now < self.target_due or not order:
            return None
        self.running[order[0]] = self.target_failures
        return self.files[order[0]]

    def settled(self, path: str, *, reached: bool) -> None:
        del self.running[path], self.files[path]
        self.tries.pop(path, None)
        self.own.pop(path, None)
        self.settled_since.add(path)
        if reached:
            self.target_failures, self.target_due = 0, 0.0

    def failed(self, path: str, reason: str, now: float) -> float:
        if self.running.pop(path) == self.target_failures and reason not in FILE_REASONS:
            self.target_failures += 1
            self.target_due = now + self.backoff.pause_s(self.target_failures, self.uniform)
        failures = self.tries.get(path, (0, 0.0))[0] + 1
        if reason in FILE_REASONS:
            self.own[path] = self.own.get(path, 0) + 1
        if failures >= self.limit:
            due = math.inf
        elif reason in FILE_REASONS:
            due = now + self.own_backoff.pause_s(self.own[path], self.uniform)
        else:
            due = now + self.backoff.pause_s(failures, self.uniform)
        self.tries[path] = (failures, due)
        return due

    def next_due(self, now: float) -> float | None:
        due = min((self.tries.get(path, (0, now))[1] for path in self.idle()), default=math.inf)
        return max(now, due, self.target_due) if self.may() and due < math.inf else None

    @property
    def finished(self) -> bool:
        left = any(self.tries.get(path, (0, 0.0))[1] < math.inf for path in self.files)
        return not self.running and (self.target_failures >= self.limit or not left)


PATHS = tuple("abcdefghijkl")
REASONS = st.sampled_from(["unreadable", "conflict", "unreachable", "failed"])
STEPS = st.one_of(
    st.tuples(st.just("take"), st.none()),
    st.tuples(st.just("fail"), REASONS),
    st.tuples(st.just("try in vain"), REASONS),
    st.tuples(st.just("try in vain"), st.just("unreadable")),
    st.tuples(st.just("settle"), st.booleans()),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.4, 1.0, 3.0, 30.0, 100.0])),
    st.tuples(st.just("wait until due"), st.none()),
    st.tuples(st.just("scan begins"), st.none()),
    st.tuples(st.just("scanned"), st.lists(st.tuples(st.sampled_from(PATHS), st.integers(0, 3)), max_size=12)),
)


@settings(max_examples=200)
@given(
    st.lists(STEPS, min_size=20, max_size=150),
    st.integers(1, 4),
    st.none() | st.integers(1, 4),
    st.integers(),
    st.data(),
)
def test_the_order_is_that_of_a_simple_plan(
    steps: list[tuple[str, Any]], parallel: int, give_up_after: int | None, seed: int, data: st.DataObject
) -> None:
    plan, simple = (
        kind(parallel=parallel, backoff=Backoff(), uniform=Random(seed).random, give_up_after=give_up_after)
        for kind in (Plan, Simple)
    )
    ages = dict.fromkeys(PATHS, 0.0)
    running: list[str] = []
    now = 0.0
    for both in (plan, simple):
        both.scanned([Waiting(path, 1, age) for path, age in ages.items()])
    for what, how in steps:
        if what in ("take", "try in vain"):
            taken = plan.take(now)
            assert taken == simple.take(now)
            if taken is not None and what == "take":
                running.append(taken.path)
            elif taken is not None:
                assert plan.failed(taken.path, how, now) == simple.failed(taken.path, how, now)
        elif what in ("fail", "settle") and running:
            path = running.pop(data.draw(st.integers(0, len(running) - 1)))
            if what == "fail":
                assert plan.attempt(path) == simple.tries.get(path, (0,))[0] + 1
                assert plan.failed(path, how, now) == simple.failed(path, how, now)
            else:
                plan.settled(path, reached=how)
                simple.settled(path, reached=how)
        elif what == "wait":
            now += how
        elif what == "wait until due":
            now = plan.next_due(now) or now
        elif what == "scan begins":
            plan.scan_begins()
            simple.scan_begins()
        elif what == "scanned":
            # a file keeps its age for as long as it is here
            ages = {path: simple.files[path].modified_at if path in simple.files else float(age) for path, age in how}
            for both in (plan, simple):
                both.scanned([Waiting(path, 1, age) for path, age in ages.items()])
        assert plan.next_due(now) == simple.next_due(now)
        assert plan.finished == simple.finished and plan.in_flight == len(running)
        assert sorted(plan.backlog) == sorted(simple.files.values())


def fail_on(plan: Plan, attempts: int, reason: str, now: float = 0.0) -> float:
    """So many attempts, all in vain, each as soon as it may be; what time it is then."""
    for _ in range(attempts):
        while (one := plan.take(now)) is None:
            due = plan.next_due(now)
            assert due is not None
            now = due
        plan.failed(one.path, reason, now)
        assert not plan.finished
    return now


@pytest.mark.parametrize("reason", ["unreadable", "failed"])
def test_an_attempt_costs_no_more_because_many_files_wait(reason: str) -> None:
    """Fifty times the files may cost a few times as much, because caches hold less of them, in no case fifty times."""

    def cost_s(count: int) -> float:
        plan = make(4, None, *(f"{number:06}" for number in range(count)))
        now = fail_on(plan, count, reason)
        begun = time.thread_time()
        fail_on(plan, 1000, reason, now)
        return time.thread_time() - begun

    small, large = (min(cost_s(count) for _ in range(3)) for count in (200, 10_000))
    assert large < 25 * small


def test_attempts_leave_nothing_behind() -> None:
    plan = make(4, None, *PATHS)
    now = fail_on(plan, 1000, "unreadable")
    tracemalloc.start()
    try:
        fail_on(plan, 10_000, "unreadable", now)
        assert tracemalloc.get_traced_memory()[0] < 50_000
    finally:
        tracemalloc.stop()
