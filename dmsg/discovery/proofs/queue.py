"""A fair queue, for the times when there is more to prove than can be proved at once. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by source and target: each source in turn, within it each target in turn, within that the newest first.

    So a source that puts 10,000 items in delays the single item of another source by one turn. The newest come first because
    the older ones have waited without being registered again.
    """

    def __init__(self) -> None:
        self._sources: OrderedDict[str, OrderedDict[str, dict[bytes, T]]] = OrderedDict()
        self._places: dict[bytes, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def put(self, key: bytes, thing: T, source: str, target: str, *, again: bool = False) -> None:
        """Add ``thing``, or move it if ``key`` is there already.

        Its target becomes the next one of its source; with ``again``, for items that had a turn before, the last one.
        """
        before, place = self._places.get(key), (source, target)
        targets = self._sources.setdefault(source, OrderedDict())
        things = targets.setdefault(target, {})
        things.pop(key, None)
        things[key] = thing
        if before != place:  # an item that is put again in the same place keeps its turn
            targets.move_to_end(target, last=again)
            if before is not None:
                self.remove(key)
            self._places[key] = place

    def remove(self, key: bytes) -> None:
        """Take ``key`` out; silent when it is not there."""
        place = self._places.pop(key, None)
        if place is None:
            return
        source, target = place
        targets = self._sources[source]
        del targets[target][key]
        if not targets[target]:
            del targets[target]
        if not targets:
            del self._sources[source]

    def take(self, busy: Container[str] = ()) -> T | None:
        """Take the next item of a source that is not ``busy``; ``None`` when there is none."""
        source = next((one for one in self._sources if one not in busy), None)
        if source is None:
            return None
        targets = self._sources[source]
        target, things = next(iter(targets.items()))
        key = next(reversed(things))
        thing = things[key]
        self.remove(key)
        if target in targets:
            targets.move_to_end(target)
        if source in self._sources:
            self._sources.move_to_end(source)
        return thing
