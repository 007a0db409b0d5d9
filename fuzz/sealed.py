"""Both ends of a sealed stream with known keys, and the frames in flight between them."""

from __future__ import annotations

import hashlib
from collections import deque

from dmsg.mux.core.e2e_handshake import SecureKeys
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.sealed_stream import SealedStream
from dmsg.mux.core.stream import StreamState
from dmsg.mux.core.wire import ACK, FWD, HEADER, HEADER_BYTES
from fuzz.oracles import KEYS

WINDOW_BYTES = 2_000
ACK_LIMIT_BYTES = 500
#: The text that is written: every byte shows where it came from.
TEXT = hashlib.shake_128(b"text").digest(1 << 16)


def make_end(side: int, path: int, *, state: StreamState = StreamState.OPEN) -> SealedStream:
    """The end of ``side`` (0 dialled) of the path of that number."""
    keys, hashes = ([hashlib.sha256(b"%s %d %d" % (what, path, n)).digest() for n in (0, 1)] for what in (b"k", b"h"))
    base = PlainStream(5, KEYS[0].public_key, b"", initiator=side == 0, window_bytes=1, first_sequence=0)
    secure = SecureKeys(keys[side], keys[1 - side], hashes[side], hashes[1 - side], b"t" * 16)
    stream = SealedStream(base, secure, window_bytes=WINDOW_BYTES, ack_limit_bytes=ACK_LIMIT_BYTES)
    stream.state = state
    return stream


class Party:
    """One application: the data it wrote, was given and has read; and its frames in flight."""

    def __init__(self, side: int) -> None:
        self.side = side
        self.stream = make_end(side, 0)
        self.written = 0
        self.received = b""
        self.read = 0
        self.sent: deque[bytes] = deque()

    def write(self, size: int) -> None:
        """Write the next bytes of the text."""
        data = TEXT[self.written : self.written + size]
        if data and not self.stream.end_wanted:
            self.written += len(data)
            self.stream.pending.append(data)

    def consume(self, size: int) -> None:
        """Read received data."""
        size = min(size, len(self.received) - self.read)
        if size:
            self.read += size
            self.stream.consumed(size)

    def send(self, limit: int) -> None:
        """Send the next frame: an ACK that is due, alone if ``limit`` is odd, or a FWD."""
        stream = self.stream
        if stream.ack_due and (limit % 2 or not stream.sendable):
            self.sent.append(stream.take_ack())
        elif stream.sendable:
            header, sealed = stream.next_fwd(limit)
            assert len(sealed) <= limit + 2
            self.sent.append(header + sealed)

    def take(self, frame: bytes) -> None:
        """Take a frame as a connection does; raises ``StreamFault``."""
        kind, _, _ = HEADER.unpack_from(frame)
        if kind == FWD:
            data, answer = self.stream.receive_fwd(frame, HEADER_BYTES, len(frame))
            assert not answer
            self.received += data
        elif kind == ACK:
            self.received += self.stream.receive_ack(frame[HEADER_BYTES:])
        else:
            self.stream.proves_close(frame[HEADER_BYTES:])

    def check(self, other: Party) -> None:
        """Check the invariants between any two operations."""
        stream = self.stream
        assert TEXT.startswith(self.received) and len(self.received) <= other.written
        assert stream.acked_bytes <= stream.sent_bytes <= self.written
        assert stream.acked_bytes <= len(other.received)
        assert stream.unread_bytes == len(self.received) - self.read
        assert stream._outstanding_bytes == sum(len(data) for _, data, _, _ in stream._outstanding) <= WINDOW_BYTES
        assert stream.unread_bytes <= WINDOW_BYTES + ACK_LIMIT_BYTES
        assert not stream.end_received or (other.stream.end_wanted and len(self.received) == other.written)
        assert stream.pending.size + stream.sent_bytes >= self.written or stream.sent_bytes <= self.written
