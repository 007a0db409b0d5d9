"""The client of the messaging system: a Twisted service that keeps links to relays, listens, and dials by public key."""

from __future__ import annotations

from twisted.internet.interfaces import IProtocolFactory
from twisted.internet.protocol import Factory

from dmsg.clients.dial import OpenedStream
from dmsg.clients.limits import ListenerLimits
from dmsg.clients.listener import ListeningPort
from dmsg.clients.service import RelayClient
from dmsg.crypto.keys import PublicKey
from dmsg.interfaces import IAccessPolicy
from dmsg.messaging.client.config import MessagingConfig
from dmsg.messaging.client.incoming import IncomingChannel
from dmsg.messaging.client.session import SCHEME, LinkSession
from dmsg.messaging.client.transport import ChannelTransport
from dmsg.messaging.core.channel import Channel
from dmsg.messaging.core.errors import NoServices


class MessagingClient(RelayClient[LinkSession, OpenedStream[LinkSession], ChannelTransport]):
    """A *Client Instance* as a Twisted service: ``publish`` is ``Public``, and ``discovery`` may stand for several
    (:class:`~dmsg.discovery.several.DiscoveryList`).

    The arguments are those of :class:`~dmsg.clients.service.RelayClient`.
    """

    scheme = SCHEME
    config_class = MessagingConfig
    config: MessagingConfig

    def make_session(self, relay: PublicKey) -> LinkSession:
        """See :class:`~dmsg.clients.service.RelayClient`."""
        return LinkSession(relay, self.key, self, self.reactor, config=self.config, random=self._random)

    def listen(
        self,
        factory: IProtocolFactory | Factory,
        service: str = "",
        *,
        policy: IAccessPolicy | None = None,
        limits: ListenerLimits | None = None,
    ) -> ListeningPort[ChannelTransport]:
        """Accept channels. Raises ``CannotListenError`` for a second port, and ``NoServices`` for a ``service`` by name."""
        if service:
            raise NoServices("the messaging system has no services: a key listens for one thing")
        return super().listen(factory, policy=policy, limits=limits)

    def offered(self, session: LinkSession, channel: Channel) -> None:
        """A peer asks for a channel."""
        IncomingChannel(self, session, channel).start()
