"""Turns of the tasks that bring a session's envelopes to the store, while what it was not given before is on its way there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from dmsg.glue.line import Line
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.relay.background import Background

#: Envelopes that waited until queues were in the store, and are stored behind them in one turn of the reactor: some 30 ms.
_KEPT_IN_A_TURN: Final = 256


class StoreLine(Line):
    """The turns of the tasks of a session; ``network`` is where it was connected last."""

    __slots__ = ("network",)
    network: str


class StoreLines:
    """A line for each session with such tasks. ``over(address)`` is called when the last task of a session has ended."""

    def __init__(self, background: Background, clock: IReactorTime, over: Callable[[SessionAddress], None]) -> None:
        self._background = background
        self._clock = clock
        self._over = over
        self._lines: dict[SessionAddress, StoreLine] = {}
        #: Lines in which the next task may go on, and whether they are called.
        self._ready: deque[tuple[SessionAddress, StoreLine]] = deque()
        self._is_calling = False

    def __len__(self) -> int:
        return len(self._lines)

    def get(self, address: SessionAddress) -> StoreLine | None:
        """The line of a session, if it has tasks."""
        return self._lines.get(address)

    def begin(self, address: SessionAddress, network: str) -> StoreLine:
        """The line of a session at ``network`` for another task, which has to end with :meth:`next`."""
        line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = StoreLine()
        line.network = network
        return line

    def next(self, address: SessionAddress, line: StoreLine) -> None:
        """End a turn in ``line``. Tasks behind it go on later, because thousands may wait, and in thousands of lines."""
        if not line.waiting:
            self._end(address, line)
            return
        self._ready.append((address, line))
        if not self._is_calling:
            self._is_calling = True
            self._background.run(self._call())

    async def _call(self) -> None:
        """Let tasks in lines that are ready go on, some in each turn of the reactor. Lines take turns."""
        while self._ready:
            await deferLater(self._clock, 0)
            for _ in range(_KEPT_IN_A_TURN):
                # A line comes back at once with its next task. PerTurn would leave that to another turn.
                if self._ready:
                    self._end(*self._ready.popleft())
        self._is_calling = False

    def _end(self, address: SessionAddress, line: StoreLine) -> None:
        if line.over():
            del self._lines[address]
            self._over(address)
