"""Pushes into a relay's store, and the bytes that the store has not acknowledged yet."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, fail

from dmsg.discovery.stores.rules import shielded
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.relay.errors import StoreUnavailable
from dmsg.rmb.relay.lanes import Room
from dmsg.rmb.relay.stores.base import QueueStore


class Pushes:
    """Pushes envelopes into ``store``, and counts the bytes that it has not acknowledged."""

    __slots__ = ("_new", "_store", "waiting_bytes")

    def __init__(self, store: QueueStore) -> None:
        self._store = store
        #: The new ones, by the networks they come from.
        self._new = Room(store.new_pushes)
        self.waiting_bytes = 0

    def push(
        self,
        session: SessionAddress,
        data: bytes,
        now: float,
        expires_at: float,
        source: int,
        *,
        new_from: str | None = None,
    ) -> Deferred[bool]:
        """See :meth:`~dmsg.rmb.relay.stores.base.QueueStore.push`. The push goes on if the caller is cancelled.

        ``new_from`` is for what does not count as delivered yet: the network that it comes from. Too much of that at a time
        fails. A network may have as much as it leaves free for others.
        """
        if new_from is not None and not self._new.has(new_from, 1):
            return fail(StoreUnavailable("the store is overloaded"))
        size = len(data)

        def answered(outcome: Any) -> Any:
            self.waiting_bytes -= size
            if new_from is not None:
                self._new.give_back(new_from, 1)
            return outcome

        pushing = self._store.push(session, data, now, expires_at, source)
        self.waiting_bytes += size
        if new_from is not None:
            self._new.take(new_from, 1)
        return shielded(pushing.addBoth(answered))
