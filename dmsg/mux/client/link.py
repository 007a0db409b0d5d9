"""What a transport runs on, and how it says that it has ended badly."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Protocol as TypingProtocol

from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.crypto.keys import PublicKey
from dmsg.errors import DmsgError
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.errors import Refused, close_error
from dmsg.mux.core.stream import Stream
from dmsg.mux.core.wire import CloseReason

if TYPE_CHECKING:
    from dmsg.mux.client.transport import DmsgTransport


class TransportLost(ConnectionLost):
    """A transport ended otherwise than by an orderly close. ``cause`` is the typed reason."""

    def __init__(self, cause: DmsgError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def end_failure(stream: Stream, code: int, *, local: bool) -> Failure:
    """What ``connectionLost`` is told for a transport that ended with ``code``."""
    if code == CloseReason.NORMAL:
        return Failure(ConnectionDone())
    if stream.was_cut:
        return Failure(TransportLost(Refused("the peer closed without taking all that was written")))
    if code != CloseReason.REFUSED or local:
        return Failure(TransportLost(close_error(code, by="local" if local else "peer")))
    cut = f", which had {stream.cut_bytes} bytes to acknowledge" if stream.cut_bytes else ""
    return Failure(TransportLost(Refused(f"the peer aborted the transport{cut}")))


class Link(TypingProtocol):
    """What carries a transport: a session with a server."""

    connection: Connection
    clock: IReactorTime
    server: PublicKey

    def flush_soon(self) -> None:
        """Send what was queued at the end of this turn of the reactor."""

    def transport_closed(self, transport: DmsgTransport, code: int, *, local: bool) -> None:
        """Told once, when a transport is over."""

    def path_lost(self, transport: DmsgTransport, error: DmsgError) -> float:
        """A transport has lost its path: for how many seconds it may wait for another one; 0 if not at all."""
