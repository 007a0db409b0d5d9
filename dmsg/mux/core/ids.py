"""The transport ids of a client's connection: which are free, and which ended a moment ago. Pure."""

from __future__ import annotations

from collections.abc import Container

from dmsg.mux.core.errors import Busy
from dmsg.sansio.rate import RecentIds


class TransportIds:
    """Gives out even ids in rotation, and remembers those that ended lately.

    Frames that were on their way when a transport ended are no offence (:ref:`spec-late-frames`).
    """

    __slots__ = ("_recent", "next_id")

    def __init__(self, first: int) -> None:
        self.next_id = first & 0xFFFE
        self._recent = RecentIds()

    def take(self, used: Container[int]) -> int:
        """The next id that is not in ``used`` (:ref:`spec-transport-ids`). Raises ``Busy`` when all 32,768 are."""
        for _ in range(1 << 15):
            stream_id = self.next_id
            self.next_id = (stream_id + 2) & 0xFFFF
            if stream_id not in used:
                self._recent.discard(stream_id)
                return stream_id
        raise Busy("all transport ids of this connection are taken", by="local")

    def taken(self, stream_id: int) -> None:
        """The peer has taken an id for a transport of its own."""
        self._recent.discard(stream_id)

    def ended(self, stream_id: int) -> None:
        """The transport with this id is over."""
        self._recent.add(stream_id)

    def ended_lately(self, stream_id: int) -> bool:
        """Whether the transport with this id is among the last that ended."""
        return stream_id in self._recent
