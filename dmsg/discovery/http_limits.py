"""What HTTP requests from strangers may cost: connections, header sizes, bodies and time.

twisted.web on its own takes any body (a long one into a file), and its time-out starts anew at each byte. Here a body
is refused as soon as it is known to be too long (by its ``Content-Length`` before the first byte, in chunks at the
first byte over), and a request has to be complete within a time counted from its first byte.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final

from twisted.internet.interfaces import IAddress, IPullProducer
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure
from twisted.web.http import RESPONSES, HTTPChannel
from twisted.web.resource import IResource, Resource
from twisted.web.server import NOT_DONE_YET, Request, Site
from zope.interface import implementer

from dmsg.address import address_group
from dmsg.discovery.entry import ENTRY_LIMIT_BYTES

JSON_TYPE: Final = b"application/json"
_PIECE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class DiscoveryLimits:
    """Everything a discovery's HTTP side limits. A rate of ``None`` means no limit."""

    #: Largest request body in bytes: the largest entry.
    body_bytes: int = ENTRY_LIMIT_BYTES
    #: Request bodies being received or worked on at one time: bounds their memory to 16 MiB.
    concurrent_bodies: int = 256
    #: A request line and headers, in bytes and in number. Ours take 300 bytes.
    headers_bytes: int = 8 * 1024
    headers: int = 64
    #: From the first byte of a request to its last, in seconds.
    request_timeout_s: float = 10.0
    #: A connection on which nothing happens, in seconds.
    idle_timeout_s: float = 60.0
    #: Open connections, and of those from one address.
    connections: int = 4000
    connections_per_address: int = 250
    #: GETs from one address: per second in the long run, and at once.
    get_rate_per_s: float | None = 200.0
    get_burst: float = 400.0
    #: POSTs from one address. Each costs a signature check and a durable write.
    post_rate_per_s: float | None = 50.0
    post_burst: float = 200.0
    #: Addresses whose rate is remembered.
    rate_addresses: int = 50_000
    #: Writes under way, whether somebody still waits for them or not.
    pending_writes: int = 4096
    #: Servers in one answer, and its length in bytes.
    available_servers: int = 64
    available_servers_bytes: int = 1024 * 1024
    #: Times the relay ranks are sent to one address: per second in the long run, and at once. They can be 4 MiB.
    ranks_rate_per_s: float | None = 0.2
    ranks_burst: float = 20.0


def message(text: str, status: int) -> bytes:
    """The body of every answer that is not an entry: the reference's ``HTTPMessage``."""
    return json.dumps({"message": text, "code": status}, separators=(",", ":")).encode()


class LongAnswer(Resource):
    """Sends ``body`` piece by piece, as fast as the client takes it: however many read, it is in memory once.

    Status and headers must be set already.
    """

    isLeaf = True

    def __init__(self, body: bytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._body = body

    def render(self, request: Any) -> bytes | int:
        """Begin to answer ``request``."""
        if request.method == b"HEAD":
            return b""
        request.registerProducer(_Pieces(request, self._body), False)
        return NOT_DONE_YET


@implementer(IPullProducer)
class _Pieces:
    """Gives ``request`` the next piece of ``body`` whenever it wants one."""

    def __init__(self, request: Any, body: bytes) -> None:
        self._request = request
        self._body = body
        self._at = 0

    def resumeProducing(self) -> None:
        """The piece before has left."""
        request = self._request
        if request is None:
            return
        piece = self._body[self._at : self._at + _PIECE_BYTES]
        self._at += len(piece)
        if piece:
            request.write(piece)
        else:
            self.stopProducing()
            request.unregisterProducer()
            request.finish()

    def stopProducing(self) -> None:
        """Nobody reads on."""
        self._request = None


class LimitedRequest(Request):
    """A request whose body is bounded while it comes in."""

    # Twisted's own annotations are of the classes these two are subclasses of.
    channel: Any
    content: Any
    _refused = False
    _counted = False

    def gotLength(self, length: int | None) -> None:
        """All headers are there; ``length`` is ``None`` for a chunked body, 0 for none."""
        self.content = BytesIO()
        site: LimitedSite = self.channel.site
        if length == 0:
            return
        if length is not None and length > site.limits.body_bytes:
            self._refuse(413, "error bad input")
        elif site.bodies >= site.limits.concurrent_bodies:
            self._refuse(503, "something unexpected happened")
        else:
            site.bodies += 1
            self._counted = True

    def handleContentChunk(self, data: bytes) -> None:
        """A piece of the body."""
        if self._refused:
            return
        if self.content.tell() + len(data) > self.channel.site.limits.body_bytes:
            self._refuse(413, "error bad input")
        else:
            self.content.write(data)

    def _refuse(self, status: int, text: str) -> None:
        self._refused = True
        body = message(text, status)
        head = b"HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        self.channel.refuse(head % (status, RESPONSES.get(status, b""), JSON_TYPE, len(body)) + body)

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        """All of the request is there."""
        if not self._refused:
            super().requestReceived(command, path, version)  # type: ignore[no-untyped-call]

    def _release(self) -> None:
        if self._counted:
            self._counted = False
            self.channel.site.bodies -= 1

    def finish(self) -> None:
        """The answer is complete."""
        self._release()
        super().finish()  # type: ignore[no-untyped-call]

    def connectionLost(self, reason: Any) -> None:
        """The connection ended before the answer did."""
        self._release()
        super().connectionLost(reason)  # type: ignore[no-untyped-call]


class LimitedChannel(HTTPChannel):
    """One connection: HTTP/1.1 requests, each complete within a time limit."""

    site: LimitedSite
    transport: Any
    _incomplete = False
    _refused = False
    _deadline: Any = None
    _host = ""
    _counted = False

    def connectionMade(self) -> None:
        """Start to be counted."""
        limits = self.site.limits
        self.maxHeaders = limits.headers
        self.totalHeadersSize = self.MAX_LENGTH = limits.headers_bytes
        self._host = address_group(getattr(self.transport.getPeer(), "host", ""))
        self._counted = True
        self.site.connections += 1
        self.site.hosts[self._host] += 1
        super().connectionMade()  # type: ignore[no-untyped-call]

    def dataReceived(self, data: bytes) -> None:
        """Bytes from the client."""
        if self._refused:
            return
        self._incomplete = True
        super().dataReceived(data)  # type: ignore[no-untyped-call]
        if self._incomplete and self._deadline is None and not self._refused:
            limit_s = self.site.limits.request_timeout_s
            self._deadline = self.callLater(limit_s, self._too_slow)  # type: ignore[no-untyped-call]

    def allContentReceived(self) -> None:
        """A whole request is there."""
        self._incomplete = False
        self._no_deadline()
        super().allContentReceived()  # type: ignore[no-untyped-call]

    def _no_deadline(self) -> None:
        if self._deadline is not None:
            deadline, self._deadline = self._deadline, None
            deadline.cancel()

    def _too_slow(self) -> None:
        self._deadline = None
        self.transport.abortConnection()

    def refuse(self, answer: bytes) -> None:
        """Write ``answer``, read no more, and close."""
        self._refused = True
        self._no_deadline()
        self.transport.write(answer)
        self.loseConnection()  # type: ignore[no-untyped-call]

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Stop being counted."""
        self._no_deadline()
        if self._counted:
            self._counted = False
            self.site.connections -= 1
            self.site.hosts[self._host] -= 1
            if not self.site.hosts[self._host]:
                del self.site.hosts[self._host]
        super().connectionLost(reason)  # type: ignore[no-untyped-call]


class LimitedSite(Site):
    """Serves ``resource`` within ``limits``. Writes no access log: the event log has a line for each request."""

    protocol: Any = LimitedChannel
    requestFactory = LimitedRequest

    def __init__(self, resource: IResource, *, reactor: Any, limits: DiscoveryLimits) -> None:
        super().__init__(resource, timeout=limits.idle_timeout_s, reactor=reactor)  # type: ignore[no-untyped-call]
        self.limits = limits
        self.bodies = 0
        self.connections = 0
        self.hosts: Counter[str] = Counter()

    def buildProtocol(self, addr: IAddress | None) -> Any:
        """A channel for a new connection, or ``None`` (which closes it) when there are too many."""
        if self.connections >= self.limits.connections:
            return None
        if self.hosts[address_group(getattr(addr, "host", ""))] >= self.limits.connections_per_address:
            return None
        return super().buildProtocol(addr)  # type: ignore[no-untyped-call]

    def acceptableProtocols(self) -> list[bytes]:
        """HTTP/1.1 only: the limits are those of its channel."""
        return [b"http/1.1"]

    def log(self, request: object) -> None:
        """Nothing."""
