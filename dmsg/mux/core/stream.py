"""The state of one transport at one of its ends: offsets and credits, not a socket.

:ref:`spec-stream-states`. A stream is pure bookkeeping; :class:`~dmsg.mux.core.connection.Connection` moves its frames.
Here is the common part; :class:`~dmsg.mux.core.plain_stream.PlainStream` speaks the base protocol,
:class:`~dmsg.mux.core.sealed_stream.SealedStream` the sealed one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Final

from dmsg.crypto.keys import PublicKey
from dmsg.errors import DmsgError, LocalProtocolError
from dmsg.mux.core.e2e_handshake import Resume
from dmsg.mux.core.wire import HEADER_BYTES, RECORD_PLAINTEXT_LIMIT_BYTES, SEQUENCE_BYTES, CloseReason
from dmsg.sansio.buffer import ByteQueue


class ConnectionState(Enum):
    """Before and after the server's OK."""

    WAITING = "waiting for OK"
    READY = "ready"


class StreamState(Enum):
    """Where a stream is in its life."""

    __hash__ = object.__hash__  # identity is enough, and the hash of Enum is a function in Python

    REQUESTED = "requested"  # our REQUEST is out
    OFFERED = "offered"  # the peer's REQUEST waits for our decision
    UPGRADING = "upgrading"  # accepted in the clear; the first FWD must carry the end-to-end handshake
    CONFIRMING = "confirming"  # sealed, and the initiator has not proved itself yet
    OPEN = "open"
    CLOSING = "closing"  # our application has closed; what it wrote is still on its way
    CLOSED = "closed"


#: The states that may follow each state; the state diagram in the documentation is drawn from this.
TRANSITIONS: dict[StreamState, frozenset[StreamState]] = {
    StreamState.REQUESTED: frozenset({StreamState.UPGRADING, StreamState.OPEN, StreamState.CLOSED}),
    StreamState.OFFERED: frozenset(
        {StreamState.UPGRADING, StreamState.CONFIRMING, StreamState.OPEN, StreamState.CLOSED}
    ),
    StreamState.UPGRADING: frozenset({StreamState.CONFIRMING, StreamState.OPEN, StreamState.CLOSED}),
    StreamState.CONFIRMING: frozenset({StreamState.OPEN, StreamState.CLOSED}),
    StreamState.OPEN: frozenset({StreamState.CLOSING, StreamState.CLOSED}),
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


class StreamOwner:
    """The owner of a stream, for example a Twisted transport. The core never calls it.

    Each method reports a fact; by default the fact is ignored.
    """

    def deliver(self, data: bytes) -> None:
        """Bytes came."""

    def ended(self, code: int, *, local: bool, proven: bool = False, detail: str = "") -> None:
        """The stream is over; ``proven`` says that the peer itself signed off, not only the relay.

        ``detail`` says what this side found wrong.
        """

    def lost(self, error: DmsgError, code: int) -> None:
        """The connection that carried the stream is gone."""

    def opened(self, stream: Stream, resume: Resume | None) -> None:
        """The requested stream is open; see :class:`~dmsg.mux.core.events.StreamOpened`."""

    def upgraded(self) -> None:
        """The peer's handshake message came after our ACCEPT."""

    def confirmed(self) -> None:
        """The peer has proved itself."""

    def crowded_out(self) -> None:
        """A later attempt to resume the same transport has taken the place of this one."""

    def end_received(self) -> None:
        """Nothing more will come."""

    def end_acked(self) -> None:
        """Everything that was sent has arrived, its end included."""

    def writable(self) -> None:
        """More may be written."""


#: The owner of streams that have none.
UNOWNED: Final = StreamOwner()


@dataclass(slots=True)
class Backlog:
    """What a path leaves to the next one of its transport (:ref:`spec-resume-offsets`)."""

    #: The data of each frame sent and not acknowledged. It begins at the offset up to which the peer has acknowledged.
    unacknowledged: list[bytes]
    #: The offset up to which data was sent on this path and on earlier ones; some of it may be pending again.
    sent_bytes: int
    unread_bytes: int
    #: The largest window that was announced to the peer; 0 if none was.
    given_bytes: int
    end_wanted: bool

    def send_again(self, pending: ByteQueue, not_sent: ByteQueue, skip: int) -> None:
        """Append to ``pending`` what was not acknowledged, then what was ``not_sent``, without the first ``skip`` bytes."""
        for data in self.unacknowledged:
            if skip >= len(data):
                skip -= len(data)
            else:
                pending.append(data[skip:])
                skip = 0
        while skip:  # the peer has these from an even earlier path; they waited to be sent again
            skip -= len(not_sent.take(skip))
        while not_sent:
            pending.append(not_sent.take(1 << 20))


class Stream(ABC):
    """One end of a transport on one path.

    ``sent_bytes``, ``acked_bytes`` and ``received_bytes`` are offsets in the two byte streams since it opened.
    """

    __slots__ = (
        "ack_due",
        "acked_bytes",
        "blocked",
        "cut_bytes",
        "dropped",
        "end_received",
        "ended_before",
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
        "token",
        "was_cut",
    )

    #: ``"e2e"``, or ``"hop"``: encrypted on the way to the relay and from it.
    security: ClassVar[str]
    #: Whether its transport can go on over another path; then a CLOSE may come from the relay alone.
    resumable: ClassVar[bool]
    #: Whether each direction has an end of its own.
    half_closes: ClassVar[bool]

    def __init__(
        self, stream_id: int, remote: PublicKey, request: bytes, *, initiator: bool, state: StreamState | None = None
    ) -> None:
        """Begin in ``state``: requested or offered, unless it replaces a stream that is further on."""
        self.id = stream_id
        self.remote = remote
        self.request = request  # as sent or received; ACCEPT repeats its first 66 bytes
        self.initiator = initiator
        self.state = state or (StreamState.REQUESTED if initiator else StreamState.OFFERED)
        self.owner: StreamOwner = UNOWNED
        self.token = b""  # names the transport when it goes on over another path
        self.pending = ByteQueue()
        self.queued = False  # whether it stands in the connection's queue of streams with something to send
        self.blocked = False  # whether its writer was told to pause
        self.ack_due = False  # whether received data has to be acknowledged, now or soon
        self.end_received = False  # whether the peer said, provably, that nothing more comes
        self.ended_before = False  # whether it said so on an earlier path: then it repeats that, and sends nothing new
        self.sent_bytes = self.acked_bytes = self.received_bytes = 0
        self.cut_bytes = 0  # written and not acknowledged when it ended
        self.dropped = False  # whether data was dropped because our application had closed
        self.was_cut = False  # whether the peer said that it dropped our data for the same reason

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.state.value} with {self.remote}>"

    def move(self, state: StreamState) -> None:
        """Go to ``state``; going where ``TRANSITIONS`` does not lead is a bug of ours."""
        assert state in TRANSITIONS[self.state], (self.state, state)
        self.state = state

    # --- sending ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def room_bytes(self) -> int:
        """How much data a FWD could carry now; not positive if none could go out."""

    @property
    def sendable(self) -> bool:
        """Whether a FWD could go out now."""
        return self.room_bytes() > 0

    @property
    @abstractmethod
    def drained(self) -> bool:
        """Whether everything written, and the end if there is one, has been acknowledged."""

    @property
    @abstractmethod
    def close_reason(self) -> CloseReason | None:
        """The reason of the CLOSE of a closing stream that has nothing left to wait for; ``None`` if it has to wait."""

    @property
    def end_acked(self) -> bool:
        """Whether the peer has acknowledged our end of the stream, and with it everything before."""
        return False

    @property
    def end_wanted(self) -> bool:
        """Whether our side has nothing more to write."""
        return False

    @property
    def complete(self) -> bool:
        """Whether nothing is missing on either side, even if the peer has not said that it knows our end."""
        return False

    @abstractmethod
    def end(self) -> None:
        """Nothing more will be written."""

    @abstractmethod
    def next_fwd(self, limit_bytes: int, room_bytes: int = 0) -> tuple[bytes, bytes]:
        """The next FWD in two pieces, whose payload is at most ``limit_bytes``; call only while :attr:`sendable`.

        ``room_bytes`` is what :meth:`room_bytes` gave, if that was just asked for.
        """

    @property
    def record_bytes(self) -> int:
        """The size limit of records with data of this stream: on a slow path, other streams would wait for a long record."""
        return RECORD_PLAINTEXT_LIMIT_BYTES

    def wait(self) -> None:
        """Data waits until an acknowledgement comes."""
        return

    def take_waiting(self) -> Sequence[Stream]:
        """Other streams that may go on because of what was acknowledged."""
        return ()

    @abstractmethod
    def receive_ack(self, payload: bytes) -> bytes:
        """Take the payload of an ACK; gives the data that came with it. Raises ``StreamFault``."""

    @property
    def again_bytes(self) -> int:
        """Bytes sent on an earlier path that wait to be sent again; they do not count against the writer."""
        return 0

    # --- receiving -------------------------------------------------------------------------------------------------

    @abstractmethod
    def receive_fwd(self, frames: bytes, start: int, end: int) -> tuple[bytes, bytes]:
        """Take the payload of a FWD, which is ``frames[start:end]``.

        Gives its data and what is to be sent for it at once (an ACK frame or nothing). Raises ``StreamFault``.
        """

    @abstractmethod
    def consumed(self, size: int) -> bytes:
        """The application took ``size`` bytes; gives what is to be sent because of it."""

    @property
    @abstractmethod
    def unread_bytes(self) -> int:
        """Received and not yet taken by the application."""

    @abstractmethod
    def drop(self) -> None:
        """Received data is dropped, because the application has closed the stream."""

    @abstractmethod
    def overfull(self, limit_bytes: int) -> bool:
        """Whether more has come than an honest peer would send to an end that does not read."""

    @property
    def ack_may_wait(self) -> bool:
        """Whether the ACK that is due may wait for data to go along with."""
        return False

    @abstractmethod
    def take_ack(self) -> bytes:
        """The cumulative ACK that is due; base streams have none."""

    # --- the end ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def close_frame(self, reason: int) -> bytes:
        """The CLOSE frame of this stream."""

    @abstractmethod
    def proves_close(self, payload: bytes) -> bool:
        """Whether the peer itself, and not only the relay, sent a CLOSE with ``payload``."""

    @abstractmethod
    def discard(self) -> None:
        """The path is over: count what is cut off, and keep only what another path may send."""

    @abstractmethod
    def let_go(self, unread_bytes: int = 0) -> None:
        """The transport is over, or goes on elsewhere: keep nothing but the counts.

        ``unread_bytes`` received bytes still wait for the application; this is called again when they do not.
        """

    # --- another path ----------------------------------------------------------------------------------------------

    @property
    def resume_bytes(self) -> int:
        """How many bytes to claim as received when another path is made (:ref:`spec-resume-offsets`)."""
        return self.received_bytes

    def backlog(self) -> Backlog:
        """What another path has to take over. Raises ``LocalProtocolError`` unless :attr:`resumable`."""
        raise LocalProtocolError(f"{self!r} cannot go on over another path")

    def go_on_from(self, earlier: Stream, peer_received_bytes: int, told_bytes: int) -> None:
        """Take over what ``earlier`` carried; ``earlier`` keeps nothing but its counts.

        The peer has received ``peer_received_bytes``. We told it that we had ``told_bytes``, and may have received more on
        the old path since. Raises ``StreamFault`` when the peer's claim is impossible, and ``LocalProtocolError`` unless
        :attr:`resumable`.
        """
        raise LocalProtocolError(f"{self!r} cannot go on from another path")


#: What a FWD costs besides its data.
FWD_OVERHEAD_BYTES = HEADER_BYTES + SEQUENCE_BYTES
