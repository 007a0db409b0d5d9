"""The state of one transport at one of its ends: offsets and credits, not a socket.

:ref:`spec-stream-states`. A stream is pure bookkeeping; :class:`~dmsg.mux.core.connection.Connection` moves its frames.
``owner`` is whatever object the shell wants to find again from a stream, usually the Twisted transport. :class:`Stream`
speaks the base protocol, :class:`~dmsg.mux.core.sealed_stream.SecureStream` the sealed one.
"""

from __future__ import annotations

from enum import Enum

from dmsg.crypto.keys import PublicKey
from dmsg.mux.core.e2e import UPGRADE_MAGIC
from dmsg.mux.core.window import OUTSTANDING_LIMIT, AckGate, SendWindow
from dmsg.mux.core.wire import ACK, FWD, HEADER, HEADER_BYTES, SEQUENCE_BYTES, CloseReason, encode_close
from dmsg.sansio.buffer import ByteQueue


class ConnectionState(Enum):
    """Before and after the server's OK."""

    WAITING = "waiting for OK"
    READY = "ready"


class StreamState(Enum):
    """Where a stream is in its life."""

    REQUESTED = "requested"  # our REQUEST is out
    OFFERED = "offered"  # the peer's REQUEST waits for our decision
    UPGRADING = "upgrading"  # accepted in the clear; the first FWD must carry the end-to-end handshake
    CONFIRMING = "confirming"  # sealed, and the initiator has not proved itself yet
    OPEN = "open"
    CLOSING = "closing"  # our application is done; what it wrote is still on its way
    CLOSED = "closed"


#: From each state, where it may go; the state diagram in the documentation is drawn from this.
TRANSITIONS: dict[StreamState, frozenset[StreamState]] = {
    StreamState.REQUESTED: frozenset({StreamState.UPGRADING, StreamState.OPEN, StreamState.CLOSED}),
    StreamState.OFFERED: frozenset(
        {StreamState.UPGRADING, StreamState.CONFIRMING, StreamState.OPEN, StreamState.CLOSED}
    ),
    StreamState.UPGRADING: frozenset({StreamState.CONFIRMING, StreamState.OPEN, StreamState.CLOSED}),
    StreamState.CONFIRMING: frozenset({StreamState.OPEN, StreamState.CLOSED}),
    StreamState.OPEN: frozenset({StreamState.UPGRADING, StreamState.CLOSING, StreamState.CLOSED}),
    StreamState.CLOSING: frozenset({StreamState.CLOSED}),
    StreamState.CLOSED: frozenset(),
}

#: States in which FWD and ACK of the peer mean something.
DATA_STATES = (StreamState.OPEN, StreamState.CLOSING, StreamState.CONFIRMING)


class StreamFault(Exception):
    """A frame that this stream cannot have got from an honest peer over an honest relay; ``code`` is for the CLOSE."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Stream:
    """One end of a transport.

    ``sent_bytes``, ``acked_bytes`` and ``received_bytes`` are offsets in the two byte streams since it opened.
    """

    __slots__ = (
        "ack_due",
        "acked_bytes",
        "blocked",
        "cut_bytes",
        "dropped",
        "end_received",
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
        "was_cut",
        "window",
    )

    security = "hop"

    def __init__(
        self,
        stream_id: int,
        remote: PublicKey,
        request: bytes,
        *,
        initiator: bool,
        window_bytes: int,
        first_sequence: int,
        state: StreamState | None = None,
    ) -> None:
        """Begin in ``state``: requested or offered, unless it stands for a stream that is further on."""
        self.id = stream_id
        self.remote = remote
        self.request = request  # as it was sent or came; its first 66 bytes stand in ACCEPT again
        self.initiator = initiator
        self.state = state or (StreamState.REQUESTED if initiator else StreamState.OFFERED)
        self.owner: object | None = None
        self.pending = ByteQueue()
        self.window = SendWindow(window_bytes, first_sequence)
        self.gate = AckGate()
        self.queued = False  # whether it stands in the connection's queue of streams with something to send
        self.blocked = False  # whether its writer was told to pause
        self.ack_due = False  # whether it stands in the connection's list of streams with something to acknowledge
        self.end_received = False  # whether the peer said, provably, that nothing more comes
        self.sent_bytes = self.acked_bytes = self.received_bytes = 0
        self.cut_bytes = 0  # written and not acknowledged when it ended
        self.dropped = False  # whether data came that our application, which has closed, did not take
        self.was_cut = False  # whether the peer said the same of its application and our data

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.state.value} with {self.remote}>"

    def move(self, state: StreamState) -> None:
        """Go to ``state``; going where ``TRANSITIONS`` does not lead is a bug of ours."""
        assert state in TRANSITIONS[self.state], (self.state, state)
        self.state = state

    # --- sending ---------------------------------------------------------------------------------------------------

    @property
    def sendable(self) -> bool:
        """Whether a FWD could go out now."""
        return self.pending.size > 0 and self.window.room_bytes > 0

    @property
    def drained(self) -> bool:
        """Whether everything written has been acknowledged."""
        return not self.pending and self.window.idle

    @property
    def close_reason(self) -> CloseReason | None:
        """The reason of the CLOSE of a closing stream that has nothing left to wait for; ``None`` if it has to wait.

        It is ``refused`` after :meth:`drop`, so that data that was cut does not look delivered.
        """
        if not self.drained:
            return None
        return CloseReason.REFUSED if self.dropped else CloseReason.NORMAL

    @property
    def end_acked(self) -> bool:
        """Whether the peer has acknowledged the end of our stream. Base streams have no such end."""
        return False

    def end(self) -> None:
        """Nothing more will be written."""

    def next_fwd(self, limit_bytes: int) -> tuple[bytes, bytes]:
        """The next FWD as (header and sequence, data); call only while :attr:`sendable`."""
        data = self.pending.take(min(limit_bytes, self.window.room_bytes))
        size = len(data)
        self.sent_bytes += size
        sequence = self.window.send(size)
        return HEADER.pack(FWD, self.id, size + SEQUENCE_BYTES) + sequence.to_bytes(2, "big"), data

    def receive_ack(self, payload: bytes) -> None:
        """Take the payload of an ACK. Raises ``StreamFault``."""
        if len(payload) != SEQUENCE_BYTES:
            raise StreamFault(CloseReason.MALFORMED)
        self.acked_bytes += self.window.acknowledge(payload[0] << 8 | payload[1])

    # --- receiving -------------------------------------------------------------------------------------------------

    def receive_fwd(self, frames: bytes, start: int, end: int) -> tuple[bytes, bytes]:
        """Take the payload of a FWD, which is ``frames[start:end]``.

        Gives its data and what is to be sent for it at once (an ACK frame or nothing). Raises ``StreamFault``.
        """
        if end - start < SEQUENCE_BYTES:
            raise StreamFault(CloseReason.MALFORMED)
        data = frames[start + SEQUENCE_BYTES : end]
        if not self.received_bytes and data.startswith(UPGRADE_MAGIC):
            # a peer that trusts our entry more than this listener, which takes everybody in the clear
            raise StreamFault(CloseReason.UNSUPPORTED)
        self.received_bytes += len(data)
        sequence = frames[start] << 8 | frames[start + 1]
        return data, self.ack_frame(sequence) if self.gate.arrived(sequence, len(data)) else b""

    def consumed(self, size: int) -> bytes:
        """The application took ``size`` bytes; gives what is to be sent because of it."""
        released = self.gate.consumed(size)
        return b"".join([self.ack_frame(sequence) for sequence in released]) if released else b""

    @property
    def unread_bytes(self) -> int:
        """Received and not yet taken by the application."""
        return self.gate.unread_bytes

    def drop(self) -> None:
        """Data that came is not given to the application, because it has closed the stream."""
        self.dropped = True

    def overfull(self, limit_bytes: int) -> bool:
        """Whether more has come than an honest peer would send to somebody who does not read.

        Held acknowledgements cost memory however little data they stand for.
        """
        return self.gate.unread_bytes > limit_bytes or len(self.gate.held) > OUTSTANDING_LIMIT

    def ack_frame(self, sequence: int) -> bytes:
        """An ACK frame."""
        return HEADER.pack(ACK, self.id, SEQUENCE_BYTES) + sequence.to_bytes(2, "big")

    def close_frame(self, reason: int) -> bytes:
        """The CLOSE frame of this stream."""
        return encode_close(self.id, reason)

    def proves_close(self, payload: bytes) -> bool:
        """Whether the peer itself, and not only the relay, sent a CLOSE with ``payload``. Base peers cannot say."""
        return False

    def discard(self) -> None:
        """The stream is over: forget what waits to be sent."""
        self.cut_bytes = self.pending.size + self.window.outstanding_bytes
        self.pending.clear()

    def let_go(self) -> None:
        """The transport is over: keep nothing but the counts."""
        self.pending.clear()

    def take_ack(self) -> bytes:
        """The cumulative ACK that is due; base streams have none."""
        return b""


#: What a FWD costs besides its data.
FWD_OVERHEAD_BYTES = HEADER_BYTES + SEQUENCE_BYTES
