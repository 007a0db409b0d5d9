"""Twisted's epoll reactor with a shorter way from a socket to its connection. Linux only: importing it fails elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from twisted.internet.epollreactor import EPollReactor
from twisted.internet.main import installReactor
from twisted.logger import Logger

from dmsg.glue.busy_wait import BusyWait
from dmsg.glue.cpu_limit import has_cpu_limit

_guarded: Final = Logger().failureHandler("Unexpected error in main loop")
#: The longest wait that epoll takes, in seconds: its milliseconds are a C int.
_LONGEST_S: Final = 2_147_483.0


class LeanEpollReactor(EPollReactor):
    """An ``EPollReactor`` that takes a quarter of the CPU time off a small message.

    It calls a descriptor that is ready without making a log context for it: what is logged meanwhile by
    ``twisted.python.log`` (not by ``twisted.logger``) begins with "-" in place of the connection's name. It looks for timed
    calls only when there are new ones, or the first is due. And where one message follows the other within 400 µs, or ten
    times the work for one, it does not go to sleep between them (:mod:`dmsg.glue.busy_wait`), unless it is told to with
    ``sleeps``.

    Its ``seconds()`` are no time of day. Twisted's web server takes them for one in its access log, whose dates are of 1970.
    """

    #: Seconds since the machine started, asleep or not. Twisted's reactors go by the time of day: when that is set back by
    #: an hour, nothing that is timed happens for an hour, and when it is set forward every time limit is over.
    seconds = staticmethod(partial(time.clock_gettime, time.CLOCK_BOOTTIME))

    def __init__(self, *, sleeps: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        #: Whether it sleeps whenever there is nothing to do.
        self.sleeps = sleeps
        poll = self._poller.poll
        busy_wait = BusyWait(poll, threads_work=self._threads_work)
        self._wait = poll if sleeps else busy_wait.wait
        self._soon: deque[Callable[[], object]] = deque()
        #: To be called when much data has passed in one piece, for which it is no use to stay awake.
        self.note_bulk = busy_wait.note_bulk

    def at_end_of_turn(self, call: Callable[[], object]) -> None:
        """Call ``call()`` when everything that was ready has been handled, before anything else is waited for."""
        self._soon.append(call)

    def _threads_work(self) -> bool:
        return self.threadpool is not None and bool(self.threadpool.working)

    def doIteration(self, delay: float | None) -> None:
        """Handle what is ready within ``delay`` seconds: of a program that calls ``iterate()`` instead of ``run()``."""
        for _ in range(len(self._soon)):
            self._soon.popleft()()
        self.doPoll(0 if self._soon else delay)  # type: ignore[no-untyped-call]

    def mainLoop(self) -> None:
        """Run until the reactor is stopped."""
        while self._started:
            with _guarded:
                self._turn_until_stopped()

    def _turn_until_stopped(self) -> None:
        selectables, wait, act, seconds = self._selectables, self._wait, self._doReadOrWrite, self.seconds
        soon = self._soon
        while self._started:
            for _ in range(len(soon)):
                soon.popleft()()
            calls = self._pendingTimedCalls
            wait_s = min(calls[0].time - seconds(), _LONGEST_S) if calls else _LONGEST_S
            if wait_s <= 0 or self._newTimedCalls or self.threadCallQueue or self._justStopped:
                self.runUntilCurrent()
                due_s = self.timeout() if self.running else 0
                wait_s = _LONGEST_S if due_s is None else due_s
            if soon:  # asked for by one of these calls
                wait_s = 0
            for descriptor, event in wait(wait_s, len(selectables)):
                selectable = selectables.get(descriptor)
                if selectable is not None:  # one that was ready before it may have closed it
                    act(selectable, descriptor, event)  # type: ignore[no-untyped-call]


def install() -> None:
    """Make a :class:`LeanEpollReactor` the reactor of this process, as ``twistd --reactor=dmsg-epoll`` does.

    Where CPU time is limited, it sleeps: a process that has spent its part on waiting would stand still for the rest of it.
    """
    installReactor(LeanEpollReactor(sleeps=has_cpu_limit()))
