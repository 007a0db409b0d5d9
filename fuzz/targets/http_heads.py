"""Where the head of an HTTP answer ends, told by our scanner and by Twisted's parser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from twisted.internet.testing import StringTransport
from twisted.web._newclient import HTTPClientParser, HTTPParser, Request
from twisted.web.http_headers import Headers

from dmsg.http.heads import INTERIM_LIMIT, HeadScanner
from fuzz import words
from fuzz.choices import Choices

DICTIONARY = words.HTTP

_LIMIT_BYTES = 2_000


def one_input(data: bytes) -> None:
    """The first byte says how the rest is cut. A head that is not over for Twisted is not over for us."""
    choices = Choices(data)
    cut = 1 + choices.byte()
    stream = choices.rest()
    whole, single = HeadScanner(_LIMIT_BYTES), HeadScanner(_LIMIT_BYTES)
    taken = whole.feed(stream)
    pieces = [stream[at : at + cut] for at in range(0, len(stream), cut)]
    assert all(single.feed(piece) for piece in pieces) == taken
    assert (single.ended, single.problem) == (whole.ended, whole.problem)
    assert len(whole._line) <= 14 and whole._interim <= INTERIM_LIMIT + 1
    if whole.ended:
        assert _ended_for_twisted(stream) is not False


def _ended_for_twisted(stream: bytes) -> bool | None:
    """Whether Twisted's parser is through with the final head; ``None`` if it refused the answer."""
    parser: Any = HTTPClientParser(Request(b"GET", b"/", Headers(), None), lambda _: None)
    parser.makeConnection(StringTransport())
    try:
        parser.dataReceived(stream)
    except Exception:
        return None
    return parser.state not in (None, "STATUS", "HEADER") if hasattr(parser, "state") else None


assert issubclass(HTTPClientParser, HTTPParser)


def seeds() -> Iterator[bytes]:
    """Answers, interim ones before them, folded lines, odd ends of lines, odd status lines."""
    for text in (
        b"HTTP/1.1 200 OK\r\nA: b\r\n\r\nbody",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\n\r\n",
        b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" * 17 + b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.0 204\n\n",
        b"HTTP/1.1 200 OK\r\nA: b\r\n folded\r\n\r\n",
        b"HTTP/1.1  +2_00 OK\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * 2_100 + b"\r\n\r\n",
    ):
        yield b"\x00" + text
        yield b"\xff" + text
