"""Distance for pipes: a link with a delay, a rate and a bounded buffer in each direction, which can break at given times.

Everything is computed from a clock's time, so the same writes at the same times arrive at the same times in every run.
A full link drops nothing, because users of TCP never see a drop: it accepts no more, and the writer has to wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Protocol

#: The default rate of a link.
FASTEST_BITS_PER_S: Final = 40e9
#: The default buffer of a link: about what a router and a socket hold for one connection.
BUFFER_BYTES: Final = 256 * 1024
#: A write crosses a link in pieces that each take this long, but have at least the size of a TCP segment on Ethernet and at
#: most 16 KiB.
_PIECE_S: Final = 0.001
_PIECE_BYTES: Final = (1448, 16 * 1024)


class Breakable(Protocol):
    """A connection over a link."""

    def cut(self) -> None:
        """Break it, for both ends."""


class Lane:
    """One direction of a :class:`Link`: bytes leave at ``bits_per_s``, and arrive ``delay_s`` later.

    At most ``buffer_bytes`` of all connections together wait to leave. One connection has at most ``window_bytes`` that its
    reader has not read: the buffer, and the bytes under way at the full rate. It counts ``carried_bytes``, the most bytes
    that ever waited (``waiting_peak_bytes``), and the seconds for which writers had more than it accepted (``full_s``).
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
        """How many bytes of one connection it accepts before the reader reads."""
        return int(self._bytes_per_s * self.delay_s) + self.buffer_bytes

    def waiting_bytes(self, now: float) -> float:
        """Bytes that have not left yet."""
        return max(0.0, self._free_at - now) * self._bytes_per_s

    def room(self, now: float) -> int:
        """How many bytes it accepts now: 0 or at least half a piece."""
        # Half a piece is more than the rounding error of times, so there is certainly room at `room_at`.
        room = int(self.buffer_bytes - self.waiting_bytes(now))
        return room if 2 * room >= self._piece_bytes else 0

    def room_at(self) -> float:
        """When there is room for a piece; a time in the past if there is room now."""
        return self._free_at - (self.buffer_bytes - self._piece_bytes) / self._bytes_per_s

    def send(self, size: int, now: float) -> Iterator[tuple[float, int]]:
        """Accept ``size`` bytes, which :meth:`room` must allow; yields the arrival time and size of each piece."""
        self.carried_bytes += size
        while size:
            piece = min(size, self._piece_bytes)
            size -= piece
            self._free_at = max(now, self._free_at) + piece / self._bytes_per_s
            yield self._free_at + self.delay_s, piece
        self.waiting_peak_bytes = max(self.waiting_peak_bytes, self.waiting_bytes(now))

    def end_at(self, now: float) -> float:
        """When the end of a stream that is sent now arrives: after all waiting bytes."""
        return max(now, self._free_at) + self.delay_s

    def clear(self) -> None:
        """Drop the bytes that wait to leave."""
        self._free_at = 0.0


class Link:
    """The link between a program and the rest of a network, shared by all its connections.

    ``delay_s`` is one way. ``bits_per_s`` is the rate and ``buffer_bytes`` the size of the buffer, in each direction.
    ``out`` is the direction away from the end that connects (``a`` of a :class:`~dmsg.testing.pipe.Pipe`), ``back`` the
    opposite one. Pass it to one or more pipes, or to :meth:`~dmsg.testing.memory.MemoryNetwork.through`.
    Raises ``ValueError`` for a buffer that is smaller than a piece that crosses the link at once (at most 16 KiB).
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
        """Cut the link at each of these times of the clock; a time in the past means now."""
        for time_s in times_s:
            self._clock.callLater(max(0.0, time_s - self._clock.seconds()), self.cut)

    def cut(self) -> None:
        """Break every open pipe now, and lose the data under way. New connections can be made."""
        for pipe in list(self.pipes):
            pipe.cut()
        self.out.clear()
        self.back.clear()
