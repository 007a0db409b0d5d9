"""The state of one transport at one of its ends: offsets and credits, not a socket.

A stream is pure bookkeeping; :class:`~dmsg.mux.connection.Connection` moves its frames. ``owner`` is whatever object
the shell wants to find again from a stream, usually the Twisted transport.
"""

from __future__ import annotations

from enum import Enum

from dmsg.crypto.keys import PublicKey
from dmsg.mux.wire import ACK, FWD, HEADER, HEADER_BYTES, SEQUENCE_BYTES
from dmsg.sansio.buffer import ByteQueue
from dmsg.sansio.window import AckGate, SendWindow


class StreamState(Enum):
    """Where a stream is in its life."""

    REQUESTED = "requested"  # our REQUEST is out
    OFFERED = "offered"  # the peer's REQUEST waits for our decision
    OPEN = "open"
    CLOSING = "closing"  # our application is done; what it wrote is still on its way
    CLOSED = "closed"


#: From each state, where it may go; the state diagram in the documentation is drawn from this.
TRANSITIONS: dict[StreamState, frozenset[StreamState]] = {
    StreamState.REQUESTED: frozenset({StreamState.OPEN, StreamState.CLOSED}),
    StreamState.OFFERED: frozenset({StreamState.OPEN, StreamState.CLOSED}),
    StreamState.OPEN: frozenset({StreamState.CLOSING, StreamState.CLOSED}),
    StreamState.CLOSING: frozenset({StreamState.CLOSED}),
    StreamState.CLOSED: frozenset(),
}


class Stream:
    """One end of a transport.

    ``sent_bytes``, ``acked_bytes`` and ``received_bytes`` are offsets in the two byte streams since it opened.
    """

    __slots__ = (
        "acked_bytes",
        "blocked",
        "gate",
        "id",
        "initiator",
        "owner",
        "pending",
        "queued",
        "received_bytes",
        "remote",
        "request",
        "sent_bytes",
        "state",
        "window",
    )

    def __init__(
        self,
        stream_id: int,
        remote: PublicKey,
        request: bytes,
        *,
        initiator: bool,
        window_bytes: int,
        first_sequence: int,
    ) -> None:
        self.id = stream_id
        self.remote = remote
        self.request = request  # the 66 bytes that ACCEPT must repeat
        self.initiator = initiator
        self.state = StreamState.REQUESTED if initiator else StreamState.OFFERED
        self.owner: object | None = None
        self.pending = ByteQueue()
        self.window = SendWindow(window_bytes, first_sequence)
        self.gate = AckGate()
        self.queued = False  # whether it stands in the connection's queue of streams with something to send
        self.blocked = False  # whether its writer was told to pause
        self.sent_bytes = self.acked_bytes = self.received_bytes = 0

    def __repr__(self) -> str:
        return f"<Stream {self.id} {self.state.value} with {self.remote}>"

    def move(self, state: StreamState) -> None:
        """Go to ``state``; going where ``TRANSITIONS`` does not lead is a bug of ours."""
        assert state in TRANSITIONS[self.state], (self.state, state)
        self.state = state

    @property
    def sendable(self) -> bool:
        """Whether a FWD could go out now."""
        return len(self.pending) > 0 and self.window.room_bytes > 0

    @property
    def drained(self) -> bool:
        """Whether everything written has been acknowledged."""
        return not self.pending and self.window.idle

    def next_fwd(self, limit_bytes: int) -> tuple[bytes, bytes]:
        """The next FWD as (header and sequence, data); call only while :attr:`sendable`."""
        data = self.pending.take(min(limit_bytes, self.window.room_bytes))
        size = len(data)
        self.sent_bytes += size
        sequence = self.window.send(size)
        return HEADER.pack(FWD, self.id, size + SEQUENCE_BYTES) + sequence.to_bytes(2, "big"), data

    def on_fwd(self, sequence: int, size: int) -> bytes:
        """Note ``size`` bytes received under ``sequence``; gives the ACK frame to send now, or nothing."""
        self.received_bytes += size
        return self.ack_frame(sequence) if self.gate.arrived(sequence, size) else b""

    def on_ack(self, sequence: int) -> None:
        """Note an acknowledgement."""
        self.acked_bytes += self.window.acknowledge(sequence)

    def ack_frame(self, sequence: int) -> bytes:
        """An ACK frame."""
        return HEADER.pack(ACK, self.id, SEQUENCE_BYTES) + sequence.to_bytes(2, "big")


#: What a FWD costs besides its data.
FWD_OVERHEAD_BYTES = HEADER_BYTES + SEQUENCE_BYTES
