"""When envelopes end. An envelope says when it was stamped, and for how many seconds from then on it is good. Pure.

Times are seconds of Unix time, whole ones in envelopes. See :ref:`spec-rmb-lifetime`.
"""

from __future__ import annotations

from dmsg.rmb.core.limits import MAX_AHEAD_S, MAX_TTL_S


def stamp(now: int, timestamp: int, expiration: int) -> tuple[int, int]:
    """The timestamp and expiration of an envelope that is sent on at ``now``: its end stays the same.

    A stamp that is 0 or later than now is replaced by now. What has ended gets an expiration of 0.
    """
    if timestamp == 0 or timestamp > now:
        return now, expiration
    return now, max(0, expiration - (now - timestamp))


def remaining(now: float, timestamp: int, expiration: int, *, late_s: int = 0) -> int | None:
    """The whole seconds that an envelope is good for, at least 1, or ``None`` when it is over.

    No envelope is good for more than :data:`~dmsg.rmb.core.limits.MAX_TTL_S` from its stamp on, and one stamped more
    than :data:`~dmsg.rmb.core.limits.MAX_AHEAD_S` in the future for none at all. ``late_s`` are added to the end, for
    receivers that allow for clocks that differ.
    """
    if timestamp > now + MAX_AHEAD_S:
        return None
    left = timestamp + min(expiration, MAX_TTL_S) + late_s - int(now)
    return left if left > 0 else None
