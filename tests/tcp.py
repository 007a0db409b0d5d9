"""A protocol over TCP with a socket at its other end that belongs to no reactor."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol


@asynccontextmanager
async def far_socket(protocol: Any) -> AsyncIterator[socket.socket]:
    """The socket that ``protocol`` is connected to."""
    made: Deferred[None] = Deferred()

    class Accepts(Factory):
        noisy = False

        def buildProtocol(self, _: object) -> Protocol:
            reactor.callLater(0, made.callback, None)  # type: ignore[attr-defined]
            built: Protocol = protocol
            return built

    port = reactor.listenTCP(0, Accepts(), interface="127.0.0.1")  # type: ignore[attr-defined]
    far = socket.create_connection(("127.0.0.1", port.getHost().port), timeout=10)
    try:
        await made
        yield far
    finally:
        far.close()
        protocol.transport.abortConnection()
        await port.stopListening()


def reset(far: socket.socket) -> None:
    """Have the other end find its connection reset."""
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
