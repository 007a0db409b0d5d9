"""Twisted endpoints over dmsg, and the endpoint strings that make them: a Twisted program that takes one runs unchanged.

Client strings are ``dmsg:PUBLIC_KEY``, server strings ``dmsg:key=FILE``, both with arguments:

==================== =====================================================================================
``service=``         the service to connect to or to listen for
``timeout=``         how long a connect may take in all (default: that of dials, 10 seconds), or a server until it can be
                     reached (default: for ever)
``allow=``           a server admits these public keys only, one at least
``idle-timeout=``    a server closes a connection on which nothing moves for so long (default: never)
``config=``          a TOML file whose table ``[client]`` says what the string does not; without it, that of ``DMSG_CONFIG``
==================== =====================================================================================

and with every setting of a client (:doc:`/reference/settings`): ``key=``, a key file, which a server needs and without which
a client is a stranger with a new key; ``discovery=`` and ``server=``, at least one of which says how relays are found;
``security=``, ``min-servers=``, ``relays=``, ``state-dir=``, ``ranks-key=``, ``resume-grace-s=`` and so on. A list may be
spread over numbered arguments (``server=``, ``server2=``): of two with one name Twisted keeps the last. With ``allow=`` the
default of ``security=`` is ``e2e``.

A colon inside a value is written ``\\:``, as in all endpoint strings. What a string does not say of the client comes from the
environment (``DMSG_KEY``, ``DMSG_SECURITY`` …), then from the file. A string with ``discovery=`` or ``server=`` has named its
network, and takes neither of them from there; in the same way ``relays=``, ``relays-key=`` and ``relays-mode=`` are taken
together.

All strings of one process with the same key, discovery and servers share one client (:mod:`dmsg.endpoints.sharing`); the other
settings of the client are those of the first of them. The lists of relays must be the same. Strings of another protocol
with the same key have a client of their own; in discovery, the entry of the key has the relays of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dmsg.address import DmsgAddress, check_service_name
from dmsg.clients.limits import ListenerLimits
from dmsg.crypto.keys import PublicKey
from dmsg.endpoints.arguments import SOURCE
from dmsg.endpoints.client import ClientSource
from dmsg.endpoints.stream import ClientEndpoint, ServerEndpoint
from dmsg.endpoints.strings import ConnectArguments, ListenArguments, Scheme
from dmsg.errors import ConfigError
from dmsg.interfaces import IAccessPolicy
from dmsg.mux.client.service import DmsgClient
from dmsg.mux.client.settings import ROLE, ClientSettings
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.ops.settings import setting
from dmsg.ops.values import SERVICE


class DmsgClientEndpoint(ClientEndpoint[DmsgClient]):
    """Connects to ``service`` of ``public_key`` through ``client``.

    ``client`` and ``timeout_s`` are as for :class:`~dmsg.endpoints.stream.ClientEndpoint`; ``security`` is the client's
    unless given.
    """

    def __init__(
        self,
        client: DmsgClient | ClientSource[DmsgClient],
        public_key: PublicKey,
        service: str = "",
        *,
        timeout_s: float | None = None,
        security: Security | str | None = None,
    ) -> None:
        self.security = security
        super().__init__(client, DmsgAddress(public_key, check_service_name(service)), timeout_s, security=security)


class DmsgServerEndpoint(ServerEndpoint[DmsgClient]):
    """Listens for ``service`` of the key of ``client``, as :class:`~dmsg.endpoints.stream.ServerEndpoint`.

    ``security`` says who may speak in the clear; without it, none under a ``policy``, else as the client does.
    """

    def __init__(
        self,
        client: DmsgClient | ClientSource[DmsgClient],
        service: str = "",
        *,
        policy: IAccessPolicy | None = None,
        limits: ListenerLimits | None = None,
        timeout_s: float | None = None,
        security: Security | str | None = None,
    ) -> None:
        self.security = security
        super().__init__(client, service, policy=policy, limits=limits, timeout_s=timeout_s, security=security)


# --- strings ---------------------------------------------------------------------------------------------------------


SCHEME: Final = Scheme("dmsg", ROLE, ClientSettings, DmsgClient.from_parts)


def parse_client(reactor: Any, *args: str, **arguments: str) -> DmsgClientEndpoint:
    """The endpoint for ``dmsg:PUBLIC_KEY:…``; raises ``ConfigError``, or ``KeyFileError`` for a bad key file."""
    public_key, settings, read = SCHEME.read_client(args, arguments, DmsgConnectArguments)
    _check(settings, read.service)
    client = SCHEME.shared(reactor, settings)
    return DmsgClientEndpoint(client, public_key, read.service, timeout_s=read.timeout, security=settings.security)


def parse_server(reactor: Any, *args: str, **arguments: str) -> DmsgServerEndpoint:
    """The endpoint for ``dmsg:key=FILE:…``; raises ``ConfigError``, or ``KeyFileError`` for a bad key file."""
    settings, read = SCHEME.read_server(args, arguments, DmsgListenArguments)
    _check(settings, read.service)
    return DmsgServerEndpoint(
        SCHEME.shared(reactor, settings),
        read.service,
        policy=read.policy,
        limits=read.limits(settings.config.listener),
        timeout_s=read.timeout,
        security=settings.security,
    )


@dataclass(frozen=True, kw_only=True)
class DmsgConnectArguments(ConnectArguments):
    """What a client string says of its connects."""

    service: str = setting(
        "the service to connect to or to listen for", default="", kind=SERVICE, unset="the one without a name"
    )


@dataclass(frozen=True, kw_only=True)
class DmsgListenArguments(ListenArguments, DmsgConnectArguments):
    """What a server string says of its listener."""


def _check(settings: ClientSettings, service: str) -> None:
    if settings.security is Security.HOP and service:
        raise ConfigError("service", "needs end-to-end security: the relay never sees the name", SOURCE)
