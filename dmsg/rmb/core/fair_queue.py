"""A bounded queue that several sources share: they take turns, and an overflow drops items of the largest source. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from dmsg.sansio.tally import Tally
from dmsg.sansio.weights import Weights

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class FairQueue(Generic[K, T]):
    """At most ``count`` items with ``size_bytes`` in all. Each item has a source; :meth:`take` serves the sources in turn.

    Above ``count``, the latest items of the source with the most items are dropped; above ``size_bytes``, those of the source
    with the most bytes. That may be the item that was just put. So a source with less than an equal share of the items, and of
    the bytes, never loses anything.
    """

    __slots__ = ("_bytes", "_count", "_items", "_length", "_limit", "_limit_bytes")

    def __init__(self, count: int, size_bytes: int) -> None:
        self._limit = count
        self._limit_bytes = size_bytes
        self._items: OrderedDict[K, deque[tuple[T, int]]] = OrderedDict()
        #: The number of all items; and how many each source has, and how many bytes.
        self._length = 0
        self._count: Tally[K] = Tally()
        self._bytes: Weights[K] = Weights()

    @property
    def size_bytes(self) -> int:
        """The bytes of all items."""
        return self._bytes.total

    def put(self, source: K, thing: T, size_bytes: int) -> list[T]:
        """Add ``thing``, of ``size_bytes``; returns the dropped items, which may include ``thing`` itself."""
        self._items.setdefault(source, deque()).append((thing, size_bytes))
        self._count.add(source)
        self._bytes.add(source, size_bytes)
        self._length += 1
        gone = []
        while (largest := self._surplus(source)) is not None:
            lost, size = self._items[largest].pop()
            gone.append(lost)
            self._removed(largest, size)
        return gone

    def _surplus(self, source: K) -> K | None:
        """The source that loses an item because ``source`` has put one, or ``None``.

        Among equals it is ``source``: it has no better right to a place than those that wait already.
        """
        if self._length > self._limit:
            return source if self._count[source] == self._count.most else self._count.largest()
        if self.size_bytes > self._limit_bytes:
            largest = self._bytes.largest()
            return source if self._bytes[source] == self._bytes[largest] else largest
        return None

    def take(self, may: Callable[[K], bool] = lambda source: True) -> T | None:
        """Take the oldest item of the next source that ``may`` have a turn; ``None`` if there is none."""
        for source, items in self._items.items():
            if may(source):
                thing, size = items.popleft()
                if items:
                    self._items.move_to_end(source)
                self._removed(source, size)
                return thing
        return None

    def _removed(self, source: K, size_bytes: int) -> None:
        self._count.remove(source)
        self._bytes.add(source, -size_bytes)
        self._length -= 1
        if not self._items[source]:
            del self._items[source]

    def __len__(self) -> int:
        return self._length
