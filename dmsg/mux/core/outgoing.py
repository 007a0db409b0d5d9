"""What a client's connection has to send: control frames, acknowledgements, and FWDs of its streams in turn. Pure.

Hot path: frames are appended as pieces and joined once for a record.
"""

from __future__ import annotations

from collections import deque

from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.stream import Stream, StreamState
from dmsg.mux.core.wire import RECORD_PLAINTEXT_LIMIT_BYTES


class Outgoing:
    """Queues of one connection, emptied in batches of about ``flush_bytes``."""

    __slots__ = (
        "_acking",
        "_config",
        "_control",
        "_proving",
        "_sending",
        "control_bytes",
        "record_bytes",
        "writable",
    )

    def __init__(self, config: ConnectionConfig) -> None:
        #: Streams whose writer may go on; the session empties this after every flush.
        self.writable: list[Stream] = []
        self.control_bytes = 0
        #: The size limit of records for the last batch: the peer cannot use a record before all of it is there.
        self.record_bytes = RECORD_PLAINTEXT_LIMIT_BYTES
        self._config = config
        self._control: list[bytes] = []
        self._acking: dict[Stream, None] = {}  # in the order in which their data came
        self._proving: list[Stream] = []
        self._sending: deque[Stream] = deque()

    def __bool__(self) -> bool:
        return bool(self._control) or bool(self._sending) or bool(self._acking) or bool(self._proving)

    def control(self, frame: bytes) -> None:
        """Send a frame that is not data; it does not wait behind data."""
        self._control.append(frame)
        self.control_bytes += len(frame)

    def acknowledge(self, stream: Stream) -> None:
        """Send the ACK of ``stream`` after all frames of this read have been handled."""
        self._acking[stream] = None

    def prove(self, stream: Stream) -> None:
        """Send the first sealed frame of ``stream``, which its peer waits for: data if there is any by then, else an ACK."""
        self._proving.append(stream)

    def queue(self, stream: Stream) -> None:
        """Give ``stream`` its turn to send data."""
        if not stream.queued:
            stream.queued = True
            self._sending.append(stream)

    def go_on(self, stream: Stream) -> None:
        """Let the writer of ``stream`` go on if little enough waits to be sent."""
        if stream.blocked and stream.pending.size <= self._config.resume_bytes:
            stream.blocked = False
            self.writable.append(stream)

    def forget(self, stream: Stream) -> None:
        """``stream`` is over."""
        self._acking.pop(stream, None)

    def take(self) -> list[bytes]:
        """The pieces of the next batch of frames; empty when there is nothing to send."""
        parts = self._control
        sending = self._sending
        acking = [stream for stream in self._acking if stream.ack_due] if self._acking else ()
        self._acking.clear()
        for stream in acking:
            # The ACK of a stream that has its turn below goes with its data.
            if not (stream.queued and stream.pending.size) and stream.state is not StreamState.CLOSED:
                parts.append(stream.take_ack())
        if self._proving:
            for stream in self._proving:
                if stream.state is StreamState.CLOSED:
                    continue
                if stream.sendable:
                    parts += stream.next_fwd(self._config.sealed_data_bytes)
                    self.go_on(stream)  # its writer may have waited for just this
                else:
                    parts.append(stream.take_ack())
            self._proving.clear()
        if not parts and not sending:
            return parts
        budget = self._config.flush_bytes - self.control_bytes
        self._control = []
        self.control_bytes = 0
        limits = self._config.frame_data_bytes, self._config.sealed_data_bytes
        resume = self._config.resume_bytes
        record = RECORD_PLAINTEXT_LIMIT_BYTES
        while sending and budget > 0:
            stream = sending.popleft()
            room = stream.room_bytes()
            if room <= 0 or stream.state is StreamState.CLOSED:
                stream.queued = False  # a sealed stream that is closed keeps its data for another path
                if stream.state is not StreamState.CLOSED:
                    stream.wait()
                continue
            limit = limits[stream.resumable]
            head, data = stream.next_fwd(limit, room)
            parts.append(head)
            parts.append(data)
            budget -= len(data)
            if len(data) < limit:
                record = min(record, stream.record_bytes)
            if stream.pending.size or stream.sendable:
                sending.append(stream)
            else:
                stream.queued = False
            if stream.blocked and stream.pending.size <= resume:
                stream.blocked = False
                self.writable.append(stream)
        for stream in acking:
            if stream.ack_due and stream.state is not StreamState.CLOSED:  # there was no room for data to carry it
                parts.append(stream.take_ack())
        self.record_bytes = record
        return parts
