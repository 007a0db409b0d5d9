"""What is written at once arrives in order, however much of it the socket takes."""

from __future__ import annotations

from typing import Any

import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure

from dmsg.glue.sockets import write_at_once


class Writer(Protocol):
    """Writes ``pieces`` as soon as it is connected, and closes."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def connectionMade(self) -> None:
        write_at_once(self.transport)
        for piece in self.pieces:
            self.transport.write(piece)  # type: ignore[union-attr]
        self.transport.loseConnection()  # type: ignore[union-attr]


class Reader(Protocol):
    """Collects everything."""

    def __init__(self) -> None:
        self.received = b""
        self.done: Deferred[bytes] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.received += data

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.done.callback(self.received)


@pytest_twisted.ensureDeferred
async def test_what_is_written_at_once_arrives_in_order(reactor: Any) -> None:
    pieces = [b"a" * 100, b"b" * 10_000_000, b"c" * 100, b"", b"d"]
    factory = Factory.forProtocol(lambda: Writer(pieces))
    port: Any = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(factory)
    reader = Reader()
    await TCP4ClientEndpoint(reactor, "127.0.0.1", port.getHost().port).connect(Factory.forProtocol(lambda: reader))
    assert await reader.done == b"".join(pieces)
    await port.stopListening()


def test_a_transport_without_a_socket_is_left_as_it_is() -> None:
    transport = StringTransport()
    write_at_once(transport)
    transport.write(b"x")
    assert transport.value() == b"x"
