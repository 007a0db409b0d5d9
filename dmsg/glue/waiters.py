"""Deferreds that wait for one fact."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

T = TypeVar("T")


class Waiters(Generic[T]):
    """Deferreds that wait for the same thing, in the order in which they began to wait.

    Cancelling one removes it; it fails with ``CancelledError``, as any Deferred does. ``abandoned()`` is called when the last
    one has been cancelled: no caller waits any more. One that begins to wait while the others are fired waits for the
    next time.
    """

    __slots__ = ("_abandoned", "_waiting")

    def __init__(self, abandoned: Callable[[], None] | None = None) -> None:
        # One in the middle leaves in O(1). Not a dict: finding its first key takes time for each that has left before it.
        self._waiting: OrderedDict[Deferred[T], None] = OrderedDict()
        self._abandoned = abandoned

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self) -> Deferred[T]:
        """A Deferred that fires with the next value or fails with the next error."""
        waiter: Deferred[T] = Deferred(self._leave)
        self._waiting[waiter] = None
        return waiter

    def wait_at_most(self, limit_s: float, clock: IReactorTime) -> Deferred[T | None]:
        """As :meth:`wait`, but fires with ``None`` when ``limit_s`` seconds of ``clock`` have passed before."""
        waiter = cast("Deferred[T | None]", self.wait())
        return waiter.addTimeout(limit_s, clock, lambda *_: None)

    def fire(self, value: T | Failure) -> None:
        """Fire all with ``value``; a ``Failure`` fails them."""
        waiting, self._waiting = self._waiting, OrderedDict()
        for waiter in waiting:
            if not waiter.called:  # an earlier callback may have cancelled this one
                waiter.callback(value)

    def fire_first(self, value: T) -> None:
        """Fire the one that has waited longest with ``value``. Raises ``StopIteration`` when there is none."""
        waiter = next(iter(self._waiting))
        del self._waiting[waiter]
        waiter.callback(value)

    def fail(self, error: BaseException) -> None:
        """Fail all with ``error``."""
        self.fire(Failure(error))

    def cancel(self) -> None:
        """Cancel all; ``abandoned()`` is not called."""
        waiting, self._waiting = self._waiting, OrderedDict()
        for waiter in waiting:
            waiter.cancel()

    def _leave(self, waiter: Deferred[T]) -> None:
        if waiter in self._waiting:
            del self._waiting[waiter]
            if not self._waiting and self._abandoned is not None:
                self._abandoned()
