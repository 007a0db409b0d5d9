"""What the cores of this package tell the shells: one small object for each thing that happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmsg.crypto.keys import PublicKey
    from dmsg.mux.core.plain_stream import PlainStream
    from dmsg.mux.core.record import RecordLayer
    from dmsg.mux.core.stream import Stream


class Event:
    """Base of all events."""

    __slots__ = ()


@dataclass(slots=True)
class HandshakeDone(Event):
    """The handshake is through: who the peer is, the sealed layer, the peer's payload, and bytes that followed."""

    remote: PublicKey
    records: RecordLayer
    peer_payload: bytes
    leftover: bytes


@dataclass(slots=True)
class Ready(Event):
    """The server's OK came: the connection may be used."""


@dataclass(slots=True)
class Rejected(Event):
    """The server answered the handshake with a refusal; ``reason`` is its text."""

    reason: str


@dataclass(slots=True)
class RequestReceived(Event):
    """A peer asks for a transport: accept or refuse ``stream``."""

    stream: PlainStream


@dataclass(slots=True)
class Accepted(Event):
    """The peer accepted the transport we asked for; ``message`` is its part of the end-to-end handshake, if any."""

    stream: Stream
    message: bytes = b""


@dataclass(slots=True)
class UpgradeReceived(Event):
    """The peer's part of the end-to-end handshake came in a FWD (carrier B)."""

    stream: Stream
    message: bytes


@dataclass(slots=True)
class Confirmed(Event):
    """The initiator of a sealed stream has proved itself: the application may be told."""

    stream: Stream


@dataclass(slots=True)
class EndAcked(Event):
    """The peer has everything this side wrote, and knows that it is everything."""

    stream: Stream


@dataclass(slots=True)
class EndReceived(Event):
    """The peer has ended its stream: nothing more comes, provably."""

    stream: Stream


@dataclass(slots=True)
class DataReceived(Event):
    """Bytes of a stream, in order. Whoever takes them says so with ``Connection.consumed``."""

    stream: Stream
    data: bytes


@dataclass(slots=True)
class StreamClosed(Event):
    """The stream is over. ``code`` is the CLOSE reason; ``local`` tells whether this side ended it.

    ``proven`` says that the peer itself sealed the reason; otherwise the relay may have made it up.
    """

    stream: Stream
    code: int
    local: bool
    proven: bool = False
