"""One expensive thing for each turn of the reactor, so that cheap ones need not wait behind a crowd of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime


class Pacer:
    """Calls what it is given in order, one for each turn of the reactor.

    The caller bounds how much waits; a handshake costs some hundred microseconds, a forwarded frame a few.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._waiting: deque[Callable[[], None]] = deque()
        self._next: IDelayedCall | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Do ``work`` now if nothing waits and nothing was done this turn, else in its turn."""
        if self._next is None:
            self._next = self._clock.callLater(0, self._turn)
            work()
        else:
            self._waiting.append(work)

    def _turn(self) -> None:
        self._next = None
        if self._waiting:
            self._next = self._clock.callLater(0, self._turn)
            self._waiting.popleft()()

    def stop(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        if self._next is not None and self._next.active():
            self._next.cancel()
        self._next = None
