"""The end of the head of an HTTP answer, found by our scanner, by Twisted's parser and by a plain second reader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorPluggableNameResolver
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.web._newclient import HTTPClientParser, HTTPParser, Request
from twisted.web.client import URI
from twisted.web.error import SchemeNotSupported
from twisted.web.http_headers import Headers
from zope.interface import implementer

from dmsg.http import heads
from dmsg.http.errors import NoAnswer
from dmsg.http.heads import INTERIM_LIMIT, HeadScanner
from fuzz import words
from fuzz.choices import Choices
from fuzz.oracles import outcome

DICTIONARY = words.HTTP

_LIMIT_BYTES = 2_000
_LONG, _MANY = (
    "the answer's head is longer than 2000 bytes",
    f"more than {INTERIM_LIMIT} heads came before the answer's",
)


def one_input(data: bytes) -> None:
    """The first byte says how the rest is cut. A head ends for us where it ends for Twisted, or exceeds a limit.

    The connection's protocol gets every byte up to the limit and none behind it.
    """
    choices = Choices(data)
    cut = 1 + choices.byte()
    stream = choices.rest()
    end, problem = _second_reading(stream)
    ended = end is not None and not problem
    whole, single = HeadScanner(_LIMIT_BYTES), HeadScanner(_LIMIT_BYTES)
    assert whole.feed(stream) == (not problem)
    assert (whole.ended, whole.problem) == (ended, problem)
    pieces = [stream[at : at + cut] for at in range(0, len(stream), cut)]
    limit = end if end is not None else len(stream) + 1
    at = 0
    for piece in pieces:
        at += cut
        took = single.feed(piece)
        if at >= limit:
            assert took is not bool(problem) and (single.ended, single.problem) == (ended, problem)
        else:
            assert took and not single.ended and len(single._line) <= 14
    assert len(single._line) <= 14 and single._interim <= INTERIM_LIMIT + 1
    whole.restart()
    assert whole.feed(stream) == (not problem) and whole.ended == ended
    if ended:
        assert end is not None
        before, after = _ended_for_twisted(stream[: end - 1], stream[end - 1 : end])
        assert after is not False
        if _is_plain(stream[:end]):
            assert not before and (after is True or not _is_good(stream[:end]))
    if cut % 16 == 1:  # it takes long
        size = 64 * cut
        _check_connection([stream[at : at + size] for at in range(0, len(stream), size)], limit, problem)


def _second_reading(stream: bytes) -> tuple[int | None, str]:
    """The number of bytes after which the scanner decides, ``None`` if it waits for more, and the problem it reports."""
    at = interim = 0
    status: bytes | None = None
    while (newline := stream.find(b"\n", at)) >= 0 and newline < _LIMIT_BYTES:
        line = stream[at:newline]
        line = line[:-1] if line.endswith(b"\r") else line
        at = newline + 1
        if status is None:
            status = line
        elif line == b"":
            if _is_final(status):
                return at, ""
            status = None
            interim += 1
            if interim > INTERIM_LIMIT:
                return at, _MANY
    return (_LIMIT_BYTES + 1, _LONG) if len(stream) > _LIMIT_BYTES else (None, "")


def _is_final(status: bytes) -> bool:
    version, code, ends = status[:9], status[9:12], status[12:13]
    return (
        version[:7] == b"HTTP/1."
        and version[7:8].isdigit()
        and version[8:] == b" "
        and len(code) == 3
        and code.isdigit()
        and b"200" <= code <= b"599"
        and ends in (b"", b" ")
    )


def _is_plain(head: bytes) -> bool:
    """Whether no head before the final one has a code that only Twisted takes for final."""
    lines = head.replace(b"\r\n", b"\n").split(b"\n\n")
    return all(one.startswith(b"HTTP/1.1 1") and one[10:12].isdigit() and one[12:13] == b" " for one in lines[:-2])


def _is_good(head: bytes) -> bool:
    """Whether every line of heads is a status line or ``name: value``, so that Twisted has nothing to refuse."""
    for one in head.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]:
        _, *lines = one.split(b"\n")
        for line in lines:
            name, colon, _ = line.partition(b":")
            if (
                not colon
                or not name.isalpha()
                or name.lower() in HTTPParser.CONNECTION_CONTROL_HEADERS
                or b"\r" in line
            ):
                return False
    return b"\r\r" not in head and head.isascii()


def _ended_for_twisted(*pieces: bytes) -> list[bool | None]:
    """Whether Twisted's parser has finished the final head after each piece; ``None`` if it refused the answer."""
    parser: Any = HTTPClientParser(Request(b"GET", b"/", Headers(), None), lambda _: None)
    parser.makeConnection(StringTransport())
    found: list[bool | None] = []
    for piece in pieces:
        try:
            parser.dataReceived(piece)
        except Exception:
            return [*found, *[None] * (len(pieces) - len(found))]
        found.append(parser.state not in ("STATUS", "HEADER"))
    return found


assert issubclass(HTTPClientParser, HTTPParser)


class _Client(Protocol):
    """In place of Twisted's client: keeps all data."""

    def __init__(self) -> None:
        self.received = b""
        self.ends: list[Failure] = []

    def dataReceived(self, data: bytes) -> None:
        self.received += data

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.ends.append(reason)


class _Network(StringTransport):
    """A connection that ends as soon as it is aborted."""

    lost: Any = None
    aborting = False

    def abortConnection(self) -> None:
        self.aborting = True
        self.lost, lost = None, self.lost
        if lost is not None:
            lost(Failure(connectionDone.value))


class _Endpoint:
    """An endpoint that connects at once."""

    network: _Network

    def connect(self, factory: Any) -> Deferred[Any]:
        protocol = factory.buildProtocol(None)
        self.network = _Network()  # type: ignore[no-untyped-call]
        protocol.makeConnection(self.network)
        self.network.lost = protocol.connectionLost
        self.limiter = protocol
        deferred: Deferred[Any] = Deferred()
        deferred.callback(protocol)
        return deferred


@implementer(IReactorPluggableNameResolver)
class _Reactor(Clock):
    """The part of a reactor that an endpoint needs to connect."""

    nameResolver = None

    def installNameResolver(self, resolver: Any) -> Any:
        """Not called."""


_ENDPOINTS = heads.HeadLimitedEndpoints(_Reactor(), timeout_s=1.0)
_URIS = [URI(scheme, b"192.0.2.1", b"192.0.2.1", 80, b"/", b"", b"", b"") for scheme in (b"http", b"ftp")]


def _check_connection(pieces: list[bytes], limit: int, problem: str) -> None:
    """Data of a connection is passed on unchanged until it exceeds a limit, and then nothing more."""
    supported = not len(pieces) & 1
    found_endpoint, _ = outcome(lambda: _ENDPOINTS.endpointForURI(_URIS[not supported]), SchemeNotSupported)
    assert found_endpoint == ("value" if supported else "error")
    endpoint: Any = _Endpoint()
    found: list[Any] = []
    connected: Deferred[Any] = heads._HeadLimitedEndpoint(endpoint).connect(Factory.forProtocol(_Client))
    connected.addCallback(found.append)
    (client,) = found
    limiter, network = endpoint.limiter, endpoint.network
    limiter._head = HeadScanner(_LIMIT_BYTES)
    transport: Any = client.transport
    transport.write(b"GET ")
    transport.writeSequence([b"/", b"\r\n"])
    assert network.value() == b"GET /\r\n"
    passed = b""
    for piece in pieces:
        limiter.dataReceived(piece)
        passed += piece
        if problem and len(passed) >= limit:
            passed = passed[: -len(piece)]
            break
        assert limiter._head.ended == (len(passed) >= limit)
        assert not network.aborting
    assert client.received == passed
    if len(passed) < sum(map(len, pieces)):
        assert network.aborting and limiter.disconnecting
        (reason,) = client.ends
        assert reason.check(NoAnswer) and str(reason.value) == problem
        return
    assert not client.ends and not limiter.disconnecting
    # The next request begins a new answer with its own limit; before this answer has ended, it is the same answer.
    ended, room = limiter._head.ended, limiter._head._room
    if len(passed) & 1:
        transport.write(b"x")
    else:
        transport.writeSequence([b"x"])
    assert limiter._head._room == (_LIMIT_BYTES if ended else room) and not limiter._head.ended
    transport.loseConnection()
    assert network.aborting and client.ends[0].value is connectionDone.value


def seeds() -> Iterator[bytes]:
    """Answers, interim ones before them, folded lines, odd ends of lines, odd status lines, heads as long as may be."""
    for text in (
        b"HTTP/1.1 200 OK\r\nA: b\r\n\r\nbody",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\n\r\n",
        b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" * 17 + b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.0 204\n\nnot a head\r\n\r\nbody",
        b"HTTP/1.1 200 OK\r\nA: b\r\n folded\r\n\r\n",
        b"HTTP/1.1  +2_00 OK\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * 2_100 + b"\r\n\r\n",
        b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" * 16 + b"HTTP/1.1 200 OK\r\n\r\n",
        *(b"HTTP/1.1 599 \r\nA: " + b"x" * (_LIMIT_BYTES - 22 + more) + b"\r\n\r\n" for more in (-1, 0, 1)),
        *(
            b"HTTP/1.1 100 C\r\n\r\n" * 16 + b"A: " + b"x" * (_LIMIT_BYTES - 295 + more) + b"\r\n\r\n"
            for more in (-1, 0, 1)
        ),
        b"HTTP/1.1 200\r\r\n\r\nHTTP/1.1 20\r\n\r\nHTTP/1.1 200\rx\r\n\r\nHTTP/1.1 200x\n\nHTTP/1.1 200\r\n\r\nmore",
    ):
        yield b"\x00" + text
        yield b"\x01" + text
        yield b"\xff" + text
