"""A stream as a transport of Twisted: one end of a stream that an application's protocol runs on.

Behaves like a TCP transport: data written before ``loseConnection`` arrives first, a second ``loseConnection`` does nothing,
data that arrives before a protocol is attached waits for it, ``connectionLost`` is called once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, cast

from twisted.internet.error import ConnectionAborted, ConnectionDone, ConnectionLost
from twisted.internet.interfaces import (
    IConsumer,
    IHalfCloseableProtocol,
    IProducer,
    IProtocol,
    IPushProducer,
    IReactorTime,
    ITransport,
)
from twisted.internet.protocol import connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.errors import DmsgError, LocalProtocolError
from dmsg.glue.deadlines import Deadlines
from dmsg.glue.inbox import Inbox
from dmsg.glue.producer import ProducerAdapter
from dmsg.glue.streams import AbortReason, S, StreamConnection
from dmsg.glue.transport_state import CLOSED_HERE, IN_USE, OVER, TRANSITIONS, WRITABLE, TransportState

_log = Logger()
_OPEN: Final = TransportState.OPEN  # looked at for each write and each piece of data
#: Text of the error when an orderly end counts as a loss: the peer did not take everything that was written.
CUT: Final = "the peer closed without taking all that was written"


class TransportLost(ConnectionLost):
    """A transport ended otherwise than by an orderly close. ``cause`` is the typed reason."""

    def __init__(self, cause: DmsgError) -> None:
        super().__init__(str(cause))
        self.cause = cause


@implementer(ITransport, IConsumer, IPushProducer)
class StreamTransport(ABC, Generic[S]):
    """A transport over ``stream``: ``connection`` moves its bytes, ``flush_soon`` sends what is queued.

    A subclass is the transport of one protocol. It provides the addresses and the errors, and ends streams
    (:meth:`_abort_stream`). The owner of the connection calls :meth:`deliver`, :meth:`writable`, :meth:`over` and, if
    the protocol has a half-close, :meth:`end_received` and :meth:`end_acked`.
    """

    __slots__ = ("_clock", "_connection", "_deadlines", "_end_later", "_ended_in_order", "_flush_soon", "_had_ended", "_inbox",
                 "_is_cut", "_paused", "_peer_has_all", "_pump_scheduled", "_reason", "_told_of_ack", "_writer", "on_over",
                 "protocol", "state", "stream")  # fmt: skip

    def __init__(
        self,
        stream: S,
        connection: StreamConnection[S],
        flush_soon: Callable[[], None],
        clock: IReactorTime,
    ) -> None:
        self.stream = stream
        self.state = _OPEN
        self.protocol: IProtocol | None = None
        #: Called once, after ``connectionLost``.
        self.on_over: Callable[[], object] | None = None
        self._connection = connection
        self._flush_soon = flush_soon
        self._clock = clock
        self._writer = ProducerAdapter(clock)
        self._deadlines = Deadlines(clock)
        self._inbox = Inbox()
        self._paused = False
        self._pump_scheduled = False
        self._is_cut = False  # whether something was written that the stream did not take
        self._peer_has_all = False  # whether it has acknowledged the end of our half
        self._told_of_ack = False  # whether a protocol was told that
        self._had_ended = False  # whether the application had ended its half when the stream was over
        self._ended_in_order = False  # whether the stream ended so; what is written later does not count
        self._end_later: Callable[[], object] | None = None  # ends this side's half once the producer is done
        self._reason = connectionDone  # of the end, once it is known

    def move(self, state: TransportState) -> None:
        """Change to ``state``; a change that ``TRANSITIONS`` does not list is a bug of ours."""
        assert state in TRANSITIONS[self.state], (self.state, state)
        self.state = state

    @property
    def connected(self) -> bool:
        """Whether the application has not been told of the end yet."""
        return self.state is not TransportState.ENDED

    @property
    def disconnecting(self) -> bool:
        """Whether the application has closed the transport, or has been told that it is over."""
        return self.state in CLOSED_HERE

    # --- ITransport ------------------------------------------------------------------------------------------------

    @abstractmethod
    def getPeer(self) -> Any:
        """The address of the other end."""

    @abstractmethod
    def getHost(self) -> Any:
        """The address of this end."""

    def write(self, data: bytes) -> None:
        """Send ``data``, anything that holds bytes; everything written in one turn of the reactor goes out together.

        Does nothing after :meth:`loseConnection`. When more than ``pending_limit_bytes`` (64 MiB by default) wait to be sent,
        even from a single write, the transport ends with :class:`TransportLost`: more is for a producer, which pauses.
        """
        if not isinstance(data, bytes):
            data = bytes(memoryview(data))  # bytes(3) would be three zeros; memoryview(3) raises
        if not data:
            return
        if self.state is not _OPEN and self.state not in WRITABLE:
            if self.state is TransportState.ENDING and not self._had_ended:
                self._not_taken()
            return
        try:
            pause = self._connection.send_data(self.stream, data)
            self._flush_soon()
        except LocalProtocolError:
            pause = self._send_later(data)
        except DmsgError as error:
            self._overflow(error)
            return
        if pause:
            self._writer.pause()

    def writeSequence(self, data: Iterable[bytes]) -> None:
        """Send the pieces of ``data`` in order."""
        self.write(b"".join(data))

    def loseConnection(self) -> None:
        """Close once everything written has arrived. Silent the second time.

        As with TCP, the close waits for a paused producer and for a pull producer. A push producer that is not paused counts
        as done, because forwarders register the other connection for good. So does one of which nothing arrives for two minutes.
        """
        if self.state is TransportState.ENDING:
            self._tell_soon()
        elif self.state in IN_USE:
            waits = self._writer.waits and self.state in WRITABLE
            self.move(TransportState.FINISHING if waits else TransportState.CLOSING)
            self._drop_unread()
            if not waits:
                self._close_stream()

    def abortConnection(self) -> None:
        """Close now; what has not been sent yet is dropped."""
        self._abort(Failure(ConnectionAborted()), AbortReason.APPLICATION)

    # --- deadlines -------------------------------------------------------------------------------------------------

    def set_deadline(self, at_s: float | None) -> None:
        """Set both deadlines: an absolute time on the client's reactor (``seconds()``), or ``None`` for none."""
        self.set_read_deadline(at_s)
        self.set_write_deadline(at_s)

    def set_read_deadline(self, at_s: float | None) -> None:
        """End the transport with ``DeadlineExceeded`` at ``at_s`` unless the deadline is moved before."""
        if self.state not in OVER:
            self._deadlines.set_read(self, at_s)

    def set_write_deadline(self, at_s: float | None) -> None:
        """End the transport with ``DeadlineExceeded`` at ``at_s`` if data waits to be acknowledged and none has been since
        the deadline was set. Whenever some has, the deadline is set again for as long: a slow transfer never trips it.
        """
        if self.state not in OVER:
            self._deadlines.set_write(self, at_s)

    @abstractmethod
    def deadline_exceeded(self, what: str) -> None:
        """End the transport, because the deadline that ``what`` names has passed."""

    def linger_over(self) -> None:
        """The peer has acknowledged nothing for too long since the close, or since both halves have ended."""
        if self.state not in OVER:
            self.deadline_exceeded("the peer took nothing of what was written before the close")

    def writing_over(self) -> None:
        """A close waits for a producer that may write. Nothing of it has arrived for too long: it counts as done."""
        if not self._writer.waits:
            self._go_on_closing()

    @property
    def unread_bytes(self) -> int:
        """Bytes received that the application has not read yet."""
        return self._inbox.size

    def unread_over(self) -> None:
        """The stream is over. For too long the application, which has more to write, has read none of the received data."""
        if self.state is TransportState.ENDING and (self._writer.waits or not self._reason.check(ConnectionDone)):
            self._count_as_loss()
            self._tell_soon()

    # --- IConsumer -------------------------------------------------------------------------------------------------

    @property
    def producer(self) -> IProducer | None:
        """The registered producer."""
        return self._writer.producer

    @property
    def blocked(self) -> bool:
        """Whether a producer has to pause."""
        return self.stream.blocked or self.state is TransportState.ENDING

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        """Let ``producer`` write at the pace the peer takes it. ``RuntimeError`` if one is registered already."""
        self._writer.register(self, producer, streaming)
        self._deliver_waiting()

    def unregisterProducer(self) -> None:
        """The producer is done; a close that waited for it goes on, whole or half."""
        self._writer.producer = None
        self._go_on_closing()

    # --- IPushProducer ---------------------------------------------------------------------------------------------

    def pauseProducing(self) -> None:
        """Deliver nothing until :meth:`resumeProducing`; the peer is slowed down once a window is full."""
        self._paused = True

    def resumeProducing(self) -> None:
        """Deliver again, beginning with what came meanwhile."""
        if self._paused:
            self._paused = False
            self._deliver_waiting()

    def stopProducing(self) -> None:
        """The same as :meth:`loseConnection`."""
        self.loseConnection()

    # --- from the owner of the connection --------------------------------------------------------------------------

    def attach(self, protocol: IProtocol) -> None:
        """Connect ``protocol``: ``connectionMade`` now, then the data that has come already, then the end if there was one.

        It takes the place of an earlier protocol, which is told nothing more.
        """
        self.protocol = protocol
        self.guarded(protocol.makeConnection, self)
        if self._peer_has_all:
            self.end_acked()
        if self.state is TransportState.ENDED:
            self._clock.callLater(0, self._tell)
        else:
            self._deliver_waiting()

    def deliver(self, data: bytes) -> None:
        """Take ``data`` from the stream: give it to the application, or keep it until the application reads."""
        if (self._paused or self._inbox or self.protocol is None) and self.state not in CLOSED_HERE:
            self._inbox.put(data)
        else:
            self._hand_over(data)

    def writable(self) -> None:
        """The stream takes more: let the producer go on."""
        self._writer.resume(self)
        if (self.state is TransportState.FINISHING or self._end_later is not None) and not self._writer.waits:
            self._deadlines.await_writing(self)

    def end_received(self) -> None:
        """The peer has ended its half. A second call does nothing."""
        if self.state not in (_OPEN, TransportState.WRITE_ENDED) or self._inbox.has_end:
            return
        if self._inbox or self._paused or self.protocol is None or self.producer is not None:
            self._inbox.put_end()  # a producer that was asked by what came before has its turn first
            self._pump_soon()
        else:
            self._on_peer_end()  # what the application sends now goes out with the other answers to this read

    def end_acked(self) -> None:
        """The peer has everything that was written, and knows that nothing more comes. A protocol is told once."""
        self._peer_has_all = True
        if self._told_of_ack or self.protocol is None:
            return
        self._told_of_ack = True
        if self.state not in CLOSED_HERE and IHalfCloseableProtocol.providedBy(self.protocol):
            self.guarded(cast(IHalfCloseableProtocol, self.protocol).writeConnectionLost)
            if self.state is TransportState.BOTH_ENDED:
                self.loseConnection()  # the peer may be long in reading what it has, and closes only then

    def over(self, reason: Failure) -> None:
        """The stream is over: tell the application ``reason`` after the data that came before. A second call does nothing."""
        self._deadlines.stop()
        self._will_end(reason)

    # --- what a subclass may use and has to give ---------------------------------------------------------------------

    def _run_on(self, stream: S, connection: StreamConnection[S], flush_soon: Callable[[], None]) -> None:
        self.stream = stream
        self._connection = connection
        self._flush_soon = flush_soon

    def _will_end(self, reason: Failure) -> None:
        """Tell the application ``reason`` after the data that came before, whether or not the stream is over by now."""
        if self.state in OVER:
            return
        self._reason = reason
        if self._is_cut:
            self._count_as_loss()
        self._ended_in_order = self._reason.check(ConnectionDone) is not None
        if self.disconnecting:
            self._tell_soon()
            return
        self._had_ended = self.state not in WRITABLE
        self.move(TransportState.ENDING)
        self._pump_soon()

    def _end_write(self, end_stream: Callable[[], object]) -> None:
        """End this side's half by ``end_stream`` and go on reading. Waits for producers as :meth:`loseConnection` does."""
        if self._writer.waits and self.state in (_OPEN, TransportState.READ_ENDED):
            self._end_later = end_stream
            return
        if self.state is _OPEN:
            self.move(TransportState.WRITE_ENDED)
        elif self.state is TransportState.READ_ENDED:
            self.move(TransportState.BOTH_ENDED)
            self._deadlines.linger(self)
        else:
            return
        end_stream()

    def _go_on_closing(self) -> None:
        """The producer is done: close what waited for that, the whole stream or one half."""
        end_stream, self._end_later = self._end_later, None
        if self.state is TransportState.FINISHING:
            self.move(TransportState.CLOSING)
            self._close_stream()
        elif end_stream is not None:
            self._end_write(end_stream)

    def _abort(self, reason: Failure, why: AbortReason) -> None:
        if self.state is TransportState.ENDED:
            return
        self._reason = reason
        self._tell_soon()
        self._deadlines.stop()
        self._abort_stream(why)

    def _overflow(self, error: DmsgError) -> None:
        """End the transport, because its writer did not pause."""
        self._abort(Failure(TransportLost(error)), AbortReason.OVERFLOW)

    def _send_later(self, data: bytes) -> bool:
        """Handle ``data`` that the stream refuses, because it ended in the read at hand. ``True`` asks the writer to pause.

        A subclass whose stream may go on over another path keeps ``data``.
        """
        self._is_cut = True
        return False

    def _cut_error(self) -> DmsgError:
        """The loss that an orderly end counts as: something was written that the peer did not take."""
        return DmsgError(CUT)

    def _close_stream(self) -> None:
        """Close the stream, once what was written has arrived."""
        if self._connection.close(self.stream):
            self.over(Failure(ConnectionDone()))
        else:
            self._deadlines.linger(self)
        self._flush_soon()

    @abstractmethod
    def _abort_stream(self, why: AbortReason) -> None:
        """End the stream at once, unless it is over already."""

    # --- inside ----------------------------------------------------------------------------------------------------

    def _count_as_loss(self) -> None:
        """Make an orderly end a loss: something was written that the peer did not take. Another reason stays."""
        if self._reason.check(ConnectionDone):
            self._reason = Failure(TransportLost(self._cut_error()))

    def _not_taken(self) -> None:
        """The application writes although the stream is over: not even a peer that closed in order gets everything."""
        self._count_as_loss()
        # TCP would report the end at once and drop unread data. Here a slow reader gets the time to read it.
        self._deadlines.await_reading(self)

    def _limit_reading(self) -> None:
        """The stream is over, the application has paused reading, and its producer waits to write.

        In a tunnel the two wait for each other, so the application would never learn of the end. Unread data is dropped, as
        TCP does when it finds a reset while writing. After an orderly close a slow reader gets the time to read it.
        """
        if not self._ended_in_order:
            self._inbox.clear()
        elif self._inbox and not self._had_ended:
            self._deadlines.await_reading(self)

    def guarded(self, call: Callable[..., object], *arguments: object) -> None:
        """Call the application. An exception ends its own transport and nothing else, as the reactor does for sockets."""
        try:
            call(*arguments)
        except BaseException:  # an application may raise anything, SystemExit too
            self._failed(Failure())

    def _failed(self, failure: Failure) -> None:
        _log.failure("Unhandled error in {protocol}", failure=failure, protocol=self.protocol)
        self._abort(failure, AbortReason.APPLICATION)

    def _hand_over(self, data: bytes) -> None:
        if self.state is _OPEN or self.state not in CLOSED_HERE:
            try:
                self.protocol.dataReceived(data)  # type: ignore[union-attr]
            except BaseException:  # as in guarded(), without the cost of another call
                self._failed(Failure())
        else:
            self.stream.drop()
        if self._connection.consumed(self.stream, len(data)):
            self._flush_soon()

    def _deliver_waiting(self) -> None:
        if self._inbox or self.state is TransportState.ENDING:
            self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._clock.callLater(0, self._pump)

    def _pump(self) -> None:
        self._pump_scheduled = False
        if self.protocol is None and not self.disconnecting:
            return  # the data and the reason of the end wait for the protocol
        while self._inbox and (not self._paused or (self.state is TransportState.ENDING and not self._inbox[0])):
            data = self._inbox.popleft()
            if data:
                self._hand_over(data)
            else:
                self._on_peer_end()
        if self.state is TransportState.ENDING and self._paused and self._writer.waits:
            self._limit_reading()
        waits = self._inbox or (self._paused and self._ended_in_order and not self._writer.waits)  # as TCP does
        if self.state is TransportState.TELLING or (self.state is TransportState.ENDING and not waits):
            self._finish()

    def _on_peer_end(self) -> None:
        if self.state is _OPEN:
            self.move(TransportState.READ_ENDED)
        elif self.state is TransportState.WRITE_ENDED:
            self.move(TransportState.BOTH_ENDED)
        elif self.state is not TransportState.ENDING:
            return
        if IHalfCloseableProtocol.providedBy(self.protocol):
            self.guarded(cast(IHalfCloseableProtocol, self.protocol).readConnectionLost)
            if self.state is TransportState.BOTH_ENDED:
                if self._peer_has_all:
                    self.loseConnection()
                else:
                    self._deadlines.linger(self)  # until end_acked() comes
        elif self.producer is not None and self.state in WRITABLE:  # the rest is cut off, and must not look complete
            self._abort(Failure(ConnectionDone()), AbortReason.APPLICATION)
        else:
            StreamTransport.loseConnection(self)  # TLS above it would wait for a goodbye

    def _drop_unread(self) -> None:
        while self._inbox:  # the application reads no more, but the peer waits for the acknowledgement
            if data := self._inbox.popleft():
                self.stream.drop()
                if self._connection.consumed(self.stream, len(data)):
                    self._flush_soon()

    def _tell_soon(self) -> None:
        """Nothing is delivered any more; the application is told of the end."""
        self._inbox.clear()
        if self.state is not TransportState.TELLING:
            self.move(TransportState.TELLING)
        self._pump_soon()

    def _finish(self) -> None:
        self.move(TransportState.ENDED)
        self._deadlines.told()
        self._end_later = None
        self.guarded(self._writer.stop)
        try:
            self._tell()
        finally:
            if self.on_over is not None:
                self.on_over()

    def _tell(self) -> None:
        # The protocol refers to the transport: without this cycle both are freed at once, not by the garbage collector.
        protocol, self.protocol = self.protocol, None
        if protocol is not None:
            protocol.connectionLost(self._reason)
