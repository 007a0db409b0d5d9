"""The memory that the sealed streams of a client share, beyond the window that each has in any case. Pure.

It holds data sent and not acknowledged, and data received and not read. Both grow with the distance to a peer.
"""

from __future__ import annotations

from typing import Final

#: A stream may hold a quarter of what is still free. So however many streams hold all they may, some is left for the next.
_SHARE: Final = 4


class Buffers:
    """Counts what streams hold; each may have more as long as there is room for all (:ref:`flow-memory`)."""

    __slots__ = ("total_bytes", "used_bytes")

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0

    @property
    def share_bytes(self) -> int:
        """How much one stream may hold now; 0 when all is used."""
        free = self.total_bytes - self.used_bytes
        return free // _SHARE if free > 0 else 0

    @property
    def full(self) -> bool:
        """Whether a stream that holds more than it has in any case is to end."""
        return self.used_bytes > self.total_bytes
