"""Turns for tasks that push into a relay's store, and the bytes that the store has not acknowledged yet."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from dmsg.discovery.stores.rules import shielded
from dmsg.glue.waiters import Waiters
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.relay.stores.base import QueueStore


class Line:
    """A first-in, first-out semaphore with ``places``. A turn that ends at once does not start the next one recursively."""

    __slots__ = ("_calling", "_free", "_places", "_waiting")

    def __init__(self, places: int = 1) -> None:
        self._places = self._free = places
        self._calling = False
        self._waiting: Waiters[None] = Waiters()

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
            self._waiting.fire_first(None)
        self._calling = False
        return self._free == self._places


class Pushes:
    """Pushes envelopes into ``store``, and counts the bytes that it has not acknowledged."""

    __slots__ = ("_store", "waiting_bytes")

    def __init__(self, store: QueueStore) -> None:
        self._store = store
        self.waiting_bytes = 0

    def push(self, session: SessionAddress, data: bytes, now: float, expires_at: float, source: int) -> Deferred[bool]:
        """See :meth:`~dmsg.rmb.relay.stores.base.QueueStore.push`. The push goes on if the caller is cancelled."""
        size = len(data)

        def answered(outcome: Any) -> Any:
            self.waiting_bytes -= size
            return outcome

        pushing = self._store.push(session, data, now, expires_at, source)
        self.waiting_bytes += size
        return shielded(pushing.addBoth(answered))
