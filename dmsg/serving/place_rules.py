"""The rules of places: whether a newcomer gets a place at a member of a relay, and which transport ends for it.

Pure. :ref:`spec-places`.
"""

from __future__ import annotations

from typing import Any, Final

from dmsg.serving.limits import ServingLimits
from dmsg.serving.member import L, Member
from dmsg.serving.places import Places

#: The precision of the last activity of transports, in seconds. The hot path counts bytes and notes no times, so the counts
#: are compared once in this time while most places are taken.
_SAMPLE_S: Final = 5.0


class PlaceRules:
    """The limits of a relay on places, applied."""

    def __init__(self, limits: ServingLimits) -> None:
        self._limits = limits

    def may_ask(self, newcomer: Member[Any], target: Member[Any], now: float) -> bool:
        """Whether a request of ``newcomer`` to ``target`` has a place, or another source has to give one up for it."""
        limits = self._limits
        if newcomer.dials + newcomer.incoming.count >= limits.transports_per_connection:
            return False
        room, taken = self._room(target), target.incoming.count
        if 4 * taken >= 3 * room:
            if now - target.sampled_at >= _SAMPLE_S:
                _sample(target, now)
            if taken >= room and self._yielding(target.incoming, newcomer) is None:
                return False
        unanswered = target.unanswered
        return unanswered.count < limits.unanswered_per_target or self._yielding(unanswered, newcomer) is not None

    def request_for(self, newcomer: Member[L], target: Member[L]) -> L | None:
        """The unanswered request that ends for one of ``newcomer``: the oldest of the source that yields, or ``None``."""
        if target.unanswered.count < self._limits.unanswered_per_target:
            return None
        source = self._yielding(target.unanswered, newcomer)
        legs = [leg for leg in target.legs.values() if not leg.initiator and leg.target is source]
        return min((leg for leg in legs if not leg.open), key=lambda leg: leg.since)

    def is_full(self, target: Member[Any]) -> bool:
        """Whether all places of ``target`` for transports that others open are taken."""
        return target.incoming.count >= self._room(target)

    def transport_for(self, newcomer: Member[L], target: Member[L], now: float) -> L | None:
        """The transport that ends for one of ``newcomer``: the longest idle of the source that yields, or ``None``."""
        source = self._yielding(target.incoming, newcomer)
        if source is None:
            return None
        _sample(target, now)
        legs = [leg for leg in target.legs.values() if not leg.initiator and leg.target is source]
        return min((leg for leg in legs if leg.open), key=lambda leg: leg.active_at)

    def _room(self, target: Member[Any]) -> int:
        places = self._limits.transports_per_connection
        return min(places // 2, places - target.dials)

    def _yielding(self, places: Places[Any], newcomer: Member[Any]) -> object:
        limits = self._limits
        return places.yielding(newcomer, per_source=limits.transports_per_source, per_pair=limits.transports_per_pair)


def _sample(target: Member[Any], now: float) -> None:
    """Note which transports to ``target`` carried bytes since the last sample."""
    target.sampled_at = now
    for leg in target.legs.values():
        if not leg.initiator and leg.open:
            size = leg.bytes + leg.other.bytes
            if size != leg.sampled_bytes:
                leg.sampled_bytes = size
                leg.active_at = now
