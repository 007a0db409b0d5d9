"""Twins that were looked up, for a while; and that there is none of a number, for a shorter one."""

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
    """How much is kept, and how long."""

    #: Twins kept, some 500 bytes each; of more, the one not asked for longest goes.
    twins: int = 10_000
    #: How long one is believed, in seconds. Events tell earlier, if they are listened for.
    twin_ttl_s: float = 300.0
    #: When it cannot be looked up after that, the old one is given for so long, in seconds: a chain that is out of reach for
    #: a while shall not stop envelopes between twins that are known.
    stale_s: float = 3600.0
    #: Numbers without a twin: fewer and shorter, because anyone can ask for any number, and a new twin wants to be found.
    missing: int = 10_000
    missing_ttl_s: float = 15.0
    #: Look-ups under way, and those that wait for their turn, which comes after eight others at the most. More are refused:
    #: they would outlive what they are for.
    at_once: int = 64
    waiting: int = 512


class TwinCache:
    """Looks twins up with ``fetch`` and remembers what it gave. All who ask for one twin wait for one look-up.

    ``len()`` is how many twins are remembered; ``hits``, ``misses`` and ``flushes`` count since the beginning.
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
        """The twin; raises what ``fetch`` does, and ``RegistryError`` (``overloaded``)."""
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
        """Look the twin up again when it is asked for. A look-up under way is too old: those who wait get it, no one else."""
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
        """Give up look-ups under way."""
        self._look_ups.cancel()

    async def _work(self) -> None:
        """Look up what waits, until nothing does."""
        while self._line:
            number, waiters = self._line.popleft()
            if waiters:
                await self._look_up(number, waiters)
            elif self._fetching.get(number) is waiters:  # all have gone
                del self._fetching[number]

    async def _look_up(self, number: int, waiters: Waiters[Twin | None]) -> None:
        found: Twin | Failure | None
        try:
            found = await self._fetch(number)
        except CancelledError:
            found = Failure(RegistryError("closed"))
        except Exception:  # whatever it is, all who asked for the twin are told, and the next one asks again
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
