"""Twisted's epoll reactor with a shorter way from a socket to its connection. Linux only: importing it fails elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from twisted.internet.epollreactor import EPollReactor
from twisted.internet.main import installReactor
from twisted.logger import Logger

from dmsg.glue.busy_wait import BusyWait
from dmsg.glue.cpu_limit import has_cpu_limit

_guarded: Final = Logger().failureHandler("Unexpected error in main loop")
_from_thread: Final = Logger().failureHandler("Unexpected error in a call from a thread")
#: The longest wait that epoll takes, in seconds: its milliseconds are a C int.
_LONGEST_S: Final = 2_147_483.0
#: Where a timed call is later than this, in seconds, what has come meanwhile is read first.
_LATE_S: Final = 0.1


class LeanEpollReactor(EPollReactor):
    """An ``EPollReactor`` that takes a quarter of the CPU time off a small message.

    It calls a ready descriptor without making a log context for it: lines that ``twisted.python.log`` (not
    ``twisted.logger``) writes meanwhile begin with "-" instead of the connection's name. It looks for timed calls only when
    there are new ones, or the first is due. And where messages follow each other within 400 µs, or within ten times the work
    for one, it stays awake between them (:mod:`dmsg.glue.busy_wait`), unless ``sleeps`` is true.

    When the process has stood still (stopped by a signal, paused with its machine, or held up by a slow call), every connection
    is read once before time limits expire. Otherwise all that seem silent would be ended, though their data waits here.

    Its ``seconds()`` are not the time of day. Twisted's web server takes them for it: the dates in its access log are of 1970.
    """

    #: Seconds since the machine started, including sleep. Twisted's reactors go by the time of day: when that is set back by
    #: an hour, no timed call happens for an hour, and when it is set forward every time limit expires.
    seconds = staticmethod(partial(time.clock_gettime, time.CLOCK_BOOTTIME))

    def __init__(self, *, sleeps: bool = False) -> None:
        # In place of Twisted's list, which stays empty: those that came meanwhile would be made before the timed calls.
        self._asked: deque[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = deque()
        super().__init__()  # type: ignore[no-untyped-call]
        #: Whether it sleeps whenever there is nothing to do.
        self.sleeps = sleeps
        poll = self._poller.poll
        busy_wait = BusyWait(poll, threads_work=self._threads_work)
        self._wait = poll if sleeps else busy_wait.wait
        self._soon: deque[Callable[[], object]] = deque()
        #: To be called after a large piece of data: in a transfer, staying awake gains nothing.
        self.note_bulk = busy_wait.note_bulk

    def at_end_of_turn(self, call: Callable[[], object]) -> None:
        """Call ``call()`` when everything that was ready has been handled, before anything else is waited for."""
        self._soon.append(call)

    def _threads_work(self) -> bool:
        return self.threadpool is not None and bool(self.threadpool.working)

    def doIteration(self, delay: float | None) -> None:
        """Handle what is ready within ``delay`` seconds, for a program that calls ``iterate()`` instead of ``run()``."""
        for _ in range(len(self._soon)):
            self._soon.popleft()()
        self.doPoll(0 if self._soon else delay)  # type: ignore[no-untyped-call]

    def callFromThread(self, f: Callable[..., Any], *args: object, **kwargs: object) -> None:
        """See Twisted's ``IReactorFromThreads``."""
        assert callable(f), f"{f} is not callable"
        self._asked.append((f, args, kwargs))
        self.wakeUp()

    def runUntilCurrent(self) -> None:
        """Make the calls that threads asked for, then those that are due, for a program that calls ``iterate()``."""
        self._call_for_threads()
        super().runUntilCurrent()

    def _call_for_threads(self) -> None:
        """Make the calls that threads asked for: not with the timed calls, all of which a slow one would make late. Those that
        are asked for meanwhile have to wait until the timed calls that are due were made."""
        asked = self._asked
        for _ in range(len(asked)):
            if asked:  # one of these calls may have called ``iterate()``
                call, arguments, keywords = asked.popleft()
                with _from_thread:
                    call(*arguments, **keywords)

    def mainLoop(self) -> None:
        """Run until the reactor is stopped."""
        while self._started:
            with _guarded:
                self._turn_until_stopped()

    def _turn_until_stopped(self) -> None:
        selectables, wait, act, seconds = self._selectables, self._wait, self._doReadOrWrite, self.seconds
        soon, asked, make_timed_calls, reads_first = self._soon, self._asked, super().runUntilCurrent, True
        while self._started:
            for _ in range(len(soon)):
                soon.popleft()()
            if asked:
                self._call_for_threads()
            if not self._started:
                return  # one of these calls has ended it
            calls = self._pendingTimedCalls
            wait_s = min(calls[0].time - seconds(), _LONGEST_S) if calls else _LONGEST_S
            if wait_s < -_LATE_S and reads_first:
                reads_first, wait_s = False, 0
            elif wait_s <= 0 or self._newTimedCalls or self._justStopped:
                reads_first = True
                make_timed_calls()
                due_s = self.timeout() if self.running else 0
                wait_s = _LONGEST_S if due_s is None else due_s
            if soon:  # asked for by one of these calls
                wait_s = 0
            for descriptor, event in wait(wait_s, len(selectables)):
                selectable = selectables.get(descriptor)
                if selectable is not None:  # a descriptor handled before may have closed it
                    act(selectable, descriptor, event)  # type: ignore[no-untyped-call]


def install() -> None:
    """Make a :class:`LeanEpollReactor` the reactor of this process, as ``twistd --reactor=dmsg-epoll`` does.

    Where CPU time is limited, it sleeps: a process that spends its quota on waiting stands still for the rest of the period.
    """
    installReactor(LeanEpollReactor(sleeps=has_cpu_limit()))
