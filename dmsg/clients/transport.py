"""A transport over a stream of a session: the common part of all protocols."""

from __future__ import annotations

from typing import Any
from typing import Protocol as TypingProtocol

from twisted.internet.interfaces import ILoggingContext, IReactorTime, ITLSTransport
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.address import DmsgAddress
from dmsg.glue.stream_transport import StreamTransport
from dmsg.glue.streams import S
from dmsg.glue.tls import start_tls


class Carrier(TypingProtocol):
    """The session with a relay that carries a transport."""

    @property
    def connection(self) -> Any:
        """The connection of its streams; see :class:`~dmsg.glue.streams.StreamConnection`."""

    @property
    def clock(self) -> IReactorTime:
        """Its clock."""

    def flush_soon(self) -> None:
        """Send what was queued at the end of this turn of the reactor."""

    def transport_closed(self, transport: Any, reason: str, *, local: bool, code: int = 0) -> None:
        """Called once, when a transport has ended on the wire; ``code`` is the code of ``reason`` there."""


class RelayTransport(StreamTransport[S]):
    """One end of a stream over ``carrier``, from the address ``host`` to ``peer``."""

    __slots__ = ("_carrier", "_has_left", "_host", "_peer", "accept_ms")

    #: Whether the program has put it under TLS.
    TLS = False

    def __init__(self, carrier: Carrier, stream: S, host: DmsgAddress, peer: DmsgAddress) -> None:
        super().__init__(stream, carrier.connection, carrier.flush_soon, carrier.clock)
        #: Time from the request to the peer's answer, at the initiator; 0 at the other side.
        self.accept_ms = 0.0
        self._carrier = carrier
        self._host = host
        self._peer = peer
        self._has_left = False

    def getPeer(self) -> DmsgAddress:
        """The address of the peer, and the relay in between."""
        return self._peer

    def getHost(self) -> DmsgAddress:
        """The address of this end."""
        return self._host

    def logPrefix(self) -> str:
        """The prefix of the protocol's messages and the beginning of the peer's key, for a program that logs as its transport."""
        protocol, name = self.protocol, "-"
        if protocol is not None:
            name = protocol.logPrefix() if ILoggingContext.providedBy(protocol) else type(protocol).__name__
        return f"{name},{str(self._peer.public_key)[:8]}"

    def startTLS(self, contextFactory: object, normal: bool = True) -> None:
        """Put the transport under TLS of the program's own, inside of ours, as ``ITLSTransport`` says.

        The side that has dialled is the client, or with ``normal=False`` the server. Raises ``RuntimeError`` under TLS already,
        and for a transport without a protocol.
        """
        is_client = self.stream.initiator is bool(normal)
        start_tls(self, self._writer, contextFactory, is_client=is_client, clock=self._clock)

    # Programs that were written for TCP call these. Setting them changes nothing: both are always on.

    def getTcpNoDelay(self) -> bool:
        """``True``: written data does not wait for more."""
        return True

    def setTcpNoDelay(self, enabled: bool) -> None:
        """Nothing changes."""

    def getTcpKeepAlive(self) -> bool:
        """``True``: this side watches its connection to its relay, and the peer's relay reports the end of the peer."""
        return True

    def setTcpKeepAlive(self, enabled: bool) -> None:
        """Nothing changes."""

    def over(self, reason: Failure) -> None:
        """See :class:`~dmsg.glue.stream_transport.StreamTransport`. If no reason is known, this side has closed the stream."""
        self._leave("normal", local=True)
        super().over(reason)

    def _leave(self, reason: str, *, local: bool, code: int = 0) -> None:
        """The transport has ended on the wire: tell its carrier, once."""
        if not self._has_left:
            self._has_left = True
            self._deadlines.stop()
            self._carrier.transport_closed(self, reason, local=local, code=code)


# Programs ask for it before they call startTLS. As a decorator, mypy would insist on the addresses of TCP.
implementer(ITLSTransport)(RelayTransport)
