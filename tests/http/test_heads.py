"""Servers whose heads never end, and callers that do not wait for it; heads in any pieces; connections kept open."""

from __future__ import annotations

import gc
import ipaddress
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from cryptography import x509
from hypothesis import example, given
from hypothesis import strategies as st
from twisted.internet import defer, task
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.ssl import Certificate, DefaultOpenSSLContextFactory
from twisted.logger import globalLogPublisher
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.failure import Failure
from twisted.web.client import URI, Agent, BrowserLikePolicyForHTTPS, HTTPConnectionPool, ResponseDone
from twisted.web.error import SchemeNotSupported
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IAgentEndpointFactory, IResponse
from zope.interface import implementer
from zope.interface.verify import verifyObject

from dmsg.http.client import HttpCaller
from dmsg.http.errors import NoAnswer
from dmsg.http.heads import HEAD_LIMIT_BYTES, INTERIM_LIMIT, HeadLimitedEndpoints, HeadScanner
from dmsg.testing.strategies import cut_at

TOO_LONG = "the answer's head is longer than 65536 bytes"
TOO_MANY = "more than 16 heads came before the answer's"
#: What a server sends that would never end; after so much of it this one does, so that a caller without a limit does.
FLOOD_BYTES = 1024 * 1024
BODY_LIMIT_BYTES = 4 * 1024 * 1024


# --- where a head ends -----------------------------------------------------------------------------------------------

LINES = st.sampled_from(
    [
        *(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 404\n", b"HTTP/1.1 599 \r\n", b"HTTP/1.1 200\r\n", b"HTTP/1.1 200\r\r\n"),
        *(b"HTTP/1.1 100 Continue\r\n", b"HTTP/1.1 103\n", b"HTTP/1.1 0200 OK\n", b"HTTP/2.0 200 OK\n"),
        *(b"A: b\r\n", b" folded\r\n", b"A: " + b"x" * 40 + b"\n", b"\r\r\n", b"A\rB\n", b"\r", b"x" * 14 + b"\r"),
        *[b"\r\n", b"\n"] * 4,
    ]
)
STREAMS = st.lists(LINES | st.binary(max_size=4), max_size=12).map(b"".join)


def final_head_bytes(stream: bytes) -> int | None:
    """Where the final head at the beginning of ``stream`` ends, found in the plainest way; ``None`` if it does not."""
    status, end = None, 0
    *lines, _ = stream.split(b"\n")
    for whole in lines:
        end += len(whole) + 1
        line = whole[:-1] if whole.endswith(b"\r") else whole
        if status is None:
            status = line
        elif line == b"":
            version, _, rest = status.partition(b" ")
            code, _, _ = rest.partition(b" ")
            digits = len(code) == 3 and all(digit in b"0123456789" for digit in code)
            one_digit = len(version) == 8 and version[7:] in tuple(b"%d" % n for n in range(10))
            if version.startswith(b"HTTP/1.") and one_digit and digits and 200 <= int(code) <= 599:
                return end
            status = None
    return None


@given(STREAMS, st.integers(0, 150), st.lists(st.integers(0, 150)))
@example(b"HTTP/1.1 200 OK\r\n\r\n", 19, [])
@example(b"HTTP/1.1 200 OK\r\n\r\n", 18, [])
@example(b"HTTP/1.1 100 C\n\nHTTP/1.1 200 OK\n\n", 33, [])
def test_in_any_pieces_the_head_ends_at_the_same_place(stream: bytes, limit: int, cuts: list[int]) -> None:
    end = final_head_bytes(stream)
    fits = min(len(stream), len(stream) if end is None else end) <= limit
    for pieces in ([stream], cut_at(stream, list(range(len(stream)))), cut_at(stream, cuts)):
        scanner = HeadScanner(limit)
        taken = [scanner.feed(piece) for piece in pieces]
        assert all(taken) == fits
        assert taken == sorted(taken, reverse=True)  # once passed, a limit stays passed
        assert scanner.ended == (fits and end is not None)


def test_the_next_answer_is_counted_anew() -> None:
    answer = b"HTTP/1.1 200 OK\r\n\r\n"
    scanner = HeadScanner(len(answer))
    for _ in range(3):
        assert scanner.feed(answer + b"body" * 100)
        assert scanner.feed(b"more of it")
        scanner.restart()
    assert not scanner.feed(answer[:-2] + b"A: b")


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_few_heads_may_come_before_the_answer_s(size: int) -> None:
    for count, wanted in ((INTERIM_LIMIT, True), (INTERIM_LIMIT + 1, False)):
        stream = b"HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n" * count + b"HTTP/1.1 200 OK\r\n\r\n"
        scanner = HeadScanner()
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert all(map(scanner.feed, pieces)) == wanted
        assert scanner.ended == wanted and bool(scanner.problem) != wanted


def test_a_scanner_keeps_next_to_nothing() -> None:
    scanner = HeadScanner(10**9)
    piece = b"x" * 10**6
    tracemalloc.start()
    try:
        for _ in range(20):
            assert scanner.feed(piece)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10**5


# --- servers on loopback -----------------------------------------------------------------------------------------------


class Server(Factory):
    """Gives its answers one after the other, one to each request; ``Endless`` ones until the caller has gone."""

    noisy = False

    def __init__(self, *answers: bytes | Endless) -> None:
        self.answers = list(answers)
        self.connections = 0
        self.gone: defer.Deferred[None] = defer.Deferred()

    def buildProtocol(self, addr: Any) -> Protocol:
        self.connections += 1
        return Answering(self)


class Last(bytes):
    """An answer behind which the server ends the connection."""


class Endless:
    """``begin``, and then ``piece`` again and again."""

    def __init__(self, begin: bytes, piece: bytes, flood_bytes: float = FLOOD_BYTES) -> None:
        self.begin = begin
        self.piece = piece * (16_384 // len(piece))
        self.flood_bytes = flood_bytes
        self.written = 0


class Answering(Protocol):
    transport: Any

    def __init__(self, server: Server) -> None:
        self.server = server
        self.request = b""
        self.flood: Endless | None = None

    def dataReceived(self, data: bytes) -> None:
        self.request += data
        if not self.request.endswith(b"\r\n\r\n"):
            return
        self.request = b""
        answer = self.server.answers.pop(0)
        if isinstance(answer, Endless):
            self.flood = answer
            self.transport.write(answer.begin)
            self.transport.registerProducer(self, False)
        else:
            self.transport.write(answer)
            if isinstance(answer, Last):
                self.transport.loseConnection()

    def resumeProducing(self) -> None:
        assert self.flood is not None
        self.transport.write(self.flood.piece)
        self.flood.written += len(self.flood.piece)
        if self.flood.written >= self.flood.flood_bytes:
            self.transport.unregisterProducer()
            self.transport.loseConnection()

    def stopProducing(self) -> None:
        pass

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if not self.server.gone.called:
            self.server.gone.callback(None)


def answer_of(body: bytes, head_bytes: int = 0) -> bytes:
    """A whole answer whose head is ``head_bytes`` long, if that is enough."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n" % len(body)
    while len(head) + 2 < head_bytes:
        missing = head_bytes - len(head) - 2
        line = missing if missing <= 1000 else min(1000, missing - 5)  # a line of less than 5 is none
        head += b"A: " + b"x" * (line - 5) + b"\r\n"
    return head + b"\r\n" + body


@pytest.fixture
def caller(reactor: Any) -> Any:
    one = HttpCaller.connect(reactor)
    yield one
    pytest_twisted.blockon(defer.Deferred.fromCoroutine(one.close()))


async def body_from(caller: HttpCaller, port: int, scheme: str = "http") -> bytes:
    _, _, body = await caller.call("GET", f"{scheme}://127.0.0.1:{port}/", limit_bytes=BODY_LIMIT_BYTES)
    return body


async def refusal_from(caller: HttpCaller, port: int, scheme: str = "http") -> str:
    with pytest.raises(NoAnswer) as caught:
        await body_from(caller, port, scheme)
    return str(caught.value)


FLOODS = {
    "headers": (TOO_LONG, b"HTTP/1.1 200 OK\r\n", b"A: " + b"x" * 1000 + b"\r\n"),
    "folded": (TOO_LONG, b"HTTP/1.1 200 OK\r\nA: 1\r\n", b" " + b"x" * 1000 + b"\r\n"),
    "small": (TOO_LONG, b"HTTP/1.1 200 OK\n", b"A:\n"),
    "1xx": (TOO_MANY, b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "1xx with headers": (TOO_MANY, b"", b"HTTP/1.1 103 Early\r\nA: 1\r\n\r\n"),
    "headers of a 1xx": (TOO_LONG, b"HTTP/1.1 102 Processing\r\n", b"A: 1\r\n"),
    "code in disguise": (TOO_MANY, b"", b"HTTP/1.1 +1_00 Continue\r\n\r\n"),
}


@pytest.mark.parametrize("kind", FLOODS)
@pytest_twisted.ensureDeferred
async def test_a_head_without_end_ends_the_call(served: Any, caller: HttpCaller, kind: str) -> None:
    problem, begin, piece = FLOODS[kind]
    server = Server(Endless(begin, piece))
    assert await refusal_from(caller, served(server)) == str(NoAnswer(problem))
    await server.gone
    assert server.connections == 1


@pytest_twisted.ensureDeferred
async def test_answers_that_are_skipped_do_not_fill_the_log(served: Any, caller: HttpCaller) -> None:
    told: list[str] = []

    def note(event: Any) -> None:
        told.append(str(event.get("log_format")))

    server = Server(Endless(*FLOODS["1xx"][1:]))
    port = served(server)
    globalLogPublisher.addObserver(note)
    try:
        await refusal_from(caller, port)
        await server.gone
    finally:
        globalLogPublisher.removeObserver(note)
    assert len(told) <= INTERIM_LIMIT + 10
    assert not any("factory" in line for line in told), "connections are no news"


@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 3])
@pytest_twisted.ensureDeferred
async def test_a_head_may_be_as_long_as_the_limit(served: Any, caller: HttpCaller, before: bytes) -> None:
    longest = HEAD_LIMIT_BYTES - len(before)
    assert answer_of(b"body", longest).index(b"\r\n\r\n") + 4 == longest
    port = served(Server(before + answer_of(b"body", longest), before + answer_of(b"body", longest + 1)))
    assert await body_from(caller, port) == b"body"
    assert await refusal_from(caller, port) == str(NoAnswer(TOO_LONG))


@pytest_twisted.ensureDeferred
async def test_each_answer_on_a_connection_kept_open_has_its_own_limit(served: Any, caller: HttpCaller) -> None:
    server = Server(*[answer_of(b"%d" % n, 50_000) for n in range(4)], Endless(*FLOODS["headers"][1:]))
    port = served(server)
    for n in range(4):
        assert await body_from(caller, port) == b"%d" % n
    assert await refusal_from(caller, port) == str(NoAnswer(TOO_LONG))
    assert server.connections == 1


@pytest_twisted.ensureDeferred
async def test_what_follows_the_head_at_once_is_body_and_not_counted(served: Any, caller: HttpCaller) -> None:
    bodies = [line * (BODY_LIMIT_BYTES // len(line)) for line in (b"\r\n\r\n", b"HTTP/1.1 100 \n\n", b"x")]
    server = Server(*[answer_of(body) for body in bodies])
    port = served(server)
    for body in bodies:
        assert await body_from(caller, port) == body
    assert server.connections == 1


@pytest_twisted.ensureDeferred
async def test_a_call_that_sends_a_body_is_answered_on_the_same_connection(reactor: Any, served: Any) -> None:
    class Posted(Answering):
        def dataReceived(self, data: bytes) -> None:
            self.request += data
            if self.request.endswith(b"x" * 3000):
                self.request = b""
                self.transport.write(answer_of(b"thanks", 50_000))

    class PostServer(Server):
        def buildProtocol(self, addr: Any) -> Protocol:
            self.connections += 1
            return Posted(self)

    server = PostServer()
    url = f"http://127.0.0.1:{served(server)}/"
    caller = HttpCaller.connect(reactor)
    for _ in range(3):
        _, _, body = await caller.call("POST", url, limit_bytes=100, body=b"x" * 3000)
        assert body == b"thanks"
    assert server.connections == 1
    await caller.close()


class Asking(Protocol):
    """Writes again whenever it has got ``PART_BYTES`` more; ``lost`` fires with how many it got in all, and why no more."""

    PART_BYTES = 40_000
    transport: Any

    def __init__(self) -> None:
        self.received = 0
        self.lost: defer.Deferred[tuple[int, Failure]] = defer.Deferred()

    def connectionMade(self) -> None:
        self.transport.writeSequence([b"POST / HTTP/1.1\r\n", b"\r\n"])

    def dataReceived(self, data: bytes) -> None:
        before = self.received
        self.received += len(data)
        if self.received // self.PART_BYTES > before // self.PART_BYTES:
            self.transport.write(b"\r\n\r\n")

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.lost.callback((self.received, reason))


@pytest_twisted.ensureDeferred
async def test_what_is_sent_before_the_head_is_over_gives_it_no_more_room(reactor: Any, served: Any) -> None:
    part = b"HTTP/1.1 200 OK\r\n".ljust(Asking.PART_BYTES, b"A")
    port = served(Server(part, part, Endless(part, part, Asking.PART_BYTES)))
    endpoint = HeadLimitedEndpoints(reactor, timeout_s=5).endpointForURI(URI.fromBytes(b"http://127.0.0.1:%d/" % port))
    asking = await endpoint.connect(Factory.forProtocol(Asking))
    received, reason = await asking.lost
    assert Asking.PART_BYTES <= received <= HEAD_LIMIT_BYTES
    assert str(reason.value) == str(NoAnswer(TOO_LONG))


# --- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(request: pytest.FixtureRequest, self_signed: Any) -> bytes:
    """A certificate of 127.0.0.1, or of another address, self-signed, and its key."""
    return self_signed(x509.IPAddress(ipaddress.ip_address(getattr(request, "param", "127.0.0.1"))))


@pytest.fixture
def served_by_tls(served: Any, certificate: bytes, tmp_path: Path) -> Any:
    """Like ``served``, with TLS."""
    path = tmp_path / "both.pem"
    path.write_bytes(certificate)
    tls = DefaultOpenSSLContextFactory(str(path), str(path))
    return lambda factory: served(TLSMemoryBIOFactory(tls, False, factory))


@pytest.fixture
def trusting_caller(reactor: Any, certificate: bytes) -> Any:
    """A caller that believes ``certificate``."""
    policy = BrowserLikePolicyForHTTPS(Certificate.loadPEM(certificate))
    endpoints = HeadLimitedEndpoints(reactor, timeout_s=5, policy=policy)
    pool = HTTPConnectionPool(reactor)
    yield HttpCaller(Agent.usingEndpointFactory(reactor, endpoints, pool), reactor)
    pytest_twisted.blockon(pool.closeCachedConnections())


@pytest_twisted.ensureDeferred
async def test_tls_has_the_same_limit(served_by_tls: Any, trusting_caller: HttpCaller) -> None:
    body = b"\r\n" * 100_000
    server = Server(answer_of(body, 50_000), answer_of(body, 50_000), Endless(*FLOODS["headers"][1:]))
    port = served_by_tls(server)
    for _ in range(2):
        assert await body_from(trusting_caller, port, "https") == body
    assert await refusal_from(trusting_caller, port, "https") == str(NoAnswer(TOO_LONG))
    await server.gone
    assert server.connections == 1


@pytest_twisted.ensureDeferred
async def test_tls_does_not_wait_for_a_server_that_sends_on(served_by_tls: Any, trusting_caller: HttpCaller) -> None:
    # What is refused is not listened to any longer, be it a body or (by Twisted) a line that is too long.
    for begin in (b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 " + b"x" * 17_000):
        server = Server(Endless(begin, b"HTTP/1.1 100 Continue\r\n\r\n", float("inf")))
        await refusal_from(trusting_caller, served_by_tls(server), "https")
        await server.gone


@pytest_twisted.ensureDeferred
async def test_a_server_with_an_untrusted_certificate_is_not_asked(served_by_tls: Any, caller: HttpCaller) -> None:
    server = Server(answer_of(b""))
    refusal = await refusal_from(caller, served_by_tls(server), "https")
    assert refusal == "TLS failed: certificate verify failed"
    assert (server.connections, len(server.answers)) == (1, 1)


@pytest.mark.parametrize("certificate", ["127.0.0.9"], indirect=True)
@pytest_twisted.ensureDeferred
async def test_a_server_of_another_name_is_not_asked(served_by_tls: Any, trusting_caller: HttpCaller) -> None:
    server = Server(answer_of(b""))
    refusal = await refusal_from(trusting_caller, served_by_tls(server), "https")
    assert refusal == "TLS failed: the certificate is not of this host"
    assert (server.connections, len(server.answers)) == (1, 1)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"SSH-2.0-OpenSSH_9.0\r\n", "the answer is not HTTP"),
        (b"\x15\x03\x03\x00\x02\x02\x46", "the connection ended before an answer"),  # an alert of TLS
        (b"", "the connection ended before an answer"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_a_server_that_does_not_speak_http_is_said_to(
    served: Any, caller: HttpCaller, answer: bytes, problem: str
) -> None:
    assert await refusal_from(caller, served(Server(Last(answer)))) == problem


def test_there_is_http_and_https_and_nothing_else() -> None:
    endpoints = HeadLimitedEndpoints(task.Clock(), timeout_s=1)
    verifyObject(IAgentEndpointFactory, endpoints)
    with pytest.raises(SchemeNotSupported):
        endpoints.endpointForURI(URI.fromBytes(b"ftp://h/"))


# --- what a body costs -------------------------------------------------------------------------------------------------


@implementer(IResponse)
class Crumbs:
    """An answer whose body comes in pieces of two bytes, each an object of its own."""

    version = (b"HTTP", 1, 1)
    code = 200
    phrase = b"OK"
    request = previousResponse = None

    def __init__(self, pieces: int) -> None:
        self.headers = Headers()
        self.pieces = pieces
        self.length = 2 * pieces

    def deliverBody(self, protocol: Any) -> None:
        for _ in range(self.pieces):
            protocol.dataReceived(bytes(bytearray(b"ab")))
        protocol.connectionLost(Failure(ResponseDone()))

    def setPreviousResponse(self, response: Any) -> None:
        raise NotImplementedError


@implementer(IAgent)
class CrumbsAgent:
    def __init__(self, pieces: int) -> None:
        self.pieces = pieces

    def request(self, method: bytes, uri: bytes, headers: Any = None, bodyProducer: Any = None) -> Any:
        return defer.succeed(Crumbs(self.pieces))


@pytest_twisted.ensureDeferred
async def test_a_body_in_crumbs_costs_what_it_is_long() -> None:
    length = 400_000
    caller = HttpCaller(CrumbsAgent(length // 2), task.Clock())
    await caller.call("GET", "http://h/", limit_bytes=length)
    gc.collect()
    tracemalloc.start()
    try:
        _, _, body = await caller.call("GET", "http://h/", limit_bytes=length)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert body == b"ab" * (length // 2)
    assert peak_bytes < 4 * length
