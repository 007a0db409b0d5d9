"""Twisted endpoints over the messaging system, and the endpoint strings that make them.

Client strings are ``messaging:PUBLIC_KEY``, server strings ``messaging:key=FILE``. They have the arguments and settings of
:mod:`dmsg.mux.client.endpoint` but for ``service=`` and ``security=``, which this protocol does not have, and those about
resumption; beside them ``dialect=``, which both ends have to say alike, and ``layout=``.
"""

from __future__ import annotations

from typing import Any, Final

from dmsg.address import DmsgAddress
from dmsg.crypto.keys import PublicKey
from dmsg.endpoints.client import ClientSource
from dmsg.endpoints.stream import ClientEndpoint, ServerEndpoint
from dmsg.endpoints.strings import ConnectArguments, ListenArguments, Scheme
from dmsg.messaging.client.service import MessagingClient
from dmsg.messaging.client.session import SCHEME
from dmsg.messaging.client.settings import ROLE, MessagingSettings


class MessagingClientEndpoint(ClientEndpoint[MessagingClient]):
    """Connects to ``public_key`` through ``client``; both arguments are as for its base class."""

    def __init__(
        self,
        client: MessagingClient | ClientSource[MessagingClient],
        public_key: PublicKey,
        *,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(client, DmsgAddress(public_key, scheme=SCHEME), timeout_s)


class MessagingServerEndpoint(ServerEndpoint[MessagingClient]):
    """Listens on the key of a client, as :class:`~dmsg.endpoints.stream.ServerEndpoint`."""


# --- strings ---------------------------------------------------------------------------------------------------------


STRINGS: Final = Scheme(SCHEME, ROLE, MessagingSettings, MessagingClient.from_parts)


def parse_client(reactor: Any, *args: str, **arguments: str) -> MessagingClientEndpoint:
    """The endpoint for ``messaging:PUBLIC_KEY:…``; raises ``ConfigError``, or ``KeyFileError`` for a bad key file."""
    public_key, settings, read = STRINGS.read_client(args, arguments, ConnectArguments)
    return MessagingClientEndpoint(STRINGS.shared(reactor, settings), public_key, timeout_s=read.timeout)


def parse_server(reactor: Any, *args: str, **arguments: str) -> MessagingServerEndpoint:
    """The endpoint for ``messaging:key=FILE:…``; raises ``ConfigError``, or ``KeyFileError`` for a bad key file."""
    settings, read = STRINGS.read_server(args, arguments, ListenArguments)
    return MessagingServerEndpoint(
        STRINGS.shared(reactor, settings),
        policy=read.policy,
        limits=read.limits(settings.config.listener),
        timeout_s=read.timeout,
    )
