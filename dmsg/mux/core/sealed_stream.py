"""A sealed stream (:ref:`spec-sealed-frames`, :ref:`spec-sealed-acks`).

FWD and ACK are sealed under one counter for each direction; acknowledgements are cumulative and carry a rolling hash of
the tags received; the end of the stream is a FWD without data. Data that is not acknowledged is kept, so that another path
can send it again (:ref:`spec-resume-offsets`).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Final, cast

from dmsg.crypto.aead import AES_MESSAGES, TAG_BYTES
from dmsg.crypto.keys import PublicKey
from dmsg.mux.core.ack_steps import AckStep, AckSteps
from dmsg.mux.core.buffers import Buffers
from dmsg.mux.core.e2e_handshake import SecureKeys
from dmsg.mux.core.path_window import PathWindow, Stamp
from dmsg.mux.core.resumption import ResumeAttempts
from dmsg.mux.core.sealed_frames import SealedFrames
from dmsg.mux.core.sealed_window import POWERS as WINDOW_POWERS
from dmsg.mux.core.sealed_window import SealedWindow
from dmsg.mux.core.stream import FWD_OVERHEAD_BYTES, Backlog, Stream, StreamFault, StreamState
from dmsg.mux.core.wire import (
    ACK,
    FWD,
    RECORD_PLAINTEXT_LIMIT_BYTES,
    SEQUENCE_BYTES,
    CloseReason,
    encode_close,
)

HASH_BYTES: Final = 4
#: With more outstanding frames a sequence would be ambiguous.
OUTSTANDING_LIMIT: Final = 32_767
#: "Nothing yet": what an ACK acknowledges before the first FWD.
NOTHING_YET: Final = 0xFFFF
#: An ACK for more bytes than this does not wait for outgoing data: the bytes may be part of a transfer, which has long frames.
HELD_ACK_BYTES: Final = 1024
_ACK_BYTES: Final = SEQUENCE_BYTES + HASH_BYTES
#: The same with its note; the content of a FWD may follow the note.
_NOTED_ACK_BYTES: Final = _ACK_BYTES + 1
_NO_NOTE: Final = b"\0"
#: The shortest frame with data: an ACK, the sequence (which the size of a frame leaves out), a byte and the tag.
LEAST_DATA_BYTES: Final = _NOTED_ACK_BYTES + 1 + TAG_BYTES
#: The note of an ACK, after its hash: the receiver's application had closed and did not take everything.
_DROPPED: Final = 0x01
#: What a frame takes of the window besides its data. So even small writes never fill the relay's queue with more than a
#: window: above that, the relay takes the sender for one that ignores its window, and ends the transport.
_FRAME_COST_BYTES: Final = FWD_OVERHEAD_BYTES + TAG_BYTES


class SealedStream(Stream):
    """One end of an end-to-end transport on one path.

    Made from a base stream once its handshake is done. :meth:`go_on_from` takes over what an earlier path leaves.
    """

    __slots__ = (
        "__weakref__",
        "_ack_limit_bytes",
        "_acked_hash",
        "_acked_sequence",
        "_acknowledged_bytes",
        "_attempt",
        "_attempts",
        "_begun_at_bytes",
        "_end_acked",
        "_end_sent",
        "_end_wanted",
        "_next_sequence",
        "_outstanding",
        "_outstanding_bytes",
        "_path",
        "_receive_hash",
        "_received_sequence",
        "_send_hash",
        "_sent_before_bytes",
        "_told_bytes",
        "_unread",
        "_window",
        "_withheld",
        "frames",
        "is_late",
        "resumes",
        "skip_bytes",
    )

    security = "e2e"
    resumable = True
    half_closes = True

    def __init__(
        self,
        base: Stream,
        keys: SecureKeys,
        *,
        window_bytes: int,
        ack_limit_bytes: int,
        largest_window_bytes: int = 0,
        rekey_after_frames: int = AES_MESSAGES,
        path: PathWindow | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        """Replace ``base``, in the same state.

        Data under way is limited by the stream's own window, which may grow to ``largest_window_bytes`` while ``buffers`` have
        room, and by the room on ``path``.
        """
        super().__init__(base.id, base.remote, base.request, initiator=base.initiator, state=base.state)
        self.owner = base.owner
        self.token = keys.token
        self._attempts: ResumeAttempts | None = None  # while it waits for the proof that lets it take a transport over
        self._attempt = 0
        self.is_late = False  # proved after a later attempt: data that comes on it is dropped
        self._told_bytes = 0  # how much we claimed to have received when this path was made
        self._begun_at_bytes = -1  # what had been received when this path took over; -1 before
        self._sent_before_bytes = 0  # how far earlier paths have sent; some of it may have to be sent again
        self._acknowledged_bytes = 0  # how much of the peer's stream our last ACK stood for
        self.resumes = False  # whether it is another path, offered by the peer, that the transport has not moved to yet
        self.skip_bytes = 0  # sent again by the peer although we have them: dropped, but hashed and acknowledged
        self.frames = SealedFrames(base.id, keys.send_key, keys.receive_key, rekey_after_frames, keys.cipher)
        self._send_hash = keys.send_hash
        self._receive_hash = keys.receive_hash
        self._window = SealedWindow(window_bytes, largest_window_bytes, buffers or Buffers(0))
        self._ack_limit_bytes = ack_limit_bytes
        self._next_sequence = 0
        self._received_sequence = NOTHING_YET
        self._acked_sequence = NOTHING_YET
        self._acked_hash = keys.send_hash[:HASH_BYTES]
        self._path = path
        # sequence, data, rolling hash after it, when it was sent
        self._outstanding: deque[tuple[int, bytes, bytes, Stamp | None]] = deque()
        self._outstanding_bytes = 0
        self._unread = 0
        self._withheld: AckSteps | None = None
        self._end_wanted = self._end_sent = self._end_acked = False

    # --- sending ---------------------------------------------------------------------------------------------------

    def room_bytes(self) -> int:
        """How many bytes the windows have room for, if there is data; or 1 for the end of the stream."""
        frames, path = len(self._outstanding), self._path
        if frames >= OUTSTANDING_LIMIT:
            return 0
        if not self.pending.size:
            return self._end_wanted and not self._end_sent
        room = self._window.bytes - self._outstanding_bytes - _FRAME_COST_BYTES * frames
        if path is None or room <= 0:
            return room
        on_path = path.room_bytes(self._outstanding_bytes, self.pending.size)
        return on_path if on_path < room else room

    @property
    def drained(self) -> bool:
        """Whether everything written, and the end if there is one, has been acknowledged."""
        return not self.pending and not self._outstanding and self._end_wanted is self._end_acked

    @property
    def end_acked(self) -> bool:
        """Whether the peer has acknowledged our end of the stream, and with it everything before."""
        return self._end_acked

    @property
    def end_wanted(self) -> bool:
        """See :attr:`Stream.end_wanted`."""
        return self._end_wanted

    @property
    def close_reason(self) -> CloseReason | None:
        """``normal`` once both ends of the stream are through: only then is a CLOSE clean."""
        return CloseReason.NORMAL if self._end_acked and self.end_received else None

    def drop(self) -> None:
        """Received data is dropped: every ACK says so from now on (:ref:`spec-clean-ends`)."""
        if not self.dropped:
            self.dropped = self.ack_due = True

    @property
    def complete(self) -> bool:
        """Whether nothing is missing on either side, even if the peer has not said that it knows our end."""
        sent = self._end_wanted and not self.pending and not self._outstanding_bytes and not self.was_cut
        return sent and (self.end_received or self.ended_before)

    def end(self) -> None:
        """Send the end of the stream behind what was written (:ref:`spec-end-of-stream`)."""
        self._end_wanted = True

    @property
    def record_bytes(self) -> int:
        """The frame size of its path; see :attr:`Stream.record_bytes`."""
        return RECORD_PLAINTEXT_LIMIT_BYTES if self._path is None else self._path.frame_bytes

    def wait(self) -> None:
        """Data waits. If it waits for room on the path, an acknowledgement of another stream can make that, too."""
        if self._path is not None and self.pending.size:
            self._path.wait(self)

    def take_waiting(self) -> Sequence[Stream]:
        """The streams that waited for the path and may go on."""
        return () if self._path is None else cast("Sequence[Stream]", self._path.take_waiting())

    def next_fwd(self, limit_bytes: int, room_bytes: int = 0) -> tuple[bytes, bytes]:
        """The next FWD as (header, sealed payload): as much data as the window allows, or the end of the stream.

        If an ACK is due, one frame carries both the ACK and the data.
        """
        path = self._path
        if path is not None and path.frame_bytes < limit_bytes:
            limit_bytes = path.frame_bytes
        kind, ack = FWD, b""
        if self.pending.size:
            if self.ack_due:
                kind, ack = ACK, self._next_ack().ljust(_NOTED_ACK_BYTES, _NO_NOTE)
                limit_bytes -= _NOTED_ACK_BYTES
            data = self.pending.take(min(limit_bytes - TAG_BYTES, room_bytes or self.room_bytes()))
        else:
            data, self._end_sent = b"", True
        sequence = self._next_sequence
        self._next_sequence = (sequence + 1) & 0xFFFF
        header, sealed = self.frames.seal(kind, ack + sequence.to_bytes(2, "big") + data)
        self._send_hash = hashlib.sha256(self._send_hash + sealed[-TAG_BYTES:]).digest()
        self._outstanding_bytes += len(data)
        stamp = path.sent(self, len(data), self._outstanding_bytes) if path is not None else None
        self._outstanding.append((sequence, data, self._send_hash[:HASH_BYTES], stamp))
        self.sent_bytes += len(data)
        if self._outstanding_bytes > self._window.least_bytes:
            self._hold()  # now, because the peer may never acknowledge it
        return header, sealed

    def receive_ack(self, payload: bytes) -> bytes:
        """Take a sealed cumulative ACK, whose rolling hash must be ours, and its data, if any (:ref:`spec-sealed-acks`)."""
        inner = self._open(ACK, payload)
        if not inner:
            self.frames.follow_marker()
            return b""
        if len(inner) == _ACK_BYTES:
            self._receive_ack(inner)
            return b""
        note, fwd = inner[_ACK_BYTES:_NOTED_ACK_BYTES], inner[_NOTED_ACK_BYTES:]
        if 0 < len(fwd) <= SEQUENCE_BYTES:  # the end of the stream has a FWD of its own
            raise StreamFault(CloseReason.MALFORMED)
        if not fwd or note != _NO_NOTE:
            self._receive_note(note)
        self._receive_ack(inner[:_ACK_BYTES])
        return self._receive_fwd(fwd, payload[-TAG_BYTES:]) if fwd else b""

    def _receive_ack(self, inner: bytes) -> None:
        sequence = inner[0] << 8 | inner[1]
        claimed = inner[2:]
        if sequence == self._acked_sequence:
            if claimed != self._acked_hash:
                raise StreamFault(CloseReason.INTEGRITY)
            self._hold()
            return
        outstanding = self._outstanding
        if not outstanding or (sequence - outstanding[0][0]) & 0xFFFF >= len(outstanding):
            raise StreamFault(CloseReason.INTEGRITY)
        acked_before = self.acked_bytes
        while True:
            number, data, expected, stamp = outstanding.popleft()
            self._outstanding_bytes -= len(data)
            self.acked_bytes += len(data)
            if not data:
                self._end_acked = True
            if number == sequence:
                break
        if self._path is not None:
            if not outstanding:
                self._path.senders.discard(self)
            self._path.acknowledged(stamp, self.acked_bytes - acked_before)
        if claimed != expected:
            raise StreamFault(CloseReason.INTEGRITY)
        self._acked_sequence, self._acked_hash = sequence, expected
        self._hold()

    @property
    def again_bytes(self) -> int:
        """See :attr:`Stream.again_bytes`."""
        again = self._sent_before_bytes - self.sent_bytes
        return min(again, self.pending.size) if again > 0 else 0

    def _hold(self) -> None:
        """Count the bytes in memory: sent or to be sent again, and received."""
        self._window.hold(self._outstanding_bytes + self.again_bytes + self._unread)

    def _receive_note(self, note: bytes) -> None:
        """The note after the hash of an ACK, in one byte: that data was dropped, or how large our window may be."""
        if len(note) != 1:
            raise StreamFault(CloseReason.MALFORMED)
        if note[0] == _DROPPED:
            self.was_cut = True
            self.pending.clear()  # the peer's application has closed: nothing more is sent for it to drop
        elif note[0] in WINDOW_POWERS:
            self._window.told(note[0])
        else:
            raise StreamFault(CloseReason.MALFORMED)

    # --- receiving -------------------------------------------------------------------------------------------------

    def receive_fwd(self, frames: bytes, start: int, end: int) -> tuple[bytes, bytes]:
        """Take a sealed FWD. No data means that the peer has ended its stream."""
        return self._receive_fwd(self._open(FWD, memoryview(frames)[start:end]), frames[end - TAG_BYTES : end]), b""

    def _receive_fwd(self, inner: bytes, tag: bytes) -> bytes:
        if len(inner) < SEQUENCE_BYTES or self.end_received:
            raise StreamFault(CloseReason.MALFORMED)
        sequence = inner[0] << 8 | inner[1]
        if sequence != (self._received_sequence + 1) & 0xFFFF:
            raise StreamFault(CloseReason.INTEGRITY)
        data = inner[SEQUENCE_BYTES:]
        self._received_sequence = sequence
        self._receive_hash = hashlib.sha256(self._receive_hash + tag).digest()
        if not data:
            self.end_received = True
        elif self.skip_bytes:
            skipped = min(self.skip_bytes, len(data))
            self.skip_bytes -= skipped
            data = data[skipped:]
        if data and self.ended_before:
            raise StreamFault(CloseReason.MALFORMED)
        self.received_bytes += len(data)
        self._unread += len(data)
        if self._unread <= self._ack_limit_bytes or self.end_received:
            self.ack_due = not self.resumes  # while it resumes, the application may never get the data
        else:
            self._withhold()
        return data

    def _withhold(self) -> None:
        """More is unread than may be acknowledged."""
        if self._withheld is None:
            self._withheld = AckSteps(self._ack_limit_bytes)
        received_bytes = self.received_bytes - self.skip_bytes
        step = AckStep(self._received_sequence, self._receive_hash[:HASH_BYTES], received_bytes)
        self._withheld.withhold(step, self._acknowledged_bytes)
        # also takes back the ACK that an earlier FWD of the same read made due, when less was unread
        self.ack_due = self._withheld.due(self.received_bytes - self._unread)
        self._hold()

    def consumed(self, size: int) -> bytes:
        """The application took ``size`` bytes: an ACK that was withheld becomes due, for all or for a part."""
        withheld = self._unread > self._ack_limit_bytes
        self._unread -= size
        if withheld and not self.ack_due:
            enough = self._unread <= self._ack_limit_bytes
            self.ack_due = enough or (
                self._withheld is not None and self._withheld.due(self.received_bytes - self._unread)
            )
        return b""

    @property
    def unread_bytes(self) -> int:
        """Received and not yet taken by the application."""
        return self._unread

    def overfull(self, limit_bytes: int) -> bool:
        """Whether more has come than an honest peer would send to an end that does not read.

        A peer that was told a large window may have used all of it, unless the shared buffers are full.
        """
        return self._unread > limit_bytes and self._window.overfull(self._unread, self._ack_limit_bytes)

    @property
    def ack_may_wait(self) -> bool:
        """See :attr:`Stream.ack_may_wait`. It is true for little data, while an answer may come and the windows have room."""
        little = self.received_bytes - self.skip_bytes - self._acknowledged_bytes <= HELD_ACK_BYTES
        quiet = little and not self.pending.size and not self.dropped and self._withheld is None
        return quiet and self.state is StreamState.OPEN and not self._end_wanted and not self.end_received

    def take_ack(self) -> bytes:
        """An ACK frame for everything received so far, or for as much as may be acknowledged."""
        header, sealed = self.frames.seal(ACK, self._next_ack())
        return header + sealed

    def _next_ack(self) -> bytes:
        self.ack_due = False
        sequence, digest = self._received_sequence, self._receive_hash[:HASH_BYTES]
        self._acknowledged_bytes = self.received_bytes - self.skip_bytes
        read_bytes = self.received_bytes - self._unread
        if self._withheld is not None:
            if self._unread <= self._ack_limit_bytes or self.end_received or self.dropped:
                self._withheld = None
            elif self._withheld.due(read_bytes):
                sequence, digest, self._acknowledged_bytes = self._withheld.take(read_bytes)
        inner = sequence.to_bytes(2, "big") + digest
        self._hold()
        taken_bytes = min(read_bytes, self.received_bytes - self.skip_bytes) - self._told_bytes
        note = _DROPPED if self.dropped else self._window.give(taken_bytes)
        return inner + bytes((note,)) if note else inner

    def close_frame(self, reason: int) -> bytes:
        """A CLOSE that proves itself to the peer.

        While a path that resumes waits for its confirmation, the CLOSE is bare (:ref:`spec-resume-exchange`): a fault
        there may be the relay's, and must not end a transport that can go on over another path.
        """
        if self.resumes and self.state is StreamState.CONFIRMING:
            return encode_close(self.id, reason)
        return self.frames.seal_close(reason)

    def proves_close(self, payload: bytes) -> bool:
        """Whether the peer itself, and not only the relay, sent a CLOSE with ``payload``."""
        return self.frames.proves_close(payload)

    def discard(self) -> None:
        """The path is over: erase its keys, keep what is not acknowledged (:ref:`spec-resume-memory`)."""
        self.cut_bytes = self.pending.size + self._outstanding_bytes
        if self._path is not None:
            self._path.forget(self, self._outstanding_bytes)
            self._path = None
        self.frames.erase()

    def let_go(self, unread_bytes: int = 0) -> None:
        """Another path has taken over, or the transport is over: keep the counts only (:ref:`spec-resume-memory`)."""
        self.frames.erase()
        self.pending.clear()
        self._outstanding.clear()
        self._outstanding_bytes = 0
        self._window.hold(unread_bytes)
        self._attempts = None

    def _open(self, kind: int, payload: bytes | memoryview) -> bytes:
        inner = self.frames.open(kind, payload)
        if self.state is StreamState.CONFIRMING:
            self.move(StreamState.OPEN)  # only the initiator can have sealed it (:ref:`spec-confirmation`)
            if self._attempts is not None:
                attempts, self._attempts = self._attempts, None
                earlier = attempts.proved(self, self._attempt)
                if earlier is None:
                    self.is_late = True
                else:
                    self._receive_after(earlier)
        return inner

    # --- another path ----------------------------------------------------------------------------------------------

    @property
    def resume_bytes(self) -> int:
        """The bytes received; while ACKs are withheld, only the bytes acknowledged.

        So data that the application has not read keeps filling the peer's window, however many paths there are.
        """
        return self._acknowledged_bytes if self._unread > self._ack_limit_bytes else self.received_bytes

    def backlog(self) -> Backlog:
        """What another path has to take over."""
        return Backlog(
            [data for _, data, _, _ in self._outstanding],
            max(self._sent_before_bytes, self.sent_bytes),
            self._unread,
            self._window.most_given_bytes,
            self._end_wanted,
        )

    def await_turn(self, attempts: ResumeAttempts, server: PublicKey, told_bytes: int) -> Stream | None:
        """Take over from the transport's path as soon as the initiator proves itself.

        That has to be done here: the first data may come in the same read as the proof. Gives an older path that still waited
        for its proof over the same ``server``; the caller closes it.
        """
        self.resumes = True
        self._attempts = attempts
        self._told_bytes = told_bytes
        self._attempt, displaced = attempts.begin(server, self)
        return displaced

    def _receive_after(self, earlier: Stream) -> None:
        self.received_bytes = self._begun_at_bytes = earlier.received_bytes
        self.skip_bytes = earlier.received_bytes - self._told_bytes
        self._acknowledged_bytes = self._told_bytes
        self.ended_before = earlier.end_received or earlier.ended_before

    def go_on_from(self, earlier: Stream, peer_received_bytes: int, told_bytes: int) -> None:
        """Queue again what the peer has not got (:ref:`spec-resume-offsets`)."""
        if self._begun_at_bytes < 0:
            self._told_bytes = told_bytes
            self._receive_after(earlier)
        backlog = earlier.backlog()
        self._sent_before_bytes = backlog.sent_bytes
        if not earlier.acked_bytes <= peer_received_bytes <= self._sent_before_bytes:
            raise StreamFault(CloseReason.INTEGRITY)
        self.dropped, self.was_cut = earlier.dropped, earlier.was_cut
        if not self.was_cut:
            backlog.send_again(self.pending, earlier.pending, peer_received_bytes - earlier.acked_bytes)
        self.sent_bytes = self.acked_bytes = peer_received_bytes
        # data that came on the old path after the proof, in the same read, was dropped and will come again
        self._unread += backlog.unread_bytes - (earlier.received_bytes - self._begun_at_bytes)
        self.resumes = False
        if self._received_sequence != NOTHING_YET:  # data came with the proof, in the same read
            self.ack_due = self._unread <= self._ack_limit_bytes or self.end_received
        self._end_wanted = backlog.end_wanted
        self.blocked = earlier.blocked
        self._window.most_given_bytes = backlog.given_bytes
        earlier.let_go()
        self._hold()
