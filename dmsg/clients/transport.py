"""A transport over a stream of a session, with what all protocols do alike."""

from __future__ import annotations

from typing import Any
from typing import Protocol as TypingProtocol

from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.address import DmsgAddress
from dmsg.glue.stream_transport import StreamTransport
from dmsg.glue.streams import S


class Carrier(TypingProtocol):
    """What carries a transport: a session with a relay."""

    @property
    def connection(self) -> Any:
        """What its streams belong to; see :class:`~dmsg.glue.streams.StreamConnection`."""

    @property
    def clock(self) -> IReactorTime:
        """Its clock."""

    def flush_soon(self) -> None:
        """Send what was queued at the end of this turn of the reactor."""

    def transport_closed(self, transport: Any, reason: str, *, local: bool, code: int = 0) -> None:
        """Told once, when nothing is left of a transport on the wire; ``code`` is what stands for ``reason`` there."""


class RelayTransport(StreamTransport[S]):
    """One end of a stream over ``carrier``, from the address ``host`` to ``peer``."""

    def __init__(self, carrier: Carrier, stream: S, host: DmsgAddress, peer: DmsgAddress) -> None:
        super().__init__(stream, carrier.connection, carrier.flush_soon, carrier.clock)
        #: From the request to the peer's answer, at the side that asked; 0 at the other.
        self.accept_ms = 0.0
        self._carrier = carrier
        self._host = host
        self._peer = peer
        self._has_left = False

    def getPeer(self) -> DmsgAddress:
        """Who is at the other end, and the relay in between."""
        return self._peer

    def getHost(self) -> DmsgAddress:
        """This end."""
        return self._host

    # Programs that were written for TCP call these. Setting them changes nothing: both are always on.

    def getTcpNoDelay(self) -> bool:
        """``True``: nothing that is written waits for more."""
        return True

    def setTcpNoDelay(self, enabled: bool) -> None:
        """Nothing changes."""

    def getTcpKeepAlive(self) -> bool:
        """``True``: this side's connection to its relay is watched, and a peer's end is told by the peer's relay."""
        return True

    def setTcpKeepAlive(self, enabled: bool) -> None:
        """Nothing changes."""

    def over(self, reason: Failure) -> None:
        """See :class:`~dmsg.glue.stream_transport.StreamTransport`; a stream of which no reason is known closed here."""
        self._leave("normal", local=True)
        super().over(reason)

    def _leave(self, reason: str, *, local: bool, code: int = 0) -> None:
        """Nothing is left of the transport on the wire: tell its carrier, once."""
        if not self._has_left:
            self._has_left = True
            self._deadlines.stop()
            self._carrier.transport_closed(self, reason, local=local, code=code)
