"""Protocols and producers that record what a transport does with them; the conformance kit uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet import error, interfaces
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure
from zope.interface import implementer


def pattern(size: int, start: int = 0) -> bytes:
    """``size`` bytes in which a missing, doubled or moved byte can be detected (period 251)."""
    turn = bytes(range(251))
    offset = start % 251
    return (turn * (size // 251 + 2))[offset : offset + size]


class ConformanceProtocol(Protocol):
    """Records what happens to it, in order, and fires Deferreds when it does.

    ``received`` is all the bytes so far, ``lost`` the reasons of ``connectionLost`` (one, if all is well), and
    ``data_while_not_connected`` counts data before ``connectionMade`` or after ``connectionLost``.
    """

    def __init__(self) -> None:
        self.received = bytearray()
        self.lost: list[Failure] = []
        self.made = 0
        self.data_while_not_connected = 0
        self.on_made: Callable[[ConformanceProtocol], object] | None = None
        self.on_data: Callable[[bytes], object] | None = None
        self._waiting: list[tuple[Callable[[], bool], Deferred[None]]] = []

    def connectionMade(self) -> None:
        """Count, and call ``on_made``."""
        self.made += 1
        if self.on_made is not None:
            self.on_made(self)
        self._check()

    def dataReceived(self, data: bytes) -> None:
        if self.made != 1 or self.lost:
            self.data_while_not_connected += 1
        self.received += data
        if self.on_data is not None:
            self.on_data(data)
        self._check()

    def connectionLost(self, reason: Failure = Failure(error.ConnectionDone())) -> None:  # noqa: B008
        self.lost.append(reason)
        self._check()

    def when(self, condition: Callable[[], bool]) -> Deferred[None]:
        """Fires as soon as ``condition`` holds; it is checked after everything that happens to this protocol."""
        waiter: Deferred[None] = Deferred()
        self._waiting.append((condition, waiter))
        self._check()
        return waiter

    def when_received(self, size: int) -> Deferred[None]:
        """Fires when ``size`` bytes have come in all."""
        return self.when(lambda: len(self.received) >= size)

    def when_lost(self) -> Deferred[None]:
        """Fires when the connection is lost."""
        return self.when(lambda: bool(self.lost))

    def _check(self) -> None:
        ready = [one for one in self._waiting if one[0]()]
        self._waiting = [one for one in self._waiting if one not in ready]
        for _, waiter in ready:
            waiter.callback(None)


@implementer(interfaces.IPushProducer)
class PushProducer:
    """Writes pieces while it is not paused, up to ``total`` bytes; counts pauses, resumes and stops."""

    def __init__(self, transport: Any, reactor: Any, total: int, piece: int = 16384) -> None:
        self.transport, self.reactor, self.total, self.piece = transport, reactor, total, piece
        self.written = self.pauses = self.resumes = self.stops = 0
        self.paused = False
        self.on_end: Callable[[], object] | None = None

    def start(self) -> None:
        """Register and begin."""
        self.transport.registerProducer(self, True)
        self._work()

    def _work(self) -> None:
        while not self.paused and not self.stops and self.written < self.total:
            size = min(self.piece, self.total - self.written)
            start, self.written = self.written, self.written + size
            self.transport.write(pattern(size, start))
            if self.written == self.total and self.on_end is not None:
                self.on_end()

    def pauseProducing(self) -> None:
        self.pauses += 1
        self.paused = True

    def resumeProducing(self) -> None:
        self.resumes += 1
        self.paused = False
        # Not from inside the consumer's call, which may come in the middle of a write.
        self.reactor.callLater(0, self._work)

    def stopProducing(self) -> None:
        self.stops += 1


@implementer(interfaces.IPullProducer)
class PullProducer:
    """Writes one piece each time it is asked to; unregisters at the end."""

    def __init__(self, transport: Any, pieces: int) -> None:
        self.transport, self.pieces, self.done, self.stops = transport, pieces, 0, 0

    def resumeProducing(self) -> None:
        if self.done < self.pieces:
            start = self.done * 1000
            self.done += 1
            self.transport.write(pattern(1000, start))
        if self.done == self.pieces:
            self.done += 1
            self.transport.unregisterProducer()

    def stopProducing(self) -> None:
        self.stops += 1


class OneProtocolFactory(Factory):
    """A factory that always returns the same given protocol."""

    noisy = False

    def __init__(self, protocol: ConformanceProtocol) -> None:
        self._protocol = protocol

    def buildProtocol(self, addr: Any) -> ConformanceProtocol:
        return self._protocol
