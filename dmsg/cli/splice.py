"""Two transports joined into one: data from one end goes out at the other, at the pace of the slower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import (
    IDelayedCall,
    IHalfCloseableProtocol,
    IPushProducer,
    IReactorTime,
    ISSLTransport,
)
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.glue.sockets import DirectWriter

#: Without half-close, one direction that ends closes both, once the other direction has carried nothing for this many seconds:
#: an answer that is on its way still arrives.
QUIET_S: Final = 1.0


@implementer(IHalfCloseableProtocol, IPushProducer)
class End(Protocol):
    """One of the two ends; it reads nothing until it is joined.

    ``made`` is called with the end once it is connected, ``lost`` with the end and the reason once it is over, if that
    was before it was joined.

    If both transports have a half-close, the two directions end one by one: a side that has ended its stream goes on receiving.
    Otherwise the first direction that ends closes both, :data:`QUIET_S` after the last byte of the other direction. Later bytes
    are lost; if they get as far as this end, the transport counts as cut off.
    """

    transport: Any
    _writer: DirectWriter

    def __init__(
        self,
        made: Callable[[End], object] | None = None,
        lost: Callable[[End, Failure], object] | None = None,
    ) -> None:
        self.other: End | None = None
        self.ended: Failure | None = None
        #: Bytes received on this end.
        self.received_bytes = 0
        self._made = made
        self._lost = lost
        self._read_ended = self._write_ended = False
        self._held = False  # whether its transport was told to pause, because the other one is slow
        self._clock: IReactorTime | None = None
        self._look: IDelayedCall | None = None

    def connectionMade(self) -> None:
        self.transport.pauseProducing()
        self._writer = DirectWriter(self.transport)
        if self._made is not None:
            self._made(self)

    def dataReceived(self, data: bytes) -> None:
        self.received_bytes += len(data)
        if self.other is not None:
            self.other._writer.write(data)

    def readConnectionLost(self) -> None:
        """See ``IHalfCloseableProtocol``: nothing more comes in here."""
        if self._read_ended:
            return  # TCP reports it again at each read
        if self._writer.failed:
            self.transport.abortConnection()
            return
        self._read_ended = True
        if self.other is not None:
            self._pass_end_on(self.other)

    def _pass_end_on(self, other: End) -> None:
        other.transport.unregisterProducer()  # nothing will be written there any more
        if self._can_half_close() and other._can_half_close():
            other.transport.loseWriteConnection()
            self._close_if_over()
        else:
            self._wait_for_quiet(other)

    def _wait_for_quiet(self, other: End) -> None:
        assert self._clock is not None
        self._look = self._clock.callLater(QUIET_S, self._end_if_quiet, other, other.received_bytes)

    def _end_if_quiet(self, other: End, seen_bytes: int) -> None:
        self._look = None
        if other._held or other.received_bytes > seen_bytes:
            self._wait_for_quiet(other)
        else:
            other.transport.loseConnection()

    def _can_half_close(self) -> bool:
        """Whether one direction can end alone. With TLS it cannot: TLS would take the end of its TCP connection for a cut."""
        if ISSLTransport.providedBy(self.transport) or not hasattr(self.transport, "loseWriteConnection"):
            return False
        return getattr(self.transport, "security", "e2e") == "e2e"

    def writeConnectionLost(self) -> None:
        """See ``IHalfCloseableProtocol``: everything has gone out here."""
        self._write_ended = True
        self._close_if_over()

    def _close_if_over(self) -> None:
        if self._read_ended and self._write_ended:
            self.transport.loseConnection()

    # --- IPushProducer, for the other transport --------------------------------------------------------------------

    def pauseProducing(self) -> None:
        self._held = True
        self.transport.pauseProducing()

    def resumeProducing(self) -> None:
        self._held = False
        self.transport.resumeProducing()

    def stopProducing(self) -> None:
        """The other transport is over; its own ``connectionLost`` says how."""

    # --- the end of all --------------------------------------------------------------------------------------------

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        reason = self._writer.reason(reason)
        if reason.check(ConnectionDone) and getattr(getattr(self.transport, "stream", None), "dropped", False):
            reason = Failure(ConnectionLost("data came after the close"))
        self._stop_looking()
        self.ended = reason
        other, self.other = self.other, None
        if other is not None:
            other.finish(reason)
        elif self._lost is not None:
            self._lost(self, reason)

    def finish(self, reason: Failure) -> None:
        """The other end is over: after an orderly close this one closes too, once everything is written.

        Otherwise this end is cut off, too: data that was cut off there must not look complete here.
        """
        self.other = None
        self._stop_looking()
        self.transport.unregisterProducer()
        if reason.check(ConnectionDone):
            self.transport.loseConnection()
            self.transport.resumeProducing()  # a paused transport would not notice its end
        else:
            self.transport.abortConnection()

    def _stop_looking(self) -> None:
        look, self._look = self._look, None
        if look is not None:
            look.cancel()


def join(one: End, two: End, clock: IReactorTime) -> None:
    """Let data flow between two connected ends. If one of them is over already, so is the other."""
    one._clock = two._clock = clock
    for here, there in ((one, two), (two, one)):
        if here.ended is not None:
            there.finish(here.ended)
            return
    one.other, two.other = two, one
    one.transport.registerProducer(two, True)
    two.transport.registerProducer(one, True)
    for here, there in ((one, two), (two, one)):
        if here._read_ended:
            here._pass_end_on(there)
    one.transport.resumeProducing()
    two.transport.resumeProducing()
