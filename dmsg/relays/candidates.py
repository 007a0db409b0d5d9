"""Relays a client may connect to, and the order in which it tries them: by network group first, then by score. Pure.

A group is a network that an operator gets in one piece (:func:`dmsg.address.network_group`). Keys, and addresses within a
group, cost nothing. So the relays of a group share one place in each round of the order: a thousand relays in one /24 come up
no earlier than a single relay elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from dmsg.address import HostPort, network_group
from dmsg.crypto.keys import PublicKey

#: Of three candidates in a race, two are remembered and one is new. Relays that served before are more likely to serve again,
#: but a client that never tried a new one would stay with those it found first for ever.
REMEMBERED_IN_TURN: Final = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A relay to try. If it has no ``address``, or is only ``remembered``, discovery is asked for its address first."""

    public_key: PublicKey
    address: HostPort | None = None
    remembered: bool = False

    @property
    def group(self) -> str:
        """The network group; a relay whose address is not known yet is a group of its own."""
        return network_group(self.address.host) if self.address is not None else str(self.public_key)


#: Puts keys in the order of a weighted draw.
Draw = Callable[[Iterable[PublicKey]], list[PublicKey]]
#: Finds the key with the largest weight.
Best = Callable[[Iterable[PublicKey]], PublicKey]


def spread(candidates: Iterable[Candidate], draw: Draw, best: Best) -> list[Candidate]:
    """All of ``candidates``: one of each group in the order of a draw, then a second one of each group, and so on.

    A group weighs as much as its best relay: if it weighed as much as the one that was drawn in it, a bad relay beside a good
    one would be weighed twice.
    """
    known = {one.public_key: one for one in candidates}
    groups: dict[str, list[PublicKey]] = {}
    for key in draw(known):
        groups.setdefault(known[key].group, []).append(key)
    weighed = {best(keys): keys for keys in groups.values()}
    order: list[Candidate] = []
    place = 0
    while len(order) < len(known):
        drawn = draw(one for one, keys in weighed.items() if len(keys) > place)
        order += (known[weighed[one][place]] for one in drawn)
        place += 1
    return order


def alternate(remembered: Sequence[Candidate], others: Sequence[Candidate]) -> list[Candidate]:
    """Both lists in turn: :data:`REMEMBERED_IN_TURN` remembered ones, one of the others, and so on to the end of both."""
    first, second = iter(remembered), iter(others)
    order: list[Candidate] = []
    while len(order) < len(remembered) + len(others):
        order += islice(first, REMEMBERED_IN_TURN)
        order += islice(second, 1)
    return order
