"""Programs that come with Twisted, over endpoints of each kind: they find there what they find over TCP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint, connectProtocol
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.mail.smtp import ESMTP, SMTPFactory
from twisted.protocols.portforward import ProxyFactory
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import Site
from twisted.web.wsgi import WSGIResource

from dmsg.address import DmsgAddress
from dmsg.endpoints.stream import ClientEndpoint, ServerEndpoint
from dmsg.http.server import client_host
from dmsg.mux.client.endpoint import DmsgClientEndpoint, DmsgServerEndpoint
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.testing.network import LOOPBACK, LocalNetwork

LIMIT_S = 10.0
KINDS = ("tcp", "e2e", "hop", "messaging")


@asynccontextmanager
async def endpoints(reactor: Any, kind: str) -> AsyncIterator[tuple[Any, Callable[[Any], Any]]]:
    """A server endpoint of ``kind``, and a function that gives a client endpoint for its port."""
    if kind == "tcp":
        server = TCP4ServerEndpoint(reactor, 0, interface=LOOPBACK)
        yield server, lambda port: TCP4ClientEndpoint(reactor, LOOPBACK, port.getHost().port)
        return
    messaging = kind == "messaging"
    async with LocalNetwork(reactor, relays=not messaging, messaging_relays=messaging, discovery=None) as network:
        if messaging:
            a, b = await network.messaging_client(), await network.messaging_client()
            address = DmsgAddress(b.public_key, scheme="messaging")
            yield ServerEndpoint(b), lambda port: ClientEndpoint(a, address)
        else:
            alice, bob = [await network.client(security=Security(kind)) for _ in range(2)]
            yield DmsgServerEndpoint(bob), lambda port: DmsgClientEndpoint(alice, bob.public_key)


class Reader(Protocol):
    """Reads to the end."""

    def __init__(self) -> None:
        self.received = b""
        self.over: Deferred[Failure] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.received += data

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.over.callback(reason.value)


class AnswerOnce(Protocol):
    def dataReceived(self, data: bytes) -> None:
        self.transport.write(data.upper())
        self.transport.loseConnection()


def quiet(factory: Factory) -> Factory:
    factory.noisy = False
    return factory


@pytest.mark.parametrize("kind", KINDS)
@pytest_twisted.ensureDeferred
async def test_a_port_forwarder_passes_the_end_on(reactor, kind):
    """Each of its connections is the producer of the other, for good."""
    back_end = TCP4ServerEndpoint(reactor, 0, interface=LOOPBACK)
    behind = await back_end.listen(quiet(Factory.forProtocol(AnswerOnce)))
    async with endpoints(reactor, kind) as (server, client_for):
        port = await server.listen(quiet(ProxyFactory(LOOPBACK, behind.getHost().port)))
        reader = await connectProtocol(client_for(port), Reader())
        reader.transport.write(b"hello")
        reason = await reader.over.addTimeout(LIMIT_S, reactor)
        assert isinstance(reason, ConnectionDone)
        assert reader.received == b"HELLO"
        await port.stopListening()
    await behind.stopListening()


@pytest.mark.parametrize("kind", KINDS)
@pytest_twisted.ensureDeferred
async def test_a_wsgi_application_is_told_who_asks(reactor, kind):
    seen: list[dict[str, Any]] = []

    def application(environ: dict[str, Any], start: Callable[..., object]) -> list[bytes]:
        seen.append(environ)
        start("200 OK", [])
        return [b"hello"]

    async with endpoints(reactor, kind) as (server, client_for):
        resource = WSGIResource(reactor, reactor.getThreadPool(), application)
        port = await server.listen(quiet(Site(resource, reactor=reactor)))
        reader = await connectProtocol(client_for(port), Reader())
        ours, theirs = reader.transport.getHost(), reader.transport.getPeer()
        reader.transport.write(b"GET / HTTP/1.0\r\n\r\n")
        assert isinstance(await reader.over.addTimeout(LIMIT_S, reactor), ConnectionDone)
        assert reader.received.startswith(b"HTTP/1.0 200 OK")
        assert reader.received.endswith(b"hello")
        assert (seen[0]["REMOTE_ADDR"], seen[0]["REMOTE_PORT"]) == (ours.host, str(ours.port))
        assert (seen[0]["SERVER_NAME"], seen[0]["SERVER_PORT"]) == (theirs.host, str(theirs.port))
        await port.stopListening()


@pytest.mark.parametrize("greeting", [b"HELO", b"EHLO"])
@pytest.mark.parametrize("kind", KINDS)
@pytest_twisted.ensureDeferred
async def test_a_mail_server_greets_its_client(reactor, kind, greeting):
    """It encodes the host of its peer as IDNA, which no label of more than 63 characters is."""

    class Mail(SMTPFactory):
        protocol = ESMTP

    async with endpoints(reactor, kind) as (server, client_for):
        port = await server.listen(quiet(Mail()))
        reader = await connectProtocol(client_for(port), Reader())
        host = reader.transport.getHost().host
        reader.transport.write(greeting + b" me\r\nQUIT\r\n")
        assert isinstance(await reader.over.addTimeout(LIMIT_S, reactor), ConnectionDone)
        assert f" Hello {host}, nice to meet you".encode() in reader.received
        assert b"\r\n221 See you later\r\n" in reader.received
        await port.stopListening()


@pytest_twisted.ensureDeferred
async def test_keys_are_no_hosts_for_limits_of_http(reactor):
    """A stranger has as many keys as it wants."""

    class Hosts(Resource):
        isLeaf = True

        def render_GET(self, request: Any) -> bytes:
            return repr(client_host(request)).encode()

    async with endpoints(reactor, "e2e") as (server, client_for):
        port = await server.listen(quiet(Site(Hosts(), reactor=reactor)))
        reader = await connectProtocol(client_for(port), Reader())
        reader.transport.write(b"GET / HTTP/1.0\r\n\r\n")
        await reader.over.addTimeout(LIMIT_S, reactor)
        assert reader.received.endswith(b"\r\n\r\n''")
        await port.stopListening()
