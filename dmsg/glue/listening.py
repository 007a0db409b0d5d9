"""Server endpoints: from strings, with a backlog for bursts of connections, and for ports that listen early."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any, Final, cast

from twisted.internet.address import IPv4Address, IPv6Address, UNIXAddress
from twisted.internet.defer import CancelledError, Deferred, maybeDeferred, succeed
from twisted.internet.endpoints import serverFromString
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import (
    IAddress,
    IListeningPort,
    IProtocolFactory,
    IProtocolNegotiationFactory,
    IStreamServerEndpoint,
)
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import Logger
from zope.interface import implementer

from dmsg.glue.connecting import tls_problem

#: TCP connections that may wait to be accepted, unless the endpoint string says how many. Twisted's 50 are used up after one
#: turn of a busy relay: the kernel then drops the packets of clients, who try again after a second. Linux allows 4,096.
BACKLOG: Final = 1024
_log = Logger()
_HAS_BACKLOG: Final = re.compile(r"(haproxy:)?(tcp|tcp6|ssl|unix):")
_SAYS_BACKLOG: Final = re.compile(r"(?<!\\):backlog=")
#: Endpoints whose ports close a connection for which a factory has no protocol: Twisted's own without TLS, and ours.
_IS_BARE: Final = re.compile(r"(tcp|tcp6|unix|systemd|dmsg|messaging):")


def server_endpoint(reactor: Any, text: str) -> IStreamServerEndpoint:
    """The endpoint of ``text``, with :data:`BACKLOG` unless it says otherwise; raises what the parser does.

    A factory that refuses a connection closes it, also where ``text`` wraps connections, as for TLS.
    """
    endpoint = _parsed(reactor, text)
    return endpoint if _IS_BARE.match(text) else _WrappedEndpoint(endpoint)


def _parsed(reactor: Any, text: str) -> IStreamServerEndpoint:
    if _HAS_BACKLOG.match(text) and not _SAYS_BACKLOG.search(text):
        with contextlib.suppress(TypeError):  # the text has the backlog by position, or is wrong: the call below tells
            return cast(IStreamServerEndpoint, serverFromString(reactor, f"{text}:backlog={BACKLOG}"))
    try:
        return cast(IStreamServerEndpoint, serverFromString(reactor, text))
    except LookupError:
        if not text.startswith("systemd:"):
            raise
        raise ValueError(_no_such_socket(os.environ.get("LISTEN_FDNAMES", ""))) from None


def _no_such_socket(names: str) -> str:
    """Why systemd's socket is not there. Twisted takes none unless ``names``, LISTEN_FDNAMES, has a name for each."""
    if not names:
        return "systemd has given this program no such socket: LISTEN_FDNAMES is not set"
    told = f"LISTEN_FDNAMES is {names}, so LISTEN_FDS must be {names.count(':') + 1} and LISTEN_PID this process"
    return f"systemd has given this program no such socket: {told}"


def address_text(port: IListeningPort) -> str:
    """``host:port`` of a port, its path, or what the port calls its address."""
    address = port.getHost()
    if isinstance(address, IPv6Address):
        return f"[{address.host}]:{address.port}"
    if isinstance(address, IPv4Address):
        return f"{address.host}:{address.port}"
    if isinstance(address, UNIXAddress) and address.name is not None:
        return os.fsdecode(address.name)
    return str(address)


def listen_problem(error: Any) -> str:
    """Why listening on an endpoint fails, or why a text is no endpoint, of a server or of a client, in a few words.

    Each kind of endpoint raises exceptions of its own.
    """
    if isinstance(error, CannotListenError):
        error = error.socketError
    error = getattr(error, "originalException", error)  # of a directory of certificates, which says nothing itself
    if isinstance(error, OSError) and error.strerror:
        # An endpoint with TLS names several files. The lock of a UNIX socket is a link: its first name is a process id.
        path = error.filename if error.filename2 is None else error.filename2
        return error.strerror if path is None else f"{os.fsdecode(path)}: {error.strerror}"
    damaged = tls_problem(error)
    if damaged:  # Twisted does not tell which of the files it is
        why = "is not whole, needs a passphrase, or has another format than PEM"
        return f"the file of its key, or of a certificate, {why} ({damaged})"
    return str(error) or type(error).__name__


async def stop_listening(port: IListeningPort) -> None:
    """Stop listening on ``port``. An error is only logged: the caller has more to stop.

    For example, Twisted fails when the file of a UNIX socket was removed meanwhile.
    """
    try:
        await maybeDeferred(port.stopListening)
    except CancelledError:
        raise
    except Exception as error:
        _log.warn("{port} was not closed well: {problem}", port=address_text(port), problem=listen_problem(error))


class Refused(Protocol):
    """Ends its connection at once. A factory gives it for a connection that it refuses.

    A port closes a connection for which there is no protocol. A wrapper, such as that of TLS, would fail instead, and leave the
    connection open for ever.
    """

    transport: Any

    def connectionMade(self) -> None:
        self.transport.abortConnection()


@implementer(IProtocolNegotiationFactory)
class LateFactory(Factory):
    """Holds a port for a factory that comes later; until :meth:`serve` it refuses connections.

    A ``wrapped`` port needs a protocol that closes what is refused (:class:`Refused`); others close it with half the work.
    """

    noisy = False

    def __init__(self, name: str, *, wrapped: bool = False) -> None:
        self._name = name
        self._wrapped = wrapped
        self._served: Any = None

    def serve(self, factory: IProtocolFactory) -> None:
        """Let ``factory`` make the protocols from now on."""
        self._served = factory
        factory.doStart()

    def logPrefix(self) -> str:
        return self._name

    def buildProtocol(self, addr: IAddress | None) -> Any:
        protocol = None if self._served is None else self._served.buildProtocol(addr)
        if protocol is None or type(protocol) is Refused:
            return Refused() if self._wrapped else None
        return protocol

    def acceptableProtocols(self) -> list[bytes]:
        """What the factory speaks. Without an answer, TLS ends every connection whose client names what it speaks (ALPN)."""
        negotiates = IProtocolNegotiationFactory.providedBy(self._served)
        return list(self._served.acceptableProtocols()) if negotiates else []

    def doStop(self) -> None:
        super().doStop()  # type: ignore[no-untyped-call]
        if self._served is not None:
            self._served.doStop()


@implementer(IStreamServerEndpoint)
class _WrappedEndpoint:
    """An endpoint whose ports wrap their connections."""

    def __init__(self, endpoint: IStreamServerEndpoint) -> None:
        self._endpoint = endpoint

    def listen(self, protocolFactory: IProtocolFactory) -> Deferred[IListeningPort]:
        """Listen; what ``protocolFactory`` refuses is closed."""
        factory = LateFactory("wrapped port", wrapped=True)
        factory.serve(protocolFactory)
        listening: Deferred[IListeningPort] = self._endpoint.listen(factory)
        return listening


@implementer(IStreamServerEndpoint)
class TakenPort:
    """An endpoint whose ``port`` listens already: a relay has to know its address before it is created."""

    def __init__(self, port: IListeningPort, factory: LateFactory) -> None:
        self.port = port
        self._factory = factory

    @classmethod
    async def take(cls, endpoint: IStreamServerEndpoint) -> TakenPort:
        """Listen on ``endpoint``; raises what that raises."""
        factory = LateFactory("taken port", wrapped=True)
        return cls(await endpoint.listen(factory), factory)

    def listen(self, protocolFactory: IProtocolFactory) -> Deferred[IListeningPort]:
        """Serve with ``protocolFactory`` from now on."""
        self._factory.serve(protocolFactory)
        return succeed(self.port)
