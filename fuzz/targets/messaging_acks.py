"""Acknowledgements in the plaintexts of a messaging channel: two honest ends, and frames of a dishonest end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from hashlib import sha256

from dmsg.messaging.core.ack import ACK_BYTES, ACKS_AT_ONCE, PAYLOAD_HEADER_BYTES, UNACKED_LIMIT, AckLayer
from dmsg.messaging.core.errors import ChannelEndReason, ChannelFault
from fuzz.choices import Choices


class _End:
    """One end: the data it wrote, was given and has taken, and its plaintexts in flight."""

    def __init__(self) -> None:
        self.layer = AckLayer()
        self.payload: bytes | None = None  # in flight and not acknowledged
        self.acked_bytes = 0
        self.untaken: deque[list[int | bytes]] = deque()  # payloads that came: what is left to take, and the whole
        self.due: deque[bytes] = deque()  # acknowledgements that are due
        self.sent: deque[bytes] = deque()

    def send(self, data: bytes | None) -> None:
        """Make the next plaintext; it has a payload only if none is in flight."""
        if self.payload is not None:
            data = None
        acks = [self.due.popleft() for _ in range(min(len(self.due), ACKS_AT_ONCE))]
        assert self.layer.acks_bytes() == len(acks) * ACK_BYTES
        expected = b"".join(acks) + (b"" if data is None else b"\x00\x00" + data)
        plaintext = self.layer.wrap(data)
        assert plaintext == expected
        if data is not None:
            self.payload = data
        if plaintext:
            self.sent.append(plaintext)

    def take(self, plaintext: bytes) -> None:
        """Read a plaintext with the layer and by simple rules; the two must agree."""
        fault, data, acked = self._read(plaintext)
        try:
            given = self.layer.unwrap(plaintext)
        except ChannelFault as error:
            assert error.reason is fault, (error.reason, fault)
            raise
        assert fault is None and given == (data or b"")
        if acked and self.payload is not None:
            self.acked_bytes += len(self.payload)
            self.payload = None
        if data is not None:
            ack = b"\x01" + plaintext[len(plaintext) - len(data) - 1 :][:1] + sha256(data).digest()
            if data or self.untaken:
                self.untaken.append([len(data), ack])
            else:
                self.due.append(ack)

    def _read(self, plaintext: bytes) -> tuple[ChannelEndReason | None, bytes | None, bool]:
        """The reason of a fault, or the payload, and whether our payload is acknowledged."""
        acked = False
        while plaintext:
            if plaintext[0] == 0 and len(plaintext) >= PAYLOAD_HEADER_BYTES:
                crowded = len(self.untaken) + len(self.due) >= UNACKED_LIMIT
                return (ChannelEndReason.MALFORMED if crowded else None), plaintext[PAYLOAD_HEADER_BYTES:], acked
            if plaintext[0] != 1 or len(plaintext) < ACK_BYTES:
                return ChannelEndReason.MALFORMED, None, acked
            if plaintext[1] == 0 and self.payload is not None and not acked:
                if plaintext[2:ACK_BYTES] != sha256(self.payload).digest():
                    return ChannelEndReason.INTEGRITY, None, acked
                acked = True
            plaintext = plaintext[ACK_BYTES:]
        return None, None, acked

    def consume(self, size: int) -> None:
        """The application takes up to ``size`` bytes of what came."""
        size = min(size, sum(int(left) for left, _ in self.untaken))
        self.layer.consumed(size)
        while self.untaken and int(self.untaken[0][0]) <= size:
            left, ack = self.untaken.popleft()
            size -= int(left)
            assert isinstance(ack, bytes)
            self.due.append(ack)
        if self.untaken:
            self.untaken[0][0] = int(self.untaken[0][0]) - size

    def check(self) -> None:
        """The layer's counters are correct."""
        layer = self.layer
        assert layer.waiting_bytes == (None if self.payload is None else len(self.payload))
        assert layer.acked_bytes == self.acked_bytes
        assert layer.has_due == bool(self.due) and layer.is_owing == bool(self.due or self.untaken)
        assert len(self.due) + len(self.untaken) <= UNACKED_LIMIT


def one_input(data: bytes) -> None:
    """Two ends write, take and send; a plaintext may be altered, repeated or made up.

    An end is given the data that was written. An acknowledgement is due exactly when its payload is taken whole. A
    plaintext that is malformed, too much or about another payload raises ``ChannelFault``; nothing else is raised.
    """
    choices = Choices(data)
    ends = _End(), _End()
    for _ in range(400):
        if not choices.left:
            break
        operation = choices.byte()
        end, other = (ends, ends[::-1])[operation >> 7]
        try:
            match operation & 7:
                case 0:
                    end.send(bytes((operation,)) * choices.byte())
                case 1:
                    end.send(None)
                case 2 | 3 if end.sent:
                    other.take(end.sent.popleft())
                case 4:
                    other.consume(choices.byte())
                case 5 if end.sent:
                    plaintext = bytearray(end.sent[0])
                    plaintext[choices.byte() % len(plaintext)] ^= choices.byte()
                    end.sent[0] = bytes(plaintext)
                case 6:
                    for _ in range(1 + (operation >> 3 & 15) * 4):
                        end.sent.append(b"\x00" + bytes((operation,)) + bytes(choices.byte() % 3))
                        other.take(end.sent.pop())
                case _:
                    acks = b"".join(end.due) if operation & 8 else b""
                    other.take(acks + choices.chunk(80))
        except ChannelFault:
            return
        ends[0].check()
        ends[1].check()


def seeds() -> Iterator[bytes]:
    """Payloads both ways, taken whole, in parts and not at all; empty ones; many at once; what is wrong in each way."""
    talk = b"\x00\x20\x02\x04\x10\x04\x10" + b"\x80\x08\x82\x84\xff" + b"\x01\x02"
    yield talk * 4
    yield b"\x00\x00\x02\x81\x82" + b"\x00\x00\x02\x80\x00\x82" + talk
    yield b"\x00\x20\x02\x00\x20\x01" + b"\x04\x08" + b"\x81\x04\xff\x81\x82" + talk
    yield b"\x00\x20\x02" + b"\x0e" + bytes(5) + b"\x81\x04\xff\x81\x82" + talk
    yield (b"\x7e" + b"\x01" * 61) * 2 + b"\x04\xff" + b"\x81\x81\x82\x82" + talk
    yield (b"\x7e" + b"\x00" * 61) * 5 + b"\x81" * 6
    yield b"\x00\x20\x02\x04\xff\x81" + b"\x85\x05\x40\x82"
    yield b"\x00\x20\x02\x04\xff\x81" + b"\x85\x01\x01\x82" + talk
    for wrong in (b"\x01", b"\x02\x00", b"\x01\x00abc", b"\x00", b"\x01\x05" + bytes(32), b"\x01\x00" + bytes(32)):
        yield talk + b"\x00\x20" + b"\x87" + bytes((len(wrong),)) + wrong
    yield b"\x00\x20\x02\x04\xff" + b"\x8f\x00" * 2 + b"\x81\x82" + talk
