"""Events about a twin's sessions for the event log."""

from __future__ import annotations

from itertools import count

from twisted.internet.interfaces import IReactorTime

from dmsg.eventlog.schema import TwinSessionClosed, TwinSessionOpened, digest
from dmsg.interfaces import IEventLog
from dmsg.rmb.client.connection import RelayConnection
from dmsg.rmb.core.address import SessionAddress


class SessionRecord:
    """Reports to ``events``, if given, to which relays a twin is connected. Each session has a number of its own."""

    def __init__(self, clock: IReactorTime, events: IEventLog | None) -> None:
        self._clock = clock
        self._events = events
        self._unused = count(1)
        self._numbers: dict[RelayConnection, int] = {}

    def opened(self, address: SessionAddress, connection: RelayConnection) -> None:
        """The session ``address`` is connected."""
        if self._events is None:
            return
        number = self._numbers[connection] = next(self._unused)
        twin, name = address
        took_ms = connection.handshake_s * 1000
        self._events.emit(TwinSessionOpened(number, twin, digest(name), connection.host, took_ms))

    def closed(self, address: SessionAddress, connection: RelayConnection, *, was_connected: bool) -> None:
        """The session ``address`` is no longer connected, or could not connect."""
        if self._events is None:
            return
        if was_connected:
            number, lasted_s = self._numbers[connection], self._clock.seconds() - connection.since_s
            counts = connection.envelopes_in, connection.envelopes_out, connection.bytes_in, connection.bytes_out
        else:
            number, lasted_s, counts = next(self._unused), 0.0, (0, 0, 0, 0)
        twin, name = address
        self._events.emit(TwinSessionClosed(number, twin, digest(name), connection.reason, lasted_s, *counts))
