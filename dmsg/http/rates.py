"""The rates of requests that a server answers: for one address, for all together, and at least for each network. Pure."""

from __future__ import annotations

from dmsg.address import address_group, network_group
from dmsg.sansio.rate import RateLimiterTable, TokenBucket

#: Requests per second in the long run (``None``: no limit), and at once.
Rate = tuple["float | None", float]


class SharedRate:
    """Allows ``total`` to all addresses together, and ``reserved`` to each network in any case.

    Strangers who use up ``total`` cannot keep a network (:func:`dmsg.address.network_group`) from its ``reserved`` rate. At
    most ``capacity`` networks are remembered.
    """

    def __init__(self, total: Rate, reserved: Rate, capacity: int) -> None:
        self._total = None if total[0] is None else TokenBucket(total[0], total[1], 0.0)
        self._reserved = _table(reserved, capacity)

    def take(self, host: str, now_s: float) -> bool:
        """Whether a request from ``host`` at ``now_s`` seconds is answered."""
        if self._total is None or self._total.take(now_s):
            return True
        return self._reserved is None or self._reserved.take(network_group(host), now_s)


class FairRate:
    """Allows ``own`` to each address (:func:`dmsg.address.address_group`), as far as ``shared`` has room.

    At most ``capacity`` addresses are remembered.
    """

    def __init__(self, own: Rate, shared: SharedRate | None, capacity: int) -> None:
        self._own = _table(own, capacity)
        self._shared = shared

    def take(self, host: str, now_s: float) -> bool:
        """Whether a request from ``host`` at ``now_s`` seconds is answered."""
        if self._own is not None and not self._own.take(address_group(host), now_s):
            return False
        return self._shared is None or self._shared.take(host, now_s)


def _table(rate: Rate, capacity: int) -> RateLimiterTable[str] | None:
    return None if rate[0] is None else RateLimiterTable(rate[0], rate[1], capacity)
