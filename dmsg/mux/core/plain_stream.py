"""A stream of the base protocol (:ref:`spec-data`): frames in the clear between its two ends.

Each FWD is acknowledged by its sequence. A CLOSE is the only end there is.
"""

from __future__ import annotations

from dmsg.crypto.keys import PublicKey
from dmsg.mux.core.e2e_handshake import UPGRADE_MAGIC, SecureInitiator, SecureResponder
from dmsg.mux.core.stream import Stream, StreamFault, StreamState
from dmsg.mux.core.window import OUTSTANDING_LIMIT, AckGate, SendWindow
from dmsg.mux.core.wire import ACK, FWD, HEADER, REQUEST_BYTES, SEQUENCE_BYTES, CloseReason, encode_close, encode_frame


class PlainStream(Stream):
    """One end of a base transport, and of every transport whose end-to-end handshake is not complete yet."""

    __slots__ = ("gate", "handshake", "message", "responder", "window")

    security = "hop"
    resumable = False
    half_closes = False

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
        super().__init__(stream_id, remote, request, initiator=initiator, state=state)
        self.window = SendWindow(window_bytes, first_sequence)
        self.gate = AckGate()
        #: The end-to-end handshake: the one that we began, or the peer's once we have read it.
        self.handshake: SecureInitiator | None = None
        self.responder: SecureResponder | None = None
        #: The peer's handshake message, until it is read.
        self.message = request[REQUEST_BYTES:] if not initiator else b""

    @property
    def wants_seal(self) -> bool:
        """Whether the peer's handshake message is here, read or not."""
        return self.responder is not None or bool(self.message)

    # --- sending ---------------------------------------------------------------------------------------------------

    def room_bytes(self) -> int:
        """How many bytes the window has room for, if there is data."""
        return self.window.room_bytes if self.pending.size else 0

    @property
    def drained(self) -> bool:
        """Whether everything written has been acknowledged."""
        return not self.pending and self.window.idle

    @property
    def close_reason(self) -> CloseReason | None:
        """``refused`` after :meth:`drop`, so that data that was cut does not look delivered."""
        if not self.drained:
            return None
        return CloseReason.REFUSED if self.dropped else CloseReason.NORMAL

    def end(self) -> None:
        """Nothing more will be written. The peer learns it from the CLOSE."""

    def next_fwd(self, limit_bytes: int, room_bytes: int = 0) -> tuple[bytes, bytes]:
        """The next FWD as (header and sequence, data)."""
        data = self.pending.take(min(limit_bytes, room_bytes or self.window.room_bytes))
        size = len(data)
        self.sent_bytes += size
        sequence = self.window.send(size)
        return HEADER.pack(FWD, self.id, size + SEQUENCE_BYTES) + sequence.to_bytes(2, "big"), data

    def upgrade_frame(self, message: bytes) -> bytes:
        """A FWD that carries a message of the end-to-end handshake (:ref:`spec-carriers`). It is not acknowledged."""
        return encode_frame(FWD, self.id, self.window.send(0).to_bytes(2, "big") + UPGRADE_MAGIC + message)

    def receive_ack(self, payload: bytes) -> bytes:
        """Take the acknowledgement of one sequence; an unknown or repeated one is ignored."""
        if len(payload) != SEQUENCE_BYTES:
            raise StreamFault(CloseReason.MALFORMED)
        self.acked_bytes += self.window.acknowledge(payload[0] << 8 | payload[1])
        return b""

    # --- receiving -------------------------------------------------------------------------------------------------

    def receive_fwd(self, frames: bytes, start: int, end: int) -> tuple[bytes, bytes]:
        """Take a FWD; its ACK goes out at once unless too much is unread (:ref:`spec-plain-acks`)."""
        if end - start < SEQUENCE_BYTES:
            raise StreamFault(CloseReason.MALFORMED)
        data = frames[start + SEQUENCE_BYTES : end]
        if not self.received_bytes and data.startswith(UPGRADE_MAGIC):
            # the peer goes by our entry, but this listener takes any peer in the clear
            raise StreamFault(CloseReason.UNSUPPORTED)
        self.received_bytes += len(data)
        sequence = frames[start] << 8 | frames[start + 1]
        return data, self.ack_frame(sequence) if self.gate.arrived(sequence, len(data)) else b""

    def consumed(self, size: int) -> bytes:
        """The application took ``size`` bytes: gives the ACKs that were held."""
        released = self.gate.consumed(size)
        return b"".join([self.ack_frame(sequence) for sequence in released]) if released else b""

    @property
    def unread_bytes(self) -> int:
        """Received and not yet taken by the application."""
        return self.gate.unread_bytes

    def drop(self) -> None:
        """Remember that data was dropped: the reason of the CLOSE says so."""
        self.dropped = True

    def overfull(self, limit_bytes: int) -> bool:
        """Whether too much is unread, or too many ACKs are held: they cost memory however little data they stand for."""
        return self.gate.unread_bytes > limit_bytes or len(self.gate.held) > OUTSTANDING_LIMIT

    def ack_frame(self, sequence: int) -> bytes:
        """An ACK frame."""
        return HEADER.pack(ACK, self.id, SEQUENCE_BYTES) + sequence.to_bytes(2, "big")

    def take_ack(self) -> bytes:
        """Nothing: there are no cumulative ACKs."""
        return b""

    # --- the end ---------------------------------------------------------------------------------------------------

    def close_frame(self, reason: int) -> bytes:
        """A CLOSE with its reason."""
        return encode_close(self.id, reason)

    def proves_close(self, payload: bytes) -> bool:
        """Never: base peers cannot say."""
        return False

    def discard(self) -> None:
        """Forget what waits to be sent."""
        self.cut_bytes = self.pending.size + self.window.outstanding_bytes
        self.pending.clear()

    def let_go(self, unread_bytes: int = 0) -> None:
        """Keep nothing but the counts."""
        self.pending.clear()
