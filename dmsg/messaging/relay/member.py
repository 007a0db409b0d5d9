"""A client's end at a relay of the messaging system, and the legs of its channels.

Pure. The part for any protocol is in :mod:`dmsg.serving.member`; :mod:`dmsg.messaging.relay.switch` decides what happens
to them.
"""

from __future__ import annotations

from typing import Final

from dmsg.crypto.keys import PublicKey
from dmsg.messaging.core.limits import LINK_IDS
from dmsg.messaging.core.wire import FrameReader, Layout
from dmsg.serving import member as any_protocol

#: The relay gives out these upper ids first, from 255 down, because clients count from 0 up: where both sides of a link share
#: the ids, an OpenChannel of each could otherwise have the same id.
_UPPER_IDS: Final = LINK_IDS // 2
#: The id of a leg whose client has not said yet what it calls the channel.
UNKNOWN_ID: Final = -1


class Leg(any_protocol.Leg["Member"]):
    """One side of a channel; ``closing`` means that its client has sent CloseChannel.

    Where a channel has one id for both directions, ``id`` and ``key`` are equal. Where each side has ids of its own, ``key`` is
    the relay's id and ``id`` the client's. Until the channel is open, the leg that asked has a ``key`` that no frame can
    have (:meth:`asking_key`).
    """

    __slots__ = ("closing",)

    def __init__(self, member: Member, channel_id: int, *, initiator: bool) -> None:
        super().__init__(member, channel_id, initiator=initiator)
        self.closing = False
        if initiator:
            self.key = self.asking_key(channel_id)

    @staticmethod
    def asking_key(channel_id: int) -> int:
        """The key of a leg whose client asked for a channel that it calls ``channel_id``."""
        return LINK_IDS + channel_id

    def rekey(self, key: int) -> None:
        """Register this leg under ``key`` from now on."""
        del self.member.legs[self.key]
        self.key = key
        self.member.legs[key] = self


class Member(any_protocol.Member[Leg]):
    """The core of one client's link (a :class:`~dmsg.sansio.core.Core`).

    ``layout`` is the layout of frames to the client: the relay's own until the client's first frame shows which one it
    speaks (:ref:`spec-messaging-layouts`). ``own_ids`` says whether each side of the link has ids of its own; ``None``
    until an answer of the client shows it. ``late`` has the ids of requests that are over, and that the client may still answer:
    it cannot be told of their end before. The oldest is first.
    """

    __slots__ = ("_next_id", "late", "layout", "own_ids", "reader")

    def __init__(self, switch: any_protocol.Router, remote: PublicKey, layout: Layout, now: float, group: str) -> None:
        super().__init__(switch, remote, now, group=group)
        self.reader = FrameReader()
        self.layout = layout
        self.own_ids: bool | None = None
        self.late: dict[int, None] = {}
        self._next_id = LINK_IDS - 1

    @property
    def unfinished_bytes(self) -> int:
        """Received bytes that do not form a whole frame yet."""
        return self.reader.held_bytes

    def send_control(self, frame: bytes) -> None:
        """Send a frame that is not data. It goes ahead of data that waits; ``b""`` is no frame."""
        if frame:
            super().send_control(frame)

    def asked_as(self, channel_id: int) -> Leg | None:
        """The leg that is in the way of an OpenChannel for ``channel_id``, or ``None``."""
        found = self.legs.get(Leg.asking_key(channel_id))
        if found is None and not self.own_ids:
            found = self.legs.get(channel_id)
            if found is not None and found.id != channel_id:
                found = None  # the id is the relay's: this client has ids of its own, or a peer has made it seem so
        if found is None and self.own_ids is not False:
            found = self.called(channel_id)
        return found

    def key_for(self, asking: Leg, own_ids: bool) -> int | None:
        """The key of a channel that this client asked for, once it is open; ``None`` if there is no room."""
        if own_ids:
            return self.free_id()
        return asking.id if asking.id not in self.legs else None

    def called(self, channel_id: int) -> Leg | None:
        """The leg of the open channel that the client calls ``channel_id``, or ``None``."""
        return next((leg for leg in self.legs.values() if leg.id == channel_id and leg.open), None)

    def free_id(self) -> int | None:
        """An id that the relay may give to a channel of this client, or ``None``; it is free until :meth:`take_id`.

        Ids are used in rotation, and not again before the last frames of the channel that had the id are sent; those in
        :attr:`late` last.
        """
        leaving = {leg.id for leg in self.waiting if not leg.open}

        def is_free(channel_id: int) -> bool:
            if channel_id in self.legs or channel_id in leaving:
                return False
            return bool(self.own_ids) or Leg.asking_key(channel_id) not in self.legs

        channel_id = self._next_id
        for _ in range(_UPPER_IDS):
            if is_free(channel_id) and channel_id not in self.late:
                return channel_id
            channel_id = _below(channel_id)
        lower = [number for number in reversed(range(_UPPER_IDS)) if number not in self.late]
        # Where both sides share the ids, the client gives the lower ones itself.
        others = [*lower, *self.late] if self.own_ids else [*self.late, *lower]
        return next(filter(is_free, others), None)

    def take_id(self, channel_id: int) -> None:
        """The relay gives ``channel_id``, which :meth:`free_id` told, to a channel."""
        if channel_id in self.late:
            del self.late[channel_id]
        elif channel_id >= _UPPER_IDS:
            self._next_id = _below(channel_id)


def _below(channel_id: int) -> int:
    """The upper id that is next in rotation."""
    return channel_id - 1 if channel_id > _UPPER_IDS else LINK_IDS - 1
