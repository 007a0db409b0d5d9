"""Which files have arrived, so that a sender that missed the confirmation does not send them again. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from dmsg.sansio.tally import Tally

#: Files that are remembered, some 400 bytes each. A sender has at most 512 under way.
REMEMBERED: Final = 4_096


class Arrival(NamedTuple):
    """A file of a sender (hex key): its offered name, its size in bytes, and its id or, of a small file, its SHA-256 (hex)."""

    sender: str
    name: str
    size: int
    mark: str


class Arrivals:
    """The last arrivals, at most ``limit``. When there are more, the oldest one of the sender that has the most is forgotten:
    a stranger that sends thousands of files makes only its own count as new again.
    """

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._of_sender: dict[str, OrderedDict[Arrival, None]] = {}
        self._tally: Tally[str] = Tally()
        self._count = 0

    def add(self, arrival: Arrival) -> None:
        """Remember ``arrival`` as the newest one of its sender."""
        own = self._of_sender.setdefault(arrival.sender, OrderedDict())
        if arrival in own:
            own.move_to_end(arrival)
            return
        own[arrival] = None
        self._tally.add(arrival.sender)
        self._count += 1
        if self._count > self._limit:
            self._forget_one(self._tally.largest())

    def __contains__(self, arrival: Arrival) -> bool:
        return arrival in self._of_sender.get(arrival.sender, ())

    def __len__(self) -> int:
        return self._count

    def _forget_one(self, sender: str) -> None:
        own = self._of_sender[sender]
        own.popitem(last=False)
        if not own:
            del self._of_sender[sender]
        self._tally.remove(sender)
        self._count -= 1
