"""Which connections are dropped first when together they hold more than there is room for.

Pure. Keys are free and addresses are not, so loads are summed by groups of addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Final, TypeVar
from typing import Protocol as TypingProtocol

from dmsg.serving.member import M

#: One part in this many of a limit is freed beyond the excess, so that not every frame causes a search.
_FREED_SHARE: Final = 64
T = TypeVar("T")


class Grouped(Hashable, TypingProtocol):
    """A connection of some protocol."""

    @property
    def group(self) -> str:
        """The group of addresses it comes from."""


G = TypeVar("G", bound=Grouped)


def to_free(held: int, limit: int) -> int:
    """How much has to go when ``held`` is more than ``limit``."""
    return held - limit + limit // _FREED_SHARE


def enough(items: Iterable[T], load_of: Callable[[T], int], least: int) -> list[T]:
    """The first of ``items`` whose loads add up to ``least``, or all of them."""
    found = []
    for item in items:
        found.append(item)
        least -= load_of(item)
        if least <= 0:
            break
    return found


def largest_first(loads: Mapping[G, int]) -> Iterator[G]:
    """The connections with a load. The next one is always the largest in the group that has the most left."""
    groups: dict[str, list[G]] = {}
    for member in sorted(loads, key=loads.__getitem__):
        groups.setdefault(member.group, []).append(member)
    heap = [(-sum(map(loads.__getitem__, each)), -loads[each[-1]], at, each) for at, each in enumerate(groups.values())]
    heapify(heap)
    while heap:
        minus_load, minus_most, at, members = heappop(heap)
        yield members.pop()
        if members:
            heappush(heap, (minus_load - minus_most, -loads[members[-1]], at, members))


def stale(members: Iterable[M], limit_bytes: int) -> list[M]:
    """The members to drop so that the stale bytes of all (:meth:`Member.stale_bytes`) stay within the limit; mostly none."""
    loads = {member: load for member in members if (load := member.stale_bytes())}
    held = sum(loads.values())
    if held <= limit_bytes:
        return []
    return enough(largest_first(loads), loads.__getitem__, to_free(held, limit_bytes))
