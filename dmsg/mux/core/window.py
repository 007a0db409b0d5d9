"""Flow control of a stream: how much may be sent, and when received data is acknowledged (:ref:`spec-data`)."""

from __future__ import annotations

from typing import Final

SEQUENCE_MODULUS: Final = 1 << 16
#: With more than this outstanding a sequence would be in use twice.
OUTSTANDING_LIMIT: Final = SEQUENCE_MODULUS - 1


class SendWindow:
    """Sequences handed out and not acknowledged yet, and the bytes they stand for."""

    __slots__ = ("_next", "_sizes", "limit_bytes", "outstanding_bytes")

    def __init__(self, limit_bytes: int, first_sequence: int) -> None:
        self.limit_bytes = limit_bytes
        self.outstanding_bytes = 0
        self._next = first_sequence % SEQUENCE_MODULUS
        self._sizes: dict[int, int] = {}

    @property
    def room_bytes(self) -> int:
        """How much may be sent now. Never negative."""
        room = self.limit_bytes - self.outstanding_bytes
        return room if room > 0 and len(self._sizes) < OUTSTANDING_LIMIT else 0

    @property
    def idle(self) -> bool:
        """Whether everything sent is acknowledged."""
        return not self._sizes

    def send(self, size: int) -> int:
        """Note ``size`` bytes as sent and give the sequence they go under."""
        sequence = self._next
        self._next = (sequence + 1) % SEQUENCE_MODULUS
        self._sizes[sequence] = size
        self.outstanding_bytes += size
        return sequence

    def acknowledge(self, sequence: int) -> int:
        """Take the acknowledgement of one sequence; gives the bytes it stood for, 0 for one unknown or repeated."""
        size = self._sizes.pop(sequence, 0)
        self.outstanding_bytes -= size
        return size


class AckGate:
    """When a base receiver acknowledges (:ref:`spec-plain-acks`).

    At once while at most 65,535 delivered bytes are unread, including the arriving ones. Otherwise it holds the ACK until
    reading has brought them *below* 65,535, and then sends all held ACKs in order.
    """

    THRESHOLD_BYTES: Final = 65_535
    __slots__ = ("held", "unread_bytes")

    def __init__(self) -> None:
        self.unread_bytes = 0
        #: Sequences that are not acknowledged yet; an honest sender keeps them at ``OUTSTANDING_LIMIT`` or fewer.
        self.held: list[int] = []

    def arrived(self, sequence: int, size: int) -> bool:
        """Note a FWD; ``True`` when it is to be acknowledged now."""
        self.unread_bytes += size
        if self.unread_bytes <= self.THRESHOLD_BYTES:
            return True
        self.held.append(sequence)
        return False

    def consumed(self, size: int) -> list[int]:
        """Note that the application took ``size`` bytes; gives the sequences to acknowledge because of it."""
        self.unread_bytes -= size
        if not self.held or self.unread_bytes >= self.THRESHOLD_BYTES:
            return []
        released, self.held = self.held, []
        return released
