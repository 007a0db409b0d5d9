"""Transports that may stay in a state for a limited time. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic

from dmsg.serving.member import L, LegState


class Waits(Generic[L]):
    """Legs that may be in ``state`` until a time. Each is added with a time that is no earlier than those before."""

    __slots__ = ("_legs", "_state")

    def __init__(self, state: LegState) -> None:
        self._state = state
        self._legs: deque[tuple[float, L]] = deque()

    def add(self, leg: L, until: float) -> None:
        """``leg`` may wait until the time ``until``."""
        self.next()
        self._legs.append((until, leg))

    def next(self) -> float | None:
        """When the time of the first leg that still waits is over, or ``None``; earlier legs are forgotten."""
        legs = self._legs
        while legs:
            until, leg = legs[0]
            if leg.state is self._state:
                return until
            legs.popleft()
        return None

    def over(self, now: float) -> Iterator[L]:
        """The legs that still wait although their time is over at ``now``."""
        while (until := self.next()) is not None and until <= now:
            yield self._legs.popleft()[1]
