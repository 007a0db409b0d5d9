"""Twisted endpoints over dmsg, and the endpoint strings that make them: any Twisted program runs over dmsg unchanged.

Client strings are ``dmsg:PUBLIC_KEY``, server strings ``dmsg:key=FILE``, both with arguments:

==================== =====================================================================================
``key=``             a key file; a server needs one, a client without one is a stranger with a new key
``discovery=``       the URL of a discovery
``server=``          a pinned server, ``pk@host:port``, or several with commas in between; for more arguments
                     of the kind, number them (``server2=``): of two with one name Twisted keeps the last
``service=``         the service to connect to or to listen for
``security=``        ``e2e``, ``prefer`` (the default) or ``hop``: see :class:`~dmsg.mux.core.negotiation.Security`. With
                     ``allow=`` the default is ``e2e``
``timeout=``         seconds a connect may take in all, or a server until it can be reached (default: for ever)
``min-servers=``     how many servers a client with a key stays connected to; without it, to two of different
                     network groups, and to one if there is only one group
``state-dir=``       the directory in which a client with a key keeps relays that worked, for its next start; ``none``
                     for nowhere; without it, the user's own directory for such things
``relays=``          a file or URL with an operator's signed list of relays; with ``relays-key=``, who may have signed
                     it, and ``relays-mode=``: ``prefer`` (the default) or ``only``
``ranks-key=``       whose relay ranks are believed: a public key, or several with commas in between
``allow=``           a server admits these public keys only: one, or several with commas in between
``idle-timeout=``    seconds after which a server closes a connection on which nothing moves (default: never)
==================== =====================================================================================

A colon inside a value is written ``\\:``, as in all endpoint strings. What a string does not say comes from the environment:
``DMSG_KEY``, ``DMSG_SECURITY``, ``DMSG_RANKS_KEY``, ``DMSG_STATE_DIR``, and, for a string with neither ``discovery=`` nor
``server=``, ``DMSG_DISCOVERY`` and ``DMSG_SERVER``; for one without ``relays=``, ``DMSG_RELAYS``, ``DMSG_RELAYS_KEY`` and
``DMSG_RELAYS_MODE``.

All strings of one process with the same key, discovery and servers share one client (:mod:`dmsg.endpoints.sharing`); what
``min-servers=``, ``state-dir=`` and ``ranks-key=`` say counts in the first of them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any, Final, cast

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

from dmsg.address import DmsgAddress, PinnedServer, check_service_name
from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import PublicKey, parse_public_keys, read_key_file
from dmsg.endpoints.sharing import Borrowed, ClientSource, SharedSettings, shared_clients
from dmsg.errors import ConfigError, DialError, InvalidAddress
from dmsg.interfaces import IAccessPolicy
from dmsg.mux.client.listener import AllowKeys, DmsgPort
from dmsg.mux.client.service import DmsgClient
from dmsg.mux.client.transport import DmsgTransport
from dmsg.mux.core.limits import ListenerLimits
from dmsg.mux.core.negotiation import Security
from dmsg.relays.choice import RelaysFrom
from dmsg.relays.errors import SessionTimeout

__all__ = ["DmsgClientEndpoint", "DmsgConnectError", "DmsgServerEndpoint", "parse_client", "parse_server"]

_log = Logger()
_ARGUMENTS: Final = (
    "key",
    "discovery",
    "server",
    "service",
    "security",
    "timeout",
    "min-servers",
    "state-dir",
    "relays",
    "relays-key",
    "relays-mode",
    "ranks-key",
)
_SERVER_ONLY: Final = ("allow", "idle-timeout")
_SERVER_ARGUMENT: Final = re.compile(r"server[0-9]*\Z")
_SOURCE: Final = "a dmsg endpoint string"


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
        raise ConfigError("public key", "write dmsg:PUBLIC_KEY", _SOURCE)
    _no_more(args[1:])
    try:
        public_key = PublicKey.parse(args[0])
    except InvalidKey as error:
        raise ConfigError("public key", str(error), _SOURCE) from None
    read = _Arguments(arguments, os.environ, _ARGUMENTS)
    source = shared_clients(reactor).get(read.settings())
    return DmsgClientEndpoint(source, public_key, read.service, timeout_s=read.timeout_s, security=read.security)


def parse_server(reactor: Any, *args: str, **arguments: str) -> DmsgServerEndpoint:
    """The endpoint for ``dmsg:key=FILE:…``; raises ``ConfigError``, or ``KeyFileError`` for a bad key file."""
    _no_more(args)
    read = _Arguments(arguments, os.environ, _ARGUMENTS + _SERVER_ONLY)
    settings = read.settings()
    if settings.key is None:
        raise ConfigError("key", "a server needs a key file: key=FILE, or DMSG_KEY in the environment", _SOURCE)
    if settings.min_servers == 0:
        raise ConfigError("min-servers", "a server needs at least one, or nobody finds it", _SOURCE)
    source = shared_clients(reactor).get(settings)
    return DmsgServerEndpoint(
        source,
        read.service,
        policy=AllowKeys(read.allowed) if read.allowed else None,
        limits=ListenerLimits(idle_timeout_s=read.idle_timeout_s),
        timeout_s=read.timeout_s,
        security=read.security,
    )


def _no_more(args: tuple[str, ...]) -> None:
    if any(args):
        raise ConfigError(
            repr(next(filter(None, args))), r"not expected; a colon inside a value is written \:", _SOURCE
        )


class _Arguments:
    """The arguments of a string, checked, with the environment behind them."""

    def __init__(self, arguments: Mapping[str, str], environment: Mapping[str, str], expected: tuple[str, ...]) -> None:
        self._given = {name.replace("_", "-"): value for name, value in arguments.items()}
        self._environment = environment
        for name in self._given:
            if name not in expected and not _SERVER_ARGUMENT.match(name):
                known = ", ".join(f"{one}=" for one in expected)
                raise ConfigError(f"{name}=", f"unknown argument; there are {known}", _SOURCE)
        try:
            self.service = check_service_name(self._given.get("service", ""))
        except InvalidAddress as error:
            raise ConfigError("service", str(error), _SOURCE) from None
        self.timeout_s = self._seconds("timeout")
        self.idle_timeout_s = self._seconds("idle-timeout") or 0.0
        self.allowed = self._allowed()
        self.security = self._security()

    def settings(self) -> SharedSettings:
        """What the client is made from."""
        key_file = self._given.get("key") or self._environment.get("DMSG_KEY")
        discovery, servers, source = self._given.get("discovery", ""), self._server_texts(), _SOURCE
        if not discovery and not servers:
            discovery = self._environment.get("DMSG_DISCOVERY", "")
            servers = re.split(r"[,\s]+", self._environment.get("DMSG_SERVER", "").strip())
            source = "the environment"
        pinned = tuple(_pinned(text, source) for text in servers if text)
        if not discovery and not pinned:
            raise ConfigError("discovery", "say how servers are found: discovery=URL or server=pk@host:port", _SOURCE)
        if discovery:
            _check_url(discovery, source)
        return SharedSettings(
            key=read_key_file(key_file) if key_file else None,
            discovery=discovery,
            servers=pinned,
            min_servers=self._min_servers(),
            ranks_keys=self._ranks_keys(),
            state_dir=self._given.get("state-dir") or self._environment.get("DMSG_STATE_DIR", ""),
            relays=self._relays(),
        )

    def _relays(self) -> RelaysFrom | None:
        given = [self._given.get(name, "") for name in ("relays", "relays-key", "relays-mode")]
        if any(given):
            return RelaysFrom.parse(given, _SOURCE)
        named = [self._environment.get(name, "") for name in ("DMSG_RELAYS", "DMSG_RELAYS_KEY", "DMSG_RELAYS_MODE")]
        return RelaysFrom.parse(named, "the environment")

    def _server_texts(self) -> list[str]:
        names = sorted(filter(_SERVER_ARGUMENT.match, self._given), key=lambda name: (len(name), name))
        return [text.strip() for name in names for text in self._given[name].split(",") if text.strip()]

    def _security(self) -> Security | None:
        given = self._given.get("security")
        text = self._environment.get("DMSG_SECURITY") if given is None else given
        try:
            security = Security.parse(text) if text is not None else None
        except ValueError:
            known = ", ".join(one.value for one in Security)
            source = "the environment" if given is None else _SOURCE
            raise ConfigError("security", f"{text!r} is none of {known}", source) from None
        if security is Security.HOP and self.service:
            raise ConfigError("service", "needs end-to-end security: the relay never sees the name", _SOURCE)
        return security

    def _allowed(self) -> tuple[PublicKey, ...]:
        text = self._given.get("allow")
        if text is None:
            return ()
        try:
            return parse_public_keys(text)
        except InvalidKey as error:
            raise ConfigError("allow", str(error), _SOURCE) from None

    def _seconds(self, name: str) -> float | None:
        text = self._given.get(name)
        if text is None:
            return None
        try:
            timeout_s = float(text)
        except ValueError:
            timeout_s = math.nan
        if not 0 < timeout_s < math.inf:
            raise ConfigError(name, f"{text!r} is not a number of seconds", _SOURCE)
        return timeout_s

    def _ranks_keys(self) -> tuple[PublicKey, ...]:
        given = self._given.get("ranks-key")
        text = self._environment.get("DMSG_RANKS_KEY", "") if given is None else given
        if given is None and not text:
            return ()
        try:
            return parse_public_keys(text)
        except InvalidKey as error:
            raise ConfigError("ranks-key", str(error), "the environment" if given is None else _SOURCE) from None

    def _min_servers(self) -> int | None:
        text = self._given.get("min-servers")
        if text is None:
            return None
        if not text.isascii() or not text.isdigit() or len(text) > 3:
            raise ConfigError("min-servers", f"{text!r} is not a number of servers", _SOURCE)
        return int(text)


def _pinned(text: str, source: str) -> PinnedServer:
    try:
        return PinnedServer.parse(text)
    except InvalidAddress as error:
        hint = "" if ":" in text else r" (a colon inside a value is written \:)"
        raise ConfigError("server", f"{error}{hint}", source) from None


def _check_url(text: str, source: str) -> None:
    """Say early what the discovery's client would say at the first use, which may be much later."""
    if not re.match(r"https?://[^/]", text):
        raise ConfigError(
            "discovery", rf"{text!r} is not a URL (its colons are written \:, as in http\://host\:port)", source
        )
