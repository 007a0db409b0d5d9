"""A relay's switch: where each frame goes, and which requests pass.

Pure. :ref:`spec-request-checks`, :ref:`spec-other-frames`, :ref:`spec-closing`. :class:`Switch` holds a
:class:`~dmsg.mux.relay.member.Member` for each client; each transport is two :class:`~dmsg.mux.relay.member.Leg` objects
that point at each other. :meth:`Switch.route` is the hot path: a FWD or ACK of an open transport takes one look-up and
adds two pieces to the output of the other member. It copies, logs and allocates nothing else.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Final

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
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.member import Leg, Member
from dmsg.serving.events import MemberDropped, RequestRefused, SwitchEvent, TransportEnded, TransportStarted
from dmsg.serving.member import LegState
from dmsg.serving.place_rules import PlaceRules
from dmsg.serving.queues import Queues
from dmsg.serving.request_rates import RequestRates

# Each is an attribute of an enumeration, which takes a call in Python.
_REQUESTED: Final = LegState.REQUESTED
_OPEN: Final = LegState.OPEN
_CLOSED: Final = LegState.CLOSED
_SLOW_CONSUMER: Final = CloseReason.SLOW_CONSUMER


class Switch:
    """The members of a relay and the transports between them."""

    def __init__(self, limits: RelayLimits | None = None, *, random: Random = os.urandom) -> None:
        self.limits = limits = limits or RelayLimits()
        self.members: dict[bytes, Member] = {}
        #: Members that have something to send. The service flushes them and empties the list.
        self.dirty: list[Member] = []
        self.queues: Queues[Leg] = Queues(limits)
        self._places = PlaceRules(limits)
        self._rates = RequestRates(limits)
        self.open_transports = 0
        self.draining = False
        #: The time of the last read or timeout.
        self.now = 0.0
        self._random = random
        self._pending: deque[tuple[float, Leg]] = deque()

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for receivers, in all."""
        return self.queues.queued_bytes

    # --- connections -----------------------------------------------------------------------------------------------

    def refusal(self, remote: PublicKey) -> str | None:
        """Why a connection of ``remote`` would not be admitted now, or ``None``."""
        if self.draining:
            return "server_draining"
        if len(self.members) >= self.limits.connections and remote.raw not in self.members:
            return "too many connections"
        return None

    def reject(self, records: RecordLayer, reason: str) -> bytes:
        """The OK frame that carries a refusal (:ref:`spec-admission`), sealed."""
        return records.seal(encode_frame(OK, 0, encode_tlvs({Tlv.REASON: reason.encode()})))

    def add_member(
        self, remote: PublicKey, records: RecordLayer, now: float, *, extended: bool = False, group: str = ""
    ) -> tuple[Member, list[SwitchEvent]]:
        """Admit a connection. Its first frame is OK, and no other client can reach it before (:ref:`spec-admission`).

        ``group`` is the group of addresses it comes from (:func:`dmsg.address.address_group`); without one it has a
        group of its own. A connection that had the key before is dropped with its transports (:ref:`spec-newest-wins`).
        """
        events: list[SwitchEvent] = []
        member = Member(self, remote, records, now, extended=extended, group=group)
        member.send_control(encode_frame(OK, 0))
        older = self.members.get(remote.raw)
        self.members[remote.raw] = member
        if older is not None:
            events += self.remove_member(older, now)
            events.append(MemberDropped(older, "replaced"))
        return member, events

    def remove_member(self, member: Member, now: float) -> list[SwitchEvent]:
        """Forget a connection that is gone and tell its peers (:ref:`spec-connection-ends`). A second call does nothing."""
        self.now = now
        events: list[SwitchEvent] = []
        if self.members.get(member.remote.raw) is member:
            del self.members[member.remote.raw]
        member.gone = True
        while member.legs:
            leg = next(iter(member.legs.values()))
            self._end(leg, CloseReason.PEER_GONE, events, by=leg.side, tell=leg.other)
        self.queues.drop_all(member)
        member.discard_output()
        self._rates.forget(member)
        return events

    def drop_transports(self, reason: int) -> list[SwitchEvent]:
        """End every transport with CLOSE ``reason`` on both sides (:ref:`spec-draining`)."""
        events: list[SwitchEvent] = []
        for member in list(self.members.values()):
            for leg in list(member.legs.values()):
                self._end_both(leg, reason, events)
        return events

    # --- the hot path ----------------------------------------------------------------------------------------------

    def route(self, member: Member, data: bytes, now: float) -> list[SwitchEvent]:
        """Take bytes that ``member`` received. Members with something to send because of them are in :attr:`dirty`.

        Raises ``RemoteProtocolError`` when the connection must be dropped.
        """
        self.now = now
        events: list[SwitchEvent] = []
        legs = member.legs
        dirty = self.dirty
        opened = _OPEN
        member.bytes_in += len(data)
        try:
            for record in member.records.open(data):
                plaintext = member.tail + record if member.tail else record
                frames, used = split_frames(plaintext)
                member.tail = plaintext[used:] if used < len(plaintext) else b""
                member.frames_in += len(frames)
                for kind, transport_id, start, end in frames:
                    leg = legs.get(transport_id)
                    size = end - start
                    if leg is None or leg.state is not opened or kind < FWD or size < SEQUENCE_BYTES or kind > ACK:
                        self._on_rare_frame(member, leg, kind, transport_id, plaintext[start:end], events)
                        continue
                    leg.bytes += size
                    target = leg.target
                    prefix = leg.fwd_prefix if kind == FWD else leg.ack_prefix
                    if target.direct:
                        # type and id anew, size and payload as they came
                        target.out += (prefix, plaintext[start - 2 : end])
                        if not target.dirty:
                            target.dirty = True
                            dirty.append(target)
                    else:
                        self._enqueue(leg, prefix + plaintext[start - 2 : end], events)
        except RemoteProtocolError as error:
            error.events = events  # of the frames before the one that is at fault
            raise
        return events

    def drain(self, member: Member) -> None:
        """Put a share of what waits for ``member`` into its output."""
        self.queues.drain(member, self.now)

    def _enqueue(self, leg: Leg, frame: bytes, events: list[SwitchEvent]) -> None:
        """Let a frame wait for a receiver that takes nothing now (:ref:`spec-queues`); ``leg`` is the sending side."""
        queue = leg.other
        self.queues.put(queue, frame, self.now)
        while excess := self.queues.excess(queue, self.now):
            for each in excess:
                self._cut(each, events)

    def _cut(self, queue: Leg, events: list[SwitchEvent]) -> None:
        """Drop a queue that is too long or has waited too long, and end its transport."""
        if queue.state is not _CLOSED:
            self._end_both(queue.other, CloseReason.SLOW_CONSUMER, events)
        else:  # its peer closed it, and its receiver never took the data before the CLOSE
            self.queues.drop(queue)
            queue.member.send_control(encode_close(queue.id, CloseReason.SLOW_CONSUMER))

    # --- everything but data ---------------------------------------------------------------------------------------

    def _on_rare_frame(
        self, member: Member, leg: Leg | None, kind: int, transport_id: int, payload: bytes, events: list[SwitchEvent]
    ) -> None:
        if kind == REQUEST:
            self._on_request(member, leg, transport_id, payload, events)
        elif kind not in (ACCEPT, CLOSE, FWD, ACK):
            raise RemoteProtocolError("frame", "unknown type")
        elif leg is None:
            self._on_stray(member, kind, transport_id)
        elif kind == CLOSE:
            self._end(
                leg, close_reason(payload), events, by=leg.side, tell=leg.other, payload=payload[:CLOSE_LIMIT_BYTES]
            )
        elif kind == ACCEPT and leg.accepts(payload):
            self._on_accept(leg, payload, events)
        else:
            # ACCEPT from the wrong side, twice or altered, or data too early or too short (:ref:`spec-other-frames`)
            self._count_stray(member)
            self._end_both(leg, CloseReason.MALFORMED, events)

    def _on_request(
        self, member: Member, leg: Leg | None, transport_id: int, payload: bytes, events: list[SwitchEvent]
    ) -> None:
        if leg is not None:
            self._count_stray(member)
            self._end(leg, CloseReason.BAD_ID, events, by="server", tell=leg.other)
        target = self.members.get(payload[33:REQUEST_BYTES])
        reason = CloseReason.BAD_ID if leg is not None else self._refusal_of(member, transport_id, payload, target)
        if reason is not None:
            self._refuse(member, transport_id, reason, events)
            return
        assert target is not None
        target_id = target.free_id(self._random)
        if target_id is None:
            self._refuse(member, transport_id, CloseReason.BUSY, events)
            return
        yielding = self._places.request_for(member, target)
        if yielding is not None:
            self._end_both(yielding, CloseReason.BUSY, events)
        asking = Leg(member, transport_id, initiator=True)
        asked = Leg(target, target_id, initiator=False)
        asking.ask(asked, payload, self.now)
        self._forget_settled()
        self._pending.append((self.now + self.limits.request_timeout_s, asking))
        target.send_control(encode_frame(REQUEST, target_id, payload))

    def _refuse(self, member: Member, transport_id: int, reason: int, events: list[SwitchEvent]) -> None:
        member.remember(transport_id)  # the client may have given up meanwhile: its CLOSE is no offence
        member.send_control(encode_close(transport_id, reason))
        events.append(RequestRefused(member, reason_name(reason)))

    def _refusal_of(
        self, member: Member, transport_id: int, payload: bytes, target: Member | None
    ) -> CloseReason | None:
        """Why a REQUEST is not passed on to ``target``, or ``None``."""
        limits = self.limits
        if transport_id % 2:
            self._count_stray(member)
            return CloseReason.BAD_ID
        longest = EXTENDED_REQUEST_LIMIT_BYTES if member.extended else REQUEST_BYTES
        if not REQUEST_BYTES <= len(payload) <= longest or payload[:33] != member.remote.raw:
            self._count_stray(member)
            return CloseReason.MALFORMED
        if self.draining:
            return CloseReason.SERVER_DRAINING
        if not member.requests.take(self.now) or member.pending_requests >= limits.pending_requests:
            return CloseReason.RATE_LIMITED
        if target is None:
            return CloseReason.UNKNOWN_PEER
        if len(payload) > REQUEST_BYTES and not target.extended:
            return CloseReason.UNSUPPORTED
        if not self._rates.take(member, target, self.now):
            return CloseReason.RATE_LIMITED
        if target.control_backlog_bytes > limits.control_backlog_bytes:
            return CloseReason.BUSY
        return None if self._places.may_ask(member, target, self.now) else CloseReason.BUSY

    def _on_accept(self, leg: Leg, payload: bytes, events: list[SwitchEvent]) -> None:
        asking = leg.other
        if self._places.is_full(leg.member):
            # Another source gives up a place now and not at the REQUEST: one that the client refuses costs others nothing.
            yielding = self._places.transport_for(asking.member, leg.member, self.now)
            self._end_both(leg if yielding is None else yielding, CloseReason.BUSY, events)
            if yielding is None:
                return
        self._rates.accepted(asking.member, leg.member)
        asking.open_both(self.now)
        self.open_transports += 1
        asking.member.send_control(encode_frame(ACCEPT, asking.id, payload))
        events.append(TransportStarted(asking))

    def _on_stray(self, member: Member, kind: int, transport_id: int) -> None:
        """Handle a frame of no transport. One that was under way when its transport ended is neither counted nor answered."""
        if transport_id in member.recent:
            return
        self._count_stray(member)
        if kind != CLOSE:  # a CLOSE is never answered with a CLOSE (:ref:`spec-late-frames`)
            member.send_control(encode_close(transport_id, CloseReason.NORMAL))

    def _count_stray(self, member: Member) -> None:
        if not member.strays.take(self.now):
            raise RemoteProtocolError("frame", "abuse")

    # --- ends ------------------------------------------------------------------------------------------------------

    def _end_both(self, leg: Leg, reason: int, events: list[SwitchEvent]) -> None:
        if leg.state is _CLOSED:
            return  # ended with the other leg: a client's transport to itself has both legs on one member
        self._end(leg, reason, events, by="server", tell=leg.other)
        leg.member.send_control(encode_close(leg.id, reason))

    def _end(
        self, leg: Leg, reason: int, events: list[SwitchEvent], *, by: str, tell: Leg, payload: bytes | None = None
    ) -> None:
        """Close a transport that the side of ``leg`` ended, and send CLOSE to ``tell`` unless its client is gone."""
        if leg.state is _CLOSED:
            return  # ended with the other leg, which was on the same member
        asking = leg if leg.initiator else leg.other
        was_open = leg.state is _OPEN
        if was_open:
            self.open_transports -= 1
        elif not asking.member.gone:
            asking.member.pending_requests -= 1
        events.append(TransportEnded(asking, reason, by, was_open))
        leg.close()
        leg.other.close()
        # The event needs the reference from the leg that asked to the other. Without the reference back there is no cycle,
        # so the memory of a closed transport is free before the garbage collector runs.
        del asking.other.other
        if leg.queue:
            self.queues.drop(leg)
        if tell.queue and (tell.member.gone or reason == _SLOW_CONSUMER):
            self.queues.drop(tell)
        if tell.member.gone:
            return
        frame = encode_close(tell.id, reason) if payload is None else encode_frame(CLOSE, tell.id, payload)
        if tell.queue:
            self.queues.put(tell, frame, self.now)  # behind the data that came before it
            self.queues.limit_time(tell, self.now)
        else:
            tell.member.send_control(frame)

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timeout(self) -> float | None:
        """When :meth:`handle_timeout` may have something to do, or ``None``."""
        self._forget_settled()
        due = self.queues.next_timeout()
        if not self._pending:
            return due
        first = self._pending[0][0]
        return first if due is None else min(first, due)

    def _forget_settled(self) -> None:
        """Forget the oldest requests that are answered."""
        while self._pending and self._pending[0][1].state is not _REQUESTED:
            self._pending.popleft()

    def handle_timeout(self, now: float) -> list[SwitchEvent]:
        """Close transports whose REQUEST was not answered in time, and those whose receiver takes nothing."""
        self.now = now
        events: list[SwitchEvent] = []
        while self._pending and (self._pending[0][0] <= now or self._pending[0][1].state is not _REQUESTED):
            _, asking = self._pending.popleft()
            if asking.state is _REQUESTED:
                self._end_both(asking, CloseReason.HANDSHAKE_TIMEOUT, events)
        for queue in self.queues.expired(now):
            self._cut(queue, events)
        return events
