"""How a reactor waits: awake, as long as the next event comes sooner than a sleeping process would wake.

Waking a process on an idle core takes 20 to 40 µs, and a message with its answer through a relay takes four wake-ups. Where
messages follow each other within 400 µs, the process polls without a timeout, and calls ``sched_yield`` between two polls, so
that other processes get the core. Where messages are rarer, where another process needs the core, and in transfers, it sleeps.
On slow machines a wake-up takes longer, and so does the work for a message: the time limits are multiples of that work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

#: What is ready, as ``(descriptor, events)``.
Ready = list[tuple[int, int]]

#: The longest wait without sleep, as a multiple of the work between two waits, and its bounds in seconds. Staying awake for
#: longer does not pay.
LONGEST_WORKS: Final = 10
LONGEST_MIN_S: Final = 400e-6
LONGEST_MAX_S: Final = 1.5e-3
#: So many waits in a row must be that short before one is spent awake. The number doubles after each wait awake that was in
#: vain, and falls by one after each that was not: where messages come at random, nearly all waits are spent asleep.
FEWEST_WAITS: Final = 32
MOST_WAITS: Final = 1024
#: Of the waits that could be spent awake, one in so many is a sleep: other threads of this process get the interpreter then.
SLEEP_EVERY: Final = 16
#: After a large piece, this many more short waits must come first. An earlier wake-up would only make a transfer's reads
#: smaller.
WAITS_AFTER_BULK: Final = 32
#: After more work than this, in seconds, staying awake gains little: a wake-up takes only a part of that time.
LONGEST_WORK_S: Final = 300e-6
#: How fast the mean of that work follows: the newest wait counts for one in so many.
_WORK_MEMORY: Final = 16
#: A process that keeps the core for longer than this after a yield needs it more than we do. A multiple of our own work,
#: since the other processes on a message's way work about as long; and its bounds in seconds.
LONG_TURN_WORKS: Final = 5
LONG_TURN_MIN_S: Final = 200e-6
LONG_TURN_MAX_S: Final = 800e-6
#: After that, our process only sleeps for a while: ``REST_S``, or ``REST_AFTER_WHOLE_TURN_S`` if the other process kept the
#: core for ``WHOLE_TURN_S``, which is all that the system gives at once; twice as long each time that it happens again soon.
WHOLE_TURN_S: Final = 0.001
REST_S: Final = 0.002
REST_AFTER_WHOLE_TURN_S: Final = 0.05
LONGEST_REST_S: Final = 16.0
#: The share of one core that waiting may take, and how much of that can be saved up, in seconds.
SHARE: Final = 0.5
SAVED_S: Final = 0.005
#: Events that are taken at once while awake: what else is ready comes next time.
_EVENTS: Final = 16


class BusyWait:
    """Waits with ``sleep(timeout_s, most)``, which gives what is ready as ``epoll.poll`` does.

    ``threads_work()`` says whether other threads of this process have work: they need the interpreter. ``give_way()`` lets
    other processes run. ``clock()`` gives seconds, ``cpu_clock()`` the seconds that this thread has run.
    """

    __slots__ = (
        "_clock",
        "_cpu_clock",
        "_give_way",
        "_longest_s",
        "_needed_waits",
        "_rest_s",
        "_rest_until",
        "_returned_at",
        "_saved_at",
        "_saved_s",
        "_short_waits",
        "_sleep",
        "_threads_work",
        "_until_sleep",
        "_work_s",
    )

    def __init__(
        self,
        sleep: Callable[[float, int], Ready],
        *,
        threads_work: Callable[[], bool] = lambda: False,
        give_way: Callable[[], object] = os.sched_yield,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._sleep = sleep
        self._threads_work = threads_work
        self._give_way = give_way
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._short_waits = 0  # in a row; less than 0 after bulk
        self._needed_waits = FEWEST_WAITS
        self._until_sleep = SLEEP_EVERY
        self._returned_at = self._saved_at = clock()
        self._saved_s = SAVED_S
        self._rest_s = self._rest_until = 0.0
        self._work_s = 0.0  # between two waits, a mean
        self._longest_s = LONGEST_MIN_S

    def note_bulk(self) -> None:
        """Much data has passed in one piece."""
        self._short_waits = -WAITS_AFTER_BULK

    def wait(self, timeout_s: float, most: int) -> Ready:
        """What is ready, at most ``most``; nothing after ``timeout_s``."""
        if timeout_s <= 0:
            return self._sleep(timeout_s, most)
        began = self._clock()
        self._note_work(began - self._returned_at)
        ready: Ready = []
        left_s = timeout_s
        if self._short_waits >= self._needed_waits and self._may_stay_awake(began):
            ready = self._stay_awake(began, timeout_s)
            left_s -= self._clock() - began
        if not ready and left_s > 0:
            ready = self._sleep(left_s, most)
        self._returned_at = now = self._clock()
        if now - began <= self._longest_s:
            self._short_waits += bool(ready)  # one that a timed call ended says nothing
        elif self._short_waits > 0:
            self._short_waits = 0
        return ready

    def _note_work(self, work_s: float) -> None:
        # Longer work is not for one message. It counts as LONGEST_WORK_S, so that a transfer keeps the mean within bounds.
        self._work_s += ((work_s if work_s < LONGEST_WORK_S else LONGEST_WORK_S) - self._work_s) / _WORK_MEMORY
        longest_s = LONGEST_WORKS * self._work_s
        # this runs before each wait: min() and max() would take three times as long
        self._longest_s = (
            LONGEST_MIN_S if longest_s < LONGEST_MIN_S else LONGEST_MAX_S if longest_s > LONGEST_MAX_S else longest_s
        )

    def _may_stay_awake(self, now: float) -> bool:
        self._until_sleep -= 1
        if not self._until_sleep:
            self._until_sleep = SLEEP_EVERY
            return False
        if now < self._rest_until or now - self._returned_at > LONGEST_WORK_S:
            return False
        self._saved_s = min(SAVED_S, self._saved_s + SHARE * (now - self._saved_at))
        self._saved_at = now
        return self._saved_s > 0 and not self._threads_work()

    def _stay_awake(self, began: float, timeout_s: float) -> Ready:
        """What becomes ready soon enough, if there is anything."""
        sleep, clock, give_way = self._sleep, self._clock, self._give_way
        cpu_began_s = self._cpu_clock()
        until = began + min(self._longest_s, timeout_s)
        long_turn_s = min(LONG_TURN_MAX_S, max(LONG_TURN_MIN_S, LONG_TURN_WORKS * self._work_s))
        gave_way_at = began
        while True:
            ready = sleep(0, _EVENTS)
            now = clock()
            if now - gave_way_at > long_turn_s:
                self._rest(now, now - gave_way_at)
                break
            if ready:
                if self._needed_waits > FEWEST_WAITS:
                    self._needed_waits -= 1
                break
            if now >= until:
                if timeout_s >= self._longest_s:  # else a timed call ends it, which says nothing
                    self._needed_waits = min(MOST_WAITS, 2 * self._needed_waits)
                break
            gave_way_at = now
            give_way()
        self._saved_s -= self._cpu_clock() - cpu_began_s
        return ready

    def _rest(self, now: float, turn_s: float) -> None:
        first_s = REST_S if turn_s < WHOLE_TURN_S else REST_AFTER_WHOLE_TURN_S
        is_again = now - self._rest_until < self._rest_s  # it was awake for less time than it had slept
        self._rest_s = min(LONGEST_REST_S, max(first_s, 2 * self._rest_s)) if is_again else first_s
        self._rest_until = now + self._rest_s
