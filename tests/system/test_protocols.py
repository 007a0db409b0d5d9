"""Twisted's own protocols over dmsg, as they are: Perspective Broker, AMP, TLS."""

from __future__ import annotations

import hashlib

import pytest
import pytest_twisted
from cryptography import x509
from twisted.cred.checkers import InMemoryUsernamePasswordDatabaseDontUse
from twisted.cred.credentials import UsernamePassword
from twisted.cred.portal import IRealm, Portal
from twisted.internet import error, ssl
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import connectProtocol, wrapClientTLS
from twisted.internet.protocol import Factory, Protocol
from twisted.protocols import amp
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.spread import pb
from zope.interface import implementer

from dmsg.mux.client.endpoint import DmsgClientEndpoint, DmsgServerEndpoint
from dmsg.testing.network import LocalNetwork
from tests.pyopenssl import twisted_and_pyopenssl

pytestmark = pytest.mark.system
MIB = 1024 * 1024


@pytest.fixture
def ends(reactor):
    """``server endpoint, client endpoint`` of two clients with one server between them."""
    network = LocalNetwork(reactor, relays=1, discovery=None)

    async def start():
        await network.start()
        alice, bob = await network.client(), await network.client()
        return DmsgServerEndpoint(bob), DmsgClientEndpoint(alice, bob.public_key)

    yield pytest_twisted.blockon(Deferred.fromCoroutine(start()))
    pytest_twisted.blockon(Deferred.fromCoroutine(network.stop()))


class Talk(Protocol):
    """Collects what it gets; ``got`` fires at ``expect`` bytes, ``over`` at the end."""

    def __init__(self, expect: int) -> None:
        self.expect = expect
        self.pieces: list[bytes] = []
        self.size = 0
        self.got: Deferred[bytes] = Deferred()
        self.over: Deferred[Exception] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.pieces.append(data)
        self.size += len(data)
        if self.size >= self.expect and not self.got.called:
            self.got.callback(b"".join(self.pieces))

    def connectionLost(self, reason=None) -> None:
        self.over.callback(reason.value.with_traceback(None))


# --- Perspective Broker ----------------------------------------------------------------------------------------------


class Sums(pb.Avatar):
    """Adds numbers; tells a client's object about it."""

    def perspective_add(self, one, other):
        return one + other

    async def _tell(self, listener, numbers):
        for number in numbers:
            await listener.callRemote("number", number)
        return len(numbers)

    def perspective_tell(self, listener, numbers):
        return Deferred.fromCoroutine(self._tell(listener, numbers))

    def perspective_fail(self):
        raise pb.Error("on purpose")


@implementer(IRealm)
class Realm:
    def requestAvatar(self, avatar_id, mind, *interfaces):
        return pb.IPerspective, Sums(), lambda: None


class Listener(pb.Referenceable):
    def __init__(self):
        self.numbers = []

    def remote_number(self, number):
        self.numbers.append(number)


@pytest_twisted.ensureDeferred
async def test_perspective_broker(ends):
    server, client = ends
    checker = InMemoryUsernamePasswordDatabaseDontUse(ada=b"secret")
    port = await server.listen(pb.PBServerFactory(Portal(Realm(), [checker])))
    factory = pb.PBClientFactory()
    await client.connect(factory)
    avatar = await factory.login(UsernamePassword(b"ada", b"secret"))
    assert await avatar.callRemote("add", 20, 22) == 42
    listener = Listener()
    assert await avatar.callRemote("tell", listener, list(range(100))) == 100
    assert listener.numbers == list(range(100))
    with pytest.raises(pb.RemoteError, match="on purpose"):
        await avatar.callRemote("fail")
    broker = avatar.broker
    gone: Deferred[None] = Deferred()
    broker.notifyOnDisconnect(lambda: gone.callback(None))
    factory.disconnect()
    await gone
    await port.stopListening()


# --- AMP -------------------------------------------------------------------------------------------------------------


class Divide(amp.Command):
    arguments = ((b"numerator", amp.Integer()), (b"denominator", amp.Integer()))
    response = ((b"result", amp.Float()),)
    errors = ((ZeroDivisionError, b"ZERO_DIVISION"),)


class Divider(amp.AMP):
    @Divide.responder
    def divide(self, numerator, denominator):
        return {"result": numerator / denominator}


@pytest_twisted.ensureDeferred
async def test_amp(ends):
    server, client = ends
    port = await server.listen(Factory.forProtocol(Divider))
    caller = await connectProtocol(client, amp.AMP())
    answers = [caller.callRemote(Divide, numerator=number, denominator=4) for number in range(200)]
    assert [(await answer)["result"] for answer in answers] == [number / 4 for number in range(200)]
    with pytest.raises(ZeroDivisionError):
        await caller.callRemote(Divide, numerator=1, denominator=0)
    pending = caller.callRemote(Divide, numerator=1, denominator=1)
    caller.transport.abortConnection()
    with pytest.raises(error.ConnectionAborted):
        await pending
    await port.stopListening()


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(self_signed):
    """A certificate for ``site.dmsg`` with its key, and without."""
    both = self_signed(x509.DNSName("site.dmsg"))
    return ssl.PrivateCertificate.loadPEM(both), ssl.Certificate.loadPEM(both)


class LoudEcho(Protocol):
    def dataReceived(self, data):
        self.transport.write(data.upper())


@twisted_and_pyopenssl
@pytest_twisted.ensureDeferred
async def test_tls(ends, certificate):
    """TLS end to end, with the client checking the server's name; big messages both ways, and TLS's own goodbye."""
    server, client = ends
    own, trusted = certificate
    port = await server.listen(TLSMemoryBIOFactory(own.options(), False, Factory.forProtocol(LoudEcho)))
    options = ssl.optionsForClientTLS("site.dmsg", trustRoot=trusted)
    data = hashlib.sha256(b"seed").hexdigest().encode() * (4 * MIB // 64)
    talk = await connectProtocol(wrapClientTLS(options, client), Talk(len(data)))
    talk.transport.write(data)
    assert await talk.got == data.upper()
    assert talk.transport.getPeerCertificate() is not None
    assert talk.transport.negotiatedProtocol is None
    talk.transport.loseConnection()
    assert isinstance(await talk.over, error.ConnectionDone)
    await port.stopListening()


@twisted_and_pyopenssl
@pytest_twisted.ensureDeferred
async def test_tls_with_the_wrong_name(ends, certificate):
    server, client = ends
    own, trusted = certificate
    port = await server.listen(TLSMemoryBIOFactory(own.options(), False, Factory.forProtocol(LoudEcho)))
    options = ssl.optionsForClientTLS("other.dmsg", trustRoot=trusted)
    talk = await connectProtocol(wrapClientTLS(options, client), Talk(1))
    talk.transport.write(b"x")
    reason = await talk.over
    assert not isinstance(reason, error.ConnectionDone)
    assert talk.size == 0
    await port.stopListening()
