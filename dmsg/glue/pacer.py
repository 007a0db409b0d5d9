"""Expensive work, one piece at a time, so that cheap work need not wait behind many expensive pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from twisted.internet.interfaces import IDelayedCall, IReactorTime

#: Cheap pieces of work done in one turn: refusing 8 strangers takes as long as one expensive piece.
_CHEAP_A_TURN: Final = 8
#: A turn does one more expensive piece for each 64 that wait. On a busy relay a turn takes 10 ms: with one piece a turn, the
#: last of 512 strangers would wait longer than a handshake may take.
_WAITING_FOR_ANOTHER: Final = 64


class Pacer:
    """Does pieces of work in order, one expensive piece in every second turn of the reactor.

    Frames that arrive during expensive work are forwarded in the free turn after it. So a frame waits for one expensive piece
    at most, and for one more for each 64 that wait.

    Work returns whether it was expensive: a handshake costs some hundred microseconds, a piece of a message as little as
    a forwarded frame. The caller limits how much waits.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._waiting: deque[Callable[[], bool]] = deque()
        self._next: IDelayedCall | None = None
        self._working = False

    def submit(self, work: Callable[[], bool]) -> bool:
        """Do ``work`` now if nothing expensive was done lately, else in its turn. Returns whether it is done."""
        if self._next is not None or self._working:
            self._waiting.append(work)
            return False
        expensive = True
        self._working = True  # what this work submits waits for a turn, and begins no second series of turns
        try:
            expensive = work()
        finally:
            self._go_on(expensive)
        return True

    def later(self, work: Callable[[], bool]) -> None:
        """Do ``work`` in a turn of its own."""
        self._waiting.append(work)
        if self._next is None and not self._working:
            self._next = self._clock.callLater(0, self._turn)

    def _rest(self) -> None:
        self._next = self._clock.callLater(0, self._turn)

    def _turn(self) -> None:
        self._next = None
        expensive, most = 0, 1 + len(self._waiting) // _WAITING_FOR_ANOTHER
        self._working = True
        try:
            for _ in range(most + _CHEAP_A_TURN - 1):
                if not self._waiting or expensive == most:
                    break
                expensive += self._waiting.popleft()()
        finally:
            self._go_on(bool(expensive))

    def _go_on(self, expensive: bool) -> None:
        self._working = False
        if expensive:
            self._next = self._clock.callLater(0, self._rest)
        elif self._waiting:
            self._next = self._clock.callLater(0, self._turn)

    def stop(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        if self._next is not None and self._next.active():
            self._next.cancel()
        self._next = None
