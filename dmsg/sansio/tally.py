"""A count for each key that knows which key has the most. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Tally(Generic[T]):
    """A count for each key. Adding, removing and finding the key with the largest count take constant time.

    Constant, because a stranger decides how many keys there are and how often the largest is asked for.
    """

    __slots__ = ("_counts", "_levels", "most")

    def __init__(self) -> None:
        #: The largest count; 0 when nothing is counted.
        self.most = 0
        self._counts: dict[T, int] = {}
        # Not dicts: finding the first key takes time for each place already freed in front of it.
        self._levels: dict[int, OrderedDict[T, None]] = {}

    def add(self, key: T) -> None:
        """Count one more of ``key``."""
        count = self._counts.get(key, 0)
        if count:
            self._leave(key, count)
        self._enter(key, count + 1)
        self.most = max(self.most, count + 1)

    def remove(self, key: T) -> None:
        """Count one less of ``key``; ``KeyError`` when there is none."""
        count = self._counts.pop(key)
        self._leave(key, count)
        if count > 1:
            self._enter(key, count - 1)
        if self.most == count and count not in self._levels:
            self.most = count - 1

    def largest(self) -> T:
        """The key with the largest count, the first to reach it among equals. ``KeyError`` when nothing is counted."""
        return next(iter(self._levels[self.most]))

    def _enter(self, key: T, count: int) -> None:
        self._counts[key] = count
        level = self._levels.get(count)
        if level is None:
            level = self._levels[count] = OrderedDict()
        level[key] = None

    def _leave(self, key: T, count: int) -> None:
        level = self._levels[count]
        del level[key]
        if not level:
            del self._levels[count]

    def __getitem__(self, key: T) -> int:
        return self._counts.get(key, 0)

    def __len__(self) -> int:
        return len(self._counts)
