"""The two windows of a sealed stream: what it may have under way, and what its peer may (:ref:`spec-windows`). Pure."""

from __future__ import annotations

from typing import Final

from dmsg.mux.core.buffers import Buffers

#: A receiver announces a window as a power of two: 1 to 32 MiB.
POWERS: Final = range(20, 26)
_LEAST_TOLD_BYTES: Final = 1 << POWERS[0]
_MOST_TOLD_BYTES: Final = 1 << POWERS[-1]
#: A window may be so many times what it has carried so far, so that it can be four times as large after each round trip.
_GROWTH: Final = 8


class SealedWindow:
    """Counts what one stream holds of the ``buffers`` of all, and how much that lets it and its peer send.

    Both windows have ``least_bytes`` in any case, and ``most_bytes`` at most.
    """

    __slots__ = (
        "_buffers",
        "_counted_bytes",
        "_most_bytes",
        "_told_bytes",
        "bytes",
        "given_bytes",
        "least_bytes",
        "most_given_bytes",
    )

    def __init__(self, least_bytes: int, most_bytes: int, buffers: Buffers) -> None:
        #: What may be sent and not acknowledged.
        self.bytes = least_bytes
        #: The peer's window as announced last; and the largest one announced, 0 if none was.
        self.given_bytes = least_bytes
        self.most_given_bytes = 0
        #: What is not counted in the buffers, because each stream may hold it in any case.
        self.least_bytes = least_bytes
        self._most_bytes = max(least_bytes, min(most_bytes, _MOST_TOLD_BYTES))
        self._told_bytes = least_bytes  # ours, as the peer told us
        self._buffers = buffers
        self._counted_bytes = 0  # what of this stream is counted in the buffers

    def told(self, power: int) -> None:
        """The peer says how large our window may be: one of :data:`POWERS`."""
        self._told_bytes = min(1 << power, self._most_bytes)

    def hold(self, size: int) -> None:
        """The stream holds ``size`` bytes now, sent or received."""
        buffers = self._buffers
        counted = size - self.least_bytes if size > self.least_bytes else 0
        buffers.used_bytes += counted - self._counted_bytes
        self._counted_bytes = counted
        told = self._told_bytes
        if told <= self.least_bytes or told <= buffers.share_bytes:
            self.bytes = told
        else:
            self.bytes = max(self.least_bytes, buffers.share_bytes)

    def give(self, taken_bytes: int) -> int:
        """The power of two to announce to the peer; 0 if it knows already.

        The application took ``taken_bytes`` of the data that came on this path. The relay counts no more than these, either.
        """
        least = self.least_bytes
        if self.given_bytes == self._most_bytes <= self._buffers.share_bytes:
            return 0
        most = min(self._most_bytes, least + _GROWTH * taken_bytes, max(least, self._buffers.share_bytes))
        window = least if most < _LEAST_TOLD_BYTES else max(least, 1 << most.bit_length() - 1)
        if window == self.given_bytes:
            return 0
        self.given_bytes = window
        self.most_given_bytes = max(window, self.most_given_bytes)
        return max(POWERS[0], window.bit_length() - 1)

    def overfull(self, unread_bytes: int, slack_bytes: int) -> bool:
        """Whether a peer has sent more than the largest window it was told, or the shared buffers are full."""
        return self._buffers.full or unread_bytes > self.most_given_bytes + slack_bytes
