"""An HTTP server that limits the cost of strangers' requests: connections, header sizes, bodies and time.

twisted.web on its own accepts any body (a long one goes into a file), and its timeout starts anew at each byte. Here a body
is refused as soon as it is known to be too long: by its ``Content-Length`` before the first byte, or in chunks at the
first byte over. A request must be complete within a time counted from its first byte, and the client must take the answer
within another. When all places are taken, connections of the network that holds the most make room, and bodies that are still
coming in (:mod:`dmsg.http.places`).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from typing import Any, Final

from twisted.internet.interfaces import IAddress, IPullProducer, IReactorTime
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure
from twisted.web.http import RESPONSES, HTTPChannel
from twisted.web.resource import IResource, Resource
from twisted.web.server import NOT_DONE_YET, Request, Site
from zope.interface import implementer

from dmsg.address import DmsgAddress, address_group, network_group
from dmsg.glue.listening import Refused
from dmsg.glue.waiters import Waiters
from dmsg.http.limits import HttpLimits
from dmsg.http.places import Places, Standing

JSON_TYPE: Final = b"application/json"
#: A longer answer is sent in pieces of this size.
PIECE_BYTES: Final = 64 * 1024
#: Long answers under way of which each has a body of its own: bounds their memory to 64 MiB.
LONG_ANSWERS: Final = 64
#: Bytes of a chunked body that are handled in one turn: they can be 700 chunks, 2 ms of work. One read can have 16 times as many.
_CHUNKED_BYTES: Final = 4 * 1024
#: Most arguments of a request. No path takes more than two; 8,000 empty ones fit into a line and take 9 ms.
_ARGUMENTS: Final = 64


def message(text: str, status: int) -> bytes:
    """The body of every answer that is not an entry: the reference's ``HTTPMessage``."""
    return json.dumps({"message": text, "code": status}, separators=(",", ":")).encode()


class LongAnswer(Resource):
    """Sends ``body`` piece by piece, as fast as the client takes it.

    A ``shared`` body is in memory once, however many clients read it. Of the others there are :data:`LONG_ANSWERS` at most.
    Status and headers must be set already.
    """

    isLeaf = True

    def __init__(self, body: bytes, *, shared: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._body = body
        self._shared = shared

    def render(self, request: Any) -> bytes | int:
        """Begin to answer ``request``."""
        if request.method == b"HEAD":
            return b""
        if not self._shared:
            request.begin_long_answer()
        request.registerProducer(_Pieces(request, self._body), False)
        return NOT_DONE_YET


@implementer(IPullProducer)
class _Pieces:
    """Gives ``request`` the next piece of ``body`` whenever ``request`` wants one."""

    def __init__(self, request: Any, body: bytes) -> None:
        self._request = request
        self._body = body
        self._at = 0

    def resumeProducing(self) -> None:
        request = self._request
        if request is None:
            return
        piece = self._body[self._at : self._at + PIECE_BYTES]
        self._at += len(piece)
        if piece:
            request.write(piece)
        else:
            self.stopProducing()
            request.unregisterProducer()
            request.finish()

    def stopProducing(self) -> None:
        self._request = None


class LimitedRequest(Request):
    """A request whose body is bounded while it comes in."""

    # Twisted annotates these two with their base classes.
    channel: Any
    content: Any
    _refused = False
    _counted = False
    _is_long = False

    def parseCookies(self) -> None:
        """Nothing: no resource reads cookies, and a header of 8 KiB can have 8,000 of them."""

    def gotLength(self, length: int | None) -> None:
        """All headers are there; ``length`` is ``None`` for a chunked body, 0 for none."""
        self.content = BytesIO()
        site: LimitedSite = self.channel.site
        if length == 0:
            return
        if length is not None and length > site.limits.body_bytes:
            self.refuse(413, "error bad input")
        elif not site.begin_body(self, self.channel.address):
            self.refuse(503, "something unexpected happened")
        else:
            self._counted = True

    def handleContentChunk(self, data: bytes) -> None:
        if self._refused:
            return
        if self.content.tell() + len(data) > self.channel.site.limits.body_bytes:
            self.refuse(413, "error bad input")
        else:
            self.content.write(data)

    def refuse(self, status: int, text: str) -> None:
        """Answer with ``status`` and the message ``text``, read no more, and close."""
        self._refused = True
        self.channel.site.requests_refused += 1
        body = message(text, status)
        head = b"HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        self.channel.refuse(head % (status, RESPONSES.get(status, b""), JSON_TYPE, len(body)) + body)

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        """The whole request has come. The declared type of its body is ignored: the body is JSON or an error."""
        if not self._refused and path.count(b"&") + path.count(b";") >= _ARGUMENTS:
            self.refuse(400, "error bad input")
        if not self._refused:
            self.channel.site.bodies_held.move(self, Standing.ANSWERING)
            # Twisted would read the type with the parser for e-mail, and then forms, which costs as much as a signature.
            self.requestHeaders.removeHeader(b"content-type")
            super().requestReceived(command, path, version)  # type: ignore[no-untyped-call]

    def handed_over(self) -> None:
        """The connection is something else's now, and this request will not be answered."""
        self._release()
        self.channel = None

    def begin_long_answer(self) -> None:
        """A long answer that nothing else needs is kept for this request until the client has taken it."""
        self._is_long = True
        self.channel.site.begin_answer(self, self.channel.address)

    def _release(self) -> None:
        if self._counted:
            self._counted = False
            self.channel.site.body_done(self)
        if self._is_long:
            self._is_long = False
            self.channel.site.answers_held.discard(self)

    def evict(self) -> None:
        """Give up the place of its body, which is still coming in, or of its long answer, at once, and close the connection."""
        self._release()
        self.channel.evict()

    def write(self, data: bytes) -> None:
        """Send ``data`` of the answer, behind its head."""
        if not self.startedWriting and self.channel is not None and self.channel.site.draining:
            self.responseHeaders.setRawHeaders(b"connection", [b"close"])
        super().write(data)  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """The answer is complete."""
        self._release()
        super().finish()  # type: ignore[no-untyped-call]

    def connectionLost(self, reason: Any) -> None:
        self._release()
        super().connectionLost(reason)  # type: ignore[no-untyped-call]


class LimitedChannel(HTTPChannel):
    """One connection: HTTP/1.1 requests, each complete within a time limit, and each answer taken within one."""

    site: LimitedSite
    transport: Any
    _refused = False
    _deadline: Any = None
    #: The call that goes on with the bytes that came behind a request.
    _rest: Any = None
    #: Bytes of a read that come behind the part of a chunked body that is being read.
    _behind = b""
    #: The other side's host; "" for a connection over no network.
    address = ""

    def connectionMade(self) -> None:
        limits = self.site.limits
        self.maxHeaders = limits.headers
        self.totalHeadersSize = self.MAX_LENGTH = limits.headers_bytes
        self.address = _host_of(self.transport.getPeer())
        self.site.enter(self, self.address)
        self._deadline = self.callLater(limits.first_byte_timeout_s, self._too_slow)  # type: ignore[no-untyped-call]
        super().connectionMade()  # type: ignore[no-untyped-call]

    def dataReceived(self, data: bytes) -> None:
        if self._refused or self._deadline is None or self.transport.disconnecting:
            return  # over TLS, a client may send on until it agrees to the end of the connection
        limits = self.site.limits
        if self.site.places.asks_nothing(self):
            self._now(Standing.RECEIVING, limits.request_timeout_s)
        super().dataReceived(data)  # type: ignore[no-untyped-call]
        # The bytes left may be the beginning of the next request.
        begun = self._deadline is not None and bool(self.requests or self._buffer)
        if begun and self.site.places.asks_nothing(self):
            self._now(Standing.RECEIVING, limits.request_timeout_s)

    def headerReceived(self, line: bytes) -> bool:
        """Take one header; ``False`` when it ends the connection."""
        try:
            return bool(super().headerReceived(line))  # type: ignore[no-untyped-call]
        except ValueError:  # a Content-Length of more digits than Python reads
            self.requests[-1].refuse(413, "error bad input")
            return False

    def rawDataReceived(self, data: bytes) -> None:
        """Take bytes of a body, or bytes behind a request that is being answered. A chunked body is read part by part."""
        is_chunked = self.length is None and not self._handlingRequest
        part, self._behind = (data[:_CHUNKED_BYTES], data[_CHUNKED_BYTES:]) if is_chunked else (data, b"")
        super().rawDataReceived(part)
        rest, self._behind = self._behind, b""
        if not rest:
            return
        if self._handlingRequest:
            self.rawDataReceived(rest)
        elif self._deadline is not None and not self.transport.disconnecting:
            self._buffer += rest
            self._give_turn()

    def allContentReceived(self) -> None:
        self._now(Standing.ANSWERING, self.site.limits.answer_timeout_s)
        super().allContentReceived()  # type: ignore[no-untyped-call]

    def requestDone(self, request: Any) -> None:
        """An answer is complete; some of it may not have left yet."""
        if self._waitingForTransport and (self._buffer or any(self._dataBuffer)):
            # More requests are there, and their client does not read: making more answers would fill our memory.
            self.persistent = 0
        if self.site.draining:
            self.persistent = 0
        if self.persistent:
            self._now(Standing.IDLE, self.site.limits.idle_timeout_s)
        super().requestDone(request)  # type: ignore[no-untyped-call]
        goes_on = self.persistent and self._deadline is not None and not self.transport.disconnecting
        if goes_on and self._buffer:
            # One request a turn: 64 KiB can hold 3,600, which would hold up all other connections for a third of a second.
            self._give_turn()

    def _give_turn(self) -> None:
        """Let other connections have their turn before the bytes that are left are handled."""
        if not self.paused:
            self.paused = True
            self._networkProducer.pauseProducing()
            self._rest = self.callLater(0, self._go_on)  # type: ignore[no-untyped-call]

    def _go_on(self) -> None:
        self._rest = None
        self.paused = False
        if not self._waitingForTransport:
            self._networkProducer.resumeProducing()
        self.dataReceived(b"")

    def loseConnection(self) -> None:
        """Close when the written bytes have left, or at the latest when the time for an answer is over."""
        self._now(Standing.ANSWERING, self.site.limits.answer_timeout_s)
        super().loseConnection()  # type: ignore[no-untyped-call]

    def _now(self, standing: Standing, limit_s: float) -> None:
        self.site.places.move(self, standing)
        deadline = self._deadline
        if deadline is not None and deadline.getTime() > self.site.reactor.seconds() + limit_s:
            deadline.cancel()  # Twisted's ``reset`` to an earlier time would search all timed calls of the reactor
            self._deadline = self.callLater(limit_s, self._too_slow)  # type: ignore[no-untyped-call]
        elif deadline is not None:
            deadline.reset(limit_s)

    def _too_slow(self) -> None:
        self._deadline = None
        self.transport.abortConnection()

    def evict(self) -> None:
        """Give the place to another connection, at once."""
        self._leave()
        self.transport.abortConnection()

    def _leave(self) -> None:
        if self._deadline is not None:
            deadline, self._deadline = self._deadline, None
            deadline.cancel()
        if self._rest is not None:
            rest, self._rest = self._rest, None
            rest.cancel()
        self.site.leave(self, self.address)

    def hand_over(self, protocol: Any) -> bytes:
        """Give the connection to ``protocol`` from now on; returns the bytes already read behind the request.

        The request that asks for this is not answered, and the connection holds no place any more.
        """
        self._leave()
        self.transport.unregisterProducer()
        leftover = b"".join((*self._dataBuffer, self._behind))
        self._behind = b""
        self._dataBuffer.clear()
        for request in self.requests:
            request.handed_over()
        self.requests.clear()
        # Twisted's loop may hold more bytes of this read, which come as raw data. Later reads bypass this object if they can.
        self.rawDataReceived = self.dataReceived = protocol.dataReceived  # type: ignore[method-assign]
        self.connectionLost = protocol.connectionLost  # type: ignore[method-assign]
        if getattr(self.transport, "protocol", None) is self:
            self.transport.protocol = protocol
        protocol.makeConnection(self.transport)
        return leftover

    def refuse(self, answer: bytes) -> None:
        """Write ``answer``, read no more, and close."""
        self._refused = True
        self.transport.write(answer)
        self.loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Leave the place to others."""
        self._leave()
        super().connectionLost(reason)  # type: ignore[no-untyped-call]
        self._transferDecoder = None  # of half a body; it would keep this object alive until the garbage collector runs


def _host_of(address: object) -> str:
    if isinstance(address, DmsgAddress):
        return ""  # the host is a key, and a stranger can have as many keys as it wants
    return str(getattr(address, "host", ""))


def client_host(request: Any) -> str:
    """The IP address a request came from; "" when it came over no network."""
    return _host_of(request.getClientAddress())


def ask_later(request: Any) -> None:
    """Let the answer to ``request`` say that its address asks too often, and end the connection.

    Asking again over a new connection takes longer, and new connections may have a rate, too.
    """
    request.setHeader(b"retry-after", b"1")
    request.setHeader(b"connection", b"close")
    request.channel.persistent = 0


class LimitedSite(Site):
    """Serves ``resource`` within ``limits``. Writes no access log: the event log has a line for each request.

    ``admit(host)`` says whether to accept a new connection: refused connections cost a sixth of accepted ones.
    """

    protocol: Any = LimitedChannel
    requestFactory = LimitedRequest

    def __init__(
        self,
        resource: IResource,
        *,
        reactor: Any,
        limits: HttpLimits,
        admit: Callable[[str], bool] = lambda host: True,
    ) -> None:
        # No timeout of Twisted's: the channel has its own timeouts, which write no line for each connection they end.
        super().__init__(resource, timeout=None, reactor=reactor)  # type: ignore[no-untyped-call]
        self.limits = limits
        self._admit = admit
        #: The standing of requests with a body: the body comes in (``NEW``), or the request is being answered.
        self.bodies_held: Places[LimitedRequest] = Places()
        #: Requests whose answer is long, and which hold it for themselves.
        self.answers_held: Places[LimitedRequest] = Places()
        #: Whether :meth:`drain` was called: each connection then ends after the answer that is under way.
        self.draining = False
        self._emptied: Waiters[None] = Waiters()
        #: Connections that were closed to make room for others, and those that were refused.
        self.evicted = self.refused = 0
        #: Requests refused for the length of their body, want of room for it, or the number of their arguments.
        self.requests_refused = 0
        #: The standing of the channels.
        self.places: Places[LimitedChannel] = Places()
        self._by_address: dict[str, OrderedDict[LimitedChannel, None]] = {}

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self.places)

    @property
    def bodies(self) -> int:
        """Requests with a body that are coming in or being answered."""
        return len(self.bodies_held)

    def buildProtocol(self, addr: IAddress | None) -> Any:
        """A channel for a new connection, or a protocol that closes it when it is refused."""
        host = _host_of(addr)
        if not self._admit(host) or not self._make_room(host):
            self.refused += 1
            return Refused()
        return super().buildProtocol(addr)  # type: ignore[no-untyped-call]

    def _make_room(self, host: str) -> bool:
        victim: LimitedChannel | None = None
        neighbours = self._by_address.get(address_group(host), ())
        if len(neighbours) >= self.limits.connections_per_address:
            victim = next(filter(self.places.asks_nothing, neighbours), None)
        elif len(self.places) >= self.limits.connections:
            victim = self.places.victim(network_group(host))
        else:
            return True
        if victim is None:
            return False
        self.evicted += 1
        victim.evict()
        return True

    # --- from the channels -------------------------------------------------------------------------------------------

    def enter(self, channel: LimitedChannel, host: str) -> None:
        """``channel`` takes a place; ``host`` is the other side's."""
        self.places.add(channel, network_group(host))
        self._by_address.setdefault(address_group(host), OrderedDict())[channel] = None

    def leave(self, channel: LimitedChannel, host: str) -> None:
        """``channel`` gives its place back; silent when it has done so already."""
        self.places.discard(channel)
        if self.draining and not self.places:
            self._emptied.fire(None)
        address = address_group(host)
        neighbours = self._by_address.get(address)
        if neighbours is not None:
            neighbours.pop(channel, None)
            if not neighbours:
                del self._by_address[address]

    def begin_body(self, request: LimitedRequest, host: str) -> bool:
        """Whether the body of ``request`` from ``host`` has a place; if all are taken, a body that is coming in makes room."""
        if self.bodies >= self.limits.concurrent_bodies:
            victim = self.bodies_held.oldest_new()
            if victim is None:
                return False
            self.evicted += 1
            victim.evict()
        self.bodies_held.add(request, network_group(host))
        return True

    def body_done(self, request: LimitedRequest) -> None:
        """``request``, one of :attr:`bodies`, was answered or is over."""
        self.bodies_held.discard(request)

    def begin_answer(self, request: LimitedRequest, host: str) -> None:
        """A long answer to ``host`` begins; with too many, the oldest one of the network that has the most is given up."""
        if len(self.answers_held) >= LONG_ANSWERS:
            victim = self.answers_held.oldest_new()
            assert victim is not None
            self.evicted += 1
            victim.evict()
        self.answers_held.add(request, network_group(host))

    async def drain(self, limit_s: float, clock: IReactorTime) -> None:
        """Close idle connections at once, the others when their request is answered, and all of them after ``limit_s``.

        Call it when no new connections come any more. When it returns, none is left, so no request comes after it.
        """
        self.draining = True
        for channel in list(self.places):
            if self.places.asks_nothing(channel):
                channel.loseConnection()
        if self.places:
            await self._emptied.wait_at_most(limit_s, clock)
        for channel in list(self.places):
            channel.evict()

    # --- as a Site ---------------------------------------------------------------------------------------------------

    def acceptableProtocols(self) -> list[bytes]:
        """HTTP/1.1 only: the limits are those of its channel."""
        return [b"http/1.1"]

    def log(self, request: object) -> None:
        """Nothing."""
