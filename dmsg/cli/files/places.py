"""Which conversations a receiver holds at a time, and which one ends when all places are taken. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T")

#: Conversations at a time: each may hold a file open, keep a thread busy and use some 3 MiB of memory.
MAX_TRANSFERS: Final = 32
#: Conversations of one sender: its transfer, and those on transports whose loss we have not noticed yet.
TRANSFERS_PER_SENDER: Final = 4
#: A conversation younger than ``FIRST_S`` counts as one that sends at least this many bytes a second: its offer takes some
#: round trips, in which strangers that hold all other places and send next to nothing would take its place away.
FIRST_BYTES_PER_S: Final = 4_096
FIRST_S: Final = 3.0


@dataclass(slots=True)
class _Place:
    sender: str
    began: float
    received_bytes: int = 0


class Places(Generic[T]):
    """The places of conversations (``T``), by sender (hex key); times are in seconds.

    A key costs a stranger nothing. So a sender that comes when all places are taken is let in, and the conversation with the
    fewest received bytes a second ends for it; if several have as few, the oldest. To keep a sender out, strangers have to send
    on every place faster than it does, and faster than :data:`FIRST_BYTES_PER_S`. The sender never has to send a byte twice.
    """

    def __init__(self) -> None:
        self._places: dict[T, _Place] = {}

    def is_open_to(self, sender: str) -> bool:
        """Whether ``sender`` may have one more place."""
        return sum(place.sender == sender for place in self._places.values()) < TRANSFERS_PER_SENDER

    def take(self, who: T, sender: str, now: float) -> T | None:
        """Give a place to ``who``; returns the conversation that has lost its place for that, if any."""
        loser = None
        if len(self._places) >= MAX_TRANSFERS:
            loser = min(self._places, key=lambda one: self._worth(self._places[one], now))
            del self._places[loser]
        self._places[who] = _Place(sender, now)
        return loser

    def received(self, who: T, count_bytes: int) -> None:
        """Count received bytes of a file."""
        if who in self._places:
            self._places[who].received_bytes += count_bytes

    def leave(self, who: T) -> None:
        """The conversation is over, or has lost its place already."""
        self._places.pop(who, None)

    @staticmethod
    def _worth(place: _Place, now: float) -> tuple[float, float]:
        age_s = now - place.began
        rate = place.received_bytes / max(age_s, 0.001)
        return max(rate, FIRST_BYTES_PER_S) if age_s < FIRST_S else rate, place.began
