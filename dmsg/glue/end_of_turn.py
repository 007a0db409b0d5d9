"""One call at the end of the reactor's current turn, however often it is asked for."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime


class AtEndOfTurn:
    """Makes one call after everything else in a turn. Our own reactor does that without a timed call."""

    __slots__ = ("_ask_reactor", "_asked", "_clock", "_delayed")

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._ask_reactor: Callable[[Callable[[], object]], object] | None = getattr(clock, "at_end_of_turn", None)
        self._asked: Callable[[], object] | None = None
        self._delayed: IDelayedCall | None = None

    def ask(self, call: Callable[[], object]) -> None:
        """Call ``call()`` at the end of this turn, unless a call was asked for already."""
        if self._asked is not None:
            return
        self._asked = call
        if self._ask_reactor is not None:
            self._ask_reactor(self._run)
        else:
            self._delayed = self._clock.callLater(0, self._run)

    def cancel(self) -> None:
        """Take the call back."""
        self._asked = None
        delayed, self._delayed = self._delayed, None
        if delayed is not None:
            delayed.cancel()

    def _run(self) -> None:
        asked, self._asked, self._delayed = self._asked, None, None
        if asked is not None:
            asked()
