"""How many REQUESTs a relay passes on to one client.

Pure. ``docs/spec/server.rst``, rates of REQUESTs. A REQUEST costs the client who gets it some hundred times what it
costs the relay, so strangers must not decide how many it gets. Who has an open transport to it, or was accepted lately,
is known to it; all others are strangers. Each of the two kinds has a rate of its own towards each client.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from dmsg.sansio.limits import FairBucket, RecentSet, TokenBucket

if TYPE_CHECKING:
    from dmsg.mux.port import Port
    from dmsg.mux.switch import Switch

#: The clients that one stranger may ask at the same time without waiting for its rates towards them.
_PAIRS: Final = 256
#: The keys that a client accepted last are known to it.
_KNOWN_KEYS: Final = 256


class RequestRates:
    """The rates towards all clients of a relay."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        # Client and kind -> its bucket, the one that was asked longest ago first.
        self._buckets: OrderedDict[tuple[Port, bool], FairBucket[str]] = OrderedDict()

    def take(self, source: Port, target: Port, now: float) -> bool:
        """Whether a REQUEST of ``source`` may be passed on to ``target``."""
        known = source in target.incoming or source.remote.raw in target.known
        if not known and not self._take_of_pair(source, target, now):
            return False
        return self._bucket(target, known, now).take(source.group, now)

    def accepted(self, source: Port, target: Port) -> None:
        """Note that ``target`` accepted a REQUEST of ``source``."""
        if not isinstance(target.known, RecentSet):
            target.known = RecentSet(_KNOWN_KEYS)
        target.known.add(source.remote.raw)

    def forget(self, target: Port) -> None:
        """Forget a client that is gone."""
        for known in (False, True):
            self._buckets.pop((target, known), None)

    def _bucket(self, target: Port, known: bool, now: float) -> FairBucket[str]:
        """The bucket towards ``target``, the latest in the line, from whose other end full ones are dropped."""
        limits = self._switch.limits
        bucket = self._buckets.get((target, known))
        if bucket is None:
            rate, burst = limits.known_requests_per_s, limits.known_request_burst
            if not known:
                rate, burst = limits.stranger_requests_per_s, limits.stranger_request_burst
            bucket = self._buckets[target, known] = FairBucket(rate, burst, now)
        else:
            self._buckets.move_to_end((target, known))
        for _ in range(2):  # one more than is ever added
            oldest, other = next(iter(self._buckets.items()))
            if other is bucket or not other.idle(now):
                break
            del self._buckets[oldest]
        return bucket

    def _take_of_pair(self, source: Port, target: Port, now: float) -> bool:
        """Whether a stranger keeps to its rate towards one client.

        The table is the stranger's own, and a bucket is forgotten only when it is full again: a stranger that asks too many
        clients at once has to wait.
        """
        limits = self._switch.limits
        pairs, key = source.pairs, target.remote.raw
        bucket = pairs.pop(key, None)
        if bucket is None:
            if len(pairs) >= _PAIRS:
                oldest = next(iter(pairs))
                if pairs[oldest].wait_s(now, limits.pair_request_burst) > 0:
                    return False
                del pairs[oldest]
            bucket = TokenBucket(limits.pair_requests_per_s, limits.pair_request_burst, now)
        pairs[key] = bucket
        return bucket.take(now)
