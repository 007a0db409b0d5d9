"""Plain Twisted over TCP, without our code: an echo, a sink, a relay that copies bytes, and a sender.

Its figures are those of the machine and the reactor at that time; the difference to ours is our own cost.
"""

from __future__ import annotations

import time
from typing import Any

from twisted.internet.defer import ensureDeferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint, connectProtocol
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from benchmarks.report import percentile
from benchmarks.roles.client import Echo, Pinger, Pusher

USES_TWISTED = True


@implementer(IHalfCloseableProtocol)
class Copy(Protocol):
    """One side of the relay: received data goes to the other side, as fast as that takes it."""

    other: Copy | None = None

    def __init__(self) -> None:
        self._early: list[bytes] = []

    def connectionMade(self) -> None:
        """No Nagle delay, as on the connections of a relay of ours."""
        self.transport.setTcpNoDelay(True)  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        """Pass on, or keep until the other side is connected."""
        if self.other is None:
            self._early.append(data)
        else:
            self.other.transport.write(data)  # type: ignore[union-attr]

    def join(self, other: Copy) -> None:
        """Pass on to ``other`` from now on."""
        self.other = other
        other.transport.writeSequence(self._early)  # type: ignore[union-attr]
        other.transport.registerProducer(self.transport, True)  # type: ignore[union-attr]

    def readConnectionLost(self) -> None:
        """The other side hears that there is no more."""
        if self.other is not None:
            self.other.transport.unregisterProducer()  # type: ignore[union-attr]
            self.other.transport.loseWriteConnection()  # type: ignore[union-attr]

    def writeConnectionLost(self) -> None:
        """The other side is told."""

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The other side goes, too."""
        if self.other is not None:
            self.other.transport.loseConnection()  # type: ignore[union-attr]


@implementer(IHalfCloseableProtocol)
class Sink(Protocol):
    """Takes everything, and closes after the last byte as confirmation."""

    def readConnectionLost(self) -> None:
        """All is here."""
        self.transport.loseConnection()  # type: ignore[union-attr]

    def writeConnectionLost(self) -> None:
        """The writer is told."""


@implementer(IHalfCloseableProtocol)
class Source(Pusher):
    """Writes, and is done when the other side has closed after the last byte."""

    def finish(self) -> None:
        """Say that there is no more."""
        self.transport.loseWriteConnection()  # type: ignore[union-attr]

    def readConnectionLost(self) -> None:
        """All has arrived."""
        self.transport.loseConnection()  # type: ignore[union-attr]

    def writeConnectionLost(self) -> None:
        """The sink is told."""

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Tell."""
        self.done.callback(0)


class Role:
    """Options: ``listen`` (``echo``, ``sink``, ``relay`` or nothing) and ``to``, the port the relay passes on to."""

    def __init__(self, reactor: Any, options: dict[str, Any]) -> None:
        self._reactor = reactor
        self._options = options

    async def start(self) -> dict[str, Any]:
        """Listen, if anything is to."""
        listen = self._options.get("listen")
        if not listen:
            return {}
        if listen == "relay":
            factory: Factory = _RelayFactory(self._to(self._options["to"]))
        else:
            factory = Factory.forProtocol({"echo": Echo, "sink": Sink}[listen])
        port = await TCP4ServerEndpoint(self._reactor, 0, interface="127.0.0.1").listen(factory)
        return {"port": port.getHost().port}

    async def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``pings``: round trips one after the other, ``rounds`` of ``size`` bytes to ``port`` in ``seconds`` at most;
        ``push``: ``total`` bytes to a sink at ``port``.
        """
        if command == "push":
            return await self._push(**arguments)
        if command != "pings":
            raise ValueError(command)
        pinger = Pinger(arguments["size"], arguments["rounds"], arguments["seconds"])
        await connectProtocol(self._to(arguments["port"]), pinger)
        times_ms = await pinger.done
        return {"p50_ms": percentile(times_ms, 0.5), "p99_ms": percentile(times_ms, 0.99)}

    async def _push(self, port: int, size: int, total: int) -> dict[str, Any]:
        source = Source(size, total)
        await connectProtocol(self._to(port), source)
        began = time.perf_counter()  # as with ours, connecting does not count
        await source.done
        return {"elapsed_s": time.perf_counter() - began}

    def _to(self, port: int) -> TCP4ClientEndpoint:
        return TCP4ClientEndpoint(self._reactor, "127.0.0.1", port)


class _RelayFactory(Factory):
    def __init__(self, endpoint: TCP4ClientEndpoint) -> None:
        self._endpoint = endpoint

    def buildProtocol(self, addr: Any) -> Copy:
        near = Copy()
        ensureDeferred(self._connect(near))
        return near

    async def _connect(self, near: Copy) -> None:
        far = await connectProtocol(self._endpoint, Copy())
        far.join(near)
        near.join(far)
