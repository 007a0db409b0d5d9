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
from typing import Any, TypeVar, cast

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred, succeed
from twisted.internet.error import CannotListenError, ConnectError, ConnectingCancelledError, NoProtocol
from twisted.internet.interfaces import (
    IAddress,
    IListeningPort,
    IProtocol,
    IProtocolFactory,
    IStreamClientEndpoint,
    IStreamServerEndpoint,
)
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.address import DmsgAddress, check_service_name
from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import PublicKey
from dmsg.endpoints.arguments import SOURCE, read_arguments
from dmsg.endpoints.sharing import Borrowed, ClientSource, SharedClient, SharedSettings, shared_clients
from dmsg.errors import ConfigError, DialError
from dmsg.interfaces import IAccessPolicy
from dmsg.mux.client.listener import AllowKeys, DmsgPort
from dmsg.mux.client.service import DmsgClient
from dmsg.mux.client.settings import ROLE, TOGETHER, ClientSettings
from dmsg.mux.client.transport import DmsgTransport
from dmsg.mux.core.limits import ListenerLimits
from dmsg.mux.core.negotiation import Security
from dmsg.ops.settings import setting
from dmsg.ops.values import DURATION, SERVICE, more_than_zero
from dmsg.relays.errors import SessionTimeout

__all__ = ["DmsgClientEndpoint", "DmsgConnectError", "DmsgServerEndpoint", "parse_client", "parse_server"]

_log = Logger()
U = TypeVar("U", bound="ConnectArguments")


class DmsgConnectError(DialError, ConnectError):
    """A connect that failed: a ``DialError`` with its attempts, and a ``ConnectError`` for programs written for TCP."""

    def __init__(self, error: DialError) -> None:
        super().__init__(error.target, error.attempts)
        self.osError = None
        self._text = error.args[0] if error.args else ""

    def __str__(self) -> str:
        return str(self._text)


# --- endpoints -------------------------------------------------------------------------------------------------------


@implementer(IStreamClientEndpoint)
class DmsgClientEndpoint:
    """Connects to ``service`` of ``public_key`` through ``client``.

    ``client`` is a running :class:`~dmsg.mux.client.service.DmsgClient` or a
    :class:`~dmsg.endpoints.sharing.ClientSource`, which is held while a connect is under way. ``timeout_s``
    limits a whole connect (default: the client's own limit); ``security`` is the client's unless given.
    """

    def __init__(
        self,
        client: DmsgClient | ClientSource,
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
        self._source = Borrowed(client) if isinstance(client, DmsgClient) else client

    def __repr__(self) -> str:
        return f"<DmsgClientEndpoint to {DmsgAddress(self.public_key, self.service)}>"

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Dial and connect a protocol of ``protocolFactory``; fails with :class:`DmsgConnectError`.

        Cancelling undoes whatever was done so far.
        """
        return ensureDeferred(self._connect(protocolFactory))

    async def _connect(self, factory: IProtocolFactory) -> IProtocol:
        factory.doStart()
        transport: DmsgTransport | None = None
        try:
            client = await self._source.acquire()
            try:
                transport = await client.dial(
                    self.public_key, self.service, security=self.security, timeout_s=self.timeout_s
                )
                return _attach(transport, factory)
            finally:
                self._source.release()
        except DialError as error:
            raise DmsgConnectError(error) from error
        except CancelledError:
            raise ConnectingCancelledError(cast(IAddress, DmsgAddress(self.public_key, self.service))) from None
        finally:
            if transport is None:
                factory.doStop()


def _attach(transport: DmsgTransport, factory: IProtocolFactory) -> IProtocol:
    """Connect a new protocol, and tell the factory when that is over, as Twisted's connectors do."""
    before = transport.on_over

    def over() -> None:
        factory.doStop()
        if before is not None:
            before()

    transport.on_over = over
    try:
        protocol = factory.buildProtocol(cast(IAddress, transport.getPeer()))
        if protocol is None:
            raise NoProtocol
    except BaseException:
        transport.abortConnection()
        raise
    transport.attach(protocol)
    return protocol


@implementer(IStreamServerEndpoint)
class DmsgServerEndpoint:
    """Listens for ``service`` of the key of ``client``, which is as for :class:`DmsgClientEndpoint`.

    ``policy`` says who may connect (all, if there is none), ``limits`` how many may wait for its decision and be connected.
    ``timeout_s`` limits the wait until the client can be reached; without it, it goes on for ever. ``security`` says who
    may speak in the clear; without it, none under a ``policy``, else as the client does.
    """

    def __init__(
        self,
        client: DmsgClient | ClientSource,
        service: str = "",
        *,
        policy: IAccessPolicy | None = None,
        limits: ListenerLimits | None = None,
        timeout_s: float | None = None,
        security: Security | None = None,
    ) -> None:
        self.security = security
        self.service = check_service_name(service)
        self.policy = policy
        self.limits = limits
        self.timeout_s = timeout_s
        self._source = Borrowed(client) if isinstance(client, DmsgClient) else client

    def listen(self, protocolFactory: IProtocolFactory) -> Deferred[IListeningPort]:
        """Fires with the port when it can be reached; fails with ``CannotListenError``. Cancelling undoes it.

        The port's ``getHost`` tells the public key to dial.
        """
        return ensureDeferred(self._listen(cast(Factory, protocolFactory)))

    async def _listen(self, factory: Factory) -> IListeningPort:
        client = await self._source.acquire()
        port: DmsgPort | None = None
        try:
            port = client.listen(factory, self.service, policy=self.policy, limits=self.limits, security=self.security)
            ready = client.when_ready()
            if self.timeout_s is not None:
                ready.addTimeout(self.timeout_s, client.reactor, self._too_late)
            await ready
        except BaseException:
            if port is not None:
                port.stopListening()
            self._source.release()
            raise
        _log.info("{factory} is reached as {address}", factory=factory, address=port.getHost())
        return HeldPort(port, self._source)

    def _too_late(self, result: object, timeout_s: float) -> Failure:
        return Failure(CannotListenError("dmsg", self.service, SessionTimeout("connecting to servers", timeout_s)))


@implementer(IListeningPort)
class HeldPort:
    """A listening port that holds the client it listens on until it is stopped."""

    def __init__(self, port: DmsgPort, source: ClientSource) -> None:
        self._port = port
        self._source: ClientSource | None = source

    def startListening(self) -> None:
        """Nothing: it listens already, and once stopped it is gone."""

    def stopListening(self) -> Deferred[None]:
        """Take no more connections; those that are open go on. Fires when a client nobody else holds has stopped."""
        source, self._source = self._source, None
        if source is None:
            return succeed(None)
        return self._port.stopListening().addCallback(lambda _: source.release())

    def getHost(self) -> IAddress:
        """The ``DmsgAddress`` it is reached under."""
        return self._port.getHost()


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
        raise ConfigError("min_servers", "a server needs at least one, or nobody finds it", SOURCE)
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


def _shared(reactor: Any, settings: ClientSettings) -> SharedClient:
    return shared_clients(reactor).get(SharedSettings(settings.read_key(), settings))
