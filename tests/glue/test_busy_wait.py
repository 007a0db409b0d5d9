"""When a reactor of ours stays awake between two messages, and when it sleeps."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from dmsg.glue.busy_wait import (
    FEWEST_WAITS,
    LONG_TURN_MAX_S,
    LONG_TURN_MIN_S,
    LONGEST_MAX_S,
    LONGEST_MIN_S,
    LONGEST_REST_S,
    LONGEST_WORK_S,
    REST_AFTER_WHOLE_TURN_S,
    REST_S,
    SAVED_S,
    SHARE,
    SLEEP_EVERY,
    WAITS_AFTER_BULK,
    BusyWait,
)

#: What a look at the descriptors takes, and what a sleeper takes to wake, in seconds.
LOOK_S = 1e-6
WAKE_S = 30e-6
READY = [(7, 1)]


class Machine:
    """A core with a clock of its own, on which one event comes after the other."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cpu_s = 0.0
        self.arrives_at: float | None = None
        self.sleeps: list[float] = []
        self.looks = 0
        #: How long others keep the core when they are given way to, and whether threads of the process have work.
        self.turn_s = LOOK_S
        self.threads_work = False
        self.wait = BusyWait(
            self._sleep,
            threads_work=lambda: self.threads_work,
            give_way=self._give_way,
            clock=lambda: self.now,
            cpu_clock=lambda: self.cpu_s,
        )

    def _sleep(self, timeout_s: float, most: int) -> list[tuple[int, int]]:
        assert most > 0
        if not timeout_s:
            self.looks += 1
            self.now += LOOK_S
            self.cpu_s += LOOK_S
        else:
            self.sleeps.append(timeout_s)
            until = self.now + timeout_s
            self.now = until if self.arrives_at is None else max(self.now, min(until, self.arrives_at + WAKE_S))
        is_there = self.arrives_at is not None and self.arrives_at <= self.now
        return READY if is_there else []

    def _give_way(self) -> None:
        self.now += self.turn_s

    def event(self, after_s: float, timeout_s: float = 60.0) -> bool:
        """Wait for an event that comes ``after_s``; whether the process slept."""
        self.arrives_at = self.now + after_s
        slept = len(self.sleeps)
        assert self.wait.wait(timeout_s, 100) == READY
        self.arrives_at = None
        return len(self.sleeps) > slept

    def exchange(self, after_s: float, work_s: float) -> bool:
        """Work for ``work_s``, then wait for an event; whether the process slept."""
        self.now += work_s
        return self.event(after_s)

    def events(self, times_s: Iterable[float]) -> int:
        """How many of the events it slept before."""
        return sum(map(self.event, times_s))

    def awake(self) -> Machine:
        """The same, after enough events that came soon."""
        assert self.events([50e-6] * FEWEST_WAITS) == FEWEST_WAITS
        while self.event(50e-6):
            pass
        return self


def test_it_stays_awake_where_one_message_follows_the_other() -> None:
    machine = Machine().awake()
    began = machine.now
    slept = machine.events([50e-6] * 160)
    assert slept == 160 // SLEEP_EVERY, "and sleeps now and then, for the sake of other threads"
    assert machine.now - began < 160 * 55e-6 + slept * WAKE_S


def test_it_sleeps_where_messages_are_rare_or_come_now_and_then() -> None:
    for pattern in ([0.002], [50e-6, 0.002], [50e-6] * (FEWEST_WAITS - 1) + [0.002]):
        machine = Machine()
        times_s = pattern * 200
        assert machine.events(times_s) == len(times_s) and machine.looks == 0


def test_a_wait_in_vain_ends_asleep_and_the_next_ones_are_asleep_too() -> None:
    machine = Machine().awake()
    assert machine.event(0.5), "what comes later is not missed"
    assert machine.sleeps[-1] == pytest.approx(60.0 - LONGEST_MIN_S, abs=1e-5)
    looks = machine.looks
    assert machine.events([50e-6] * 2 * FEWEST_WAITS) == 2 * FEWEST_WAITS and machine.looks == looks


def test_each_wait_in_vain_makes_the_next_less_likely() -> None:
    machine = Machine().awake()
    asleep = []
    for _ in range(6):
        machine.event(0.5)
        asleep.append(0)
        while machine.event(50e-6):
            asleep[-1] += 1
    assert asleep[-1] > 8 * asleep[0]


def test_a_timed_call_is_not_late_and_says_nothing_of_messages() -> None:
    machine = Machine().awake()
    for timeout_s in (100e-6, LONGEST_MIN_S + 200e-6):
        began = machine.now
        assert machine.wait.wait(timeout_s, 1) == []
        assert machine.now - began == pytest.approx(timeout_s, abs=5e-6)
    other = Machine()
    for _ in range(2 * FEWEST_WAITS):
        assert other.wait.wait(50e-6, 1) == []
    assert other.event(50e-6)


def test_nothing_is_waited_for_without_a_time() -> None:
    machine = Machine()
    assert machine.wait.wait(0, 1) == [] and machine.looks == 1
    machine.arrives_at = 0.0
    assert machine.wait.wait(0, 1) == READY


def test_it_sleeps_while_much_data_passes() -> None:
    machine = Machine().awake()
    for _ in range(100):
        machine.wait.note_bulk()
        assert machine.event(50e-6)
    # the first of these was counted above
    assert machine.events([50e-6] * (WAITS_AFTER_BULK + FEWEST_WAITS - 1)) == WAITS_AFTER_BULK + FEWEST_WAITS - 1
    assert not machine.event(50e-6) or not machine.event(50e-6)


def slept_of(machine: Machine, after_s: float, work_s: float, warm_up: int = 200) -> float:
    """The share of waits that were slept through, once the process knows how long it works."""
    for _ in range(warm_up):
        machine.exchange(50e-6, work_s)
    return sum(machine.exchange(after_s, work_s) for _ in range(320)) / 320


def test_who_works_longer_for_a_message_stays_awake_longer_for_the_next() -> None:
    often = 1.5 / SLEEP_EVERY
    for work_s, longest_s in ((30e-6, LONGEST_MIN_S), (80e-6, 800e-6), (250e-6, LONGEST_MAX_S)):
        assert slept_of(Machine(), 0.9 * longest_s, work_s) < often, work_s
        assert slept_of(Machine(), 1.1 * longest_s + WAKE_S, work_s) > 0.9, work_s


def test_a_transfer_leaves_the_longest_wait_within_its_bounds() -> None:
    machine = Machine()
    for _ in range(100):
        machine.exchange(50e-6, 0.05)
    assert slept_of(machine, 0.9 * LONGEST_MIN_S, 10e-6, 2 * FEWEST_WAITS) < 1.5 / SLEEP_EVERY
    for _ in range(100):
        machine.exchange(50e-6, 0.05)
    assert slept_of(machine, 1.1 * LONGEST_MIN_S + WAKE_S, 10e-6, 2 * FEWEST_WAITS) > 0.9


def test_others_on_the_way_of_a_message_may_work_as_long_as_this_one() -> None:
    for work_s, turn_s in ((10e-6, LONG_TURN_MIN_S), (100e-6, 500e-6), (250e-6, LONG_TURN_MAX_S)):
        machine = Machine()
        assert slept_of(machine, 50e-6, work_s) < 1.5 / SLEEP_EVERY
        machine.turn_s = 0.9 * turn_s
        assert slept_of(machine, 50e-6, work_s) < 1.5 / SLEEP_EVERY, "these are no strangers"
        machine.turn_s = 1.1 * turn_s
        assert slept_of(machine, 50e-6, work_s) > 0.9, "who needs the core longer gets it"


def test_it_sleeps_after_much_work() -> None:
    machine = Machine().awake()
    for _ in range(50):
        machine.now += 2 * LONGEST_WORK_S
        assert machine.event(50e-6)


def test_it_sleeps_while_threads_of_the_process_work() -> None:
    machine = Machine().awake()
    machine.threads_work = True
    assert machine.events([50e-6] * 50) == 50


def test_it_sleeps_for_some_time_where_another_process_needs_the_core() -> None:
    machine = Machine().awake()
    machine.turn_s = 500e-6
    machine.event(50e-6)
    machine.turn_s = LOOK_S
    began, looks = machine.now, machine.looks
    while machine.looks == looks:
        machine.event(50e-6)
    assert REST_S <= machine.now - began < 2 * REST_S
    machine.events([50e-6] * 1000)  # quiet for longer than it slept: the next time is a first one

    rests_s = []
    machine.turn_s = 0.004  # as a process does that never sleeps
    looks = machine.looks
    while sum(rests_s) < 2 * LONGEST_REST_S:
        while machine.looks == looks:
            machine.event(50e-6)
        began, looks = machine.now, machine.looks
        while machine.looks == looks and machine.now - began < 2 * LONGEST_REST_S:
            machine.event(50e-6)
        rests_s.append(machine.now - began)
    assert rests_s[0] == pytest.approx(REST_AFTER_WHOLE_TURN_S, rel=0.2)
    assert rests_s[1] == pytest.approx(2 * REST_AFTER_WHOLE_TURN_S, rel=0.2)
    assert max(rests_s) == pytest.approx(LONGEST_REST_S, rel=0.2)


def test_what_comes_while_another_has_the_core_is_taken_at_once() -> None:
    machine = Machine().awake()
    machine.turn_s = 0.01
    assert not machine.event(50e-6)


def test_waiting_takes_its_share_of_a_core_and_no_more() -> None:
    machine = Machine()
    machine.turn_s = 0.0  # no other process wants the core: the whole wait is spent on polls
    began = machine.now
    for _ in range(20_000):
        machine.event(100e-6)
    elapsed_s = machine.now - began
    assert 0.9 * SHARE * elapsed_s < machine.cpu_s < SHARE * elapsed_s + SAVED_S + LONGEST_MIN_S
