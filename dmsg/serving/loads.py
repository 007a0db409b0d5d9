"""Who goes first when connections together hold more than there is room for.

Pure. Keys are free and addresses are not, so loads are summed by address group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Final

from dmsg.serving.member import M

#: One part in this many of a limit is freed beyond the excess, so that not each frame causes a search.
FREED_SHARE: Final = 64


def largest_first(loads: Mapping[M, int]) -> Iterator[M]:
    """The members with a load: each is the one with the most, in the group for which the most is left."""
    groups: dict[str, list[M]] = {}
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
    """The members to drop so that the stale bytes of all (:meth:`Member.stale_bytes`) keep to the limit; mostly none."""
    loads = {member: load for member in members if (load := member.stale_bytes())}
    excess = sum(loads.values()) - limit_bytes
    if excess <= 0:
        return []
    excess += limit_bytes // FREED_SHARE
    found = []
    for member in largest_first(loads):
        found.append(member)
        excess -= loads[member]
        if excess <= 0:
            break
    return found
