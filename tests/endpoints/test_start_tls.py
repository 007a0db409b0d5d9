"""TLS that a program begins on a transport in use, over endpoints of each kind: it goes as over TCP."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
import pytest_twisted
from cryptography import x509
from twisted.cred.checkers import AllowAnonymousAccess
from twisted.cred.portal import IRealm, Portal
from twisted.internet import ssl
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import connectProtocol
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import ISSLTransport, ITLSTransport
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import Clock, deferLater
from twisted.mail.smtp import ESMTP, ESMTPSender, ESMTPSenderFactory, IMessage, IMessageDelivery, SMTPFactory
from twisted.protocols import amp
from twisted.protocols.basic import FileSender
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.glue.tls import start_tls
from dmsg.mux.client.endpoint import DmsgClientEndpoint, DmsgServerEndpoint
from dmsg.mux.core.errors import Unsupported
from dmsg.testing.network import LocalNetwork
from tests.endpoints.test_programs import KINDS, LIMIT_S, Reader, endpoints, quiet
from tests.glue.test_stream_transport import LineTransport, Plain, Source
from tests.pyopenssl import twisted_and_pyopenssl

MIB = 1024 * 1024
pytestmark = twisted_and_pyopenssl


@pytest.fixture(scope="module")
def certificate(self_signed):
    """A certificate for ``site.dmsg`` with its key."""
    return ssl.PrivateCertificate.loadPEM(self_signed(x509.DNSName("site.dmsg")))


def client_options(certificate, name="site.dmsg"):
    return ssl.optionsForClientTLS(name, trustRoot=ssl.Certificate(certificate.original))


class Talk(Protocol):
    """Reads. The end that dials asks for TLS; the TLS server begins first, because it is silent then."""

    def __init__(self, options: Any, *, normal: bool = True) -> None:
        self.options = options
        self.normal = normal
        self.received = b""
        self.secured = False
        self.wanted = 0
        self.got: Deferred[bytes] = Deferred()
        self.over: Deferred[Failure] = Deferred()

    def begin(self) -> None:
        self.transport.startTLS(self.options, self.normal)
        self.secured = True

    def want(self, size: int) -> Deferred[bytes]:
        """Fires with what was read once it has ``size`` bytes."""
        self.wanted, self.got = size, Deferred()
        self.check()
        return self.got

    def check(self) -> None:
        if self.wanted and len(self.received) >= self.wanted:
            self.wanted = 0
            self.got.callback(self.received)

    def dataReceived(self, data: bytes) -> None:
        if self.secured:
            self.received += data
            self.check()
        elif data == b"STARTTLS":
            if self.normal:
                self.transport.write(b"GO")
            self.begin()
        else:
            assert data == b"GO"
            self.begin()
            self.transport.write(b"secret")

    def ask(self) -> None:
        self.transport.write(b"STARTTLS")
        if not self.normal:
            self.begin()
            self.transport.write(b"secret")

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.over.callback(reason.value)


class Early(Talk):
    """Writes much, and registers a producer, before the handshake is over."""

    def begin(self) -> None:
        super().begin()
        self.source = Source()
        self.transport.registerProducer(self.source, True)
        self.transport.write(bytes(4 * MIB))


async def secured(server, client_for, certificate, *, normal=True, name="site.dmsg", dialler=Talk):
    """Two ends that have begun TLS, and the port; the dialling end is the TLS client, or the server."""
    for_client, for_server = client_options(certificate, name), certificate.options()
    theirs = Talk(for_server if normal else for_client, normal=normal)
    port = await server.listen(quiet(Factory.forProtocol(lambda: theirs)))
    ours = await connectProtocol(client_for(port), dialler(for_client if normal else for_server, normal=normal))
    ours.ask()
    return ours, theirs, port


@pytest.mark.parametrize("normal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest_twisted.ensureDeferred
async def test_both_ends_go_on_under_tls(reactor, kind, normal, certificate):
    async with endpoints(reactor, kind) as (server, client_for):
        ours, theirs, port = await secured(server, client_for, certificate, normal=normal)
        assert await theirs.want(6).addTimeout(LIMIT_S, reactor) == b"secret"
        theirs.transport.writeSequence([b"told ", b"back"])
        assert await ours.want(9).addTimeout(LIMIT_S, reactor) == b"told back"
        for end in (ours, theirs):
            assert ITLSTransport.providedBy(end.transport)
            assert ISSLTransport.providedBy(end.transport)
            assert end.transport.TLS
        in_front = ours if normal else theirs
        peer = ssl.Certificate.peerFromTransport(in_front.transport)
        assert peer.digest("sha256") == certificate.digest("sha256")
        ours.transport.loseConnection()
        for end in (ours, theirs):
            assert isinstance(await end.over.addTimeout(LIMIT_S, reactor), ConnectionDone)
        await port.stopListening()


class Remembers(Talk):
    """Asks for the certificate of its peer when it is told of the end."""

    certificate: Any = None

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.certificate = ssl.Certificate.peerFromTransport(self.transport)
        self.transport.write(b"nothing happens")
        self.transport.loseConnection()
        super().connectionLost(reason)


@pytest.mark.parametrize("kind", KINDS)
@pytest_twisted.ensureDeferred
async def test_the_certificate_is_there_until_the_end_was_told(reactor, kind, certificate):
    async with endpoints(reactor, kind) as (server, client_for):
        ours, theirs, port = await secured(server, client_for, certificate, dialler=Remembers)
        await theirs.want(6).addTimeout(LIMIT_S, reactor)
        theirs.transport.loseConnection()
        for end in (ours, theirs):
            assert isinstance(await end.over.addTimeout(LIMIT_S, reactor), ConnectionDone)
        assert ours.certificate.digest("sha256") == certificate.digest("sha256")
        await port.stopListening()


class NoFile(ssl.ContextFactory):
    def getContext(self) -> Any:
        raise FileNotFoundError("the certificate")


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest_twisted.ensureDeferred
async def test_a_transport_is_as_it_was_when_tls_cannot_begin(reactor, kind, certificate):
    """Over TCP it could not even be closed, and its program would not be told of the end."""
    async with endpoints(reactor, kind) as (server, client_for):
        theirs = Reader()
        port = await server.listen(quiet(Factory.forProtocol(lambda: theirs)))
        ours = await connectProtocol(client_for(port), Reader())
        source = Source()
        ours.transport.registerProducer(source, True)
        with pytest.raises(FileNotFoundError):
            ours.transport.startTLS(NoFile())
        assert not ours.transport.TLS
        assert ours.transport.producer is source
        ours.transport.write(b"no TLS")
        ours.transport.loseConnection()
        for end in (ours, theirs):
            assert isinstance(await end.over.addTimeout(LIMIT_S, reactor), ConnectionDone)
        assert theirs.received == b"no TLS"
        await port.stopListening()


@pytest.mark.parametrize("kind", KINDS)
@pytest_twisted.ensureDeferred
async def test_a_producer_sends_at_the_pace_of_the_reader(reactor, kind, certificate):
    data = hashlib.sha256(b"seed").digest() * (2 * MIB // 32)
    async with endpoints(reactor, kind) as (server, client_for):
        ours, theirs, port = await secured(server, client_for, certificate)
        await theirs.want(6).addTimeout(LIMIT_S, reactor)
        theirs.transport.pauseProducing()
        done = FileSender().beginFileTransfer(BytesIO(data), ours.transport)
        ours.transport.loseConnection()  # the rest of the file, then the goodbye
        theirs.transport.resumeProducing()
        assert await theirs.want(6 + len(data)).addTimeout(LIMIT_S, reactor) == b"secret" + data
        await done.addTimeout(LIMIT_S, reactor)
        for end in (ours, theirs):
            assert isinstance(await end.over.addTimeout(LIMIT_S, reactor), ConnectionDone)
        await port.stopListening()


@pytest.mark.parametrize("kind", KINDS)
@pytest_twisted.ensureDeferred
async def test_a_file_follows_data_that_the_peer_has_not_taken(reactor, kind, certificate):
    """TLS cannot pause its producer while it registers it."""
    data, file = bytes(2 * MIB), hashlib.sha256(b"seed").digest() * 1024
    async with endpoints(reactor, kind) as (server, client_for):
        ours, theirs, port = await secured(server, client_for, certificate)
        await theirs.want(6).addTimeout(LIMIT_S, reactor)
        theirs.transport.pauseProducing()
        ours.transport.write(data)
        await deferLater(reactor, 0)  # TLS has passed it on
        done = FileSender().beginFileTransfer(BytesIO(file), ours.transport)
        theirs.transport.resumeProducing()
        assert await theirs.want(6 + len(data) + len(file)).addTimeout(LIMIT_S, reactor) == b"secret" + data + file
        await done.addTimeout(LIMIT_S, reactor)
        ours.transport.loseConnection()
        for end in (ours, theirs):
            assert isinstance(await end.over.addTimeout(LIMIT_S, reactor), ConnectionDone)
        await port.stopListening()


@pytest.mark.parametrize("kind", KINDS)
@pytest_twisted.ensureDeferred
async def test_a_producer_from_before_the_handshake_keeps_to_the_pace_of_the_reader(reactor, kind, certificate):
    """Once the handshake is over, TLS lets it go on, whether or not the transport takes more."""
    async with endpoints(reactor, kind) as (server, client_for):
        ours, theirs, port = await secured(server, client_for, certificate, dialler=Early)
        await theirs.want(6).addTimeout(LIMIT_S, reactor)
        theirs.transport.pauseProducing()
        assert ours.source.told[0] == "pause"
        assert ours.source.told[-1] == "resume"
        for _ in range(100):
            await deferLater(reactor, 0)
            if ours.source.told[-1] == "resume":
                ours.transport.write(bytes(65536))
        assert ours.source.told[-1] != "resume"
        ours.transport.abortConnection()
        theirs.transport.resumeProducing()
        for end in (ours, theirs):
            await end.over.addTimeout(LIMIT_S, reactor)
        await port.stopListening()


@pytest.mark.parametrize("kind", KINDS)
@pytest_twisted.ensureDeferred
async def test_the_wrong_certificate_ends_both_with_an_error(reactor, kind, certificate):
    async with endpoints(reactor, kind) as (server, client_for):
        ours, theirs, port = await secured(server, client_for, certificate, name="other.dmsg")
        for end in (ours, theirs):
            reason = await end.over.addTimeout(LIMIT_S, reactor)
            assert not isinstance(reason, ConnectionDone), reason
            assert end.received == b""
        await port.stopListening()


@pytest.mark.parametrize("kind", KINDS)
@pytest_twisted.ensureDeferred
async def test_an_end_without_goodbye_is_a_loss(reactor, kind, certificate):
    """TLS tells a cut from an end."""
    async with endpoints(reactor, kind) as (server, client_for):
        ours, theirs, port = await secured(server, client_for, certificate)
        await theirs.want(6).addTimeout(LIMIT_S, reactor)
        below = ours.transport.protocol.transport
        below.loseConnection()
        assert isinstance(await theirs.over.addTimeout(LIMIT_S, reactor), ConnectionLost)
        await ours.over.addTimeout(LIMIT_S, reactor)
        await port.stopListening()


@pytest.mark.parametrize("kind", KINDS)
@pytest_twisted.ensureDeferred
async def test_an_abort_ends_both(reactor, kind, certificate):
    async with endpoints(reactor, kind) as (server, client_for):
        ours, theirs, port = await secured(server, client_for, certificate)
        await theirs.want(6).addTimeout(LIMIT_S, reactor)
        ours.transport.write(b"more")
        ours.transport.abortConnection()
        for end in (ours, theirs):
            assert not isinstance(await end.over.addTimeout(LIMIT_S, reactor), ConnectionDone)
        ours.transport.write(b"nothing happens")
        ours.transport.loseConnection()
        await port.stopListening()


@pytest.mark.parametrize("kind", KINDS[1:3])
@pytest_twisted.ensureDeferred
async def test_there_is_no_half_close_under_tls(reactor, kind, certificate):
    """The peer's TLS could not tell it from a cut."""
    async with endpoints(reactor, kind) as (server, client_for):
        ours, theirs, port = await secured(server, client_for, certificate)
        await theirs.want(6).addTimeout(LIMIT_S, reactor)
        with pytest.raises(Unsupported):
            ours.transport.loseWriteConnection()
        theirs.transport.write(b"still here")
        assert await ours.want(10).addTimeout(LIMIT_S, reactor) == b"still here"
        ours.transport.loseConnection()
        await theirs.over.addTimeout(LIMIT_S, reactor)
        await port.stopListening()


@pytest_twisted.ensureDeferred
async def test_tls_outlives_a_relay(reactor, certificate):
    data = hashlib.sha256(b"seed").digest() * (MIB // 32)
    async with LocalNetwork(reactor, relays=2) as network:
        bob, alice = await network.client(), await network.client()
        ours, theirs, _ = await secured(
            DmsgServerEndpoint(bob), lambda _: DmsgClientEndpoint(alice, bob.public_key), certificate
        )
        await theirs.want(6).addTimeout(LIMIT_S, reactor)
        ours.transport.write(data)
        theirs.transport.write(data)
        first = ours.transport.getPeer().server_public_key
        await network.stop_relay(next(one for one in network.relays if one.key.public_key == first))
        ours.transport.write(b"the end")
        assert await theirs.want(6 + len(data) + 7).addTimeout(LIMIT_S, reactor) == b"secret" + data + b"the end"
        assert await ours.want(len(data)).addTimeout(LIMIT_S, reactor) == data
        assert ours.transport.getPeer().server_public_key != first
        ours.transport.loseConnection()
        for end in (ours, theirs):
            assert isinstance(await end.over.addTimeout(LIMIT_S, reactor), ConnectionDone)


# --- programs --------------------------------------------------------------------------------------------------------


class Whisper(amp.Command):
    arguments = ((b"what", amp.String()),)
    response = ((b"heard", amp.String()),)


class Listener(amp.AMP):
    certificate: Any = None

    @Whisper.responder
    def whisper(self, what):
        return {"heard": what.upper()}

    @amp.StartTLS.responder
    def start(self):
        return {"tls_localCertificate": self.certificate}


@pytest.mark.parametrize("kind", KINDS)
@pytest_twisted.ensureDeferred
async def test_amp_begins_tls(reactor, kind, certificate):
    class Own(Listener):
        pass

    Own.certificate = certificate
    async with endpoints(reactor, kind) as (server, client_for):
        port = await server.listen(quiet(Factory.forProtocol(Own)))
        caller = await connectProtocol(client_for(port), amp.AMP())
        authority = ssl.Certificate(certificate.original)
        started = caller.callRemote(amp.StartTLS, tls_verifyAuthorities=[authority])
        await started.addTimeout(LIMIT_S, reactor)
        answer = await caller.callRemote(Whisper, what=b"a secret").addTimeout(LIMIT_S, reactor)
        assert answer == {"heard": b"A SECRET"}
        assert caller.peerCertificate.digest("sha256") == certificate.digest("sha256")
        caller.transport.loseConnection()
        await port.stopListening()


@implementer(IMessage)
class Letter:
    def __init__(self, received: list[bytes]) -> None:
        self._received = received

    def lineReceived(self, line: bytes) -> None:
        self._received.append(line)

    def eomReceived(self) -> Deferred[None]:
        done: Deferred[None] = Deferred()
        done.callback(None)
        return done

    def connectionLost(self) -> None:
        """Nothing is kept."""


@implementer(IRealm)
class MailRealm:
    def __init__(self, received: list[bytes]) -> None:
        self._received = received

    def requestAvatar(self, who: object, mind: object, *interfaces: Any) -> tuple[Any, Any, Callable[[], None]]:
        return IMessageDelivery, MailDelivery(self._received), lambda: None


@implementer(IMessageDelivery)
class MailDelivery:
    def __init__(self, received: list[bytes]) -> None:
        self._received = received

    def receivedHeader(self, helo: object, origin: object, recipients: object) -> bytes:
        return b"Received: here"

    def validateFrom(self, helo: object, origin: object) -> object:
        return origin

    def validateTo(self, user: object) -> Callable[[], Letter]:
        return lambda: Letter(self._received)


@pytest.mark.parametrize("kind", KINDS)
@pytest_twisted.ensureDeferred
async def test_mail_goes_under_tls(reactor, kind, certificate):
    """The sender insists on it."""
    letter: list[bytes] = []
    portal = Portal(MailRealm(letter), [AllowAnonymousAccess()])

    over: list[Deferred[None]] = [Deferred(), Deferred()]

    class Server(ESMTP):
        def connectionLost(self, reason: Failure = connectionDone) -> None:
            super().connectionLost(reason)
            over[0].callback(None)

    class Sender(ESMTPSender):
        def connectionLost(self, reason: Failure = connectionDone) -> None:
            super().connectionLost(reason)
            over[1].callback(None)

    class Mail(SMTPFactory):
        def buildProtocol(self, address: Any) -> ESMTP:
            esmtp = Server(contextFactory=certificate.options())
            esmtp.portal = portal
            esmtp.factory = self
            return esmtp

    async with endpoints(reactor, kind) as (server, client_for):
        port = await server.listen(quiet(Mail()))
        sent: Deferred[Any] = Deferred()
        sender = ESMTPSenderFactory(
            b"",
            b"",
            b"me@here",
            b"you@there",
            BytesIO(b"Subject: hello\r\n\r\nA secret.\r\n"),
            sent,
            contextFactory=client_options(certificate),
            requireTransportSecurity=True,
            requireAuthentication=False,
            heloFallback=True,
            hostname="site.dmsg",
        )
        sender.protocol = Sender
        await client_for(port).connect(quiet(sender))
        assert (await sent.addTimeout(LIMIT_S, reactor))[0] == 1
        assert letter[-1].strip() == b"A secret."
        for end in over:
            await end.addTimeout(LIMIT_S, reactor)
        await port.stopListening()


# --- on a transport alone ---------------------------------------------------------------------------------------------


def put_under_tls(transport: LineTransport, options: Any, *, is_client: bool = True) -> None:
    start_tls(transport, transport._writer, options, is_client=is_client, clock=transport._clock)


def test_nothing_is_written_in_the_clear_afterwards(certificate):
    clock = Clock()
    transport = LineTransport(clock)
    transport.attach(Plain())
    transport.write(b"hello")
    sent = transport.stream.sent
    put_under_tls(transport, certificate.options(), is_client=False)
    transport.write(b"secret")
    transport.write(bytearray(b"secret"))
    transport.writeSequence([b"sec", b"ret"])
    clock.advance(1)
    assert sent == b"hello"  # the rest waits for the handshake


@pytest.mark.parametrize("blocked", [True, False])
def test_a_producer_from_before_goes_on(certificate, blocked):
    """It was paused. The peer takes more before TLS begins, or afterwards."""
    transport, source = LineTransport(Clock()), Source()
    transport.attach(Plain())
    transport.stream.blocked = True
    transport.registerProducer(source, True)
    assert source.told == ["pause"]
    transport.stream.blocked = blocked
    put_under_tls(transport, certificate.options(), is_client=False)
    if blocked:
        assert "resume" not in source.told
        transport.stream.blocked = False
        transport.writable()
    assert source.told[-1] == "resume"
    with pytest.raises(RuntimeError, match="still registered"):
        transport.registerProducer(Source(), True)
    transport.unregisterProducer()
    transport.registerProducer(source, True)
    transport.abortConnection()
    transport._clock.advance(1)
    assert source.told[-1] == "stop"
    late = Source()
    transport.registerProducer(late, True)
    assert late.told == ["stop"]
    transport.unregisterProducer()
    assert transport.getHandle() is transport.getPeerCertificate() is None


def test_a_paused_producer_goes_on_in_the_turn_in_which_tls_began(certificate):
    transport, source = LineTransport(Clock()), Source()
    transport.attach(Plain())
    transport.stream.blocked = True
    transport.registerProducer(source, True)
    put_under_tls(transport, certificate.options(), is_client=False)
    transport.stream.blocked = False
    transport.writable()  # in the same read
    assert source.told[-1] == "resume"
    transport.abortConnection()
    transport._clock.advance(1)


def test_tls_begins_once_and_needs_a_protocol(certificate):
    transport = LineTransport(Clock())
    with pytest.raises(RuntimeError, match="without a protocol"):
        put_under_tls(transport, client_options(certificate))
    transport.attach(Plain())
    put_under_tls(transport, client_options(certificate))
    with pytest.raises(RuntimeError, match="already"):
        transport.startTLS(client_options(certificate))
    with pytest.raises(RuntimeError, match="keeps its protocol"):
        transport.attach(Plain())
