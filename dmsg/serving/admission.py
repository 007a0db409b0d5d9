"""The places of a relay for connections: how many each network holds, and which connection ends when there are no more.

Pure. :ref:`spec-server-connections`. Places are counted by address group (an IPv4 address, an IPv6 /64) and by network
group (a /24, a /48), see :mod:`dmsg.address`. When none is left, the network that holds the most gives one up: a
stranger with many connections competes with itself, and a client that is alone in its network stays while others hold
many.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Generic, TypeVar
from typing import Protocol as TypingProtocol

from dmsg.address import address_group, network_group
from dmsg.crypto.keys import Random
from dmsg.sansio.tally import Tally
from dmsg.serving.limits import AdmissionLimits

#: The part of all places that one network may hold with idle clients before the relay calls the others free: some 150
#: of 10,000, more than an honest /24 has that only listens.
_FAIR_SHARE: Final = 1 / 64
#: So many quiet clients count as one fresh client. So a client that has carried a transport stays when unused connections
#: from a few networks take all places, and thousands of quiet clients still make room for clients that listen.
_QUIET_PARTS: Final = 4
#: Of so many idle connections, drawn at random, the youngest ends. So a connection that is older than three quarters of its
#: group ends with a probability of 0.4 %, and newcomers of one group do not end only each other.
_DRAWN: Final = 4


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a connection comes from."""

    address: str
    network: str

    @staticmethod
    @lru_cache(maxsize=1_024)  # without a cache, this is a fifth of the cost of turning a connection away
    def of(host: str) -> Origin:
        """The groups of ``host``, the text of an IP address (or anything else, which counts as one group)."""
        return Origin(address_group(host), network_group(host))


class Holder(TypingProtocol):
    """A connection that holds a place."""

    @property
    def origin(self) -> Origin:
        """Where it comes from. Never changes."""

    @property
    def number(self) -> int:
        """Connections that came later have larger ones."""


H = TypeVar("H", bound=Holder)


class Crowd(Generic[H]):
    """Holders by network and address group. All operations but :meth:`oldest` take constant time."""

    __slots__ = ("_addresses", "_holders", "_places", "networks")

    def __init__(self) -> None:
        #: How many holders each network has.
        self.networks: Tally[str] = Tally()
        self._addresses: dict[str, Tally[str]] = {}
        self._holders: dict[str, list[H]] = {}
        self._places: dict[H, int] = {}

    def add(self, holder: H) -> None:
        """Add a holder."""
        origin = holder.origin
        self.networks.add(origin.network)
        addresses = self._addresses.get(origin.network)
        if addresses is None:
            addresses = self._addresses[origin.network] = Tally()
        addresses.add(origin.address)
        holders = self._holders.setdefault(origin.address, [])
        self._places[holder] = len(holders)
        holders.append(holder)

    def discard(self, holder: H) -> bool:
        """Remove a holder; ``False`` if it was none."""
        place = self._places.pop(holder, None)
        if place is None:
            return False
        origin = holder.origin
        holders = self._holders[origin.address]
        last = holders.pop()
        if last is not holder:
            holders[place] = last
            self._places[last] = place
        if not holders:
            del self._holders[origin.address]
        self.networks.remove(origin.network)
        addresses = self._addresses[origin.network]
        addresses.remove(origin.address)
        if not addresses.most:
            del self._addresses[origin.network]
        return True

    def count(self, address: str) -> int:
        """How many holders an address group has."""
        return len(self._holders.get(address, ()))

    def largest(self, network: str | None = None) -> str:
        """The address group with the most holders in ``network``, or in the network with the most.

        Raises ``KeyError`` when there is no holder.
        """
        return self._addresses[self.networks.largest() if network is None else network].largest()

    def oldest(self, address: str) -> H:
        """The holder of an address group that came first. Takes time in proportion to the size of the group."""
        return min(self._holders[address], key=_number)

    def drawn(self, address: str, random: Random) -> H:
        """The youngest of a few holders of an address group, drawn at random."""
        holders = self._holders[address]
        draws = random(4 * _DRAWN)
        picks = (int.from_bytes(draws[at : at + 4], "big") for at in range(0, len(draws), 4))
        return max((holders[pick % len(holders)] for pick in picks), key=_number)

    def __contains__(self, holder: object) -> bool:
        return holder in self._places

    def __len__(self) -> int:
        return len(self._places)


def _number(holder: Holder) -> int:
    return holder.number


class Admission(Generic[H]):
    """The places of strangers, whose handshake goes on, and of clients, which were admitted.

    An admitted client is *fresh* until it has carried a transport or was found with a request. It is *quiet* once the last
    of its transports and requests is over.
    """

    def __init__(self, limits: AdmissionLimits, *, random: Random = os.urandom) -> None:
        self._limits = limits
        self._random = random
        self.strangers: Crowd[H] = Crowd()
        self.admitted: Crowd[H] = Crowd()
        self._fresh: Crowd[H] = Crowd()
        # May hold clients that carry a transport again: removing them at once would cost time for every transport.
        self._quiet: Crowd[H] = Crowd()

    # --- strangers -------------------------------------------------------------------------------------------------

    def arrived(self, stranger: H) -> tuple[H, str] | None:
        """Admit ``stranger`` to a place. Gives the stranger that has to end for it and the limit, or ``None``.

        That is the oldest of the address group, or at the limit of all strangers the oldest of the largest group. So idle
        connections of a group replace each other, and a handshake that makes progress is done before it is the oldest.
        """
        address = stranger.origin.address
        victim = None
        if self.strangers.count(address) >= self._limits.half_open_per_address:
            victim = self.strangers.oldest(address), "half_open_per_address"
        elif len(self.strangers) >= self._limits.half_open:
            victim = self.strangers.oldest(self.strangers.largest()), "half_open"
        if victim is not None:
            self.strangers.discard(victim[0])
        self.strangers.add(stranger)
        return victim

    # --- clients ---------------------------------------------------------------------------------------------------

    def is_full(self, origin: Origin) -> bool:
        """Whether the address group has as many clients as it may."""
        return self.admitted.count(origin.address) >= self._limits.connections_per_address

    def victim(self, origin: Origin) -> H | None:
        """The idle client to end for a newcomer from ``origin``. ``None`` when no place is needed, or no client is idle.

        At the limit of an address group it is a fresh client of that group. At the limit of all clients it is one of the
        network that has the most idle ones, where four quiet clients count as one fresh client: a fresh client; or a quiet
        one, if that network has more of them than the newcomer's network has clients. If the newcomer's network has four times
        as many clients as any network has fresh ones, the newcomer only gets the place of a fresh client of its own network.
        The victim may have a transport again, or a request: then call :meth:`is_busy`, and this method again.
        """
        if self.is_full(origin):
            return self._fresh.drawn(origin.address, self._random) if self._fresh.count(origin.address) else None
        if len(self.admitted) < self._limits.connections:
            return None
        fresh, quiet = self._fresh.networks.most, self._quiet.networks.most
        held = self.admitted.networks[origin.network]
        if quiet > fresh * _QUIET_PARTS and quiet > held + 1:
            return self._quiet.drawn(self._quiet.largest(), self._random)
        if fresh * _QUIET_PARTS > held:
            return self._fresh.drawn(self._fresh.largest(), self._random)
        # The newcomer's network has many clients, quiet or busy: it would take the places of listeners alone in theirs.
        if self._fresh.networks[origin.network]:
            return self._fresh.drawn(self._fresh.largest(origin.network), self._random)
        return None

    @property
    def spare(self) -> int:
        """Places that the network with the most idle clients holds above its fair share: others can have them."""
        most = max(self._fresh.networks.most, self._quiet.networks.most)
        return max(0, most - int(self._limits.connections * _FAIR_SHARE))

    def joined(self, client: H) -> None:
        """Note that ``client`` was admitted."""
        self.strangers.discard(client)
        self.admitted.add(client)
        self._fresh.add(client)

    def carries(self, client: H) -> None:
        """Note that a transport of ``client`` was accepted."""
        self._fresh.discard(client)

    def rests(self, client: H) -> None:
        """Note that ``client`` has no transport and no request left."""
        if client in self.admitted and client not in self._fresh and client not in self._quiet:
            self._quiet.add(client)

    def is_busy(self, client: H) -> None:
        """Note that ``client``, which :meth:`victim` gave, has a transport or a request: it is not given again before it
        :meth:`rests`.
        """
        self._fresh.discard(client)
        self._quiet.discard(client)

    def left(self, holder: H) -> None:
        """Take back the place of a connection that has ended, or is being ended."""
        for crowd in (self.strangers, self.admitted, self._fresh, self._quiet):
            crowd.discard(holder)
