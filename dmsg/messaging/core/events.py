"""What the cores of this package tell the shells: one small object for each thing that happened."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.crypto.keys import PublicKey
from dmsg.messaging.core.channel import Channel
from dmsg.messaging.core.errors import ChannelEndReason


class Event:
    """Base of all events."""

    __slots__ = ()


@dataclass(slots=True)
class LinkRequested(Event):
    """A client has proved that it has the key ``remote``: call ``accept`` or ``refuse`` of the handshake."""

    remote: PublicKey


@dataclass(slots=True)
class LinkDone(Event):
    """The link handshake is done: the key of the other side, and the bytes after the handshake, which are frames.

    From now on frames may be sent.
    """

    remote: PublicKey
    leftover: bytes


@dataclass(slots=True)
class ChannelOffered(Event):
    """Another client wants to open ``channel``: accept or refuse it.

    Until ``Connection.prove`` only the relay vouches for its key. Then the key is proved, unless the relay repeats an old
    offer of that key; the relay can neither read nor write what goes through such a channel.
    """

    channel: Channel


@dataclass(slots=True)
class ChannelOpened(Event):
    """The channel we asked for is open."""

    channel: Channel


@dataclass(slots=True)
class DataReceived(Event):
    """Bytes of a channel, in order. The reader calls ``Connection.consumed`` for them."""

    channel: Channel
    data: bytes


@dataclass(slots=True)
class ChannelEnded(Event):
    """The channel is over for the application. ``local`` tells whether this side ended it."""

    channel: Channel
    reason: ChannelEndReason
    local: bool
