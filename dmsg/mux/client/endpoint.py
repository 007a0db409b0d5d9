"""Twisted endpoints over dmsg, and the endpoint strings that make them: any Twisted program runs over dmsg unchanged.

Client strings are ``dmsg:PUBLIC_KEY``, server strings ``dmsg:key=FILE``, both with arguments:

==================== =====================================================================================
``service=``         the service to connect to or to listen for
``timeout=``         how long a connect may take in all, or a server until it can be reached (default: for ever)
``allow=``           a server admits these public keys only
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
settings of the client are those of the first of them. The lists of relays must be the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from twisted.internet.protocol import Factory

from dmsg.address import DmsgAddress, check_service_name
from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import PublicKey
from dmsg.endpoints.arguments import SOURCE, read_arguments
from dmsg.endpoints.client import Borrowed, ClientSource
from dmsg.endpoints.sharing import ClientParts, Holder, SharedClient, SharedSettings, shared_clients
from dmsg.endpoints.stream import ClientEndpoint, ServerEndpoint
from dmsg.errors import ConfigError
from dmsg.interfaces import IAccessPolicy
from dmsg.mux.client.listener import AllowKeys, DmsgPort
from dmsg.mux.client.service import DmsgClient
from dmsg.mux.client.session import ServerSession
from dmsg.mux.client.settings import ROLE, TOGETHER, ClientSettings
from dmsg.mux.client.transport import DmsgTransport
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.limits import ListenerLimits
from dmsg.ops.settings import setting
from dmsg.ops.values import DURATION, SERVICE, more_than_zero

__all__ = ["DmsgClientEndpoint", "DmsgServerEndpoint", "make_client", "parse_client", "parse_server"]

U = TypeVar("U", bound="ConnectArguments")


class DmsgClientEndpoint(ClientEndpoint[DmsgClient]):
    """Connects to ``service`` of ``public_key`` through ``client``.

    ``client`` is a running :class:`~dmsg.mux.client.service.DmsgClient` or a
    :class:`~dmsg.endpoints.client.ClientSource`, which is held while a connect is under way. ``timeout_s``
    limits a whole connect (default: the client's own limit); ``security`` is the client's unless given.
    """

    def __init__(
        self,
        client: DmsgClient | ClientSource[DmsgClient],
        public_key: PublicKey,
        service: str = "",
        *,
        timeout_s: float | None = None,
        security: Security | None = None,
    ) -> None:
        self.security = security
        self.public_key = public_key
        self.service = check_service_name(service)
        self.timeout_s = timeout_s
        super().__init__(_source(client), DmsgAddress(public_key, service))

    async def dial(self, client: DmsgClient) -> DmsgTransport:
        """An open transport, without a protocol. Raises ``DialError``; cancelling undoes it."""
        return await client.dial(self.public_key, self.service, security=self.security, timeout_s=self.timeout_s)


class DmsgServerEndpoint(ServerEndpoint[DmsgClient]):
    """Listens for ``service`` of the key of ``client``, which is as for :class:`DmsgClientEndpoint`.

    ``policy`` says who may connect (all, if there is none), ``limits`` how many may wait for its decision and be connected.
    ``timeout_s`` limits the wait until the client can be reached; without it, it goes on for ever. ``security`` says who
    may speak in the clear; without it, none under a ``policy``, else as the client does.
    """

    def __init__(
        self,
        client: DmsgClient | ClientSource[DmsgClient],
        service: str = "",
        *,
        policy: IAccessPolicy | None = None,
        limits: ListenerLimits | None = None,
        timeout_s: float | None = None,
        security: Security | None = None,
    ) -> None:
        self.security = security
        self.policy = policy
        self.limits = limits
        super().__init__(_source(client), check_service_name(service), "dmsg", timeout_s)

    def listen_on(self, client: DmsgClient, factory: Factory) -> DmsgPort:
        """A port of ``client`` that listens. Raises ``CannotListenError``."""
        return client.listen(factory, self.service, policy=self.policy, limits=self.limits, security=self.security)


def _source(client: DmsgClient | ClientSource[DmsgClient]) -> ClientSource[DmsgClient]:
    return Borrowed(client) if isinstance(client, DmsgClient) else client


# --- clients that endpoints share ------------------------------------------------------------------------------------


class _HeldClient(DmsgClient):
    """A client that is held by each of its transports until their protocols know that they are over."""

    holder: Holder

    def transport_opened(self, session: ServerSession, transport: DmsgTransport, port: DmsgPort | None = None) -> None:
        super().transport_opened(session, transport, port)
        self.holder.hold()
        transport.on_over = self.holder.release


def make_client(parts: ClientParts[ClientSettings]) -> DmsgClient:
    """The client that endpoints of the same key, discovery and servers share, not started."""
    settings, lasting = parts.settings, parts.lasting
    client = _HeldClient(
        parts.reactor,
        parts.key,
        discovery=parts.discovery,
        servers=settings.servers,
        min_servers=settings.min_servers if lasting or settings.min_servers is not None else 0,
        publish=lasting,
        config=settings.config,
        events=parts.events,
        relay_file=settings.relay_file(parts.key),
        relays=parts.relays,
    )
    client.holder = parts.holder
    return client


# --- strings ---------------------------------------------------------------------------------------------------------


def parse_client(reactor: Any, *args: str, **arguments: str) -> DmsgClientEndpoint:
    """The endpoint for ``dmsg:PUBLIC_KEY:…``; raises ``ConfigError``, or ``KeyFileError`` for a bad key file."""
    if not args or not args[0]:
        raise ConfigError("public key", "write dmsg:PUBLIC_KEY", SOURCE)
    _no_more(args[1:])
    try:
        public_key = PublicKey.parse(args[0])
    except InvalidKey as error:
        raise ConfigError("public key", str(error), SOURCE) from None
    settings, read = _read(arguments, ConnectArguments)
    source = _shared(reactor, settings)
    return DmsgClientEndpoint(source, public_key, read.service, timeout_s=read.timeout, security=settings.security)


def parse_server(reactor: Any, *args: str, **arguments: str) -> DmsgServerEndpoint:
    """The endpoint for ``dmsg:key=FILE:…``; raises ``ConfigError``, or ``KeyFileError`` for a bad key file."""
    _no_more(args)
    settings, read = _read(arguments, ListenArguments)
    if settings.key is None:
        raise ConfigError("key", "a server needs a key file: key=FILE, or DMSG_KEY in the environment", SOURCE)
    if settings.min_servers == 0:
        raise ConfigError("min_servers", "a server needs at least one, or no client finds it", SOURCE)
    limits = settings.config.listener
    if read.idle_timeout is not None:
        limits = replace(limits, idle_timeout_s=read.idle_timeout)
    return DmsgServerEndpoint(
        _shared(reactor, settings),
        read.service,
        policy=AllowKeys(read.allow) if read.allow else None,
        limits=limits,
        timeout_s=read.timeout,
        security=settings.security,
    )


def _no_more(args: tuple[str, ...]) -> None:
    if any(args):
        raise ConfigError(repr(next(filter(None, args))), r"not expected; a colon inside a value is written \:", SOURCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectArguments:
    """What a client string says of its connects."""

    service: str = setting(
        "the service to connect to or to listen for", default="", kind=SERVICE, unset="the one without a name"
    )
    timeout: float | None = setting(
        "a connect may take so long in all, or a server until it can be reached",
        default=None,
        kind=DURATION,
        unset="a connect: timeout_s of dial; a server: no limit",
        check=more_than_zero,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenArguments(ConnectArguments):
    """What a server string says of its listener."""

    allow: tuple[PublicKey, ...] = setting(
        "a server admits these public keys only", default=(), unset="all are admitted"
    )
    idle_timeout: float | None = setting(
        "a server closes a connection on which nothing moves for so long",
        default=None,
        kind=DURATION,
        unset="never",
        check=more_than_zero,
    )


def _read(arguments: Mapping[str, str], use: type[U]) -> tuple[ClientSettings, U]:
    """The settings of the client, and what the string says of its own use. Raises ``ConfigError``."""
    settings, read = read_arguments(arguments, ClientSettings, use, role=ROLE, environ=os.environ, together=TOGETHER)
    if settings.discovery is None and not settings.servers:
        raise ConfigError("discovery", "say how servers are found: discovery=URL or server=pk@host:port", SOURCE)
    if settings.security is Security.HOP and read.service:
        raise ConfigError("service", "needs end-to-end security: the relay never sees the name", SOURCE)
    return settings, read


def _shared(reactor: Any, settings: ClientSettings) -> SharedClient[ClientSettings, DmsgClient]:
    return shared_clients(reactor, make_client).get(SharedSettings(settings.read_key(), settings))
