"""A channel that a peer asks for, from its OpenChannel to the moment the application is told."""

from __future__ import annotations

from typing import Protocol as TypingProtocol

from dmsg.clients.decision import ServiceOffer
from dmsg.clients.listener import ListeningPort
from dmsg.clients.services import Services
from dmsg.crypto.keys import PublicKey
from dmsg.errors import DmsgError
from dmsg.messaging.client.session import LinkSession
from dmsg.messaging.client.transport import ChannelTransport
from dmsg.messaging.core.channel import Channel, ChannelOwner, ChannelState
from dmsg.messaging.core.errors import ChannelEndReason, HandshakeFailed


class Host(TypingProtocol):
    """The client that is asked for a channel."""

    services: Services[ListeningPort[ChannelTransport]]

    def refused(self, remote: PublicKey, reason: str) -> None:
        """Count a refused request for a channel that came in the name of ``remote``."""


class IncomingChannel(ChannelOwner, ServiceOffer[ListeningPort[ChannelTransport]]):
    """The owner of an offered channel until it is open.

    A key that no policy could admit costs nothing. Any other is proved before the policy is asked.
    """

    def __init__(self, client: Host, session: LinkSession, channel: Channel) -> None:
        super().__init__(session.server, channel.remote)
        self._client = client
        self._session = session
        self._channel = channel
        channel.owner = self

    def start(self) -> None:
        """Begin with the decisions about the OpenChannel."""
        port = self._client.services.port("")
        if self._channel.state is ChannelState.CLOSED:
            self._over = True  # taken back in the same read
        elif port is None:
            self._refuse("no_such_service")
        elif not port.may_admit(self._channel.remote):
            self.deny()
        else:
            try:
                self._session.connection.prove(self._channel)
            except HandshakeFailed as error:
                self._refuse(str(error))
            else:
                self._put_to(port)

    def take(self, port: ListeningPort[ChannelTransport]) -> None:
        """See :class:`~dmsg.clients.decision.ServiceOffer`."""
        self._end()
        if self._channel.state is ChannelState.CLOSED:
            return  # taken back in the read that is still being handled
        self._session.connection.accept(self._channel)
        self._session.flush_soon()
        port.open(self._session, self._channel)

    def deny(self) -> None:
        """See :class:`~dmsg.clients.decision.PendingOffer`."""
        self._refuse("access_denied")

    def crowded_out(self) -> None:
        """See :class:`~dmsg.clients.decision.PendingOffer`."""
        self._refuse("busy")

    def _refuse(self, reason: str) -> None:
        self._client.refused(self._channel.remote, reason)
        self._end()
        self._session.abort_stream(self._channel)

    def ended(self, reason: ChannelEndReason, *, local: bool) -> None:
        """The peer gave up, or a newer offer has taken the place of this one."""
        if local:
            self.crowded_out()
        else:
            self._end()

    def lost(self, error: DmsgError) -> None:
        """The link is gone."""
        self._end()
