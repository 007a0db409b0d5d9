"""Who holds the places at a member of a relay, and whose place a newcomer may take when there is none left.

Pure. :ref:`spec-places`. Places are lent: while there is room a source may take them all, so that a burst through one
tunnel is served. When all are taken, a newcomer gets one from the source that holds the most. Sources are groups of
addresses first and connections second, because keys are free and addresses are not.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dmsg.mux.relay.member import Leg, Member
    from dmsg.mux.relay.switch import Switch

#: How exactly the last activity of transports is known: the hot path only counts bytes, and these are looked at once in
#: this time while most places are taken.
_SAMPLE_S: Final = 5.0


class Places:
    """The places at one member: how many each source holds."""

    __slots__ = ("_held", "count")

    def __init__(self) -> None:
        self.count = 0
        self._held: dict[Member, int] = {}

    def add(self, source: Member) -> None:
        """Give ``source`` one place more."""
        self._held[source] = self._held.get(source, 0) + 1
        self.count += 1

    def remove(self, source: Member) -> None:
        """Take one place of ``source`` back."""
        held = self._held[source]
        if held > 1:
            self._held[source] = held - 1
        else:
            del self._held[source]
        self.count -= 1

    def __contains__(self, source: Member) -> bool:
        return source in self._held

    def yielding(self, newcomer: Member, *, per_source: int, per_pair: int) -> Member | None:
        """The connection that has to give up a place for ``newcomer``, or ``None`` when none has to.

        It is of the group with the most places, if that has at least two more than the newcomer's group (with one more
        the two would only change places), and the newcomer's group has fewer than ``per_source``. Else it is the
        connection with the most places in the newcomer's own group, by the same rule and with ``per_pair``.
        """
        groups: Counter[str] = Counter()
        for source, held in self._held.items():
            groups[source.group] += held
        own = newcomer.group
        largest = max(groups, key=groups.__getitem__, default=own)
        if groups[own] < per_source and groups[largest] >= groups[own] + 2:
            return self._most(largest)
        if own not in groups:
            return None
        most, held = self._most(own), self._held.get(newcomer, 0)
        return most if held < per_pair and self._held[most] >= held + 2 else None

    def _most(self, group: str) -> Member:
        """The connection of ``group`` with the most places."""
        return max((member for member in self._held if member.group == group), key=self._held.__getitem__)


class PlaceRules:
    """What the limits of a server say about places."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    def may_ask(self, newcomer: Member, target: Member, now: float) -> bool:
        """Whether a REQUEST of ``newcomer`` to ``target`` has a place, or another source has to give one up for it."""
        limits = self._switch.limits
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

    def request_for(self, newcomer: Member, target: Member) -> Leg | None:
        """The unanswered request that goes for one of ``newcomer``, which may ask: the oldest of who has to yield."""
        if target.unanswered.count < self._switch.limits.unanswered_per_target:
            return None
        source = self._yielding(target.unanswered, newcomer)
        legs = [leg for leg in target.legs.values() if not leg.initiator and leg.target is source]
        return min((leg for leg in legs if not leg.open), key=lambda leg: leg.since)

    def is_full(self, target: Member) -> bool:
        """Whether all places of ``target`` for transports that others open are taken."""
        return target.incoming.count >= self._room(target)

    def transport_for(self, newcomer: Member, target: Member, now: float) -> Leg | None:
        """The transport that goes for one of ``newcomer``: the longest idle of who has to yield, or ``None``."""
        source = self._yielding(target.incoming, newcomer)
        if source is None:
            return None
        _sample(target, now)
        legs = [leg for leg in target.legs.values() if not leg.initiator and leg.target is source]
        return min((leg for leg in legs if leg.open), key=lambda leg: leg.active_at)

    def _room(self, target: Member) -> int:
        places = self._switch.limits.transports_per_connection
        return min(places // 2, places - target.dials)

    def _yielding(self, places: Places, newcomer: Member) -> Member | None:
        limits = self._switch.limits
        return places.yielding(newcomer, per_source=limits.transports_per_source, per_pair=limits.transports_per_pair)


def _sample(target: Member, now: float) -> None:
    """Note which transports to ``target`` carried anything since the last sample."""
    target.sampled_at = now
    for leg in target.legs.values():
        if not leg.initiator and leg.open:
            size = leg.bytes + leg.other.bytes
            if size != leg.sampled_bytes:
                leg.sampled_bytes = size
                leg.active_at = now
