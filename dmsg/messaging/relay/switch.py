"""The switch of a messaging relay: which channel goes where, under which id, in which layout.

Pure. :ref:`spec-messaging-relay`. The part for any protocol is in :mod:`dmsg.serving.switch`. A frame of no channel, or of
an unknown type, is ignored, as clients do.
"""

from __future__ import annotations

from typing import Final

from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import PublicKey
from dmsg.errors import LocalProtocolError, RemoteProtocolError
from dmsg.messaging.core.wire import (
    CHANNEL_CLOSED,
    CHANNEL_OPENED,
    CHANNEL_OPENED_BYTES,
    CLOSE_CHANNEL,
    GO,
    KEY_BYTES,
    OPEN_CHANNEL,
    OPEN_CHANNEL_BYTES,
    SEND,
    Layout,
)
from dmsg.messaging.relay.limits import RelayLimits
from dmsg.messaging.relay.member import UNKNOWN_ID, Leg, Member
from dmsg.serving import switch as any_protocol
from dmsg.serving.events import REFUSALS, Ending, Refusal, RequestRefused, SwitchEvent
from dmsg.serving.member import LegState
from dmsg.serving.waits import Waits

# Looked up once: an attribute of an Enum class takes a call in Python.
_OPEN: Final = LegState.OPEN
_REQUESTED: Final = LegState.REQUESTED


class Switch(any_protocol.Switch[Member, Leg]):
    """The members of a relay and the channels between them.

    ``layout`` is for clients that have not sent a frame yet. With ``go_quirks`` the relay itself ends channels by CloseChannel,
    because clients of 2019 ignore ChannelClosed on an open channel. A client that writes the layout SEED is none of 2019, and
    still gets ChannelClosed: to such a client a CloseChannel would be an orderly end.
    """

    limits: RelayLimits

    def __init__(self, limits: RelayLimits | None = None, *, layout: Layout = GO, go_quirks: bool = False) -> None:
        super().__init__(limits or RelayLimits())
        self._layout = layout
        self._closes_open = CLOSE_CHANNEL if go_quirks else CHANNEL_CLOSED
        #: Channels that one side has closed, and until when the other side may go on.
        self._closing: Waits[Leg] = Waits(_OPEN)

    def add_member(self, remote: PublicKey, now: float, *, group: str = "") -> tuple[Member, list[SwitchEvent]]:
        """Admit a link. An older link of the same key is dropped with its channels (:ref:`spec-newest-wins`).

        ``group`` is the group of addresses it comes from (:func:`dmsg.address.address_group`); without one it has a
        group of its own.
        """
        member = Member(self, remote, self._layout, now, group)
        return member, self.admit(member, now)

    def closing(self, leg: Leg, reason: int) -> bytes:
        """ChannelClosed; or CloseChannel for a client of 2019 whose channel was offered or is open.

        Gives ``b""`` when the client has not told its id of the channel yet: the frame is sent when it does. A client that has
        not shown yet whether it has ids of its own does have some if the relay's id is also the id of one of its open channels.
        """
        member = leg.member
        if leg.id == UNKNOWN_ID or (not leg.initiator and member.own_ids is None and member.called(leg.id) is not None):
            return b""
        waits = leg.closing or leg.key == Leg.asking_key(leg.id)
        return member.layout.encode(CHANNEL_CLOSED if waits else self._closes(member), leg.id)

    def _closes(self, member: Member) -> int:
        """The frame that ends an open channel of ``member``; programs of 2019 write only the layout GO."""
        return self._closes_open if member.layout is GO else CHANNEL_CLOSED

    # --- frames ----------------------------------------------------------------------------------------------------

    def route(self, member: Member, data: bytes, now: float) -> list[SwitchEvent]:
        """Take bytes that ``member`` received. Members with something to send because of them are in ``dirty``.

        Raises ``RemoteProtocolError`` when the link must be dropped.
        """
        self.now = now
        events: list[SwitchEvent] = []
        legs = member.legs
        member.bytes_in += len(data)
        try:
            data, frames = member.reader.read(data)
            layout = member.reader.layout
            if layout is not None:
                member.layout = layout
            member.frames_in += len(frames)
            for kind, channel_id, start, end in frames:
                leg = legs.get(channel_id)
                if kind != SEND:
                    self._on_rare_frame(member, leg, kind, channel_id, data[start:end], events)
                elif leg is not None and leg.state is _OPEN and not leg.closing:
                    leg.bytes += end - start
                    target, there = leg.target, leg.other.id
                    if target.layout is layout:  # the header and the payload as they came, and another id
                        head, body = data[start - 4 : start - 1] + there.to_bytes(1, "big"), data[start:end]
                    else:
                        try:
                            frame = target.layout.encode(SEND, there, data[start:end])
                        except LocalProtocolError:  # too long for a frame of the other layout
                            self._end_both(leg, Ending.MALFORMED, events)
                            continue
                        head, body = frame[:4], frame[4:]
                    if target.direct:
                        target.out += (head, body)
                        target.mark_dirty()
                    else:
                        self._enqueue(leg, head + body, events)
        except RemoteProtocolError as error:
            error.events = events  # of the frames before the faulty one
            raise
        return events

    def _on_rare_frame(
        self, member: Member, leg: Leg | None, kind: int, channel_id: int, payload: bytes, events: list[SwitchEvent]
    ) -> None:
        if kind == OPEN_CHANNEL:
            self._on_open_channel(member, channel_id, payload, events)
            return
        if leg is None and kind in (CHANNEL_OPENED, CLOSE_CHANNEL, CHANNEL_CLOSED):
            member.late.pop(channel_id, None)
        if kind == CHANNEL_OPENED:
            self._on_channel_opened(member, leg, payload, events)
        elif kind in (CLOSE_CHANNEL, CHANNEL_CLOSED):
            if leg is None and not member.own_ids:
                leg = member.legs.get(Leg.asking_key(channel_id))
            if leg is not None:
                self._on_close(leg, kind, events)

    # --- opening ---------------------------------------------------------------------------------------------------

    def _on_open_channel(self, member: Member, channel_id: int, payload: bytes, events: list[SwitchEvent]) -> None:
        older = member.asked_as(channel_id)
        if older is not None:  # the answer closes that channel at the client, so it ends here as well
            self._end(older, Ending.BAD_ID, events, by="server", tell=older.other)
        target = self.members.get(payload[:KEY_BYTES])
        in_use = REFUSALS[Ending.BAD_ID] if older is not None else None
        refusal = in_use or self._refusal_of(member, payload, target)
        theirs = target.free_id() if target is not None and refusal is None else None
        if target is None or theirs is None:
            member.send_control(member.layout.encode(CHANNEL_CLOSED, channel_id))
            events.append(RequestRefused(member, (refusal or REFUSALS[Ending.BUSY]).reason))
            return
        target.take_id(theirs)
        asked = Leg(target, theirs, initiator=False)
        if target.own_ids:
            asked.id = UNKNOWN_ID
        self._ask(Leg(member, channel_id, initiator=True), asked, events)
        message = member.remote.raw + payload[KEY_BYTES:]
        target.send_control(target.layout.encode(OPEN_CHANNEL, theirs, message))

    def _refusal_of(self, member: Member, payload: bytes, target: Member | None) -> Refusal | None:
        """Why an OpenChannel is not passed on to ``target``, or ``None``."""
        if len(payload) != OPEN_CHANNEL_BYTES:
            self._count_stray(member)  # a request of four bytes costs as much as a whole one
            return REFUSALS[Ending.MALFORMED]
        refusal = self._refusal_from(member)
        if refusal is not None:
            return refusal
        if target is None:
            return REFUSALS[Ending.UNKNOWN_PEER]
        if target is member:
            return REFUSALS[Ending.REFUSED]
        if not _is_message(payload[KEY_BYTES:]):
            self._count_stray(member)
            return REFUSALS[Ending.MALFORMED]
        return self._refusal_towards(member, target)

    def _on_channel_opened(self, member: Member, leg: Leg | None, payload: bytes, events: list[SwitchEvent]) -> None:
        own_ids = len(payload) == CHANNEL_OPENED_BYTES + 1
        # In use by a channel, or by a request of the client itself.
        in_use = own_ids and (member.called(payload[0]) is not None or Leg.asking_key(payload[0]) in member.legs)
        if leg is None or leg.initiator or leg.state is not _REQUESTED:
            if leg is None and own_ids and not in_use:  # the request is over, and only now is there an id to tell it
                member.send_control(member.layout.encode(self._closes(member), payload[0]))
            return
        message = payload[own_ids:]
        is_sound = len(message) == CHANNEL_OPENED_BYTES and not in_use and _is_message(message)
        if not is_sound or member.own_ids not in (None, own_ids):
            self._end_both(leg, Ending.MALFORMED, events)
            return
        member.own_ids = own_ids
        if own_ids:
            leg.id = payload[0]
        else:
            member.late.clear()
        asking = leg.other
        if asking.member.own_ids not in (None, own_ids):
            self._end_both(leg, Ending.UNSUPPORTED, events)
            return
        key = asking.member.key_for(asking, own_ids)
        if key is None:
            self._end_both(leg, Ending.BUSY, events)
        elif self._accept(leg, events):
            if own_ids:
                asking.member.take_id(key)
            asking.rekey(key)
            answer = key.to_bytes(1, "big") + message if own_ids else message
            asking.member.send_control(asking.member.layout.encode(CHANNEL_OPENED, asking.id, answer))

    # --- closing ---------------------------------------------------------------------------------------------------

    def _end(
        self, leg: Leg, reason: int, events: list[SwitchEvent], *, by: str, tell: Leg, notice: bytes | None = None
    ) -> None:
        """See :class:`dmsg.serving.switch.Switch`. A client with ids of its own may still answer a request that is over."""
        if leg.state is _REQUESTED:
            asked = leg.other if leg.initiator else leg
            if by != asked.side and asked.member.own_ids is not False:
                asked.member.late[asked.key] = None
        super()._end(leg, reason, events, by=by, tell=tell, notice=notice)

    def _on_close(self, leg: Leg, kind: int, events: list[SwitchEvent]) -> None:
        """CloseChannel or ChannelClosed: a refusal, the end of a request, or a step of the closing of a channel."""
        other = leg.other
        if leg.state is _REQUESTED:
            self._end(leg, Ending.NORMAL if leg.initiator else Ending.REFUSED, events, by=leg.side, tell=other)
            if kind == CLOSE_CHANNEL:
                leg.closing = True
                leg.member.send_control(self.closing(leg, Ending.NORMAL))
        elif kind == CHANNEL_CLOSED:
            self._end(leg, Ending.NORMAL, events, by=(other if other.closing else leg).side, tell=other)
        elif not leg.closing:
            leg.closing = True
            self._closing.add(leg, self.now + self.limits.close_timeout_s)
            frame = other.member.layout.encode(CLOSE_CHANNEL, other.id)
            if other.queue:
                self._enqueue(leg, frame, events)  # after the data that came before it
            else:
                other.member.send_control(frame)

    def next_timeout(self) -> float | None:
        """When :meth:`handle_timeout` may have something to do, or ``None``."""
        due, closed = super().next_timeout(), self._closing.next()
        if closed is None:
            return due
        return closed if due is None else min(closed, due)

    def handle_timeout(self, now: float) -> list[SwitchEvent]:
        """Close channels not answered, or not closed by both sides, in time, and those whose receiver takes nothing."""
        events = super().handle_timeout(now)
        for leg in self._closing.over(now):
            self._end(leg, Ending.NORMAL, events, by=leg.side, tell=leg.other)
            leg.member.send_control(self.closing(leg, Ending.NORMAL))
        return events


def _is_message(message: bytes) -> bool:
    """Whether a Noise message begins with a point of the curve. Clients of 2019 crash when it does not."""
    try:
        PublicKey(message[:KEY_BYTES])
    except InvalidKey:
        return False
    return True
