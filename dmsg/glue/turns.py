"""A rate limit: callers wait in line for their turn, and may leave the line."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from dmsg.glue.waiters import Waiters
from dmsg.sansio.backoff import SHORTEST_PAUSE_S
from dmsg.sansio.rate import TokenBucket


class Turns:
    """Gives out ``rate_per_s`` turns a second (more than 0), and the turns of one second at once."""

    def __init__(self, clock: IReactorTime, rate_per_s: float) -> None:
        self._clock = clock
        self._bucket = TokenBucket(rate_per_s, max(1.0, rate_per_s), clock.seconds())
        self._line: Waiters[None] = Waiters()
        self._call: IDelayedCall | None = None

    def __len__(self) -> int:
        """How many stand in line."""
        return len(self._line)

    def take(self) -> Deferred[None] | None:
        """``None`` if the caller's turn is now, else a Deferred that fires when it is. Cancelling it leaves the line."""
        if not self._line and self._bucket.take(self._clock.seconds()):
            return None
        turn = self._line.wait()
        self._arm()
        return turn

    def stop(self) -> None:
        """Let all in line go at once: there is nothing more to wait for."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
        while self._line:
            self._line.fire_first(None)

    def _arm(self) -> None:
        if self._call is None and self._line:
            wait_s = max(SHORTEST_PAUSE_S, self._bucket.wait_s(self._clock.seconds()))
            self._call = self._clock.callLater(wait_s, self._due)

    def _due(self) -> None:
        self._call = None
        while self._line and self._bucket.take(self._clock.seconds()):
            self._line.fire_first(None)
        self._arm()
