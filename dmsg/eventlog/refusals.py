"""Refusals of clients, peers and strangers, written at a rate a log can bear."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from dmsg.eventlog import schema as ev
from dmsg.eventlog.reasons import Reason


class RefusalReport:
    """Writes refusals to the event log at most once a second for each client and reason, with how many there were."""

    _CAPACITY = 4_096

    def __init__(self, clock: IReactorTime, emit: Callable[[ev.Event], None]) -> None:
        self._emit = emit
        self._counts: dict[tuple[int, str, str, Reason], int] = {}
        self._clock = clock
        self._call: IDelayedCall | None = None

    def add(self, conn: int, remote: str, what: str, reason: str) -> None:
        """Count one refusal."""
        why = Reason.of(reason)
        key = (conn, remote, what, why)
        if key not in self._counts and len(self._counts) >= self._CAPACITY:
            key = (0, "", what, why)  # a crowd of strangers shares one line
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._call is None:
            self._call = self._clock.callLater(1.0, self._write)

    def _write(self) -> None:
        self._call = None
        counts, self._counts = self._counts, {}
        for key, times in counts.items():
            self._emit(ev.Refused(*key, times))

    def close(self) -> None:
        """Write what is left."""
        if self._call is not None:
            self._call.cancel()
            self._write()
