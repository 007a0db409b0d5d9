"""Pushes into a relay's store, and the bytes that the store has not acknowledged yet."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, fail

from dmsg.discovery.stores.rules import shielded
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.relay.errors import StoreUnavailable
from dmsg.rmb.relay.stores.base import QueueStore


class Pushes:
    """Pushes envelopes into ``store``, and counts the bytes that it has not acknowledged."""

    __slots__ = ("_new", "_store", "waiting_bytes")

    def __init__(self, store: QueueStore) -> None:
        self._store = store
        self._new = 0
        self.waiting_bytes = 0

    def push(
        self,
        session: SessionAddress,
        data: bytes,
        now: float,
        expires_at: float,
        source: int,
        *,
        is_new: bool = False,
    ) -> Deferred[bool]:
        """See :meth:`~dmsg.rmb.relay.stores.base.QueueStore.push`. The push goes on if the caller is cancelled.

        ``is_new`` is for what does not count as delivered yet. Too much of that at a time fails.
        """
        if is_new and self._new >= self._store.new_pushes:
            return fail(StoreUnavailable("the store is overloaded"))
        size = len(data)

        def answered(outcome: Any) -> Any:
            self.waiting_bytes -= size
            self._new -= is_new
            return outcome

        pushing = self._store.push(session, data, now, expires_at, source)
        self.waiting_bytes += size
        self._new += is_new
        return shielded(pushing.addBoth(answered))
