"""Acknowledgements inside the plaintexts of a channel (:ref:`spec-messaging-acks`).

A plaintext has any number of acknowledgements, then one payload at most. The sender waits for the acknowledgement of each
payload before it sends the next one, because Go's programs lose all but the last of several payloads. The receiver
acknowledges each payload once its application has taken it: that is the back-pressure on the sender.
"""

from __future__ import annotations

from collections import deque
from hashlib import sha256
from typing import Final

from dmsg.messaging.core.errors import ChannelEndReason, ChannelFault

_PAYLOAD: Final = b"\x00"
_ACK: Final = b"\x01"
_PAYLOAD_BYTE, _ACK_BYTE = 0, 1
#: Type and number.
PAYLOAD_HEADER_BYTES: Final = 2
#: Type, number and the SHA-256 of the payload.
ACK_BYTES: Final = 2 + 32
#: Acknowledgements that go into one plaintext; more wait for the next one.
ACKS_AT_ONCE: Final = 64
#: Payloads that a peer may have under way: as many as there are numbers, 0 to 254.
UNACKED_LIMIT: Final = 255


class AckLayer:
    """Both directions of one channel."""

    __slots__ = ("_due", "_held", "_sent_hash", "acked_bytes", "waiting_bytes")

    def __init__(self) -> None:
        #: Bytes of payload under way, ``None`` if none is: an empty payload has to be acknowledged, too.
        self.waiting_bytes: int | None = None
        self.acked_bytes = 0
        self._sent_hash = b""
        self._due: deque[bytes] = deque()
        #: Acknowledgements of payloads that the application has not taken yet, each with the bytes left to take.
        self._held: deque[list[int | bytes]] = deque()

    @property
    def has_due(self) -> bool:
        """Whether acknowledgements wait to be sent."""
        return bool(self._due)

    @property
    def is_owing(self) -> bool:
        """Whether payloads have come that are not acknowledged yet: the application has them, or is taking them."""
        return bool(self._due or self._held)

    def wrap(self, data: bytes | None) -> bytes:
        """The next plaintext: acknowledgements that are due, and ``data`` as a payload unless it is ``None``.

        ``data`` may be given only while :attr:`waiting_bytes` is ``None``. The plaintext is longer than ``data`` by
        ``PAYLOAD_HEADER_BYTES`` and :meth:`acks_bytes` at most.
        """
        parts = [self._due.popleft() for _ in range(min(len(self._due), ACKS_AT_ONCE))]
        if data is not None:
            assert self.waiting_bytes is None
            self.waiting_bytes = len(data)
            self._sent_hash = sha256(data).digest()
            # With one payload under way the lowest free number is always 0.
            parts += (_PAYLOAD, b"\x00", data)
        return b"".join(parts)

    def acks_bytes(self) -> int:
        """Bytes of acknowledgements in the next plaintext."""
        return min(len(self._due), ACKS_AT_ONCE) * ACK_BYTES

    def unwrap(self, plaintext: bytes) -> bytes:
        """Take a plaintext of the peer; gives the data of its payload, ``b""`` if there is none.

        Raises ``ChannelFault`` if the plaintext is not well formed, has too many payloads at once, or acknowledges other data
        than was sent.
        """
        at, size = 0, len(plaintext)
        while at < size:
            if size - at < PAYLOAD_HEADER_BYTES:
                raise ChannelFault(ChannelEndReason.MALFORMED)
            kind, number = plaintext[at], plaintext[at + 1]
            if kind == _PAYLOAD_BYTE:
                data = plaintext[at + PAYLOAD_HEADER_BYTES :]
                self._hold(number, data)
                return data
            if kind != _ACK_BYTE or size - at < ACK_BYTES:
                raise ChannelFault(ChannelEndReason.MALFORMED)
            self._take_ack(number, plaintext[at + 2 : at + ACK_BYTES])
            at += ACK_BYTES
        return b""

    def consumed(self, size: int) -> None:
        """The application took ``size`` bytes: payloads that it took as a whole are now to be acknowledged."""
        held = self._held
        while held:
            left, ack = held[0]
            assert isinstance(left, int) and isinstance(ack, bytes)
            if left > size:
                held[0][0] = left - size
                return
            size -= left
            self._due.append(ack)
            held.popleft()

    def _hold(self, number: int, data: bytes) -> None:
        ack = b"".join((_ACK, bytes((number,)), sha256(data).digest()))
        if len(self._held) + len(self._due) >= UNACKED_LIMIT:
            raise ChannelFault(ChannelEndReason.MALFORMED)
        if not data and not self._held:
            self._due.append(ack)
        else:
            self._held.append([len(data), ack])

    def _take_ack(self, number: int, digest: bytes) -> None:
        if self.waiting_bytes is None or number:
            return  # a repeated acknowledgement, or one for a number that was never given, is ignored
        if digest != self._sent_hash:
            raise ChannelFault(ChannelEndReason.INTEGRITY)
        self.acked_bytes += self.waiting_bytes
        self.waiting_bytes = None
