"""Envelopes whose sender is being looked up: a relay that brings too many at once is not read from."""

from __future__ import annotations

from collections import Counter

from twisted.internet.defer import Deferred

from dmsg.rmb.client.connection import RelayConnection


class Lookups:
    """What waits for the registry, at most ``limit`` for each connection before it is held."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[Deferred[None], RelayConnection] = {}
        self._counts: Counter[RelayConnection] = Counter()

    def add(self, lookup: Deferred[None], connection: RelayConnection) -> None:
        """Count ``lookup`` until it is over; does nothing if it is already."""
        if lookup.called:
            return
        self._waiting[lookup] = connection
        self._counts[connection] += 1
        if self._counts[connection] >= self._limit:  # above the limit it has been made anew meanwhile
            connection.hold(True)
        lookup.addBoth(self._over, lookup)

    def _over(self, result: object, lookup: Deferred[None]) -> object:
        connection = self._waiting.pop(lookup)
        self._counts[connection] -= 1
        if self._counts[connection] == self._limit - 1:
            connection.hold(False)
        return result

    def cancel(self) -> None:
        """Give all up."""
        for lookup in list(self._waiting):
            lookup.cancel()
