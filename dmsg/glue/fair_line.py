"""Turns for tasks of which only so many may run at a time, where those for whom they run take turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from dmsg.glue.waiters import Waiters

K = TypeVar("K", bound=Hashable)


class FairLine(Generic[K]):
    """A semaphore with ``places``. The tasks of one key have their turns in the order in which they came, and keys take turns.

    So a key with one task waits for one task of each other key, and not for all that came before. A turn that ends at once does
    not start the next one recursively.
    """

    __slots__ = ("_calling", "_free", "_places", "_waiting")

    def __init__(self, places: int) -> None:
        self._places = self._free = places
        self._calling = False
        #: The tasks that wait, by key; the key whose turn is next is first.
        self._waiting: OrderedDict[K, Waiters[None]] = OrderedDict()

    @property
    def under_way(self) -> int:
        """How many have a turn."""
        return self._places - self._free

    async def turn(self, key: K) -> None:
        """Wait for a turn of ``key``."""
        if not self._free or self._waiting:
            waiting = self._waiting.get(key)
            if waiting is None:
                waiting = self._waiting[key] = Waiters(lambda: self._forget(key))
            await waiting.wait()
        self._free -= 1

    def over(self) -> None:
        """End a turn and start those that wait."""
        self._free += 1
        if self._calling:
            return
        self._calling = True
        while self._waiting and self._free:
            key, waiting = next(iter(self._waiting.items()))
            if len(waiting) == 1:
                del self._waiting[key]
            else:
                self._waiting.move_to_end(key)
            waiting.fire_first(None)
        self._calling = False

    def _forget(self, key: K) -> None:
        """All tasks of ``key`` have been cancelled."""
        del self._waiting[key]
