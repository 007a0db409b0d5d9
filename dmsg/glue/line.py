"""Turns for tasks of which only so many may run at a time."""

from __future__ import annotations

from dmsg.glue.waiters import Waiters


class Line:
    """A first-in, first-out semaphore with ``places``. A turn that ends at once does not start the next one recursively."""

    __slots__ = ("_calling", "_free", "_places", "_waiting", "started")

    def __init__(self, places: int = 1) -> None:
        self._places = self._free = places
        self._calling = False
        #: How many turns the call of :meth:`over` that runs now has started; 0 when none runs.
        self.started = 0
        self._waiting: Waiters[None] = Waiters()

    @property
    def waiting(self) -> int:
        """How many wait for a turn."""
        return len(self._waiting)

    async def turn(self) -> None:
        """Wait for a turn."""
        if not self._free or self._waiting:
            await self._waiting.wait()
        self._free -= 1

    def over(self) -> bool:
        """End a turn and start those that wait; returns whether nobody has a turn now."""
        self._free += 1
        if self._calling:
            return False
        self._calling = True
        while self._waiting and self._free:
            self.started += 1
            self._waiting.fire_first(None)
        self._calling, self.started = False, 0
        return self._free == self._places
