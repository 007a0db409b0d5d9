"""Twisted endpoints over the messaging system, and the endpoint strings that make them.

Client strings are ``messaging:PUBLIC_KEY``, server strings ``messaging:key=FILE``. They have the arguments and settings of
:mod:`dmsg.mux.client.endpoint` but for ``service=`` and ``security=``, which this protocol does not have, and those about
resumption; beside them ``dialect=``, which both ends have to say alike, and ``layout=``.
"""

from __future__ import annotations

from typing import Any, Final

from twisted.internet.protocol import Factory

from dmsg.address import DmsgAddress
from dmsg.clients.access import AllowKeys
from dmsg.clients.limits import ListenerLimits
from dmsg.clients.listener import ListeningPort
from dmsg.clients.parts import ClientParts
from dmsg.crypto.keys import PublicKey
from dmsg.endpoints.client import Borrowed, ClientSource
from dmsg.endpoints.stream import ClientEndpoint, ServerEndpoint
from dmsg.endpoints.strings import ConnectArguments, ListenArguments, Scheme
from dmsg.interfaces import IAccessPolicy
from dmsg.messaging.client.service import MessagingClient
from dmsg.messaging.client.session import SCHEME
from dmsg.messaging.client.settings import ROLE, MessagingSettings
from dmsg.messaging.client.transport import ChannelTransport


class MessagingClientEndpoint(ClientEndpoint[MessagingClient]):
    """Connects to ``public_key`` through ``client``, which is running, or the source of one that is.

    ``timeout_s`` limits a whole connect (default: the client's own limit).
    """

    def __init__(
        self,
        client: MessagingClient | ClientSource[MessagingClient],
        public_key: PublicKey,
        *,
        timeout_s: float | None = None,
    ) -> None:
        self.public_key = public_key
        self.timeout_s = timeout_s
        super().__init__(_source(client), DmsgAddress(public_key, scheme=SCHEME))

    async def dial(self, client: MessagingClient) -> ChannelTransport:
        """An open transport, without a protocol. Raises ``DialError``; cancelling undoes it."""
        return await client.dial(self.public_key, timeout_s=self.timeout_s)


class MessagingServerEndpoint(ServerEndpoint[MessagingClient]):
    """Listens on the key of ``client``, which is as for :class:`MessagingClientEndpoint`.

    ``policy`` says who may connect (all, if there is none), ``limits`` how many may wait for its decision and be connected.
    ``timeout_s`` limits the wait until the client can be reached; without it, it goes on for ever.
    """

    def __init__(
        self,
        client: MessagingClient | ClientSource[MessagingClient],
        *,
        policy: IAccessPolicy | None = None,
        limits: ListenerLimits | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.policy = policy
        self.limits = limits
        super().__init__(_source(client), "", SCHEME, timeout_s)

    def listen_on(self, client: MessagingClient, factory: Factory) -> ListeningPort[ChannelTransport]:
        """A port of ``client`` that listens. Raises ``CannotListenError``."""
        return client.listen(factory, policy=self.policy, limits=self.limits)


def _source(client: MessagingClient | ClientSource[MessagingClient]) -> ClientSource[MessagingClient]:
    return Borrowed(client) if isinstance(client, MessagingClient) else client


# --- strings ---------------------------------------------------------------------------------------------------------


def make_client(parts: ClientParts[MessagingSettings], *, publish: bool, min_servers: int | None) -> MessagingClient:
    """A client, not started, with what was opened for it."""
    settings = parts.settings
    return MessagingClient(
        parts.reactor,
        parts.key,
        discovery=parts.discovery,
        servers=settings.servers,
        min_servers=min_servers,
        publish=publish,
        config=settings.config,
        events=parts.events,
        relay_file=settings.relay_file(parts.key),
        relays=parts.relays,
    )


STRINGS: Final = Scheme(SCHEME, ROLE, MessagingSettings, make_client)


def parse_client(reactor: Any, *args: str, **arguments: str) -> MessagingClientEndpoint:
    """The endpoint for ``messaging:PUBLIC_KEY:…``; raises ``ConfigError``, or ``KeyFileError`` for a bad key file."""
    public_key, settings, read = STRINGS.read_client(args, arguments, ConnectArguments)
    return MessagingClientEndpoint(STRINGS.shared(reactor, settings), public_key, timeout_s=read.timeout)


def parse_server(reactor: Any, *args: str, **arguments: str) -> MessagingServerEndpoint:
    """The endpoint for ``messaging:key=FILE:…``; raises ``ConfigError``, or ``KeyFileError`` for a bad key file."""
    settings, read = STRINGS.read_server(args, arguments, ListenArguments)
    return MessagingServerEndpoint(
        STRINGS.shared(reactor, settings),
        policy=AllowKeys(read.allow) if read.allow else None,
        limits=read.limits(settings.config.listener),
        timeout_s=read.timeout,
    )
