"""Staggered retries of callers to whom Redis has said "not now"."""

from __future__ import annotations

from typing import Final

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from dmsg.glue.waiters import Waiters

#: Seconds until a Redis that is there, but says "not now", is asked again.
RETRY_S: Final = 0.1


class Retries:
    """Turns of callers to whom Redis has said "not now", because it is full or loading.

    There may be thousands, and other twins decide how many. If each retried ten times a second, Redis and this process would
    do nothing else. So one retries first, and while that goes well, twice as many each time.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._waiting: Waiters[None] = Waiters(self._rest)
        self._call: IDelayedCall | None = None
        #: How many callers retry next.
        self._most = 1

    def __len__(self) -> int:
        return len(self._waiting)

    async def turn(self, limit_s: float) -> None:
        """Wait for the turn of a caller that was just refused, at most ``limit_s``."""
        self._most = 1
        turn = self._waiting.wait_at_most(max(0.0, limit_s), self._clock)
        self._go_on()
        await turn

    def _go_on(self) -> None:
        if self._call is None and self._waiting:
            self._call = self._clock.callLater(RETRY_S, self._next)

    def _next(self) -> None:
        self._call = None
        most, self._most = self._most, 2 * self._most
        for _ in range(min(most, len(self._waiting))):
            if self._waiting:
                self._waiting.fire_first(None)
        self._go_on()

    def _rest(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None
