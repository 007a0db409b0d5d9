"""How many handshakes a relay does for strangers: by address group, by network group and in all. Pure.

Keys are free, so a stranger is known by where it comes from. Each handshake takes a token of its address group, its
network group and the relay before it costs anything. Network groups share the tokens of the relay.
"""

from __future__ import annotations

from typing import Final

from dmsg.sansio.rate import FairBucket, RateLimiterTable
from dmsg.serving.admission import Origin
from dmsg.serving.limits import AdmissionLimits

#: Connections a group may open for each handshake it may begin. A connection costs a relay a fifth of a first message.
_CONNECTS_A_HANDSHAKE: Final = 4
#: Groups that are remembered; each table takes some 3 MB for that. The address groups of one network share its bucket, and
#: an attacker with more networks than this reaches the limit of the relay first.
_GROUPS: Final = 8_192


def _table(rate_per_s: float, burst: float, *, times: int = 1) -> RateLimiterTable[str]:
    return RateLimiterTable(times * rate_per_s, times * burst, _GROUPS)


class HandshakeRates:
    """The token buckets of all strangers."""

    def __init__(self, limits: AdmissionLimits, now: float) -> None:
        address = limits.handshakes_per_s_per_address, limits.handshake_burst_per_address
        network = limits.handshakes_per_s_per_network, limits.handshake_burst_per_network
        self._addresses = _table(*address)
        self._networks = _table(*network)
        self._all: FairBucket[str] = FairBucket(limits.handshakes_per_s, limits.handshake_burst, now)
        self._address_connects = _table(*address, times=_CONNECTS_A_HANDSHAKE)
        self._network_connects = _table(*network, times=_CONNECTS_A_HANDSHAKE)

    def connects(self, origin: Origin, now: float) -> str:
        """Count a TCP connection; gives the name of the limit that refuses it, or ""."""
        if not self._address_connects.take(origin.address, now):
            return "connects_per_address"
        if not self._network_connects.take(origin.network, now):
            return "connects_per_network"
        return ""

    def take(self, origin: Origin, now: float, *, kept: float = 0.0) -> str:
        """Take a token of each bucket, or of none; gives the name of the limit that is reached, or "".

        ``kept`` is the part of each bucket that must be left over.
        """
        buckets = (
            ("handshakes_per_address", self._addresses.bucket(origin.address, now)),
            ("handshakes_per_network", self._networks.bucket(origin.network, now)),
        )
        for name, bucket in buckets:
            if not bucket.has(now, keep=kept * bucket.burst):
                return name
        if not self._all.take(origin.network, now, keep=kept * self._all.burst):
            return "handshakes"
        for _, bucket in buckets:
            bucket.take(now)
        return ""
