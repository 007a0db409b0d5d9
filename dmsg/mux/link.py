"""What a transport runs on, and how it says that it has ended badly."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Protocol as TypingProtocol

from twisted.internet.error import ConnectionLost
from twisted.internet.interfaces import IReactorTime

from dmsg.crypto.keys import PublicKey
from dmsg.errors import DmsgError
from dmsg.mux.connection import Connection

if TYPE_CHECKING:
    from dmsg.mux.transport import DmsgTransport


class TransportLost(ConnectionLost):
    """A transport ended otherwise than by an orderly close. ``cause`` is the typed reason."""

    def __init__(self, cause: DmsgError) -> None:
        super().__init__(str(cause))
        self.cause = cause


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
