"""What the cores of this package tell the shells: one small object for each thing that happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmsg.crypto.keys import PublicKey
    from dmsg.mux.core.e2e_handshake import Resume
    from dmsg.mux.core.hello import Capabilities
    from dmsg.mux.core.plain_stream import PlainStream
    from dmsg.mux.core.record import RecordLayer
    from dmsg.mux.core.stream import Stream


class Event:
    """Base of all events."""

    __slots__ = ()


@dataclass(slots=True)
class HandshakeDone(Event):
    """The handshake is done: the peer's key, the record layer, what the peer's payload says, and bytes that followed."""

    remote: PublicKey
    records: RecordLayer
    peer: Capabilities
    leftover: bytes


@dataclass(slots=True)
class Ready(Event):
    """The server's OK came: the connection may be used."""


@dataclass(slots=True)
class Rejected(Event):
    """The server answered the handshake with a refusal; ``reason`` is its text."""

    reason: str


@dataclass(slots=True)
class StreamOffered(Event):
    """A peer asks for a transport: accept or refuse ``stream``."""

    stream: PlainStream


@dataclass(slots=True)
class StreamOpened(Event):
    """The transport we asked for is open, and sealed if that was asked for.

    ``stream`` replaces the requested one. ``resume`` is what the peer says about the transport to go on with; ``None`` if it
    does not know it, or was not asked.
    """

    stream: Stream
    resume: Resume | None = None


@dataclass(slots=True)
class UpgradeReceived(Event):
    """The handshake message of an offered stream that was accepted for upgrade has come, and can be read."""

    stream: PlainStream


@dataclass(slots=True)
class Confirmed(Event):
    """The initiator of a sealed stream has proved itself: the application may be told."""

    stream: Stream


@dataclass(slots=True)
class EndAcked(Event):
    """The peer has everything this side wrote, and knows that nothing more comes."""

    stream: Stream


@dataclass(slots=True)
class EndReceived(Event):
    """The peer has ended its stream: nothing more comes, provably."""

    stream: Stream


@dataclass(slots=True)
class DataReceived(Event):
    """Bytes of a stream, in order. The reader calls ``Connection.consumed`` for them."""

    stream: Stream
    data: bytes


@dataclass(slots=True)
class StreamClosed(Event):
    """The stream is over. ``code`` is the CLOSE reason; ``local`` tells whether this side ended it.

    ``proven`` says that the peer itself sealed the reason; otherwise the relay may have made it up. ``detail`` says what
    this side found wrong, if the code does not say it all.
    """

    stream: Stream
    code: int
    local: bool
    proven: bool = False
    detail: str = ""
