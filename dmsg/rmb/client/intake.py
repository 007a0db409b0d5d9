"""Messages that are being checked: the client stops reading from a relay that sends too many at once."""

from __future__ import annotations

from collections import Counter

from twisted.internet.defer import Deferred

from dmsg.rmb.client.connection import RelayConnection


class Intake:
    """Messages whose sender is being looked up. At ``limit`` messages or ``limit_bytes`` of a connection, reading pauses."""

    def __init__(self, limit: int, limit_bytes: int) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._under_way: dict[Deferred[None], tuple[RelayConnection, int]] = {}
        self._counts: Counter[RelayConnection] = Counter()
        self._bytes: Counter[RelayConnection] = Counter()

    def add(self, taking: Deferred[None], connection: RelayConnection, size: int) -> None:
        """Count ``taking``, for a message of ``size`` bytes, until it is done; does nothing if it is done already."""
        if taking.called:
            return
        self._under_way[taking] = connection, size
        self._counts[connection] += 1
        self._bytes[connection] += size
        if self._is_full(connection):  # also when it is held already: after a reconnection it is not
            connection.hold(True)
        taking.addBoth(self._over, taking)

    def _is_full(self, connection: RelayConnection) -> bool:
        return self._counts[connection] >= self._limit or self._bytes[connection] >= self._limit_bytes

    def _over(self, result: object, taking: Deferred[None]) -> object:
        connection, size = self._under_way.pop(taking)
        was_full = self._is_full(connection)
        self._counts[connection] -= 1
        self._bytes[connection] -= size
        if was_full and not self._is_full(connection):
            connection.hold(False)
        return result

    def cancel(self) -> None:
        """Cancel all."""
        for taking in list(self._under_way):
            taking.cancel()
