"""Time limits of waits that follow each other closely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

T = TypeVar("T")


class TimeLimits:
    """Time limits that share one timed call, which is moved only for a limit that ends sooner.

    To make and cancel a timed call for each wait would take longer than the waits of a transfer.
    """

    __slots__ = ("_call", "_clock", "_ends")

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._ends: dict[Deferred[Any], float] = {}
        self._call: IDelayedCall | None = None

    def limit(self, waiting: Deferred[T], limit_s: float, late: Callable[[], T]) -> Deferred[T]:
        """``waiting``, which is cancelled when ``limit_s`` seconds have passed, and then gives or raises what ``late()`` does."""

        def over(result: T | Failure) -> T | Failure:
            return late() if self._ends.pop(waiting, None) is None else result

        end = self._ends[waiting] = self._clock.seconds() + limit_s
        waiting.addBoth(over)
        if waiting in self._ends:
            self._look_at(end, limit_s)
        return waiting

    def _look_at(self, end: float, left_s: float) -> None:
        if self._call is None:
            self._call = self._clock.callLater(left_s, self._look)
        elif self._call.getTime() > end:
            self._call.reset(left_s)

    def stop(self) -> None:
        """Limit no wait any more."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _look(self) -> None:
        self._call = None
        now = self._clock.seconds()
        for waiting in [waiting for waiting, end in self._ends.items() if end <= now]:
            if self._ends.pop(waiting, None) is not None:  # else cancelling an earlier one has ended it
                waiting.cancel()
        if self._ends:  # a wait that a callback began just now may have set the timed call too late for the others
            end = min(self._ends.values())
            self._look_at(end, max(0.0, end - now))
