"""A limit for the heads of HTTP answers, which Twisted's client reads for as long as a server sends them.

Twisted's parser keeps every header and every folded line, and skips any number of 1xx answers, logging a line for each.
This module counts the bytes before the parser gets them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import wrapClientTLS
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IStreamClientEndpoint
from twisted.internet.protocol import connectionDone
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from twisted.python.failure import Failure
from twisted.web.client import URI
from twisted.web.error import SchemeNotSupported
from twisted.web.iweb import IAgentEndpointFactory, IPolicyForHTTPS
from zope.interface import implementer

from dmsg.glue.connecting import NamedHost, tls_options
from dmsg.http.errors import NoAnswer

#: Longest head of an answer, with the 1xx heads before it.
HEAD_LIMIT_BYTES: Final = 64 * 1024
#: Most 1xx heads before an answer. There is hardly ever one, and each writes a line to the log.
INTERIM_LIMIT: Final = 16

# Stricter than Twisted, which accepts " +1_00" as a code: a head that Twisted skips must never count as the final one here.
# The reverse does no harm: as long as no final head is seen, the limit stays in force.
_FINAL: Final = re.compile(rb"HTTP/1\.[0-9] [2-5][0-9][0-9](?: |\Z)")
#: Bytes kept of a line: those that ``_FINAL`` needs, and one more to tell the last "\r" of a line from one within it.
_KEPT_BYTES: Final = 14


class HeadScanner:
    """Counts the bytes of one answer up to the end of its final head, which it finds where Twisted's parser does.

    Lines end with a line feed; one carriage return before that is ignored. The first line is the status line, an empty line
    ends the head. Pure, and of a fixed size in memory, in whatever pieces the bytes come.
    """

    def __init__(self, limit_bytes: int = HEAD_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self.restart()

    def restart(self) -> None:
        """The next bytes begin another answer."""
        #: Whether the final head is over; the bytes behind it are the body and not counted.
        self.ended = False
        self._room = self._limit_bytes
        self._line = bytearray()
        self._in_status = True
        self._is_final = False
        #: Which limit was exceeded; empty if none was.
        self.problem = ""
        self._interim = 0

    def feed(self, data: bytes) -> bool:
        """Take the next bytes; ``False`` once a limit is exceeded before the end of the final head."""
        if self.ended or self.problem:
            return not self.problem
        data = data[: self._room + 1]  # the first byte over the limit decides
        position = 0
        while position < len(data) and not self.ended and not self.problem:
            newline = data.find(b"\n", position)
            end = len(data) if newline < 0 else newline
            self._line += data[position : min(end, position + _KEPT_BYTES - len(self._line))]
            position = end
            if newline >= 0:
                position += 1
                self._line_received(bytes(self._line.removesuffix(b"\r")))
                self._line.clear()
        self._room -= position
        if self._room < 0:
            self.ended = False  # if the head ended, then only with the byte over the limit
            self.problem = f"the answer's head is longer than {self._limit_bytes} bytes"
        return not self.problem

    def _line_received(self, line: bytes) -> None:
        if self._in_status:
            self._in_status = False
            self._is_final = _FINAL.match(line) is not None
        elif not line:
            self._in_status = True  # of the next answer, if this was a 1xx
            self.ended = self._is_final
            self._interim += not self._is_final
            if self._interim > INTERIM_LIMIT:
                self.problem = f"more than {INTERIM_LIMIT} heads came before the answer's"


class _HeadLimiter(ProtocolWrapper):
    """Between a connection and Twisted's HTTP client; ends the connection when a head is too long."""

    transport: Any

    def __init__(self, factory: Any, wrapped: IProtocol) -> None:
        super().__init__(factory, wrapped)
        self._head = HeadScanner()
        self._refusal: Failure | None = None

    def _sending(self) -> None:
        # Nothing is pipelined: bytes sent after an answer's head are the next request. (Or the rest of a request whose
        # answer came early; then the limit also covers some of the body, which does no harm.)
        if self._head.ended:
            self._head.restart()

    def write(self, data: bytes) -> None:
        self._sending()
        ProtocolWrapper.write(self, data)

    def writeSequence(self, data: Iterable[bytes]) -> None:
        self._sending()
        ProtocolWrapper.writeSequence(self, data)

    def loseConnection(self) -> None:
        """End the connection now: TLS would first wait for the other side to agree, and accept its data until then."""
        self.disconnecting = 1
        self.transport.abortConnection()

    def dataReceived(self, data: bytes) -> None:
        if self._head.feed(data):
            ProtocolWrapper.dataReceived(self, data)
        else:
            self._refusal = Failure(NoAnswer(self._head.problem))
            self.loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The end of the connection, with our reason if we have one."""
        ProtocolWrapper.connectionLost(self, self._refusal or reason)


@implementer(IStreamClientEndpoint)
class _HeadLimitedEndpoint:
    """An endpoint whose connections have a :class:`_HeadLimiter` each."""

    def __init__(self, endpoint: IStreamClientEndpoint) -> None:
        self._endpoint = endpoint

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Connect; fires with the protocol of ``protocolFactory``, which is what a pool keeps."""
        wrapped: Any = protocolFactory
        wrapped.noisy = False  # or it writes two lines to the program's log for each connection
        factory: Any = WrappingFactory(wrapped)
        factory.protocol = _HeadLimiter
        factory.noisy = False
        connected: Deferred[Any] = self._endpoint.connect(factory)
        return connected.addCallback(lambda limiter: limiter.wrappedProtocol)


@implementer(IPolicyForHTTPS)
class HostPolicy:
    """The certificate has to be of the host, whatever characters its name has, and trusted by ``trust`` or the platform."""

    def __init__(self, trust: Any = None) -> None:
        self._trust = trust

    def creatorForNetloc(self, hostname: bytes, port: int) -> Any:
        """What makes connections to ``hostname``."""
        return tls_options(hostname.decode("ascii"), self._trust)


@implementer(IAgentEndpointFactory)
class HeadLimitedEndpoints:
    """Connections for ``Agent.usingEndpointFactory``: like its own, but no head is longer than ``HEAD_LIMIT_BYTES``.

    A longer head ends the connection with a ``NoAnswer`` as the reason. Connecting may take ``timeout_s``
    seconds on ``reactor``; ``policy`` says which certificates are valid.
    """

    def __init__(self, reactor: Any, *, timeout_s: float, policy: IPolicyForHTTPS | None = None) -> None:
        self._reactor = reactor
        self._timeout_s = timeout_s
        self._policy: IPolicyForHTTPS = policy if policy is not None else HostPolicy()

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        """The endpoint for ``uri``; raises ``SchemeNotSupported`` for what is neither http nor https."""
        if uri.scheme not in (b"http", b"https"):
            raise SchemeNotSupported(f"Unsupported scheme: {uri.scheme!r}")
        endpoint: Any = NamedHost(self._reactor, uri.host.decode("ascii"), uri.port, timeout=self._timeout_s)
        if uri.scheme == b"https":
            endpoint = wrapClientTLS(self._policy.creatorForNetloc(uri.host, uri.port), endpoint)
        return _HeadLimitedEndpoint(endpoint)
