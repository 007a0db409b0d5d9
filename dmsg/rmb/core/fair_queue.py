"""A bounded queue that several sources share: they take turns, and an overflow drops items of the largest source. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class _Line(Generic[T]):
    __slots__ = ("items", "size_bytes")

    def __init__(self) -> None:
        self.items: deque[tuple[T, int]] = deque()
        self.size_bytes = 0


class FairQueue(Generic[K, T]):
    """At most ``count`` items with ``size_bytes`` in all. Each item has a source; :meth:`take` serves the sources in turn.

    Above a limit, items of the source with the most bytes are dropped, the latest first; that may be the item that was
    just put. So a source that puts less than its equal share never loses anything.
    """

    __slots__ = ("_count", "_limit", "_limit_bytes", "_lines", "size_bytes")

    def __init__(self, count: int, size_bytes: int) -> None:
        self._limit = count
        self._limit_bytes = size_bytes
        self._lines: OrderedDict[K, _Line[T]] = OrderedDict()
        self._count = 0
        self.size_bytes = 0

    def put(self, source: K, thing: T, size_bytes: int) -> list[T]:
        """Add ``thing``, of ``size_bytes``; returns the dropped items, which may include ``thing`` itself."""
        line = self._lines.get(source)
        if line is None:
            line = self._lines[source] = _Line()
        line.items.append((thing, size_bytes))
        self._counted(line, 1, size_bytes)
        gone = []
        while self._count > self._limit or self.size_bytes > self._limit_bytes:
            largest = max(self._lines, key=self._weight)
            line = self._lines[largest]
            lost, size = line.items.pop()
            gone.append(lost)
            self._counted(line, -1, -size)
            if not line.items:
                del self._lines[largest]
        return gone

    def _weight(self, source: K) -> tuple[int, int]:
        line = self._lines[source]
        return line.size_bytes, len(line.items)

    def take(self, may: Callable[[K], bool] = lambda source: True) -> T | None:
        """Take the oldest item of the next source that ``may`` have a turn; ``None`` if there is none."""
        for source, line in self._lines.items():
            if may(source):
                thing, size = line.items.popleft()
                self._counted(line, -1, -size)
                if line.items:
                    self._lines.move_to_end(source)
                else:
                    del self._lines[source]
                return thing
        return None

    def _counted(self, line: _Line[T], count: int, size_bytes: int) -> None:
        line.size_bytes += size_bytes
        self.size_bytes += size_bytes
        self._count += count

    def __len__(self) -> int:
        return self._count
