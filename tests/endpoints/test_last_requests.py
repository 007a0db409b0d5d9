"""A client that ends its half with its request, over dmsg as over TCP."""

from __future__ import annotations

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Protocol
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site
from zope.interface import implementer

from dmsg.mux.client.endpoint import DmsgClientEndpoint
from dmsg.testing.network import LocalNetwork

PAGE = b"a page" * 1000


class Page(Resource):
    """Written by a pull producer, as files are."""

    isLeaf = True

    def render_GET(self, request):
        request.setHeader(b"content-length", str(len(PAGE)).encode())
        Pages(request)
        return NOT_DONE_YET


class Pages:
    def __init__(self, request) -> None:
        self.request = request
        request.registerProducer(self, False)

    def resumeProducing(self) -> None:
        self.request.write(PAGE)
        self.request.unregisterProducer()
        self.request.finish()

    def stopProducing(self) -> None:
        pass


@implementer(IHalfCloseableProtocol)
class Asking(Protocol):
    """Sends a request and the end in one."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.answer = b""
        self.over: Deferred[BaseException] = Deferred()

    def connectionMade(self) -> None:
        self.transport.write(self.request)
        self.transport.loseWriteConnection()

    def dataReceived(self, data: bytes) -> None:
        self.answer += data

    def readConnectionLost(self) -> None:
        self.transport.loseConnection()

    def writeConnectionLost(self) -> None:
        pass

    def connectionLost(self, reason=None) -> None:
        self.over.callback(reason.value)


@pytest.mark.parametrize("request_line", [b"GET /page HTTP/1.0", b"GET /page HTTP/1.1\r\nHost: x\r\nConnection: close"])
@pytest.mark.parametrize("how", ["dmsg", "tcp"])
@pytest_twisted.ensureDeferred
async def test_a_web_server_answers_it(reactor, how, request_line):
    """The server's protocol has no half-close, and its producer writes in the next turn of the reactor."""
    site = Site(Page())
    site.noisy = False
    asking = Asking(request_line + b"\r\n\r\n")
    async with LocalNetwork(reactor, relays=1) as network:
        if how == "dmsg":
            server = await network.client()
            port = server.listen(site)
            endpoint = DmsgClientEndpoint(await network.client(), server.public_key)
        else:
            port = reactor.listenTCP(0, site, interface="127.0.0.1")
            endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", port.getHost().port)
        await connectProtocol(endpoint, asking)
        assert isinstance(await asking.over, ConnectionDone)
        assert asking.answer.endswith(b"\r\n\r\n" + PAGE)
        await port.stopListening()
