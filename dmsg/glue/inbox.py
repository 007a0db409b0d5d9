"""Received data that waits until the application reads."""

from __future__ import annotations

from collections import deque
from typing import Final

#: Pieces are joined up to this size: a piece of two bytes takes 56 bytes of memory, and limits count its content only.
JOINED_BYTES: Final = 1024
#: Stands for the end of the peer's half; data is never empty.
_END: Final = b""


class Inbox(deque[bytes]):
    """Pieces of data, the oldest first. The last one may be empty: it is the end of the peer's half."""

    __slots__ = ()

    def put(self, data: bytes) -> None:
        """``data`` has come."""
        if self and self[-1] and len(self[-1]) + len(data) <= JOINED_BYTES:
            self[-1] += data
        else:
            self.append(data)

    def put_end(self) -> None:
        """The peer has ended its half."""
        self.append(_END)

    @property
    def has_end(self) -> bool:
        """Whether the end of the peer's half waits."""
        return bool(self) and not self[-1]

    @property
    def size(self) -> int:
        """How many bytes wait."""
        return sum(map(len, self))
