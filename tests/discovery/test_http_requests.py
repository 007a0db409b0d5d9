"""Requests that are made to cost much, or to raise errors, cost a discovery as little as others."""

from __future__ import annotations

import contextlib
import json
import random
import ssl
import time
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from cryptography import x509
from twisted.internet.address import IPv4Address
from twisted.internet.ssl import DefaultOpenSSLContextFactory
from twisted.internet.task import Clock, deferLater
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET

from dmsg.discovery.entry import Entry, ServerPart
from dmsg.discovery.stores.memory import MemoryStore
from dmsg.http.server import LONG_ANSWERS
from dmsg.testing.probes import ConformanceProtocol

from .conftest import NOW_NS, secret_key
from .front import GET, Front, Wire

CHUNKED = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"


class TcpWire(Wire):
    """A wire that takes the option which a connection over TLS asks for without looking."""

    def setTcpNoDelay(self, enabled: bool) -> None:
        """Nothing changes."""


class Echo(Resource):
    """Answers with what was sent, and remembers the requests and their bodies."""

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Any] = []
        self.bodies: list[bytes] = []

    def render(self, request: Any) -> bytes:
        self.requests.append(request)
        self.bodies.append(request.content.read())
        return self.bodies[-1] + b"."


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize("before", [b"", b"Expect: 100-continue\r\n"])
@pytest.mark.parametrize("after", [b"", b"X: y\r\n"])
def test_a_length_of_thousands_of_digits_is_too_long(clock: Clock, before: bytes, after: bytes) -> None:
    place = Front(clock, resource=Echo())
    head = b"POST / HTTP/1.1\r\nHost: h\r\n" + before + b"Content-Length: " + b"9" * 5000 + b"\r\n" + after
    wire = place.connect("192.0.2.1", head + b"\r\n")
    assert wire is not None
    assert wire.value().startswith(b"HTTP/1.1 413 ") and b'"code":413' in wire.value() and wire.disconnecting
    wire.hang_up()
    assert place.site.connections == place.site.bodies == 0


# --- chunks ------------------------------------------------------------------------------------------------------------


def chunked(body: bytes) -> bytes:
    return CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"


def test_small_chunks_on_many_connections_take_turns_with_other_requests(clock: Clock) -> None:
    echo = Echo()
    place = Front(clock, resource=echo)
    body = bytes(range(256)) * 40
    assert len(chunked(body)) < 64 * 1024, "all of it comes in one read"
    strangers = [place.connect("10.0.0.1", chunked(body)) for _ in range(20)]
    assert not echo.requests, "each of them has only begun"
    assert place.connect("192.0.2.1", GET).value().endswith(b"\r\n\r\n."), "another one is answered at once"
    late = place.connect("192.0.2.1", chunked(b"x" * 2000))
    assert not late.value()
    clock.advance(0)
    assert late.value().endswith(b"\r\n\r\n" + b"x" * 2000 + b".")
    assert echo.bodies[1] == b"x" * 2000, "who comes last and sends less does not wait for all that the others send"
    assert all(one.value().endswith(b"\r\n\r\n" + body + b".") for one in strangers)
    assert all(one.producerState == "producing" for one in strangers)


def test_what_comes_behind_a_chunked_body_is_the_next_request(clock: Clock) -> None:
    echo = Echo()
    place = Front(clock, resource=echo)
    body = b"abc" * 3000
    chunks = b"".join(b"3\r\nabc\r\n" for _ in range(3000))
    for filling in range(0, 64, 3):  # the next request begins anywhere in a part
        sent = CHUNKED + b"%x\r\n" % (filling + 1) + b"x" * (filling + 1) + b"\r\n" + chunks + b"0\r\n\r\n" + GET * 5
        wire = place.connect("192.0.2.1", sent)
        clock.advance(0)
        assert b"\r\n\r\n" + b"x" * (filling + 1) + body + b"." in wire.value()
        wire.channel.dataReceived(GET)
        clock.advance(0)
        assert wire.value().count(b"HTTP/1.1 200 ") == 7
        wire.hang_up()
    assert place.site.connections == place.site.bodies == 0


class Taker(Resource):
    """Takes the connection over, with the bytes behind the request."""

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.taken = ConformanceProtocol()
        self.leftover = b""

    def render(self, request: Any) -> int:
        self.leftover = request.channel.hand_over(self.taken)
        return NOT_DONE_YET


def test_who_takes_the_connection_over_gets_all_that_came_behind_a_chunked_body(clock: Clock) -> None:
    taker = Taker()
    place = Front(clock, resource=taker)
    wire = place.connect("192.0.2.1", CHUNKED + b"3\r\nabc\r\n0\r\n\r\n" + b"frames" * 2000)
    assert taker.leftover == b"frames" * 2000 and not taker.taken.received
    wire.channel.dataReceived(b"more")
    assert taker.taken.received.endswith(b"more") and place.site.connections == 0
    assert not clock.getDelayedCalls()


def test_a_connection_that_ends_within_its_chunks_leaves_nothing(clock: Clock) -> None:
    place = Front(clock, resource=Echo())
    wire = place.connect("192.0.2.1", CHUNKED + b"1\r\n \r\n" * 10_000)
    bad = place.connect("192.0.2.2", CHUNKED + b"1\r\n \r\n" * 900 + b"garbage\r\n" * 1000)
    assert not bad.value()
    clock.advance(0)
    assert bad.value() == b"HTTP/1.1 400 Bad Request\r\n\r\n" and bad.disconnecting
    gone = place.connect("192.0.2.3", CHUNKED + b"1\r\n \r\n" * 10_000)
    for one in (wire, bad, gone):
        one.hang_up()
    assert place.site.connections == place.site.bodies == 0
    assert not clock.getDelayedCalls()


# --- heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [b"&", b";"])
def test_thousands_of_arguments_are_not_read(clock: Clock, separator: bytes) -> None:
    echo = Echo()
    place = Front(clock, resource=echo)
    for separators in (64, 7000):
        wire = place.connect("192.0.2.1", b"GET /?a=1" + separator * separators + b" HTTP/1.1\r\nHost: h\r\n\r\n")
        assert wire.value().startswith(b"HTTP/1.1 400 ") and wire.disconnecting
    wire = place.connect("192.0.2.1", b"GET /?" + separator * 63 + b" HTTP/1.1\r\nHost: h\r\n\r\n")
    assert wire.value().startswith(b"HTTP/1.1 200 ") and echo.requests.pop()
    assert place.connect("192.0.2.1", b"GET /?a=1&b=2 HTTP/1.1\r\nHost: h\r\n\r\n").value().startswith(b"HTTP/1.1 200 ")
    assert [one.args for one in echo.requests] == [{b"a": [b"1"], b"b": [b"2"]}]


def test_a_request_that_is_refused_twice_has_one_answer(clock: Clock) -> None:
    place = Front(clock, resource=Echo())
    size = place.site.limits.body_bytes + 1
    line = b"POST /?" + b"&" * 100 + b" HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire = place.connect("192.0.2.1", line + b"%x\r\n" % size + b"x" * size + b"\r\n0\r\n\r\n")
    while not wire.disconnecting:
        clock.advance(0)
    assert wire.value().startswith(b"HTTP/1.1 413 ") and wire.value().count(b"HTTP/1.1 ") == 1


def test_thousands_of_cookies_are_not_read(clock: Clock) -> None:
    echo = Echo()
    place = Front(clock, resource=echo)
    place.connect("192.0.2.1", b"GET / HTTP/1.1\r\nHost: h\r\nCookie: " + b"a=b;" * 1900 + b"\r\n\r\n")
    assert [one.received_cookies for one in echo.requests] == [{}]


# --- long answers ------------------------------------------------------------------------------------------------------


class StuckWire(Wire):
    """A connection to a client that takes nothing: the transport asks its producer to pause with the first write."""

    def write(self, data: bytes) -> None:
        super().write(data)
        self.producer.pauseProducing()


@pytest_twisted.ensureDeferred
async def test_long_lists_that_are_not_taken_are_bounded_in_memory(clock: Clock, reactor: Any) -> None:
    """Relays with entries of 15 KiB make a list of 1 MiB, which each of thousands of slow readers would hold."""
    store = MemoryStore(random=random.Random(1))
    for n in range(64):
        key = secret_key(f"relay {n}")
        server = ServerPart(f"10.0.{n}.1:80", 9)
        store.put(Entry("0.1.0", 0, NOW_NS, key.public_key, None, server, client_type="x" * 15_000).sign(key), NOW_NS)
    place = Front(clock, store=store)
    readers = [place.connect(f"10.1.{n % 2}.1", wire=StuckWire) for n in range(100)]
    for reader in readers:
        reader.channel.dataReceived(GET)
    assert sum(not one.aborting for one in readers) == LONG_ANSWERS
    honest = place.connect("192.0.2.1", GET)
    for _ in range(1000):
        if honest.value().endswith(b"]"):
            break
        await deferLater(reactor, 0)
    assert len(json.loads(honest.value().partition(b"\r\n\r\n")[2])) == 64
    assert not honest.aborting and honest.producerState == "producing"
    for one in [*readers, honest]:
        one.channel.stopProducing()
        one.hang_up()
    assert place.site.connections == len(place.site.answers_held) == 0


# --- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "records",
    [
        [b"POST / HTTP/1.1\r\nTransfer-Encoding: none\r\nX: y\r\n\r\n", b"\r\n", b"rest"],
        [b"garbage\r\n", b"POST / HTTP/1.1\r\nTransfer-Encoding: none\r\n", b"\r\n", b"rest"],
        [GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), b"\r\n", GET],
    ],
    ids=["a bad length", "a bad request", "a last request"],
)
def test_what_is_sent_behind_the_last_answer_is_not_read_over_tls(
    clock: Clock, self_signed: Any, tmp_path: Path, records: list[bytes]
) -> None:
    """A connection over TLS ends when both sides have said so: until then a client may send whatever it wants."""
    pem = tmp_path / "site.pem"
    pem.write_bytes(self_signed(x509.DNSName("site")))
    place = Front(clock, resource=Echo())
    address = IPv4Address("TCP", "192.0.2.1", 1000)
    factory = TLSMemoryBIOFactory(DefaultOpenSSLContextFactory(str(pem), str(pem)), False, place.site, clock=clock)
    server, wire = factory.buildProtocol(address), TcpWire(peerAddress=address)
    server.makeConnection(wire)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, to_server)
    for _ in range(2):
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        server.dataReceived(to_server.read())
        clock.advance(0)
        to_client.write(wire.value())
        wire.clear()
    for record in records:  # each a record of its own
        client.write(record)
    server.dataReceived(to_server.read())
    clock.advance(0)
    to_client.write(wire.value())
    assert client.read(1 << 16).count(b"HTTP/1.1 ") == 1
    server.connectionLost(None)
    assert place.site.connections == 0


def test_a_request_costs_no_more_where_many_timed_calls_wait(crowded):
    real, ahead_s = crowded.seconds, 0.0
    crowded.seconds = lambda: real() + ahead_s
    front = Front(crowded, resource=Echo())
    wires = [front.connect(f"198.51.{at}.1", GET) for at in range(200)]
    ahead_s = 6.0
    crowded.runUntilCurrent()  # the timed calls of the first requests begin to wait for the end of the idle time
    cpu = time.process_time()
    for wire in wires:
        wire.channel.dataReceived(GET)
    assert time.process_time() - cpu < 0.2
    assert all(wire.value().count(b"200 OK") == 2 for wire in wires)
