"""A channel as a Twisted transport."""

from __future__ import annotations

from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure

from dmsg.address import DmsgAddress
from dmsg.clients.transport import Carrier, RelayTransport
from dmsg.errors import DmsgError
from dmsg.glue.stream_transport import CUT, TransportLost
from dmsg.glue.streams import AbortReason
from dmsg.messaging.core.channel import UNOWNED, Channel, ChannelOwner, ChannelState
from dmsg.messaging.core.errors import ChannelDeadline, ChannelEndReason, PeerGone, end_error

_REASONS = {
    AbortReason.APPLICATION: ChannelEndReason.REFUSED,
    AbortReason.OVERFLOW: ChannelEndReason.SLOW_CONSUMER,
    AbortReason.DEADLINE: ChannelEndReason.DEADLINE,
}


class ChannelTransport(RelayTransport[Channel], ChannelOwner):
    """One end of a channel. It ends with its link, and has no half-close."""

    def __init__(self, carrier: Carrier, channel: Channel, host: DmsgAddress, peer: DmsgAddress) -> None:
        super().__init__(carrier, channel, host, peer)
        channel.owner = self

    @property
    def security(self) -> str:
        """``"e2e"``: the relay cannot read what the channel carries."""
        return self.stream.security

    def deadline_exceeded(self, what: str) -> None:
        """See :meth:`~dmsg.glue.stream_transport.StreamTransport.deadline_exceeded`."""
        self._abort(Failure(TransportLost(ChannelDeadline(what))), AbortReason.DEADLINE)

    def ended(self, reason: ChannelEndReason, *, local: bool) -> None:
        """See :class:`~dmsg.messaging.core.channel.ChannelOwner`."""
        error = end_error(reason)
        if error is None and not local and self.stream.cut_bytes:
            error = PeerGone(f"the peer closed without taking {self.stream.cut_bytes} bytes that were written")
        self._leave(reason.value, local=local)
        self.over(Failure(ConnectionDone() if error is None else TransportLost(error)))

    def lost(self, error: DmsgError) -> None:
        """See :class:`~dmsg.messaging.core.channel.ChannelOwner`."""
        self._leave(ChannelEndReason.PEER_GONE.value, local=True)
        self.over(Failure(TransportLost(error)))

    def _cut_error(self) -> DmsgError:
        return PeerGone(CUT)

    def _close_stream(self) -> None:
        if self.stream.state is not ChannelState.CLOSED:  # else it ended in this read, and the transport is told next
            super()._close_stream()

    def _abort_stream(self, why: AbortReason) -> None:
        self._carrier.connection.abort(self.stream)
        self._flush_soon()
        self._leave(_REASONS[why].value, local=True)

    def _leave(self, reason: str, *, local: bool, code: int = 0) -> None:
        super()._leave(reason, local=local, code=code)
        self.stream.owner = UNOWNED
