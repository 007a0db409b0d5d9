"""The client of the messaging system: a Twisted service that keeps links to relays, listens, and dials by public key."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twisted.internet.interfaces import IProtocol, IProtocolFactory, IReactorTime, IStreamClientEndpoint

from dmsg.address import HostPort, PinnedServer
from dmsg.clients.dialer import OpenedStream
from dmsg.clients.service import RelayClient
from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.errors import StageError
from dmsg.interfaces import IDiscovery, IEventLog
from dmsg.messaging.client.config import MessagingConfig
from dmsg.messaging.client.incoming import IncomingChannel
from dmsg.messaging.client.session import SCHEME, LinkSession
from dmsg.messaging.client.transport import ChannelTransport
from dmsg.messaging.core.channel import Channel
from dmsg.messaging.core.errors import NoServices
from dmsg.relays.choice import RelayChoice

Opened = OpenedStream[LinkSession]


@dataclass(frozen=True, slots=True)
class ChannelRequest:
    """What a dial is for; see :class:`dmsg.clients.dialer.Dial`."""

    target: PublicKey
    service: str = ""
    moves: bool = False  # a channel ends with its link

    async def through(self, session: LinkSession, *, promised: bool) -> Opened:
        """See :class:`dmsg.clients.dialer.Dial`; a channel is always end-to-end, so ``promised`` does not matter."""
        if self.service:
            raise StageError("request", "unsupported", NoServices("the messaging system has no services"))
        return await session.request(self.target)


class MessagingClient(RelayClient[LinkSession, Opened, ChannelTransport]):
    """A *Client Instance* as a Twisted service: ``publish`` is ``Public``, and ``discovery`` may stand for several
    (:class:`~dmsg.discovery.preferred.PreferredDiscovery`).

    The arguments are those of :class:`~dmsg.clients.service.RelayClient`.
    """

    scheme = SCHEME

    def __init__(
        self,
        reactor: IReactorTime,
        key: SecretKey,
        *,
        discovery: IDiscovery | None = None,
        servers: Sequence[PinnedServer] = (),
        min_servers: int | None = None,
        publish: bool = True,
        config: MessagingConfig | None = None,
        events: IEventLog | None = None,
        relay_file: str | os.PathLike[str] | None = None,
        relays: RelayChoice | None = None,
        random: Random = os.urandom,
        endpoint_for: Callable[[HostPort], IStreamClientEndpoint] | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.config = config or MessagingConfig()
        super().__init__(
            reactor,
            key,
            self.config,
            discovery=discovery,
            servers=servers,
            min_servers=min_servers,
            publish=publish,
            events=events,
            relay_file=relay_file,
            relays=relays,
            random=random,
            endpoint_for=endpoint_for,
            now_ns=now_ns,
        )

    def make_session(self, relay: PublicKey) -> LinkSession:
        """See :class:`~dmsg.clients.service.RelayClient`."""
        return LinkSession(relay, self.key, self, self.reactor, config=self.config, random=self._random)

    async def dial(self, target: PublicKey, service: str = "", *, timeout_s: float | None = None) -> ChannelTransport:
        """An open transport to ``target`` with no protocol yet: ``attach`` one. Raises ``DialError``.

        The protocol has no services: any name but "" fails. What the peer sends meanwhile waits. Cancelling undoes
        everything.
        """
        return await self.open(ChannelRequest(target, service), service, timeout_s)

    async def connect(
        self, factory: IProtocolFactory, target: PublicKey, *, timeout_s: float | None = None
    ) -> IProtocol:
        """Dial and attach the protocol ``factory`` builds."""
        return self.connected(await self.dial(target, timeout_s=timeout_s), factory)

    # --- from sessions ---------------------------------------------------------------------------------------------

    def offered(self, session: LinkSession, channel: Channel) -> None:
        """A peer asks for a channel."""
        IncomingChannel(self, session, channel).start()
