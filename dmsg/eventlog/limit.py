"""Rate-limits the lines that strangers can make a program write, so that they cannot push everything else out of the log.

A stranger can cause a thousand events a second (a handshake that fails, a request that is refused, a GET). Each would be a
line, and published files are deleted, oldest first, when all of them reach their limit. So each reason has a rate of lines,
and so has each kind of event. Events beyond the rate are counted, and every few seconds one line for each reason reports
them, with ``count`` and without the address or key, of which there were several. So sums over ``count`` are exact; metrics
are counted before this limit and are exact, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from zope.interface import implementer

from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import (
    CallFinished,
    DiscoveryRequest,
    EnvelopeFailed,
    Event,
    FederationAttempted,
    HandshakeFailed,
    RateLimited,
    Refused,
)
from dmsg.interfaces import IEventLog
from dmsg.sansio.rate import RateLimiterTable, TokenBucket

#: Seconds for which counts are collected before they are written.
TOLD_EVERY_S: Final = 10.0
#: Reasons that are counted separately for each kind of event; further ones count as "other". Most kinds have some thirty.
REASONS_LIMIT: Final = 128


@dataclass(frozen=True, slots=True)
class LineRate:
    """The rate of lines of one kind of event: per second in the long run and at once, for each reason and for all.

    At the full rate of all kinds a program writes 40 lines a second, an RMB relay 60. Packed, a line takes at most 100 bytes:
    216 MB in ten hours, a fifth of the directory's limit.
    """

    reason_per_s: float = 2.0
    reason_burst: float = 100.0
    all_per_s: float = 10.0
    all_burst: float = 1_000.0


class _Crowd(NamedTuple):
    """The key for events beyond the limit of reasons, which are counted by success and failure only."""

    ok: bool


@dataclass(slots=True)
class _Tally:
    """The events left out for one reason."""

    event: Any
    count: int = 0
    elapsed_ms: float = 0.0


class _Kind:
    """One kind of event: the function that gives its reason, and the one that makes a line for several events."""

    def __init__(
        self, rate: LineRate, reason_of: Callable[[Any], tuple[Any, ...]], several: Callable[[Any, _Tally], Event]
    ) -> None:
        self.reason_of = reason_of
        self.several = several
        self.tallies: dict[tuple[Any, ...], _Tally] = {}
        self._each: RateLimiterTable[tuple[Any, ...]] = RateLimiterTable(
            rate.reason_per_s, rate.reason_burst, REASONS_LIMIT
        )
        self._all = TokenBucket(rate.all_per_s, rate.all_burst, 0.0)

    def take(self, event: Any, now: float) -> bool:
        """Whether ``event`` gets a line of its own; it is counted if not."""
        reason = self.reason_of(event)
        if self._each.take(reason, now) and self._all.take(now):
            return True
        if reason not in self.tallies and len(self.tallies) >= REASONS_LIMIT:
            reason = _Crowd(getattr(event, "ok", False))
        tally = self.tallies.get(reason)
        if tally is None:
            tally = self.tallies[reason] = _Tally(event)
        tally.count += event.count
        tally.elapsed_ms += getattr(event, "elapsed_ms", 0.0) * event.count
        return False

    def told(self) -> list[Event]:
        """The lines for the events left out; counting starts anew."""
        tallies, self.tallies = self.tallies, {}
        events = []
        for reason, tally in tallies.items():
            event = self.several(tally.event, tally)
            if isinstance(reason, _Crowd):
                event.reason = Reason.NONE if reason.ok else Reason.OTHER  # type: ignore[attr-defined]
                if isinstance(event, FederationAttempted):
                    event.relay = ""
            events.append(event)
        return events


def _kinds(rate: LineRate) -> dict[type[Event], _Kind]:
    twice = LineRate(rate.reason_per_s * 2, rate.reason_burst, rate.all_per_s * 2, rate.all_burst)
    return {
        HandshakeFailed: _Kind(
            rate,
            lambda event: (event.stage, event.reason),
            lambda event, tally: HandshakeFailed(
                "", event.stage, event.reason, tally.elapsed_ms / tally.count, tally.count
            ),
        ),
        # These lines tell which keys misbehave, and are written once a second for each client at most.
        Refused: _Kind(
            twice,
            lambda event: (event.what, event.reason),
            lambda event, tally: Refused(0, "", event.what, event.reason, tally.count),
        ),
        DiscoveryRequest: _Kind(
            rate,
            lambda event: (event.method, event.path, event.status, event.reason),
            lambda event, tally: DiscoveryRequest(
                event.method, event.path, event.status, tally.elapsed_ms / tally.count, event.reason, "", tally.count
            ),
        ),
        EnvelopeFailed: _Kind(
            rate, lambda event: (event.reason,), lambda event, tally: EnvelopeFailed(0, event.reason, tally.count)
        ),
        RateLimited: _Kind(rate, lambda event: (), lambda event, tally: RateLimited(0, tally.count)),
        FederationAttempted: _Kind(
            rate,
            lambda event: (event.relay, event.ok, event.reason),
            lambda event, tally: FederationAttempted(
                event.relay, event.ok, event.reason, tally.elapsed_ms / tally.count, tally.count
            ),
        ),
        CallFinished: _Kind(
            rate,
            lambda event: (event.ok, event.reason),
            lambda event, tally: CallFinished(0, event.ok, event.reason, tally.elapsed_ms / tally.count, tally.count),
        ),
    }


@implementer(IEventLog)
class LimitedEventLog:
    """Passes events on to ``inner``, those that strangers cause within ``rate``; the rest is counted and reported later.

    Call it on the reactor's side, and call :meth:`tell` before ``inner`` is closed.
    """

    def __init__(self, inner: Any, clock: IReactorTime, rate: LineRate | None = None) -> None:
        self.inner = inner
        self._clock = clock
        self._kinds = _kinds(rate or LineRate())
        self._call: IDelayedCall | None = None

    @property
    def dropped(self) -> int:
        """Events that ``inner`` left out."""
        return int(self.inner.dropped)

    @property
    def discarded(self) -> int:
        """Events in published files that ``inner`` deleted."""
        return int(getattr(self.inner, "discarded", 0))

    def emit(self, event: Event) -> None:
        """Pass ``event`` on, or count it."""
        kind = self._kinds.get(type(event))
        if kind is None or kind.take(event, self._clock.seconds()):
            self.inner.emit(event)
        elif self._call is None:
            self._call = self._clock.callLater(TOLD_EVERY_S, self.tell)

    def tell(self) -> None:
        """Write the lines for the events left out so far."""
        call, self._call = self._call, None
        if call is not None and call.active():
            call.cancel()
        for kind in self._kinds.values():
            for event in kind.told():
                self.inner.emit(event)
