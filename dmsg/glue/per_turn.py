"""A limit of how many tasks go on in one turn of the reactor."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from dmsg.glue.waiters import Waiters


class PerTurn:
    """Lets ``most`` tasks go on in one turn of the reactor, in the order in which they came.

    For work that takes milliseconds and that thousands of tasks may have to do at once.
    """

    def __init__(self, most: int, clock: IReactorTime) -> None:
        self._most = most
        self._clock = clock
        self._waiting: Waiters[None] = Waiters()
        self._is_due = False

    def wait(self) -> Deferred[None]:
        """Fires in a later turn of the reactor, the next one if few wait."""
        waiter = self._waiting.wait()
        self._turn_later()
        return waiter

    def _turn_later(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._clock.callLater(0, self._turn)

    def _turn(self) -> None:
        self._is_due = False
        for _ in range(min(self._most, len(self._waiting))):  # one that waits again meanwhile goes on in another turn
            if self._waiting:  # an earlier one may have cancelled the others
                self._waiting.fire_first(None)
        if self._waiting:
            self._turn_later()
