"""The switch of a dmsg relay: where each frame goes, and which requests pass.

Pure. :ref:`spec-request-checks`, :ref:`spec-other-frames`, :ref:`spec-closing`. The part for any protocol is in
:mod:`dmsg.serving.switch`. :meth:`Switch.route` is the hot path: a FWD or ACK of an open transport takes one look-up and
adds two pieces to the output of the other member. It copies, logs and allocates nothing else.
"""

from __future__ import annotations

import os
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
    FRAME_PAYLOAD_LIMIT_BYTES,
    FWD,
    HEADER,
    HEADER_BYTES,
    OK,
    REQUEST,
    REQUEST_BYTES,
    SEQUENCE_BYTES,
    CloseReason,
    close_reason,
    encode_close,
    encode_frame,
)
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.member import Leg, Member
from dmsg.serving import switch as any_protocol
from dmsg.serving.events import REFUSALS, Refusal, RequestRefused, SwitchEvent
from dmsg.serving.member import LegState

# Looked up once: an attribute of an Enum class takes a call in Python.
_OPEN: Final = LegState.OPEN


class Switch(any_protocol.Switch[Member, Leg]):
    """The members of a relay and the transports between them."""

    limits: RelayLimits

    def __init__(self, limits: RelayLimits | None = None, *, random: Random = os.urandom) -> None:
        super().__init__(limits or RelayLimits())
        self._random = random

    def closing(self, leg: Leg, reason: int) -> bytes:
        """A CLOSE frame."""
        return encode_close(leg.id, reason)

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
        member = Member(self, remote, records, now, extended=extended, group=group)
        member.send_control(encode_frame(OK, 0))
        return member, self.admit(member, now)

    # --- the hot path ----------------------------------------------------------------------------------------------

    def route(self, member: Member, data: bytes | memoryview, now: float) -> list[SwitchEvent]:
        """Take bytes that ``member`` received. Members with something to send because of them are in :attr:`dirty`.

        Raises ``RemoteProtocolError`` when the connection must be dropped.
        """
        self.now = now
        events: list[SwitchEvent] = []
        legs = member.legs
        dirty = self.dirty
        opened = _OPEN
        unpack_header = HEADER.unpack_from
        frames = 0
        member.bytes_in += len(data)
        try:
            for record in member.records.open(data):
                plaintext = member.tail + record if member.tail else record
                total, end = len(plaintext), 0
                # split_frames() written out: most records hold one frame, and a list of it takes as long as routing it.
                while total - end >= HEADER_BYTES:
                    kind, transport_id, size = unpack_header(plaintext, end)
                    if size > FRAME_PAYLOAD_LIMIT_BYTES:
                        raise RemoteProtocolError("frame", "payload over the limit")
                    start = end + HEADER_BYTES
                    if start + size > total:
                        break
                    end = start + size
                    frames += 1
                    leg = legs.get(transport_id)
                    if leg is None or leg.state is not opened or kind < FWD or size < SEQUENCE_BYTES or kind > ACK:
                        self._on_rare_frame(member, leg, kind, transport_id, plaintext[start:end], events)
                        continue
                    leg.bytes += size
                    target = leg.target
                    prefix = leg.fwd_prefix if kind == FWD else leg.ack_prefix
                    if target.direct:
                        # a new type and id, then size and payload as they came
                        target.out += (prefix, plaintext[start - 2 : end])
                        if not target.dirty:
                            target.dirty = True
                            dirty.append(target)
                    else:
                        self._enqueue(leg, prefix + plaintext[start - 2 : end], events)
                member.tail = plaintext[end:] if end < total else b""
        except RemoteProtocolError as error:
            error.events = events  # of the frames before the faulty one
            raise
        finally:
            member.frames_in += frames
        return events

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
            notice = encode_frame(CLOSE, leg.other.id, payload[:CLOSE_LIMIT_BYTES])
            self._end(leg, close_reason(payload), events, by=leg.side, tell=leg.other, notice=notice)
        elif kind == ACCEPT and leg.accepts(payload):
            asking = leg.other
            if self._accept(leg, events):
                asking.member.send_control(encode_frame(ACCEPT, asking.id, payload))
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
        in_use = REFUSALS[CloseReason.BAD_ID] if leg is not None else None
        refusal = in_use or self._refusal_of(member, transport_id, payload, target)
        if refusal is not None:
            self._refuse(member, transport_id, refusal, events)
            return
        assert target is not None
        target_id = target.free_id(self._random)
        if target_id is None:
            self._refuse(member, transport_id, REFUSALS[CloseReason.BUSY], events)
            return
        asking = Leg(member, transport_id, initiator=True, request=payload)
        self._ask(asking, Leg(target, target_id, initiator=False, request=payload), events)
        target.send_control(encode_frame(REQUEST, target_id, payload))

    def _refuse(self, member: Member, transport_id: int, refusal: Refusal, events: list[SwitchEvent]) -> None:
        member.remember(transport_id)  # the client may have given up meanwhile: its CLOSE is no offence
        member.send_control(encode_close(transport_id, refusal.code))
        events.append(RequestRefused(member, refusal.reason))

    def _refusal_of(self, member: Member, transport_id: int, payload: bytes, target: Member | None) -> Refusal | None:
        """Why a REQUEST is not passed on to ``target``, or ``None``."""
        if transport_id % 2:
            self._count_stray(member)
            return REFUSALS[CloseReason.BAD_ID]
        longest = EXTENDED_REQUEST_LIMIT_BYTES if member.extended else REQUEST_BYTES
        if not REQUEST_BYTES <= len(payload) <= longest or payload[:33] != member.remote.raw:
            self._count_stray(member)
            return REFUSALS[CloseReason.MALFORMED]
        refusal = self._refusal_from(member)
        if refusal is not None:
            return refusal
        if target is None:
            return REFUSALS[CloseReason.UNKNOWN_PEER]
        if len(payload) > REQUEST_BYTES and not target.extended:
            return REFUSALS[CloseReason.UNSUPPORTED]
        return self._refusal_towards(member, target)

    def _on_stray(self, member: Member, kind: int, transport_id: int) -> None:
        """Handle a frame of no transport. If its transport ended just now, the frame is neither counted nor answered."""
        if transport_id in member.recent:
            return
        self._count_stray(member)
        if kind != CLOSE:  # a CLOSE is never answered with a CLOSE (:ref:`spec-late-frames`)
            member.send_control(encode_close(transport_id, CloseReason.NORMAL))
