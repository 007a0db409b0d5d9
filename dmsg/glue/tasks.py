"""Coroutines that run side by side, and are ended together; and one that is not ended before it is done."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.interfaces import IReactorTime

from dmsg.glue.waiters import Waiters


def to_the_end(work: Coroutine[Any, Any, None]) -> Deferred[None]:
    """Run ``work``. Cancelling the Deferred, or a timeout of it, ends only the wait: ``work`` goes on."""

    def tell(result: Any) -> Any:
        if done.called:
            return result  # the wait was cancelled: an error goes to the log
        return done.callback(result)

    done: Deferred[None] = Deferred()
    ensureDeferred(work).addBoth(tell)
    return done


class Tasks:
    """The coroutines that run; ``len()`` counts them."""

    def __init__(self) -> None:
        self._running: dict[Deferred[None], None] = {}
        self._idle: Waiters[None] = Waiters()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, work: Coroutine[Any, Any, None]) -> Deferred[None]:
        """Run ``work``, which raises nothing but ``CancelledError``."""
        task = ensureDeferred(work)
        if not task.called:
            self._running[task] = None
            task.addBoth(self._over, task)
        return task

    def _over(self, result: Any, task: Deferred[None]) -> Any:
        del self._running[task]
        if not self._running:
            self._idle.fire(None)
        return None if getattr(result, "type", None) is CancelledError else result

    async def when_idle(self, limit_s: float, clock: IReactorTime) -> None:
        """Returns when none runs, or after ``limit_s``."""
        deadline = clock.seconds() + limit_s
        while self._running and (left_s := deadline - clock.seconds()) > 0:
            await self._idle.wait_at_most(left_s, clock)

    async def end(self, patience_s: float, clock: IReactorTime) -> None:
        """Wait until none runs; after ``patience_s`` cancel those that still do."""
        if self._running and patience_s > 0:
            await self._idle.wait_at_most(patience_s, clock)
        self.cancel()

    def cancel(self) -> None:
        """Cancel all that run."""
        for task in list(self._running):
            task.cancel()
