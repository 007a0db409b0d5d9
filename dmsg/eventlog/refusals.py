"""Refusals of clients, peers, twins and strangers, written at a limited rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from dmsg.eventlog import schema as ev
from dmsg.eventlog.reasons import Reason


class _CountingReport:
    """Writes at most one event a second for each kind and set of facts, with the number of times it happened."""

    _CAPACITY = 4_096

    def __init__(self, clock: IReactorTime, emit: Callable[[ev.Event], None]) -> None:
        self._emit = emit
        self._counts: dict[tuple[Any, ...], int] = {}
        self._clock = clock
        self._call: IDelayedCall | None = None

    def _add(self, key: tuple[Any, ...], crowd: tuple[Any, ...]) -> None:
        """Count the event of class ``key[0]`` with the fields ``key[1:]``, or under ``crowd`` if there are too many keys."""
        if key not in self._counts and len(self._counts) >= self._CAPACITY:
            key = crowd  # a crowd of strangers shares one line
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._call is None:
            self._call = self._clock.callLater(1.0, self._write)

    def _write(self) -> None:
        self._call = None
        counts, self._counts = self._counts, {}
        for (make, *fields), times in counts.items():
            self._emit(make(*fields, times))

    def close(self) -> None:
        """Write the remaining counts."""
        if self._call is not None:
            self._call.cancel()
            self._write()


class RefusalReport(_CountingReport):
    """Refusals, once a second for each client and reason."""

    def add(self, conn: int, remote: str, what: str, reason: str) -> None:
        """Count one refusal."""
        why = Reason.of(reason)
        self._add((ev.Refused, conn, remote, what, why), (ev.Refused, 0, "", what, why))


class TwinReport(_CountingReport):
    """Envelopes of twins that cannot be delivered, once a second for each twin and reason."""

    def failed(self, twin: int, reason: str) -> None:
        """Count one envelope of ``twin`` (0: unknown) that could not be delivered."""
        why = Reason.of(reason)
        self._add((ev.EnvelopeFailed, twin, why), (ev.EnvelopeFailed, 0, why))

    def rate_limited(self, twin: int) -> None:
        """Count one envelope that was dropped because ``twin`` sends too many."""
        self._add((ev.RateLimited, twin), (ev.RateLimited, 0))
