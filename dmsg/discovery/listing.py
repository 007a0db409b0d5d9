"""Which servers discovery names, and in which order: at most so many, at random, the better ranked ones likelier. Pure
but for waiting for the store.

A draw without replacement in which each relay's chance to come next is its weight's share of what is left. With
nothing ranked all weights are equal, and the store's own uniform draw does.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from dmsg.discovery.entry import Entry
from dmsg.discovery.ranks import RELAYS_LIMIT, Ranks, weight
from dmsg.discovery.store import NS_PER_S, Random
from dmsg.interfaces import IEntryStore, IRankedStore

#: How many of the available servers are looked at for a draw: as many as a document can name. When there are more,
#: the store draws so many of them with equal chances first.
ROSTER_LIMIT: Final = RELAYS_LIMIT
#: A roster of more than so many servers is used again for a while, because making one means to look at all of them.
CACHED_FROM: Final = 256
ROSTER_LIFETIME_NS: Final = 2 * NS_PER_S
#: A roster this many times as long as what is wanted is drawn from by chance alone, a shorter one is sorted.
_SPARSE: Final = 8


class Roster:
    """Servers (raw public keys) and their weights, made to be drawn from again and again."""

    def __init__(self, keys: Sequence[bytes], weights: Sequence[float]) -> None:
        self._keys = keys
        self._weights = weights
        self._sums = list(accumulate(weights))

    def __len__(self) -> int:
        return len(self._keys)

    def draw(self, count: int, random: Random) -> list[bytes]:
        """At most ``count`` different keys in the order in which they were drawn."""
        if len(self._keys) > _SPARSE * count:
            return self._one_by_one(count, random)
        # The k-th smallest of exponential waiting times is the k-th of a weighted draw without replacement
        # (Efraimidis and Spirakis); random() may be 0, never 1.
        waits = [-math.log(1.0 - random.random()) / each for each in self._weights]
        order = sorted(range(len(self._keys)), key=waits.__getitem__)
        return [self._keys[at] for at in order[:count]]

    def _one_by_one(self, count: int, random: Random) -> list[bytes]:
        """The same distribution, drawing again what was drawn already: what is left is most of the weight."""
        drawn: dict[int, None] = {}
        total = self._sums[-1]
        while len(drawn) < count:
            drawn[min(bisect(self._sums, random.random() * total), len(self._sums) - 1)] = None
        return [self._keys[at] for at in drawn]


class ServerListing:
    """Draws servers from ``store``; ``ranks()`` gives the document in force, or ``None``.

    A store that is no :class:`~dmsg.interfaces.IRankedStore` draws with equal chances, and what it drew is put in an
    order by rank.
    """

    def __init__(self, store: IEntryStore, random: Random, ranks: Callable[[], Ranks | None] = lambda: None) -> None:
        self._store = store
        self._random = random
        self._ranks = ranks
        self._roster: Roster | None = None
        self._made_for: tuple[Ranks, int] | None = None

    async def servers(self, limit: int, now_ns: int) -> list[Entry]:
        """At most ``limit`` entries of available servers, in the order they are to be tried in."""
        ranks = self._ranks()
        if ranks is None or not ranks.freshness(now_ns / NS_PER_S):
            entries = await self._store.available_servers(limit, now_ns)
            return self._random.sample(entries, len(entries))
        if not IRankedStore.providedBy(self._store):
            entries = await self._store.available_servers(limit, now_ns)
            by_key = {entry.static.raw: entry for entry in entries}
            return [by_key[key] for key in _roster(list(by_key), ranks, now_ns).draw(limit, self._random)]
        store: IRankedStore = self._store
        roster = self._roster
        if roster is None or not self._is_current(ranks, now_ns):
            roster = _roster(await store.available_keys(ROSTER_LIMIT, now_ns), ranks, now_ns)
            self._roster = roster if len(roster) > CACHED_FROM else None
            self._made_for = (ranks, now_ns)
        return await store.servers_of(roster.draw(limit, self._random), now_ns)

    def _is_current(self, ranks: Ranks, now_ns: int) -> bool:
        if self._made_for is None or self._made_for[0] is not ranks:
            return False
        return 0 <= now_ns - self._made_for[1] < ROSTER_LIFETIME_NS


def _roster(keys: Sequence[bytes], ranks: Ranks, now_ns: int) -> Roster:
    now_s = now_ns / NS_PER_S
    return Roster(keys, [weight(ranks.effective(key, now_s)) for key in keys])
