"""A transport of dmsg as a transport of Twisted: one end of a stream an application's protocol runs on.

Behaves as TCP's do: what was written before ``loseConnection`` arrives first, a second ``loseConnection`` is silent,
data that comes before a protocol is attached waits for it, ``connectionLost`` is called once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, cast
from typing import Protocol as TypingProtocol

from twisted.internet.error import ConnectionAborted, ConnectionDone, ConnectionLost
from twisted.internet.interfaces import (
    IAddress,
    IConsumer,
    IDelayedCall,
    IProducer,
    IProtocol,
    IPullProducer,
    IPushProducer,
    IReactorTime,
    ITransport,
)
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import classImplements, implementer

from dmsg.address import DmsgAddress
from dmsg.errors import Busy, DeadlineExceeded, DmsgError, Refused, close_error
from dmsg.mux.connection import Connection
from dmsg.mux.stream import Stream, StreamState
from dmsg.mux.wire import CloseReason

classImplements(DmsgAddress, IAddress)
_log = Logger()


#: A closing transport whose peer acknowledges nothing for so long is cut off, in seconds.
LINGER_S: Final = 60.0


class TransportLost(ConnectionLost):
    """A transport ended otherwise than by an orderly close. ``cause`` is the typed reason."""

    def __init__(self, cause: DmsgError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Link(TypingProtocol):
    """What carries a transport: a session with a server."""

    connection: Connection
    clock: IReactorTime

    def flush_soon(self) -> None:
        """Send what was queued at the end of this turn of the reactor."""

    def transport_closed(self, transport: DmsgTransport, code: int, *, local: bool) -> None:
        """Told once, when the stream under a transport is over."""


@implementer(ITransport, IConsumer, IPushProducer)
class DmsgTransport:
    """One end of a transport.

    ``security`` is ``"hop"`` (encrypted on the way to the relay and from it) or ``"e2e"``. ``stream`` tells how many bytes
    were sent, acknowledged by the peer, and received.
    """

    def __init__(self, link: Link, stream: Stream, host: DmsgAddress, peer: DmsgAddress) -> None:
        stream.owner = self
        self.stream = stream
        self.connected = True
        self.disconnecting = False
        self.security = "hop"
        self.producer: IProducer | None = None
        self.protocol: IProtocol | None = None
        #: Called once, after the protocol was told that it is over.
        self.on_over: Callable[[], object] | None = None
        self._link = link
        self._host = host
        self._peer = peer
        self._streaming = False
        self._paused = False
        self._producer_paused = False
        self._pump_scheduled = False
        self._inbox: deque[bytes] = deque()
        self._lingering: IDelayedCall | None = None
        self._ending: Failure | None = None  # known, and told once everything that came before it is delivered

    # --- ITransport ------------------------------------------------------------------------------------------------

    def getPeer(self) -> DmsgAddress:
        """Who is at the other end, and the relay in between."""
        return self._peer

    def getHost(self) -> DmsgAddress:
        """This end."""
        return self._host

    def write(self, data: bytes) -> None:
        """Send ``data``; everything written in one turn of the reactor goes out together."""
        if not isinstance(data, bytes):
            if isinstance(data, str):
                raise TypeError("data must be bytes")
            data = bytes(data)
        if not data or not self.connected or self.stream.state is not StreamState.OPEN:
            return
        if self.disconnecting and self.producer is None:
            return  # a producer that is waited for may still write
        try:
            pause = self._link.connection.send_data(self.stream, data)
        except Busy as error:
            self._abort(Failure(TransportLost(error)), CloseReason.SLOW_CONSUMER)
            return
        self._link.flush_soon()
        if pause and self.producer is not None and not self._producer_paused:
            self._producer_paused = True
            if self._streaming:
                cast(IPushProducer, self.producer).pauseProducing()

    def writeSequence(self, data: Iterable[bytes]) -> None:
        """Send the pieces of ``data`` in order."""
        self.write(b"".join(data))

    def loseConnection(self) -> None:
        """Close once everything written has arrived; a registered producer is waited for. Silent the second time."""
        if self.connected and not self.disconnecting:
            self.disconnecting = True
            if self.producer is None:
                self._close()

    def abortConnection(self) -> None:
        """Close now; what has not been sent yet is dropped."""
        self._abort(Failure(ConnectionAborted()), CloseReason.REFUSED)

    # --- IConsumer -------------------------------------------------------------------------------------------------

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        """Let ``producer`` write at the pace the peer takes it. ``RuntimeError`` if one is registered already."""
        if self.producer is not None:
            raise RuntimeError(f"cannot register {producer!r}: {self.producer!r} is still registered")
        if not self.connected:
            producer.stopProducing()
            return
        self.producer = producer
        self._streaming = streaming
        self._producer_paused = False
        if self.stream.blocked:
            self._producer_paused = True
            if streaming:
                cast(IPushProducer, producer).pauseProducing()
        elif not streaming:
            cast(IPullProducer, producer).resumeProducing()
            self._pull_again()

    def unregisterProducer(self) -> None:
        """The producer is done; a close that waited for it goes on."""
        self.producer = None
        if self.connected and self.disconnecting:
            self._close()

    # --- IPushProducer ---------------------------------------------------------------------------------------------

    def pauseProducing(self) -> None:
        """Deliver nothing until :meth:`resumeProducing`; the peer is slowed down once a window is full."""
        self._paused = True

    def resumeProducing(self) -> None:
        """Deliver again, beginning with what came meanwhile."""
        if self._paused:
            self._paused = False
            if self._inbox or self._ending is not None:
                self._pump_soon()

    def stopProducing(self) -> None:
        """The same as :meth:`loseConnection`."""
        self.loseConnection()

    # --- from the session ------------------------------------------------------------------------------------------

    def attach(self, protocol: IProtocol) -> None:
        """Connect ``protocol``: ``connectionMade`` now, what has come already right after."""
        self.protocol = protocol
        self._guarded(protocol.makeConnection, self)
        if self._inbox or self._ending is not None:
            self._pump_soon()

    def deliver(self, data: bytes) -> None:
        """Take ``data`` from the stream, to the application if it reads."""
        if self._paused or self.protocol is None or self._inbox:
            self._inbox.append(data)
        else:
            self._hand_over(data)

    def writable(self) -> None:
        """The stream takes more: let the producer go on."""
        if self.producer is not None and self._producer_paused:
            self._producer_paused = False
            self._guarded(cast(IPullProducer, self.producer).resumeProducing)
            if not self._streaming:
                self._pull_again()

    def ended(self, code: int, *, local: bool) -> None:
        """The stream is over, with a CLOSE of ``code`` from the other side or from this one."""
        self._link.transport_closed(self, code, local=local)
        if code == CloseReason.NORMAL:
            self._end(Failure(ConnectionDone()))
        elif code == CloseReason.REFUSED and not local:
            self._end(Failure(TransportLost(Refused("the peer aborted the transport"))))
        else:
            self._end(Failure(TransportLost(close_error(code, by="local" if local else "peer"))))

    def lost(self, error: DmsgError, code: int) -> None:
        """What carried the transport is gone."""
        self._link.transport_closed(self, code, local=True)
        self._end(Failure(TransportLost(error)))

    # --- inside ----------------------------------------------------------------------------------------------------

    def _hand_over(self, data: bytes) -> None:
        if not self.disconnecting and self.connected:
            self._guarded(cast(IProtocol, self.protocol).dataReceived, data)
        self._link.connection.consumed(self.stream, len(data))
        self._link.flush_soon()

    def _guarded(self, call: Callable[..., object], *arguments: object) -> None:
        """Call the application: its fault ends its own transport and nothing else, as the reactor does for sockets."""
        try:
            call(*arguments)
        except Exception:
            failure = Failure()
            _log.failure("Unhandled error in {protocol}", failure=failure, protocol=self.protocol)
            self._abort(failure, CloseReason.REFUSED)

    def _pump_soon(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._link.clock.callLater(0, self._pump)

    def _pump(self) -> None:
        self._pump_scheduled = False
        if self.protocol is None and not self.disconnecting:
            return  # both what came and how it ended wait for the protocol
        while self._inbox and self.connected and not self._paused:
            self._hand_over(self._inbox.popleft())
        if self._ending is not None and self.connected and (self.disconnecting or not self._inbox):
            self._finish(self._ending)

    def _pull_again(self) -> None:
        self._link.clock.callLater(0, self._pull)

    def _pull(self) -> None:
        if self.producer is None or self._streaming or not self.connected or self._producer_paused:
            return
        if self.stream.blocked:
            self._producer_paused = True
        else:
            self._guarded(cast(IPullProducer, self.producer).resumeProducing)
            self._pull_again()

    def _close(self) -> None:
        if self.stream.state is StreamState.CLOSED:
            return  # over already, and about to be told
        while self._inbox:  # nobody will read it, but the peer's own close waits for the acknowledgement
            self._link.connection.consumed(self.stream, len(self._inbox.popleft()))
        if self._link.connection.close(self.stream):
            self.ended(CloseReason.NORMAL, local=True)
        elif self._lingering is None:
            self._linger(self.stream.acked_bytes)
        self._link.flush_soon()

    def _linger(self, acked_bytes: int) -> None:
        """Wait for the peer to take what was written, but not for a peer that takes nothing (W14, W17)."""
        self._lingering = self._link.clock.callLater(LINGER_S, self._lingered, acked_bytes)

    def _lingered(self, acked_bytes: int) -> None:
        self._lingering = None
        if self.stream.acked_bytes > acked_bytes:
            self._linger(self.stream.acked_bytes)
        else:
            error = DeadlineExceeded("the peer took nothing of what was written before the close", by="local")
            self._abort(Failure(TransportLost(error)), CloseReason.DEADLINE)

    def _abort(self, reason: Failure, code: int) -> None:
        if not self.connected:
            return
        self.disconnecting = True
        self._inbox.clear()
        if self.stream.state is not StreamState.CLOSED:
            self._link.connection.abort(self.stream, code)
            self._link.transport_closed(self, code, local=True)
            self._link.flush_soon()
        self._ending = reason
        self._pump_soon()

    def _end(self, reason: Failure) -> None:
        if self._ending is None:
            self._ending = reason
            self._pump_soon()

    def _finish(self, reason: Failure) -> None:
        self.connected = False
        self.disconnecting = True
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        producer, self.producer = self.producer, None
        if producer is not None:
            producer.stopProducing()
        try:
            if self.protocol is not None:
                self.protocol.connectionLost(reason)
        finally:
            if self.on_over is not None:
                self.on_over()
