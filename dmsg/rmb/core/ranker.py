"""Which of a twin's relays to try first: those that failed less in the last hour. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Final

from dmsg.rmb.core.limits import RANKED_FAILURES, RANKED_RELAYS
from dmsg.sansio.jitter import RandomNumbers

#: Failures older than this, in seconds, do not count.
WINDOW_S: Final = 3600
_HOUR_S: Final = 3600


class Ranker:
    """Remembers the failures of relays for ``window_s`` seconds; after that they no longer count against the relay.

    It remembers at most :data:`~dmsg.rmb.core.limits.RANKED_RELAYS` relays, those that failed last, and the last
    :data:`~dmsg.rmb.core.limits.RANKED_FAILURES` failures of each. ``now`` is in seconds on any monotonic clock.
    """

    __slots__ = ("_failures", "_random", "_window_s")

    def __init__(self, random: RandomNumbers, window_s: float = WINDOW_S) -> None:
        self._random = random
        self._window_s = window_s
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def failed(self, relay: str, now: float) -> None:
        """Count a failure of ``relay``."""
        self._failures.setdefault(relay, deque(maxlen=RANKED_FAILURES)).append(now)
        self._failures.move_to_end(relay)
        if len(self._failures) > RANKED_RELAYS:
            self._failures.popitem(last=False)

    def rate(self, relay: str, now: float) -> float:
        """Failures of ``relay`` per hour, over the window."""
        failures = self._failures.get(relay)
        if failures is None:
            return 0.0
        while failures and now - failures[0] >= self._window_s:
            failures.popleft()
        return len(failures) * _HOUR_S / self._window_s

    def order(self, relays: Iterable[str], now: float) -> list[str]:
        """``relays`` by their rates, the best first; equal relays in random order, so that they share the load."""
        candidates = list(relays)
        if len(candidates) < 2:  # most twins have one relay: skip the shuffle and the sort, which take microseconds
            return candidates
        return sorted(self._random.sample(candidates, len(candidates)), key=lambda relay: self.rate(relay, now))
