"""The relay: which transport goes where, and what may pass.

Pure. :ref:`spec-request-checks`, :ref:`spec-other-frames`, :ref:`spec-closing`. :class:`Switch` holds a :class:`Port`
for each client that is connected; every transport is two :class:`Half` objects that point at each other.
``Port.receive_data`` is the hot path: for a FWD or ACK of an open transport it does one look-up and appends two pieces
to the other port's output; nothing is copied, logged or allocated besides.
"""

from __future__ import annotations

import os
from collections import deque

from dmsg.crypto.keys import PublicKey, Random
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.record import RecordLayer
from dmsg.mux.core.tlv import Tlv, encode_tlvs
from dmsg.mux.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    CLOSE_LIMIT_BYTES,
    EXTENDED_REQUEST_LIMIT_BYTES,
    FWD,
    OK,
    REQUEST,
    REQUEST_BYTES,
    SEQUENCE_BYTES,
    CloseReason,
    close_reason,
    encode_close,
    encode_frame,
    reason_name,
    split_frames,
)
from dmsg.mux.relay.events import PortDropped, RequestRefused, SwitchEvent, TransportEnded, TransportStarted
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.member import Half, Port
from dmsg.mux.relay.places import PlaceRules
from dmsg.mux.relay.queues import Queues
from dmsg.mux.relay.request_rates import RequestRates


class Switch:
    """All connections of a server and the transports between them."""

    def __init__(self, limits: RelayLimits | None = None, *, random: Random = os.urandom) -> None:
        self.limits = limits or RelayLimits()
        self.ports: dict[bytes, Port] = {}
        #: Ports that have something to send; the shell takes the list, empties it, and flushes each.
        self.dirty: list[Port] = []
        self.queues = Queues(self)
        self._places = PlaceRules(self)
        self._rates = RequestRates(self)
        self.open_transports = 0
        self.draining = False
        #: The time of the last read or timeout.
        self.now = 0.0
        self._random = random
        self._pending: deque[tuple[float, Half]] = deque()

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for receivers, in all."""
        return self.queues.queued_bytes

    # --- connections -----------------------------------------------------------------------------------------------

    def refusal(self, remote: PublicKey) -> str | None:
        """Why a connection of ``remote`` would not be admitted now, or ``None``."""
        if self.draining:
            return "server_draining"
        if len(self.ports) >= self.limits.connections and remote.raw not in self.ports:
            return "too many connections"
        return None

    def reject(self, records: RecordLayer, reason: str) -> bytes:
        """The OK frame that carries a refusal (:ref:`spec-admission`), sealed."""
        return records.seal(encode_frame(OK, 0, encode_tlvs({Tlv.REASON: reason.encode()})))

    def add_port(
        self, remote: PublicKey, records: RecordLayer, now: float, *, extended: bool = False, group: str = ""
    ) -> tuple[Port, list[SwitchEvent]]:
        """Admit a connection: OK is its first frame, and only then can it be reached (:ref:`spec-admission`).

        ``group`` is the group of addresses it comes from (:func:`dmsg.address.address_group`); without one it is alone
        in its group. A connection that had the key before is dropped with its transports (:ref:`spec-newest-wins`).
        """
        events: list[SwitchEvent] = []
        port = Port(self, remote, records, now, extended=extended, group=group)
        port.emit(encode_frame(OK, 0))
        older = self.ports.get(remote.raw)
        self.ports[remote.raw] = port
        if older is not None:
            events += self.remove_port(older, now)
            events.append(PortDropped(older, "replaced"))
        return port, events

    def remove_port(self, port: Port, now: float) -> list[SwitchEvent]:
        """Forget a connection that is gone and tell its peers (:ref:`spec-connection-ends`). Doing it again is harmless."""
        self.now = now
        events: list[SwitchEvent] = []
        if self.ports.get(port.remote.raw) is port:
            del self.ports[port.remote.raw]
        port.gone = True
        while port.halves:
            half = next(iter(port.halves.values()))
            self._end(half, CloseReason.PEER_GONE, events, by=half.side, tell=half.other)
        port.discard_output()
        self._rates.forget(port)
        return events

    def drop_transports(self, reason: int) -> list[SwitchEvent]:
        """End every transport with CLOSE ``reason`` on both sides (:ref:`spec-draining`)."""
        events: list[SwitchEvent] = []
        for port in list(self.ports.values()):
            for half in list(port.halves.values()):
                self._end_both(half, reason, events)
        return events

    # --- the hot path ----------------------------------------------------------------------------------------------

    def route(self, port: Port, data: bytes, now: float) -> list[SwitchEvent]:
        """Take bytes that ``port`` received; what is to be sent because of them stands in the ports in :attr:`dirty`.

        Raises ``RemoteProtocolError`` when the connection must be dropped.
        """
        self.now = now
        events: list[SwitchEvent] = []
        halves = port.halves
        dirty = self.dirty
        port.bytes_in += len(data)
        try:
            for record in port.records.open(data):
                plaintext = port.tail + record if port.tail else record
                frames, used = split_frames(plaintext)
                port.tail = plaintext[used:] if used < len(plaintext) else b""
                port.frames_in += len(frames)
                for kind, transport_id, start, end in frames:
                    half = halves.get(transport_id)
                    if half is None or not half.open or kind < FWD or end - start < SEQUENCE_BYTES or kind > ACK:
                        self._on_rare_frame(port, half, kind, transport_id, plaintext[start:end], events)
                        continue
                    half.bytes += end - start
                    target = half.target
                    prefix = half.fwd_prefix if kind == FWD else half.ack_prefix
                    if target.direct:
                        # type and id anew, size and payload as they came
                        target.out += (prefix, plaintext[start - 2 : end])
                        if not target.dirty:
                            target.dirty = True
                            dirty.append(target)
                    else:
                        self._enqueue(half, prefix + plaintext[start - 2 : end], events)
        except RemoteProtocolError as error:
            error.events = events  # they have happened, whatever came after them
            raise
        return events

    def _enqueue(self, half: Half, frame: bytes, events: list[SwitchEvent]) -> None:
        """Let a frame wait for a receiver that takes nothing now (:ref:`spec-queues`); ``half`` is the sending side."""
        queue = half.other
        self.queues.put(queue, frame, self.now)
        while excess := self.queues.excess(queue, self.now):
            for each in excess:
                self._cut(each, events)

    def _cut(self, queue: Half, events: list[SwitchEvent]) -> None:
        """End the transport of a queue that is too long, or waits for too long, and drop what waits."""
        if queue.port.halves.get(queue.id) is queue:
            self._end_both(queue.other, CloseReason.SLOW_CONSUMER, events)
        else:  # its peer closed it, and what came before the CLOSE was never taken
            self.queues.drop(queue)
            queue.port.emit(encode_close(queue.id, CloseReason.SLOW_CONSUMER))

    # --- everything but data ---------------------------------------------------------------------------------------

    def _on_rare_frame(
        self, port: Port, half: Half | None, kind: int, transport_id: int, payload: bytes, events: list[SwitchEvent]
    ) -> None:
        if kind == REQUEST:
            self._on_request(port, half, transport_id, payload, events)
        elif kind not in (ACCEPT, CLOSE, FWD, ACK):
            raise RemoteProtocolError("frame", "unknown type")
        elif half is None:
            self._on_stray(port, kind, transport_id)
        elif kind == CLOSE:
            self._end(
                half, close_reason(payload), events, by=half.side, tell=half.other, payload=payload[:CLOSE_LIMIT_BYTES]
            )
        elif kind == ACCEPT and half.accepts(payload):
            self._on_accept(half, payload, events)
        else:
            # ACCEPT from the wrong side, twice or altered, or data too early or too short (:ref:`spec-other-frames`)
            self._count_stray(port)
            self._end_both(half, CloseReason.MALFORMED, events)

    def _on_request(
        self, port: Port, half: Half | None, transport_id: int, payload: bytes, events: list[SwitchEvent]
    ) -> None:
        if half is not None:
            self._count_stray(port)
            self._end(half, CloseReason.BAD_ID, events, by="server", tell=half.other)
        reason = self._refuse_request(port, half, transport_id, payload)
        if reason is not None:
            self._refuse(port, transport_id, reason, events)
            return
        target = self.ports[payload[33:REQUEST_BYTES]]
        target_id = target.free_id(self._random)
        if target_id is None:
            self._refuse(port, transport_id, CloseReason.BUSY, events)
            return
        yielding = self._places.request_for(port, target)
        if yielding is not None:
            self._end_both(yielding, CloseReason.BUSY, events)
        asking = Half(port, transport_id, initiator=True)
        asked = Half(target, target_id, initiator=False)
        asking.join(asked, payload, self.now)
        port.pending_requests += 1
        self._forget_settled()
        self._pending.append((self.now + self.limits.request_timeout_s, asking))
        target.emit(encode_frame(REQUEST, target_id, payload))

    def _refuse(self, port: Port, transport_id: int, reason: int, events: list[SwitchEvent]) -> None:
        port.remember(transport_id)  # the client may have given up meanwhile: its CLOSE is no offence
        port.emit(encode_close(transport_id, reason))
        events.append(RequestRefused(port, reason_name(reason)))

    def _refuse_request(self, port: Port, half: Half | None, transport_id: int, payload: bytes) -> int | None:
        limits = self.limits
        if half is not None:
            return CloseReason.BAD_ID
        if transport_id % 2:
            self._count_stray(port)
            return CloseReason.BAD_ID
        longest = EXTENDED_REQUEST_LIMIT_BYTES if port.extended else REQUEST_BYTES
        if not REQUEST_BYTES <= len(payload) <= longest or payload[:33] != port.remote.raw:
            self._count_stray(port)
            return CloseReason.MALFORMED
        if self.draining:
            return CloseReason.SERVER_DRAINING
        if not port.requests.take(self.now) or port.pending_requests >= limits.pending_requests:
            return CloseReason.RATE_LIMITED
        target = self.ports.get(payload[33:REQUEST_BYTES])
        if target is None:
            return CloseReason.UNKNOWN_PEER
        if len(payload) > REQUEST_BYTES and not target.extended:
            return CloseReason.UNSUPPORTED
        if not self._rates.take(port, target, self.now):
            return CloseReason.RATE_LIMITED
        if target.control_backlog_bytes > limits.control_backlog_bytes:
            return CloseReason.BUSY
        return None if self._places.may_ask(port, target, self.now) else CloseReason.BUSY

    def _on_accept(self, half: Half, payload: bytes, events: list[SwitchEvent]) -> None:
        asking = half.other
        if self._places.is_full(half.port):
            # Only now: a stranger who asks and is refused by the client takes no place away from others.
            yielding = self._places.transport_for(asking.port, half.port, self.now)
            self._end_both(half if yielding is None else yielding, CloseReason.BUSY, events)
            if yielding is None:
                return
        asking.port.pending_requests -= 1
        self._rates.accepted(asking.port, half.port)
        asking.open_both(self.now)
        self.open_transports += 1
        asking.port.emit(encode_frame(ACCEPT, asking.id, payload))
        events.append(TransportStarted(asking))

    def _on_stray(self, port: Port, kind: int, transport_id: int) -> None:
        """A frame of no transport. What was under way when the transport ended is no offence and not answered."""
        if transport_id in port.recent:
            return
        self._count_stray(port)
        if kind != CLOSE:  # a CLOSE is never answered with a CLOSE (:ref:`spec-late-frames`)
            port.emit(encode_close(transport_id, CloseReason.NORMAL))

    def _count_stray(self, port: Port) -> None:
        if not port.strays.take(self.now):
            raise RemoteProtocolError("frame", "abuse")

    # --- ends ------------------------------------------------------------------------------------------------------

    def _end_both(self, half: Half, reason: int, events: list[SwitchEvent]) -> None:
        if half.port.halves.get(half.id) is not half:
            return  # over already: a client's transport to itself has both halves on one port
        self._end(half, reason, events, by="server", tell=half.other)
        half.port.emit(encode_close(half.id, reason))

    def _end(
        self, half: Half, reason: int, events: list[SwitchEvent], *, by: str, tell: Half, payload: bytes | None = None
    ) -> None:
        """Forget a transport, ``half`` being the side that ended it, and send CLOSE to the half named by ``tell``."""
        if half.port.halves.get(half.id) is not half:
            return  # over already: both of its halves were on a connection that is being forgotten
        asking = half if half.initiator else half.other
        if asking.open:
            self.open_transports -= 1
        elif not asking.port.gone:
            asking.port.pending_requests -= 1
        events.append(TransportEnded(asking, reason, by, was_open=asking.open))
        half.forget()
        half.other.forget()
        # The event needs the way from who asked to who was asked. Without the way back no cycle keeps a closed
        # transport in memory until the garbage collector comes by.
        del asking.other.other
        self.queues.drop(half)
        if tell.port.gone or reason == CloseReason.SLOW_CONSUMER:
            self.queues.drop(tell)
        if tell.port.gone:
            return
        frame = encode_close(tell.id, reason) if payload is None else encode_frame(CLOSE, tell.id, payload)
        if tell.queue:
            self.queues.put(tell, frame, self.now)  # behind the data that came before it
            self.queues.limit_time(tell, self.now)
        else:
            tell.port.emit(frame)

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timeout(self) -> float | None:
        """When :meth:`handle_timeout` wants to be called."""
        self._forget_settled()
        due = self.queues.next_timeout()
        if not self._pending:
            return due
        first = self._pending[0][0]
        return first if due is None else min(first, due)

    def _forget_settled(self) -> None:
        """What was answered need not be kept until it would have timed out."""
        while self._pending and self._pending[0][1].settled:
            self._pending.popleft()

    def handle_timeout(self, now: float) -> list[SwitchEvent]:
        """Close transports whose REQUEST was not answered in time, and those whose receiver takes nothing."""
        self.now = now
        events: list[SwitchEvent] = []
        while self._pending and (self._pending[0][0] <= now or self._pending[0][1].settled):
            _, asking = self._pending.popleft()
            if not asking.settled:
                self._end_both(asking, CloseReason.HANDSHAKE_TIMEOUT, events)
        for queue in self.queues.expired(now):
            self._cut(queue, events)
        return events
