"""A cache of twins, and for a shorter time of numbers without a twin."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.glue.tasks import Tasks
from dmsg.glue.waiters import Waiters
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.twins.errors import RegistryError


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """How much is cached, and how long."""

    #: Cached twins, some 500 bytes each. Above that, the least recently used one is evicted.
    twins: int = 10_000
    #: Seconds for which a cached twin is valid. If new blocks are watched, a change invalidates it earlier.
    twin_ttl_s: float = 300.0
    #: Seconds after that for which the stale twin is used if it cannot be looked up, so that an unreachable chain does not stop
    #: envelopes between known twins.
    stale_s: float = 3600.0
    #: Numbers without a twin. They are cached for less time, so that a new twin is found soon.
    missing: int = 10_000
    missing_ttl_s: float = 15.0
    #: Look-ups under way, and look-ups that wait, for at most eight rounds. More are refused, because they would outlive the
    #: envelopes that need them.
    at_once: int = 64
    waiting: int = 512


class TwinCache:
    """Looks twins up with ``fetch`` and caches the results. Concurrent calls for one twin share one look-up.

    ``len()`` is the number of cached twins; ``hits``, ``misses`` and ``flushes`` count since the start.
    """

    def __init__(
        self,
        clock: IReactorTime,
        fetch: Callable[[int], Coroutine[Any, Any, Twin | None]],
        limits: CacheLimits | None = None,
    ) -> None:
        self._clock = clock
        self._fetch = fetch
        self._limits = limits or CacheLimits()
        self._twins: OrderedDict[int, tuple[Twin, float]] = OrderedDict()
        self._missing: OrderedDict[int, float] = OrderedDict()
        self._fetching: dict[int, Waiters[Twin | None]] = {}
        self._look_ups = Tasks()
        self._line: deque[tuple[int, Waiters[Twin | None]]] = deque()
        self.hits = self.misses = self.flushes = 0

    def __len__(self) -> int:
        return len(self._twins)

    async def get(self, number: int) -> Twin | None:
        """The twin ``number``; raises the errors of ``fetch``, and ``RegistryError`` (``overloaded``)."""
        now = self._clock.seconds()
        known = self._twins.get(number)
        if known is not None and now < known[1]:
            self._twins.move_to_end(number)
            self.hits += 1
            return known[0]
        if now < self._missing.get(number, now):
            self.hits += 1
            return None
        self.misses += 1
        waiters = self._fetching.get(number)
        if waiters is not None:
            return await waiters.wait()
        has_place = len(self._look_ups) < self._limits.at_once
        if not has_place and len(self._line) >= self._limits.waiting:
            if known is not None and now < known[1] + self._limits.stale_s:
                return known[0]
            raise RegistryError("overloaded")
        waiters = self._fetching[number] = Waiters()
        waiter = waiters.wait()
        self._line.append((number, waiters))
        if has_place:
            self._look_ups.begin(self._work())
        return await waiter

    def forget(self, number: int) -> None:
        """Forget the twin, so that the next call looks it up. Only callers that wait already get a look-up under way."""
        self._twins.pop(number, None)
        self._missing.pop(number, None)
        self._fetching.pop(number, None)

    def clear(self) -> None:
        """Forget everything."""
        self.flushes += 1
        self._twins.clear()
        self._missing.clear()
        self._fetching.clear()

    def close(self) -> None:
        """Cancel look-ups under way."""
        self._look_ups.cancel()

    async def _work(self) -> None:
        """Look up twins until no look-up waits."""
        while self._line:
            number, waiters = self._line.popleft()
            if waiters:
                await self._look_up(number, waiters)
            elif self._fetching.get(number) is waiters:  # all callers have gone
                del self._fetching[number]

    async def _look_up(self, number: int, waiters: Waiters[Twin | None]) -> None:
        found: Twin | Failure | None
        try:
            found = await self._fetch(number)
        except CancelledError:
            found = Failure(RegistryError("closed"))
        except Exception:  # all waiting callers get the error, and the next call retries
            found = Failure()
        if self._fetching.get(number) is waiters:
            del self._fetching[number]
            if not isinstance(found, Failure):
                self._keep(number, found)
            elif found.check(RegistryError) and number in self._twins:
                twin, end = self._twins[number]
                if self._clock.seconds() < end + self._limits.stale_s:
                    found = twin
        waiters.fire(found)

    def _keep(self, number: int, found: Twin | None) -> None:
        now = self._clock.seconds()
        if found is None:
            self._twins.pop(number, None)
            self._missing[number] = now + self._limits.missing_ttl_s
            self._missing.move_to_end(number)
            if len(self._missing) > self._limits.missing:
                self._missing.popitem(last=False)
        else:
            self._missing.pop(number, None)
            self._twins[number] = found, now + self._limits.twin_ttl_s
            self._twins.move_to_end(number)
            if len(self._twins) > self._limits.twins:
                self._twins.popitem(last=False)
