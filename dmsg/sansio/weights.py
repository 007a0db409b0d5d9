"""A weight for each key that knows which key weighs most. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

#: Stale entries that are kept, besides as many as there are keys, before all stale ones are cleared away at once.
_PAST_ENTRIES = 64


class Weights(Generic[T]):
    """The weight of each key, in whole units. A key of weight 0 is forgotten.

    A change, and finding the heaviest key, take logarithmic time in the number of keys (amortised), because a stranger decides
    how many keys there are. :class:`~dmsg.sansio.tally.Tally` counts in steps of one, and takes constant time.
    """

    __slots__ = ("_changes", "_entries", "_heap", "total")

    def __init__(self) -> None:
        #: The weight of all keys together.
        self.total = 0
        self._changes = 0
        self._entries: dict[T, tuple[int, int, T]] = {}
        # Each change adds an entry; the entry that it makes stale stays until it is on top or there are too many.
        self._heap: list[tuple[int, int, T]] = []

    def add(self, key: T, weight: int) -> None:
        """Add ``weight``, which may be negative, to that of ``key``. ``ValueError`` if the sum is less than 0."""
        after = self[key] + weight
        if after < 0:
            raise ValueError(f"{key!r} would weigh {after}")
        if not weight:
            return  # the key keeps its place among equals
        self.total += weight
        if not after:
            self._entries.pop(key, None)
            return
        self._changes += 1
        entry = self._entries[key] = (-after, self._changes, key)
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _PAST_ENTRIES:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def largest(self) -> T:
        """The heaviest key, among equals the one that has had this weight for longest. ``KeyError`` when there is none."""
        if not self._entries:
            raise KeyError
        while self._entries.get(self._heap[0][2]) is not self._heap[0]:
            heappop(self._heap)
        return self._heap[0][2]

    def __getitem__(self, key: T) -> int:
        entry = self._entries.get(key)
        return -entry[0] if entry else 0

    def __len__(self) -> int:
        return len(self._entries)
