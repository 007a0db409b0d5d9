"""Distance for pipes: a link with a delay, a rate and a bounded buffer in each direction, which can break at given times.

Everything is computed from a clock's time, so the same writes at the same times arrive at the same times in every run.
A link that is full drops nothing, because TCP's users never see a drop: it takes no more, and the writer has to wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Protocol

#: The rate of a link that was given none.
FASTEST_BITS_PER_S: Final = 40e9
#: What waits before the narrow hop, unless told otherwise: about what a router and a socket hold for one connection.
BUFFER_BYTES: Final = 256 * 1024
#: A write crosses a link in pieces that take it this long, but no smaller than a TCP segment on Ethernet and no larger
#: than what costs a simulation too many steps.
_PIECE_S: Final = 0.001
_PIECE_BYTES: Final = (1448, 16 * 1024)


class Breakable(Protocol):
    """A connection over a link."""

    def cut(self) -> None:
        """Break it, for both ends."""


class Lane:
    """One direction of a :class:`Link`: ``delay_s`` for each byte after it has left at ``bits_per_s``.

    ``buffer_bytes`` at most wait to leave, of all connections together. One connection has at most ``window_bytes`` that
    its reader has not read: the buffer, and what is under way at the full rate. Counted are ``carried_bytes``, the most
    that ever waited (``waiting_peak_bytes``), and ``full_s``, for how many seconds writers had more than it took.
    """

    def __init__(self, delay_s: float, bits_per_s: float, buffer_bytes: int) -> None:
        self.delay_s = delay_s
        self.buffer_bytes = buffer_bytes
        self.carried_bytes = 0
        self.waiting_peak_bytes = 0.0
        self.full_s = 0.0
        self._bytes_per_s = bits_per_s / 8
        least, most = _PIECE_BYTES
        self._piece_bytes = int(min(most, max(least, self._bytes_per_s * _PIECE_S)))
        if buffer_bytes < self._piece_bytes:
            raise ValueError(f"a buffer of {buffer_bytes} bytes is less than one piece of {self._piece_bytes}")
        self._free_at = 0.0

    @property
    def window_bytes(self) -> int:
        """How many bytes of one connection it takes before its reader reads."""
        return int(self._bytes_per_s * self.delay_s) + self.buffer_bytes

    def waiting_bytes(self, now: float) -> float:
        """Bytes that have not left yet."""
        return max(0.0, self._free_at - now) * self._bytes_per_s

    def room(self, now: float) -> int:
        """How many bytes it takes now: 0 or at least half a piece."""
        # The half piece outweighs the rounding of times, so that at `room_at` there is room indeed.
        room = int(self.buffer_bytes - self.waiting_bytes(now))
        return room if 2 * room >= self._piece_bytes else 0

    def room_at(self) -> float:
        """When there is room for a piece; in the past if there is some now."""
        return self._free_at - (self.buffer_bytes - self._piece_bytes) / self._bytes_per_s

    def send(self, size: int, now: float) -> Iterator[tuple[float, int]]:
        """Take ``size`` bytes, which :meth:`room` allows; gives when how many of them arrive."""
        self.carried_bytes += size
        while size:
            piece = min(size, self._piece_bytes)
            size -= piece
            self._free_at = max(now, self._free_at) + piece / self._bytes_per_s
            yield self._free_at + self.delay_s, piece
        self.waiting_peak_bytes = max(self.waiting_peak_bytes, self.waiting_bytes(now))

    def end_at(self, now: float) -> float:
        """When the end of a stream arrives that is told now: behind all that waits."""
        return max(now, self._free_at) + self.delay_s

    def clear(self) -> None:
        """Forget what waits to leave."""
        self._free_at = 0.0


class Link:
    """What lies between a program and the rest of a network, for all its connections together.

    ``delay_s`` is one way. ``bits_per_s`` is the rate and ``buffer_bytes`` what waits at most, in each direction.
    ``out`` is the direction away from the end that connects (``a`` of a :class:`~dmsg.testing.pipe.Pipe`), ``back`` the
    other one. Give it to one or more pipes, or to :meth:`~dmsg.testing.memory.MemoryNetwork.through`.
    Raises ``ValueError`` for a buffer that is smaller than what crosses the link at once (at most 16 KiB).
    """

    def __init__(
        self,
        clock: Any,
        *,
        delay_s: float = 0.0,
        bits_per_s: float = FASTEST_BITS_PER_S,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.out = Lane(delay_s, bits_per_s, buffer_bytes)
        self.back = Lane(delay_s, bits_per_s, buffer_bytes)
        self.pipes: list[Breakable] = []
        self._clock = clock

    def cut_at(self, *times_s: float) -> None:
        """Cut the link at each of these times of the clock; a time that is over is now."""
        for time_s in times_s:
            self._clock.callLater(max(0.0, time_s - self._clock.seconds()), self.cut)

    def cut(self) -> None:
        """Both ends of every open pipe lose their connection now, with what is under way. New ones can be made."""
        for pipe in list(self.pipes):
            pipe.cut()
        self.out.clear()
        self.back.clear()
