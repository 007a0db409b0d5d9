"""A client's sealed connection to a server: frames in, streams multiplexed, frames out.

:ref:`spec-admission`, :ref:`spec-establishing`, :ref:`spec-data`, :ref:`spec-closing`.

Pure. ``send_data`` queues, ``data_to_send`` turns what the windows allow into frames and packs them into records, one
frame of each stream in turn; ``receive_data`` does the reverse.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sized
from typing import Final, cast

from dmsg.crypto.aead import TAG_BYTES
from dmsg.crypto.keys import PublicKey, Random
from dmsg.errors import LocalProtocolError, RemoteProtocolError
from dmsg.mux.core.buffers import Buffers
from dmsg.mux.core.e2e_handshake import Resume
from dmsg.mux.core.e2e_negotiation import Carrier, EndToEnd
from dmsg.mux.core.errors import Busy, IntegrityError
from dmsg.mux.core.events import (
    Confirmed,
    DataReceived,
    EndAcked,
    EndReceived,
    Event,
    Ready,
    Rejected,
    StreamClosed,
)
from dmsg.mux.core.held_acks import HeldAcks
from dmsg.mux.core.hello import read_refusal
from dmsg.mux.core.ids import TransportIds
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.openings import Openings
from dmsg.mux.core.outgoing import Outgoing
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.record import RecordLayer
from dmsg.mux.core.rekeying import KeyTimer
from dmsg.mux.core.resumption import ResumeAttempts
from dmsg.mux.core.sealed_stream import SealedStream
from dmsg.mux.core.stream import DATA_STATES, ConnectionState, Stream, StreamFault, StreamState
from dmsg.mux.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    FWD,
    OK,
    REQUEST,
    SEQUENCE_BYTES,
    CloseReason,
    answers_request,
    close_reason,
    encode_close,
    split_frames,
)
from dmsg.sansio.core import Core


class Connection(Core):
    """The client's end of a connection, from the end of the handshake on."""

    takes_views = True

    def __init__(
        self,
        identity: PublicKey,
        records: RecordLayer,
        *,
        now: float,
        config: ConnectionConfig | None = None,
        random: Random = os.urandom,
        extended: bool = False,
        end_to_end: EndToEnd | None = None,
        clock: Callable[[], float] | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        """Without ``end_to_end`` all streams are plain. Without a ``clock`` their windows do not follow their paths.

        ``buffers`` are shared by all connections of a client; without them, this one has its own.
        """
        self.identity = identity
        #: Whether the server knows the extension, so that REQUEST and ACCEPT may carry more than two keys.
        self.extended = extended
        self.config = config = config or ConnectionConfig()
        self.state = ConnectionState.WAITING
        self.streams: dict[int, Stream] = {}
        self._records = records
        self._random = random
        self._deadline: float | None = now + config.ok_timeout_s
        self._tail = b""
        self._key_timer = KeyTimer(config.rekey_after_s, now)
        self._out = Outgoing(config)
        self._held_acks = HeldAcks()
        self._ids = TransportIds(int.from_bytes(random(2), "big"))
        self._openings = Openings(
            identity,
            self.streams,
            self._ids,
            self._out,
            self._key_timer,
            config=config,
            random=random,
            extended=extended,
            end_to_end=end_to_end,
            clock=clock,
            buffers=buffers or Buffers(config.shared_buffer_bytes),
        )
        #: Streams that :meth:`open_more` would open.
        self.answers: Sized = self._openings.answers

    # --- what the application asks for -----------------------------------------------------------------------------

    @property
    def near_exhaustion(self) -> bool:
        """Whether the record counters are so high that this connection should be replaced when it is idle."""
        return self._records.near_exhaustion

    def open(
        self, remote: PublicKey, carrier: Carrier = Carrier.NONE, *, service: str = "", resume: Resume | None = None
    ) -> PlainStream:
        """Send a REQUEST to ``remote``; :class:`StreamOpened` or :class:`StreamClosed` follows.

        With a ``carrier``, the stream that opens is sealed; ``service`` and the transport to ``resume`` are sent in the
        handshake. Raises ``Busy`` when all 32,768 ids are taken.
        """
        if self.state is not ConnectionState.READY:
            raise LocalProtocolError("the server has not admitted this connection yet")
        return self._openings.request(remote, carrier, service, resume)

    def accept_for_upgrade(self, stream: PlainStream) -> None:
        """Answer an offered stream with ACCEPT; :class:`UpgradeReceived` follows when its handshake message comes."""
        self._openings.accept_for_upgrade(stream)

    def read_offer(self, stream: PlainStream) -> tuple[str, Resume | None]:
        """Read the peer's handshake message, which names the service and the transport to resume. Raises ``IntegrityError``.

        The message may be a replay: nothing is proved before :class:`Confirmed`.
        """
        return self._openings.read_offer(stream)

    def accept(self, stream: PlainStream) -> Stream:
        """Answer an offered stream with ACCEPT; gives the stream that replaces it.

        If the handshake message was read, the new stream is sealed, and opens once its initiator has proved itself. Otherwise
        it is plain and open. An offer to resume a transport that is not known here is accepted as a new one.
        """
        return self._openings.accept(stream)

    def accept_path(
        self, stream: PlainStream, resume: Resume, attempts: ResumeAttempts
    ) -> tuple[SealedStream, Stream | None]:
        """Accept an offered stream as another path of a transport, and tell the peer how much of it we have.

        Gives the sealed stream, and an older one that still waited for its proof over the same relay; the caller closes the
        older one.
        """
        sealed = self._openings.accept_sealed(stream, resume)
        return sealed, sealed.await_turn(attempts, self._openings.server, resume.received_bytes)

    def go_on(self, stream: Stream) -> None:
        """``stream`` has taken over the backlog of another path: send it, and let its writer go on if it may."""
        self._out.queue(stream)
        self._out.go_on(stream)
        if stream.ack_due and stream.state is not StreamState.CLOSED:
            self._acknowledge(stream)

    @property
    def writable(self) -> list[Stream]:
        """Streams whose writer may go on; the session empties this after every flush."""
        return self._out.writable

    def take_writable(self) -> list[Stream]:
        """Empty :attr:`writable` and give what was in it, but for streams whose writer is to pause again by now."""
        streams = self._out.writable
        if not streams:
            return streams
        self._out.writable = []
        return [stream for stream in streams if not stream.blocked]

    def end(self, stream: Stream) -> None:
        """Half-close: nothing more will be written to ``stream``. Base streams have no half-close."""
        if stream.state is StreamState.OPEN:
            stream.end()
            self._out.queue(stream)

    def send_data(self, stream: Stream, data: bytes) -> bool:
        """Queue ``data``; ``True`` asks the writer to pause until the stream shows up in :attr:`writable`, or ends.

        Once the peer's application has closed, what waits is dropped, and the writer may go on.
        Raises ``Busy`` when the writer does not pause and more than ``pending_limit_bytes`` wait.
        """
        if stream.state is not StreamState.OPEN:
            raise LocalProtocolError(f"{stream!r} takes no data")
        pending = stream.pending
        pending.append(data)
        self._out.queue(stream)
        if pending.size <= self.config.pause_bytes:
            return False
        if pending.size - stream.again_bytes > self.config.pending_limit_bytes:
            raise Busy("more was written than may wait to be sent", by="local")
        stream.blocked = True
        return True

    def consumed(self, stream: Stream, size: int) -> bool:
        """The application took ``size`` received bytes; ``True`` asks for a flush, of a frame or for a new timeout."""
        released = stream.consumed(size)
        if stream.state is StreamState.CLOSED:
            return False
        if released:
            self.send_control(released)
            return True
        return stream.ack_due and self._acknowledge(stream)

    def close(self, stream: Stream) -> bool:
        """End ``stream`` once everything written is acknowledged; ``True`` if it is over right now.

        Otherwise a :class:`StreamClosed` comes later. What arrives meanwhile is acknowledged and dropped.
        """
        if stream.state is StreamState.OPEN:
            stream.move(StreamState.CLOSING)
            stream.end()
            self._out.queue(stream)
        if stream.state is StreamState.CLOSING:
            self._finish_if_through(stream)
            if stream.ack_due:
                self._out.acknowledge(stream)
        return stream.state is StreamState.CLOSED

    def abort(self, stream: Stream, reason: int = CloseReason.NORMAL) -> None:
        """End ``stream`` now, or refuse an offer: drop what is not sent yet, and send a CLOSE with ``reason``."""
        if stream.state is not StreamState.CLOSED:
            self._finish(stream, reason)

    # --- towards the network ---------------------------------------------------------------------------------------

    @property
    def wants_write(self) -> bool:
        """Whether :meth:`data_to_send` would give anything."""
        return bool(self._out)

    @property
    def overloaded(self) -> bool:
        """Whether so many control frames wait for the network that reading should stop."""
        return self._out.control_bytes > self.config.control_limit_bytes

    def data_to_send(self) -> bytes:
        """Sealed records: first control frames and ACKs, then FWDs of the streams in turn."""
        parts = self._out.take()
        if not parts:
            return b""
        return self._records.seal(b"".join(parts), self._out.record_bytes)

    # --- from the network ------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes | memoryview, now: float) -> list[Event]:
        """Take bytes from the network. ``RemoteProtocolError`` means that the connection must be dropped.

        At most ``ANSWERS_AT_ONCE`` streams are opened; :meth:`open_more` opens the others.
        """
        events: list[Event] = []
        self._key_timer.now = now
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
            error.events = events + self.open_more()  # these happened before the fault
            raise
        return events + self.open_more() if self.answers else events

    def open_more(self) -> list[Event]:
        """Finish the handshakes of the next streams whose peers have answered; no events when there are none.

        A handshake takes time, so the session flushes between two calls.
        """
        events: list[Event] = []
        for stream, message in self._openings.take_answers():
            if stream.state is StreamState.CLOSED:
                continue  # closed right after the answer, or given up
            try:
                events.append(self._openings.finish(stream, message))
            except IntegrityError as error:
                self._fail(stream, error.code, events, str(error))
        return events

    def _on_fwd(self, stream: Stream, frames: bytes, start: int, end: int, events: list[Event]) -> None:
        if stream.state not in DATA_STATES:
            self._on_early_fwd(stream, frames[start:end], events)
            return
        confirming = stream.state is StreamState.CONFIRMING
        try:
            data, ack = stream.receive_fwd(frames, start, end)
        except StreamFault as fault:
            self._fail(stream, fault.code, events)
            return
        if confirming:
            events.append(Confirmed(stream))
        if ack:
            self.send_control(ack)
        elif stream.ack_due:
            self._acknowledge(stream)
        if stream.end_received and not data and end - start <= _EMPTY_SEALED_BYTES:
            self._on_end(stream, events)
        else:
            self._on_data(stream, data, events)

    def _on_data(self, stream: Stream, data: bytes, events: list[Event]) -> None:
        if stream.state is StreamState.CLOSING:
            if data:  # else the application got it on the path before
                stream.drop()
                self.consumed(stream, len(data))
        elif stream.overfull(self.config.receive_limit_bytes):
            self._fail(stream, CloseReason.SLOW_CONSUMER, events)
        elif data:
            events.append(DataReceived(stream, data))

    def _on_early_fwd(self, stream: Stream, payload: bytes, events: list[Event]) -> None:
        if stream.state is not StreamState.UPGRADING:
            self._fail(stream, CloseReason.MALFORMED, events)
            return
        try:
            self._openings.receive_upgrade(cast(PlainStream, stream), payload[SEQUENCE_BYTES:], events)
        except StreamFault as fault:
            in_the_clear = stream.initiator and fault.code == CloseReason.DOWNGRADE
            self._fail(stream, fault.code, events, "the peer answered in the clear" if in_the_clear else "")

    def _on_end(self, stream: Stream, events: list[Event]) -> None:
        if not self._cut(stream, events) and not self._finish_if_through(stream, events):
            events.append(EndReceived(stream))

    def _on_ack(self, stream: Stream, payload: bytes, events: list[Event]) -> None:
        was_acked = stream.end_acked
        confirming = stream.state is StreamState.CONFIRMING
        try:
            if stream.state not in DATA_STATES:
                # the upgrade is never acknowledged: a peer that does so took it for data
                upgrading = stream.state is StreamState.UPGRADING
                raise StreamFault(CloseReason.DOWNGRADE if upgrading else CloseReason.MALFORMED)
            data = stream.receive_ack(payload)
        except StreamFault as fault:
            self._fail(stream, fault.code, events)
            return
        if confirming:
            events.append(Confirmed(stream))
        if stream.was_cut:
            if self._cut(stream, events):
                return
            self._out.go_on(stream)  # what its writer waited for is dropped
        if stream.end_acked and not was_acked:
            events.append(EndAcked(stream))
        for other in stream.take_waiting():
            self._out.queue(other)
        if stream.sendable or stream.pending.size:
            self._out.queue(stream)
        else:
            self._finish_if_through(stream, events)
        if stream.ack_due:
            self._acknowledge(stream)
        if data:
            self._on_data(stream, data, events)

    def _acknowledge(self, stream: Stream) -> bool:
        """Acknowledge what has come, now or together with an answer; ``True`` if there is a frame to send or a new timeout."""
        if stream.ack_may_wait:
            return self._held_acks.hold(stream, self._key_timer.now)
        self._out.acknowledge(stream)
        return True

    def _cut(self, stream: Stream, events: list[Event]) -> bool:
        """End ``stream`` if its peer dropped our data and has ended its own half; ``True`` if so."""
        if not stream.was_cut or not stream.end_received:
            return False
        self._fail(stream, CloseReason.REFUSED, events)
        return True

    def _finish_if_through(self, stream: Stream, events: list[Event] | None = None) -> bool:
        """End ``stream`` if it is closing and waits for nothing more; ``True`` if so.

        Our application sees a clean end, whatever the peer is told about its own data.
        """
        reason = stream.close_reason if stream.state is StreamState.CLOSING else None
        if reason is None:
            return False
        self._finish(stream, reason)
        if events is not None:
            events.append(StreamClosed(stream, CloseReason.NORMAL, local=True))
        return True

    def _on_rare_frame(
        self, kind: int, stream_id: int, stream: Stream | None, payload: bytes, events: list[Event]
    ) -> None:
        if kind == OK:
            self._on_ok(payload, events)
        elif kind == REQUEST:
            self._on_request(stream_id, stream, payload, events)
        elif stream is None and self.state is ConnectionState.WAITING and not self._ids.ended_lately(stream_id):
            raise RemoteProtocolError("frame", "frame before OK")
        elif stream is None:
            # A CLOSE is never answered with a CLOSE, nor is a frame that crossed ours (:ref:`spec-late-frames`).
            if kind != CLOSE and not self._ids.ended_lately(stream_id):
                self.send_control(encode_close(stream_id, CloseReason.NORMAL))
        elif kind == CLOSE:
            proven = stream.proves_close(payload)
            self._forget(stream)
            if stream.resumable and not proven:
                # the relay may have told this end alone: tell the peer, so that both look for a path (:ref:`spec-sealed-close`)
                self.send_control(encode_close(stream_id, CloseReason.PEER_GONE))
            events.append(StreamClosed(stream, close_reason(payload), local=False, proven=proven))
        elif kind == ACCEPT:
            if stream.state is StreamState.REQUESTED and answers_request(payload, stream.request):
                self._openings.receive_accept(cast(PlainStream, stream), payload, events)
            else:
                self._fail(stream, CloseReason.MALFORMED, events)

    def _on_ok(self, payload: bytes, events: list[Event]) -> None:
        if self.state is not ConnectionState.WAITING:
            raise RemoteProtocolError("frame", "second OK")
        self._deadline = None
        reason = read_refusal(payload)
        if reason is not None:
            events.append(Rejected(reason))
            return
        self._move(ConnectionState.READY)
        events.append(Ready())

    def _on_request(self, stream_id: int, stream: Stream | None, payload: bytes, events: list[Event]) -> None:
        # Legal before OK: a base server makes the client reachable before it says OK (:ref:`spec-admission`).
        if stream is not None:
            raise RemoteProtocolError("frame", "REQUEST for an id in use")
        self._openings.receive_request(stream_id, payload, events)

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timeout(self) -> float | None:
        """The next deadline: for the server's OK, for new keys of sealed streams, or for ACKs that are held."""
        due_s = self._key_timer.due_s if self._deadline is None else self._deadline
        held = self._held_acks
        if held.due_s is not None:
            held.settle()
        return held.due_s if due_s is None or (held.due_s is not None and held.due_s < due_s) else due_s

    def handle_timeout(self, now: float) -> list[Event]:
        """Raises ``RemoteProtocolError`` when no OK came in time (:ref:`spec-admission`)."""
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            raise RemoteProtocolError("handshake", "no OK in time")
        for marker in self._key_timer.frames(now):
            self.send_control(marker)
        for stream in self._held_acks.take(now):
            self._out.acknowledge(stream)
        return []

    # --- bookkeeping -----------------------------------------------------------------------------------------------

    def _move(self, state: ConnectionState) -> None:
        self.state = state

    def send_control(self, frame: bytes) -> None:
        """Send a frame that is not data; it does not wait behind data."""
        self._out.control(frame)

    def _finish(self, stream: Stream, reason: int) -> None:
        if stream.ack_due and stream.state in DATA_STATES:
            self.send_control(stream.take_ack())  # the peer's close may wait for it
        frame = stream.close_frame(reason)
        self._forget(stream)
        self.send_control(frame)

    def _fail(self, stream: Stream, reason: int, events: list[Event], detail: str = "") -> None:
        self._finish(stream, reason)
        events.append(StreamClosed(stream, reason, local=True, detail=detail))

    def _forget(self, stream: Stream) -> None:
        if stream.state is StreamState.OFFERED:
            self._openings.offered -= 1
        stream.move(StreamState.CLOSED)
        stream.discard()
        self._out.forget(stream)
        self._held_acks.forget(stream)
        self._key_timer.forget(stream.id)
        del self.streams[stream.id]
        self._ids.ended(stream.id)


#: Payload of a sealed FWD without data: the end of a stream.
_EMPTY_SEALED_BYTES: Final = SEQUENCE_BYTES + TAG_BYTES
