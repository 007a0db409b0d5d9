"""When envelopes expire. An envelope states its timestamp, and for how many seconds from then on it is valid. Pure.

Times are seconds of Unix time, whole ones in envelopes. See :ref:`spec-rmb-lifetime`.
"""

from __future__ import annotations

from dmsg.rmb.core.limits import MAX_AHEAD_S, MAX_TTL_S


def stamp(now: int, timestamp: int, expiration: int) -> tuple[int, int]:
    """The timestamp and expiration of an envelope that is sent on at ``now``: it still ends at the same time.

    A timestamp of 0, or later than now, is replaced by now. An expired envelope gets an expiration of 0.
    """
    if timestamp == 0 or timestamp > now:
        return now, expiration
    return now, max(0, expiration - (now - timestamp))


def remaining(now: float, timestamp: int, expiration: int, *, late_s: int = 0) -> int | None:
    """The whole seconds for which an envelope is still valid, at least 1, or ``None`` when it has expired.

    No envelope is valid for more than :data:`~dmsg.rmb.core.limits.MAX_TTL_S` from its timestamp on. An envelope stamped
    more than :data:`~dmsg.rmb.core.limits.MAX_AHEAD_S` in the future is never valid. ``late_s`` is added to the end, by
    receivers that allow for differing clocks.
    """
    if timestamp > now + MAX_AHEAD_S:
        return None
    left = timestamp + min(expiration, MAX_TTL_S) + late_s - int(now)
    return left if left > 0 else None
