"""How many requests a relay passes on to one client.

Pure. :ref:`spec-request-rates`. A request costs the client that gets it some 100 times what it costs the relay, so the
relay limits the requests of strangers. A client is known to a target when it has an open transport to it, or was accepted
by it lately; otherwise it is a stranger to it. Both kinds have a rate of their own towards each target.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Any, Final

from dmsg.eventlog.reasons import Reason
from dmsg.sansio.rate import FairBucket, RecentSet, TokenBucket
from dmsg.serving.limits import ServingLimits
from dmsg.serving.member import Member, Rates

#: Clients for which one stranger has buckets. For another client it has to wait until one of the buckets is full again.
_PAIRS: Final = 256
#: Full buckets are searched for once in so many seconds, at this many clients: more than get new buckets in that time.
_LOOK_S: Final = 0.1
_LOOKED_AT: Final = 256
#: Buckets of pairs forgotten in one search: more than a relay takes requests in that time.
_FORGOTTEN_PAIRS: Final = 4_096
#: Keys that a client accepted last: they are known to it.
_KNOWN_KEYS: Final = 256


class RequestRates:
    """The rates towards all clients of a relay."""

    def __init__(self, limits: ServingLimits) -> None:
        self._limits = limits
        #: The clients that have buckets, in the order in which they are searched for full ones.
        self._targets: OrderedDict[Member[Any], None] = OrderedDict()
        #: The strangers that have buckets of pairs, in the same way.
        self._sources: OrderedDict[Member[Any], None] = OrderedDict()
        self._looked_at = 0.0

    def take(self, source: Member[Any], target: Member[Any], now: float) -> str:
        """Why a request of ``source`` may not be passed on to ``target``, "" if it may.

        The reasons tell apart what ``source`` itself sends too much of and what all others have used up: the log must not
        blame it for them.
        """
        if not 0 <= now - self._looked_at < _LOOK_S:
            self._forget_full(now)
        rates = target.rates
        if rates is None:
            rates = self._add(target, now)
        if self.known(source, target):
            return "" if rates[1].take(source.group, now) else Reason.REQUESTS_PER_TARGET
        if not self._take_of_pair(source, target, now):
            return Reason.RATE_LIMITED
        return "" if rates[0].take(source.group, now) else Reason.REQUESTS_PER_TARGET

    def known(self, source: Member[Any], target: Member[Any]) -> bool:
        """Whether ``target`` knows ``source``: it has an open transport of ``source``, or accepted its key lately."""
        return source in target.incoming or source.remote.raw in target.known

    def accepted(self, source: Member[Any], target: Member[Any]) -> None:
        """Note that ``target`` accepted a request of ``source``."""
        if not isinstance(target.known, RecentSet):
            target.known = RecentSet(_KNOWN_KEYS)
        target.known.add(source.remote.raw)

    def forget(self, member: Member[Any]) -> None:
        """Forget a client that is gone."""
        self._forget_target(member)
        self._sources.pop(member, None)

    def _forget_target(self, target: Member[Any]) -> None:
        target.rates = None
        self._targets.pop(target, None)

    def _add(self, target: Member[Any], now: float) -> Rates:
        limits = self._limits
        strangers = FairBucket[str](limits.stranger_requests_per_s, limits.stranger_request_burst, now)
        known = FairBucket[str](limits.known_requests_per_s, limits.known_request_burst, now)
        target.rates = strangers, known
        self._targets[target] = None
        return target.rates

    def _forget_full(self, now: float) -> None:
        self._looked_at = now
        for member in list(islice(self._targets, _LOOKED_AT)):
            assert member.rates is not None
            strangers, known = member.rates
            if strangers.idle(now) and known.idle(now):
                self._forget_target(member)
            else:
                self._targets.move_to_end(member)
        left = _FORGOTTEN_PAIRS
        for member in list(islice(self._sources, _LOOKED_AT)):
            left -= self._forget_full_pairs(member, now, left)
            if member.pairs:
                self._sources.move_to_end(member)
            else:
                del self._sources[member]
            if left <= 0:
                break

    def _forget_full_pairs(self, source: Member[Any], now: float, most: int) -> int:
        """Forget up to ``most`` buckets of ``source`` that are full again, from the one used longest ago; gives how many."""
        pairs, burst = source.pairs, self._limits.pair_request_burst
        for forgotten in range(most):
            if not pairs:
                return forgotten
            oldest = next(iter(pairs))
            if pairs[oldest].wait_s(now, burst) > 0:
                return forgotten
            del pairs[oldest]
        return most

    def _take_of_pair(self, source: Member[Any], target: Member[Any], now: float) -> bool:
        """Whether a stranger keeps to its rate towards one client.

        The table is the stranger's own, and a bucket is forgotten only when it is full again: a stranger that asks too many
        clients at once has to wait.
        """
        limits = self._limits
        pairs, key = source.pairs, target.remote.raw
        bucket = pairs.pop(key, None)
        if bucket is None:
            if len(pairs) >= _PAIRS and not self._forget_full_pairs(source, now, 1):
                return False
            if not pairs:
                self._sources[source] = None
            bucket = TokenBucket(limits.pair_requests_per_s, limits.pair_request_burst, now)
        pairs[key] = bucket
        return bucket.take(now)
