"""A bounded queue that several sources share: they take turns, and an overflow drops items of the largest source. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from dmsg.sansio.tally import Tally
from dmsg.sansio.weights import Weights

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class _Line(Generic[T]):
    """The items of one source, each with its bytes, and the bytes of all."""

    __slots__ = ("items", "size_bytes")

    def __init__(self) -> None:
        self.items: deque[tuple[T, int]] = deque()
        self.size_bytes = 0


class FairQueue(Generic[K, T]):
    """At most ``count`` items with ``size_bytes`` in all. Each item has a source; :meth:`take` serves the sources in turn.

    Above ``count``, the latest items of the source with the most items are dropped; above ``size_bytes``, those of the source
    with the most bytes. That may be the item that was just put. So a source with less than an equal share of the items, and of
    the bytes, never loses anything.
    """

    __slots__ = ("_count", "_limit", "_limit_bytes", "_lines", "_ranks", "size_bytes")

    def __init__(self, count: int, size_bytes: int) -> None:
        self._limit = count
        self._limit_bytes = size_bytes
        self._lines: OrderedDict[K, _Line[T]] = OrderedDict()
        self._count = 0
        #: How many items each source has, and how many bytes; from when the queue is full until it is half empty, because
        #: counting takes as long as the rest.
        self._ranks: tuple[Tally[K], Weights[K]] | None = None
        self.size_bytes = 0

    def put(self, source: K, thing: T, size_bytes: int) -> list[T]:
        """Add ``thing``, of ``size_bytes``; returns the dropped items, which may include ``thing`` itself."""
        line = self._lines.get(source)
        if line is None:
            line = self._lines[source] = _Line()
        line.items.append((thing, size_bytes))
        self._changed(source, line, 1, size_bytes)
        gone = []
        while self._count > self._limit or self.size_bytes > self._limit_bytes:
            largest = self._largest(source)
            line = self._lines[largest]
            lost, size = line.items.pop()
            gone.append(lost)
            self._changed(largest, line, -1, -size)
        return gone

    def take(self, may: Callable[[K], bool] = lambda source: True) -> T | None:
        """Take the oldest item of the next source that ``may`` have a turn; ``None`` if there is none."""
        for source, line in self._lines.items():
            if may(source):
                thing, size = line.items.popleft()
                self._lines.move_to_end(source)
                self._changed(source, line, -1, -size)
                if 2 * self._count < self._limit and 2 * self.size_bytes < self._limit_bytes:
                    self._ranks = None
                return thing
        return None

    def _changed(self, source: K, line: _Line[T], number: int, size_bytes: int) -> None:
        line.size_bytes += size_bytes
        self.size_bytes += size_bytes
        self._count += number
        if self._ranks is not None:
            counts, sizes = self._ranks
            (counts.add if number > 0 else counts.remove)(source)
            sizes.add(source, size_bytes)
        if not line.items:
            del self._lines[source]

    def _largest(self, source: K) -> K:
        """The source that loses an item because ``source`` has put one.

        Among equals it is ``source``: it has no better right to a place than those that wait already.
        """
        counts, sizes = self._ranks = self._ranks or self._ranked()
        if self._count > self._limit:
            return source if counts[source] == counts.most else counts.largest()
        largest = sizes.largest()
        return source if sizes[source] == sizes[largest] else largest

    def _ranked(self) -> tuple[Tally[K], Weights[K]]:
        counts, sizes = Tally[K](), Weights[K]()
        for source, line in self._lines.items():
            for _ in line.items:
                counts.add(source)
            sizes.add(source, line.size_bytes)
        return counts, sizes

    def __len__(self) -> int:
        return self._count
