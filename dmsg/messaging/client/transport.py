"""A channel as a Twisted transport."""

from __future__ import annotations

from typing import Protocol as TypingProtocol

from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.address import DmsgAddress
from dmsg.errors import DmsgError
from dmsg.glue.stream_transport import AbortReason, StreamTransport, TransportLost
from dmsg.messaging.core.channel import UNOWNED, Channel, ChannelOwner
from dmsg.messaging.core.connection import Connection
from dmsg.messaging.core.errors import ChannelDeadline, ChannelEndReason, end_error

_REASONS = {
    AbortReason.APPLICATION: ChannelEndReason.REFUSED,
    AbortReason.OVERFLOW: ChannelEndReason.SLOW_CONSUMER,
    AbortReason.DEADLINE: ChannelEndReason.DEADLINE,
}


class Link(TypingProtocol):
    """What carries a transport: a session with a relay."""

    connection: Connection
    clock: IReactorTime

    def flush_soon(self) -> None:
        """Send what was queued at the end of this turn of the reactor."""

    def transport_closed(self, transport: ChannelTransport, reason: str, *, local: bool) -> None:
        """Told once, when a transport is over."""


class ChannelTransport(StreamTransport[Channel], ChannelOwner):
    """One end of a channel. It ends with its link, and cannot be closed by half."""

    def __init__(self, link: Link, channel: Channel, host: DmsgAddress, peer: DmsgAddress) -> None:
        super().__init__(channel, link.connection, link.flush_soon, link.clock)
        channel.owner = self
        #: From OpenChannel to ChannelOpened, at the side that asked; 0 at the other.
        self.accept_ms = 0.0
        self._link = link
        self._host = host
        self._peer = peer
        self._released = False

    @property
    def security(self) -> str:
        """``"e2e"``: the relay cannot read what the channel carries."""
        return self.stream.security

    def getPeer(self) -> DmsgAddress:
        """Who is at the other end, and the relay in between."""
        return self._peer

    def getHost(self) -> DmsgAddress:
        """This end."""
        return self._host

    def deadline_exceeded(self, what: str) -> None:
        """See :meth:`StreamTransport.deadline_exceeded`."""
        self._abort(Failure(TransportLost(ChannelDeadline(what))), AbortReason.DEADLINE)

    # --- from the session ------------------------------------------------------------------------------------------

    def ended(self, reason: ChannelEndReason, *, local: bool) -> None:
        """See :class:`~dmsg.messaging.core.channel.ChannelOwner`."""
        error = end_error(reason)
        self._release(reason, local=local)
        self.over(Failure(ConnectionDone() if error is None else TransportLost(error)))

    def lost(self, error: DmsgError) -> None:
        """See :class:`~dmsg.messaging.core.channel.ChannelOwner`."""
        self._release(ChannelEndReason.PEER_GONE, local=True)
        self.over(Failure(TransportLost(error)))

    def _close_stream(self) -> None:
        if self._link.connection.close(self.stream):
            self.ended(ChannelEndReason.NORMAL, local=True)
        else:
            self._deadlines.linger(self.stream.acked_bytes)
        self._flush_soon()

    def _abort_stream(self, why: AbortReason) -> None:
        self._link.connection.abort(self.stream)
        self._flush_soon()
        self._release(_REASONS[why], local=True)

    def _release(self, reason: ChannelEndReason, *, local: bool) -> None:
        if not self._released:
            self._released = True
            self._deadlines.stop()
            self._link.transport_closed(self, reason.value, local=local)
            self.stream.owner = UNOWNED
