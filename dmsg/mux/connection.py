"""A client's sealed connection to a server: frames in, streams multiplexed, frames out.

Protocol notes, sections 2 to 6.

Pure. ``send_data`` queues, ``data_to_send`` turns what the windows allow into frames and packs them into records, one
frame of each stream in turn; ``receive_data`` does the reverse.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dmsg.crypto.keys import PublicKey, Random
from dmsg.errors import Busy, InvalidKey, LocalProtocolError, RemoteProtocolError
from dmsg.mux.events import Accepted, DataReceived, Event, Ready, Rejected, RequestReceived, StreamClosed
from dmsg.mux.record import RecordLayer
from dmsg.mux.stream import Stream, StreamState
from dmsg.mux.tlv import Tlv, decode_tlvs
from dmsg.mux.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    FWD,
    OK,
    REQUEST,
    REQUEST_BYTES,
    SEQUENCE_BYTES,
    CloseReason,
    close_reason,
    encode_close,
    encode_frame,
    split_frames,
)
from dmsg.sansio.limits import RecentSet
from dmsg.sansio.window import OUTSTANDING_LIMIT


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """Limits of a client's connection, each with its unit."""

    #: Unacknowledged bytes a stream may have under way (D20).
    send_window_bytes: int = 256 * 1024
    #: Data in one FWD: two of them fill a record, and no stream waits long behind another.
    frame_data_bytes: int = 32_750
    #: Unread bytes a stream may hold before its peer is closed as misbehaving (D19, W10).
    receive_limit_bytes: int = 4 * 1024 * 1024
    #: Written and not yet framed: the writer is told to pause above the first and to go on below the second.
    pause_bytes: int = 64 * 1024
    resume_bytes: int = 32 * 1024
    #: A writer that does not heed the pause is cut off here.
    pending_limit_bytes: int = 64 * 1024 * 1024
    #: Sealed at once; the network takes it before the next lot is made.
    flush_bytes: int = 128 * 1024
    #: Frames that answer the server, waiting for the network: above this, reading stops.
    control_limit_bytes: int = 256 * 1024
    ok_timeout_s: float = 10.0
    #: Offered streams that wait for a decision.
    offered_limit: int = 1_024


class ConnectionState(Enum):
    """Before and after the server's OK."""

    WAITING = "waiting for OK"
    READY = "ready"


class Connection:
    """The client's end of a connection, from the end of the handshake on."""

    _RECENT_IDS: Final = 4_096

    def __init__(
        self,
        identity: PublicKey,
        records: RecordLayer,
        *,
        now: float,
        config: ConnectionConfig = ConnectionConfig(),
        random: Random = os.urandom,
    ) -> None:
        self.identity = identity
        self.config = config
        self.state = ConnectionState.WAITING
        self.streams: dict[int, Stream] = {}
        #: Streams whose writer may go on; the shell empties this after every flush.
        self.writable: list[Stream] = []
        self._records = records
        self._random = random
        self._deadline: float | None = now + config.ok_timeout_s
        self._tail = b""
        self._control: list[bytes] = []
        self._control_bytes = 0
        self._sending: deque[Stream] = deque()
        self._recent: RecentSet[int] = RecentSet(self._RECENT_IDS)
        self._next_id = int.from_bytes(random(2), "big") & ~1
        self._offered = 0

    # --- what the application asks for -----------------------------------------------------------------------------

    @property
    def worn(self) -> bool:
        """Whether the record counters are so far on that this connection should be replaced when idle."""
        return self._records.worn

    def open(self, remote: PublicKey) -> Stream:
        """Send a REQUEST to ``remote``; :class:`Accepted` or :class:`StreamClosed` follows.

        Raises ``Busy`` when all 32,768 ids are taken (D10).
        """
        if self.state is not ConnectionState.READY:
            raise LocalProtocolError("the server has not admitted this connection yet")
        request = self.identity.raw + remote.raw
        stream = self._new_stream(self._free_id(), remote, request, initiator=True)
        self._emit(encode_frame(REQUEST, stream.id, request))
        return stream

    def accept(self, stream: Stream) -> None:
        """Answer an offered stream with ACCEPT."""
        if stream.state is not StreamState.OFFERED:
            raise LocalProtocolError(f"{stream!r} is not waiting for a decision")
        stream.move(StreamState.OPEN)
        self._offered -= 1
        self._emit(encode_frame(ACCEPT, stream.id, stream.request))

    def send_data(self, stream: Stream, data: bytes) -> bool:
        """Queue ``data``; ``True`` asks the writer to pause until the stream shows up in :attr:`writable`.

        Raises ``Busy`` when the writer has not heeded that for ``pending_limit_bytes``.
        """
        if stream.state is not StreamState.OPEN:
            raise LocalProtocolError(f"{stream!r} takes no data")
        pending = stream.pending
        pending.append(data)
        if not stream.queued:
            stream.queued = True
            self._sending.append(stream)
        if len(pending) <= self.config.pause_bytes:
            return False
        if len(pending) > self.config.pending_limit_bytes:
            raise Busy("more was written than may wait to be sent", by="local")
        stream.blocked = True
        return True

    def consumed(self, stream: Stream, size: int) -> None:
        """The application took ``size`` bytes of what :class:`DataReceived` brought: acknowledgements may follow."""
        released = stream.gate.consumed(size)
        if released and stream.state is not StreamState.CLOSED:
            for sequence in released:
                self._emit(stream.ack_frame(sequence))

    def close(self, stream: Stream) -> bool:
        """End ``stream`` once everything written is acknowledged; ``True`` if it is over right now.

        Otherwise a :class:`StreamClosed` comes later. What arrives meanwhile is acknowledged and dropped.
        """
        if stream.state is StreamState.OPEN:
            stream.move(StreamState.CLOSING)
        if stream.state is StreamState.CLOSING and stream.drained:
            self._finish(stream, CloseReason.NORMAL)
        return stream.state is StreamState.CLOSED

    def abort(self, stream: Stream, reason: int = CloseReason.NORMAL) -> None:
        """End ``stream`` now, or refuse an offer: what is not sent is dropped, CLOSE with ``reason`` goes out."""
        if stream.state is not StreamState.CLOSED:
            self._finish(stream, reason)

    # --- towards the network ---------------------------------------------------------------------------------------

    @property
    def wants_write(self) -> bool:
        """Whether :meth:`data_to_send` would give anything."""
        return bool(self._control) or bool(self._sending)

    @property
    def overloaded(self) -> bool:
        """Whether so many answers wait for the network that reading should stop."""
        return self._control_bytes > self.config.control_limit_bytes

    def data_to_send(self) -> bytes:
        """Sealed records with everything that answers the server, then FWDs of the streams in turn."""
        parts = self._control
        sending = self._sending
        if not parts and not sending:
            return b""
        budget = self.config.flush_bytes - self._control_bytes
        self._control = []
        self._control_bytes = 0
        limit = self.config.frame_data_bytes
        resume = self.config.resume_bytes
        while sending and budget > 0:
            stream = sending.popleft()
            if not stream.sendable:
                stream.queued = False
                continue
            head, data = stream.next_fwd(limit)
            parts.append(head)
            parts.append(data)
            budget -= len(data)
            if stream.sendable:
                sending.append(stream)
            else:
                stream.queued = False
            if stream.blocked and len(stream.pending) <= resume:
                stream.blocked = False
                self.writable.append(stream)
        return self._records.seal(b"".join(parts)) if parts else b""

    # --- from the network ------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """Take bytes from the network. ``RemoteProtocolError`` means that the connection must be dropped."""
        events: list[Event] = []
        try:
            for record in self._records.open(data):
                plaintext = self._tail + record if self._tail else record
                frames, used = split_frames(plaintext)
                self._tail = plaintext[used:]
                for kind, stream_id, start, end in frames:
                    stream = self.streams.get(stream_id)
                    if kind == FWD and stream is not None:
                        self._on_fwd(stream, plaintext, start, end, events)
                    elif kind == ACK and stream is not None:
                        self._on_ack(stream, plaintext[start:end], events)
                    else:
                        self._on_rare_frame(kind, stream_id, stream, plaintext[start:end], events)
        except RemoteProtocolError as error:
            error.events = events  # they have happened, whatever came after them
            raise
        return events

    def _on_fwd(self, stream: Stream, plaintext: bytes, start: int, end: int, events: list[Event]) -> None:
        data_start = start + SEQUENCE_BYTES
        if data_start > end or stream.state not in _DATA_STATES:
            self._fail(stream, CloseReason.MALFORMED, events)
            return
        size = end - data_start
        ack = stream.on_fwd(plaintext[start] << 8 | plaintext[start + 1], size)
        if ack:
            self._emit(ack)
        if stream.state is StreamState.CLOSING:
            self.consumed(stream, size)
        elif stream.gate.unread_bytes > self.config.receive_limit_bytes or (
            not ack and len(stream.gate.held) > OUTSTANDING_LIMIT  # each costs memory, however little it carries
        ):
            self._fail(stream, CloseReason.SLOW_CONSUMER, events)
        elif size:
            events.append(DataReceived(stream, plaintext[data_start:end]))

    def _on_ack(self, stream: Stream, payload: bytes, events: list[Event]) -> None:
        if len(payload) != SEQUENCE_BYTES or stream.state not in _DATA_STATES:
            self._fail(stream, CloseReason.MALFORMED, events)
            return
        stream.on_ack(payload[0] << 8 | payload[1])
        if stream.pending:
            if not stream.queued:
                stream.queued = True
                self._sending.append(stream)
        elif stream.state is StreamState.CLOSING and stream.window.idle:
            self._finish(stream, CloseReason.NORMAL)
            events.append(StreamClosed(stream, CloseReason.NORMAL, local=True))

    def _on_rare_frame(
        self, kind: int, stream_id: int, stream: Stream | None, payload: bytes, events: list[Event]
    ) -> None:
        if kind == OK:
            self._on_ok(payload, events)
        elif kind == REQUEST:
            self._on_request(stream_id, stream, payload, events)
        elif stream is None and self.state is ConnectionState.WAITING and stream_id not in self._recent:
            raise RemoteProtocolError("frame", "frame before OK")
        elif stream is None:
            # A CLOSE is never answered with a CLOSE, nor is what was under way when we closed (D16).
            if kind != CLOSE and stream_id not in self._recent:
                self._emit(encode_close(stream_id, CloseReason.NORMAL))
        elif kind == CLOSE:
            self._forget(stream)
            events.append(StreamClosed(stream, close_reason(payload), local=False))
        elif kind == ACCEPT:
            if stream.state is StreamState.REQUESTED and payload == stream.request:
                stream.move(StreamState.OPEN)
                events.append(Accepted(stream))
            else:
                self._fail(stream, CloseReason.MALFORMED, events)

    def _on_ok(self, payload: bytes, events: list[Event]) -> None:
        if self.state is not ConnectionState.WAITING:
            raise RemoteProtocolError("frame", "second OK")
        self._deadline = None
        try:
            reason = decode_tlvs(payload).get(Tlv.REASON)
        except RemoteProtocolError:
            reason = None  # base peers do not look at the payload of OK, whatever it is
        if reason is not None:
            events.append(Rejected(reason.decode("utf-8", "replace")[:200]))
            return
        self.state = ConnectionState.READY
        events.append(Ready())

    def _on_request(self, stream_id: int, stream: Stream | None, payload: bytes, events: list[Event]) -> None:
        # Legal before OK: a base server makes the client reachable before it says OK (D1, W12).
        if stream is not None:
            raise RemoteProtocolError("frame", "REQUEST for an id in use")
        if stream_id % 2 == 0:
            self._emit(encode_close(stream_id, CloseReason.BAD_ID))
            return
        try:
            if len(payload) != REQUEST_BYTES or payload[33:] != self.identity.raw:
                raise InvalidKey("not for us")
            remote = PublicKey(payload[:33])
        except InvalidKey:
            self._emit(encode_close(stream_id, CloseReason.MALFORMED))
            return
        if self._offered >= self.config.offered_limit:
            self._emit(encode_close(stream_id, CloseReason.BUSY))
            return
        self._recent.discard(stream_id)
        self._offered += 1
        events.append(RequestReceived(self._new_stream(stream_id, remote, payload, initiator=False)))

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timeout(self) -> float | None:
        """When OK has been waited for too long."""
        return self._deadline

    def handle_timeout(self, now: float) -> list[Event]:
        """Raises ``RemoteProtocolError`` when no OK came in time (D1)."""
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            raise RemoteProtocolError("handshake", "no OK in time")
        return []

    # --- bookkeeping -----------------------------------------------------------------------------------------------

    def _emit(self, frame: bytes) -> None:
        self._control.append(frame)
        self._control_bytes += len(frame)

    def _free_id(self) -> int:
        for _ in range(1 << 15):
            stream_id = self._next_id
            self._next_id = (stream_id + 2) & 0xFFFF
            if stream_id not in self.streams:
                self._recent.discard(stream_id)
                return stream_id
        raise Busy("all transport ids of this connection are taken", by="local")

    def _new_stream(self, stream_id: int, remote: PublicKey, request: bytes, *, initiator: bool) -> Stream:
        stream = Stream(
            stream_id,
            remote,
            request,
            initiator=initiator,
            window_bytes=self.config.send_window_bytes,
            first_sequence=int.from_bytes(self._random(2), "big"),
        )
        self.streams[stream_id] = stream
        return stream

    def _finish(self, stream: Stream, reason: int) -> None:
        self._forget(stream)
        self._emit(encode_close(stream.id, reason))

    def _fail(self, stream: Stream, reason: int, events: list[Event]) -> None:
        self._finish(stream, reason)
        events.append(StreamClosed(stream, reason, local=True))

    def _forget(self, stream: Stream) -> None:
        if stream.state is StreamState.OFFERED:
            self._offered -= 1
        stream.move(StreamState.CLOSED)
        stream.pending.clear()
        del self.streams[stream.id]
        self._recent.add(stream.id)


_DATA_STATES: Final = (StreamState.OPEN, StreamState.CLOSING)
