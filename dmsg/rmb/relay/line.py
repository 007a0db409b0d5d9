"""Those who put something into a relay's store, one after the other."""

from __future__ import annotations

from dmsg.glue.waiters import Waiters


class Line:
    """Turns of those who put something into the store, ``places`` at a time. One that is over at once starts no other."""

    __slots__ = ("_calling", "_free", "_places", "_waiting")

    def __init__(self, places: int = 1) -> None:
        self._places = self._free = places
        self._calling = False
        self._waiting: Waiters[None] = Waiters()

    async def turn(self) -> None:
        """Wait for it."""
        if not self._free or self._waiting:
            await self._waiting.wait()
        self._free -= 1

    def over(self) -> bool:
        """End a turn, and give the next ones theirs; gives whether no one has one now."""
        self._free += 1
        if self._calling:
            return False
        self._calling = True
        while self._waiting and self._free:
            self._waiting.fire_first(None)
        self._calling = False
        return self._free == self._places
