"""A fake clock for very many delayed calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count

from twisted.internet.base import DelayedCall
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import Clock

__all__ = ["HeapClock"]


class HeapClock(Clock):
    """A ``Clock`` that starts at ``now_s`` and keeps its calls in a heap instead of sorting all of them each time.

    Unlike the original, it stops at each call that is due: each call sees the time it asked for.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        super().__init__()
        self.rightNow = now_s
        self._heap: list[tuple[float, int, DelayedCall]] = []
        self._numbers = count()

    def callLater(self, delay: float, callable: Callable[..., object], *args: object, **kw: object) -> IDelayedCall:
        """See ``IReactorTime``."""
        call = DelayedCall(
            self.rightNow + delay, callable, args, kw, lambda call: None, self._push, lambda: self.rightNow
        )
        self._push(call)
        return call

    def _push(self, call: DelayedCall) -> None:
        heappush(self._heap, (call.getTime(), next(self._numbers), call))

    def getDelayedCalls(self) -> Sequence[IDelayedCall]:
        """See ``IReactorTime``."""
        return list({id(call): call for _, _, call in self._heap if call.active()}.values())

    def advance(self, amount: float) -> None:
        """Move on by ``amount`` seconds, making the calls that come due."""
        end = self.rightNow + amount
        while self.step(end):
            pass
        self.rightNow = end

    def step(self, limit_s: float) -> bool:
        """Make the next call if it is due by the time ``limit_s``; gives whether there was one."""
        while self._heap and self._heap[0][0] <= limit_s:
            at_s, _, call = heappop(self._heap)
            if not call.active():
                continue
            if call.getTime() > at_s:
                self._push(call)  # it was delayed
                continue
            self.rightNow = max(self.rightNow, at_s)
            call.called = 1
            call.func(*call.args, **call.kw)
            return True
        return False
