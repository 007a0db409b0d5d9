"""A weight for each key that knows which key weighs most. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

#: Entries of the past that are kept at least, beside as many as there are keys, before all are cleared away at once.
_PAST_ENTRIES = 64


class Weights(Generic[T]):
    """How much each key weighs, in whole units. A key that weighs nothing is none.

    A change takes time in the logarithm of the number of keys, and so does the heaviest, amortised: a stranger decides how
    many keys there are. :class:`~dmsg.sansio.tally.Tally` counts single things, and takes constant time.
    """

    __slots__ = ("_changes", "_entries", "_heap", "total")

    def __init__(self) -> None:
        #: What all weigh together.
        self.total = 0
        self._changes = 0
        self._entries: dict[T, tuple[int, int, T]] = {}
        # Each change adds an entry; those it made stale stay until they are on top or too many.
        self._heap: list[tuple[int, int, T]] = []

    def add(self, key: T, weight: int) -> None:
        """Let ``key`` weigh ``weight`` more; less, for a negative one. ``ValueError`` when it would weigh less than nothing."""
        after = self[key] + weight
        if after < 0:
            raise ValueError(f"{key!r} would weigh {after}")
        if not weight:
            return  # it has weighed so for as long as before
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
        """The key that weighs most; of equals the one that has weighed so for longest. ``KeyError`` when there is none."""
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
