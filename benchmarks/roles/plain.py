"""Twisted alone over TCP, without any of ours: an echo, a relay that copies bytes, and who sends a message through it.

What such a message takes is what the machine and the reactor take at the time; the rest is ours.
"""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import ensureDeferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint, connectProtocol
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure

from benchmarks.report import percentile
from benchmarks.roles.client import Echo, Pinger

USES_TWISTED = True


class Copy(Protocol):
    """One side of the relay: what comes goes to the other side."""

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

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The other side goes, too."""
        if self.other is not None:
            self.other.transport.loseConnection()  # type: ignore[union-attr]


class Role:
    """Options: ``listen`` (``echo``, ``relay`` or nothing) and ``to``, the port the relay passes on to."""

    def __init__(self, reactor: Any, options: dict[str, Any]) -> None:
        self._reactor = reactor
        self._options = options

    async def start(self) -> dict[str, Any]:
        """Listen, if anything is to."""
        listen = self._options.get("listen")
        if not listen:
            return {}
        factory = Factory.forProtocol(Echo) if listen == "echo" else _RelayFactory(self._to(self._options["to"]))
        port = await TCP4ServerEndpoint(self._reactor, 0, interface="127.0.0.1").listen(factory)
        return {"port": port.getHost().port}

    async def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``pings``: round trips one after the other, ``rounds`` of ``size`` bytes to ``port`` in ``seconds`` at most."""
        if command != "pings":
            raise ValueError(command)
        pinger = Pinger(arguments["size"], arguments["rounds"], arguments["seconds"])
        await connectProtocol(self._to(arguments["port"]), pinger)
        times_ms = await pinger.done
        return {"p50_ms": percentile(times_ms, 0.5), "p99_ms": percentile(times_ms, 0.99)}

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
