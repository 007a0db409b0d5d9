"""A transport of dmsg as a transport of Twisted: one end of a stream an application's protocol runs on.

Behaves as TCP's do: what was written before ``loseConnection`` arrives first, a second ``loseConnection`` is silent,
data that comes before a protocol is attached waits for it, ``connectionLost`` is called once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, cast

from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.interfaces import (
    IAddress,
    IConsumer,
    IHalfCloseableProtocol,
    IProducer,
    IProtocol,
    IPushProducer,
    ITransport,
)
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import classImplements, implementer

from dmsg.address import DmsgAddress
from dmsg.errors import DmsgError
from dmsg.mux.client.deadlines import Deadlines, TransportTimers
from dmsg.mux.client.link import Link, TransportLost, end_failure
from dmsg.mux.client.pending import StreamOwner
from dmsg.mux.client.producer import Feed
from dmsg.mux.core.endings import close_is_final, peers_reason
from dmsg.mux.core.errors import Busy, DeadlineExceeded, IntegrityError, Unsupported, close_error
from dmsg.mux.core.resumption import ResumeAttempts
from dmsg.mux.core.sealed_stream import SecureStream
from dmsg.mux.core.stream import Stream, StreamFault, StreamState
from dmsg.mux.core.wire import CloseReason

classImplements(DmsgAddress, IAddress)
_log = Logger()
#: Owns the streams that no transport runs on any more.
_DONE: Final = StreamOwner()


@implementer(ITransport, IConsumer, IPushProducer)
class DmsgTransport(Deadlines, StreamOwner):
    """One end of a transport.

    ``stream`` tells how many bytes were sent, acknowledged by the peer, and received. Over end-to-end security the
    transport outlives its path: while there is none, what is written waits and nothing is reported
    (:ref:`spec-resumption`).
    """

    def __init__(self, link: Link, stream: Stream, host: DmsgAddress, peer: DmsgAddress) -> None:
        stream.owner = self
        self.stream = stream
        self.connected = True
        self.disconnecting = False
        self._feed = Feed(self, link.clock)
        self.protocol: IProtocol | None = None
        #: Called once, after the protocol was told that it is over.
        self.on_over: Callable[[], object] | None = None
        self._link = link
        self._host = host
        self._peer = peer
        self._paused = False
        self._pump_scheduled = False
        self._inbox: deque[bytes] = deque()
        self._timers = TransportTimers(self, link.clock)
        #: The peer's attempts to resume, if there were any.
        self.attempts: ResumeAttempts | None = None
        #: From REQUEST to ACCEPT, at the side that asked; 0 at the other.
        self.accept_ms = 0.0
        self.token = b""  # under which it may be resumed; fixed by its first path
        self._resume_error: DmsgError | None = None
        self._detached = False  # between two paths
        self._told = False  # whether the link knows that this is over
        self._write_ended = self._write_end_told = False
        self._peer_ended = self._peer_end_told = False
        self._ending: Failure | None = None  # known, and told once everything that came before it is delivered

    @property
    def security(self) -> str:
        """``"e2e"``, or ``"hop"``: encrypted on the way to the relay and from it."""
        return self.stream.security

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
        if not data or not self.connected or self._write_ended:
            return
        if self.disconnecting and self.producer is None:
            return  # a producer that is waited for may still write
        if self._between_paths:
            pause = self._keep(data)
        elif self.stream.state is not StreamState.OPEN:
            return
        else:
            try:
                pause = self._link.connection.send_data(self.stream, data)
            except Busy as error:
                self._abort(Failure(TransportLost(error)), CloseReason.SLOW_CONSUMER)
                return
            self._link.flush_soon()
        if pause:
            self._feed.pause()

    @property
    def _between_paths(self) -> bool:
        """Whether what is written has to wait: there is no path, or it has ended in this very read."""
        return self._detached or (
            self.stream.state is StreamState.CLOSED and self.security == "e2e" and self._ending is None
        )

    def _keep(self, data: bytes) -> bool:
        """Let ``data`` wait for another path."""
        config = self._link.connection.config
        self.stream.pending.append(data)
        if self.stream.pending.size > config.pending_limit_bytes:
            error = Busy("more was written than may wait to be sent", by="local")
            self._abort(Failure(TransportLost(error)), CloseReason.SLOW_CONSUMER)
        self.stream.blocked = self.stream.pending.size > config.pause_bytes
        return self.stream.blocked

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

    def loseWriteConnection(self) -> None:
        """End this side's stream and go on reading: half-close. Raises ``Unsupported`` without end-to-end security."""
        if self.security != "e2e":
            raise Unsupported("only end-to-end transports can be closed by half", by="local")
        if self.connected and not self.disconnecting and not self._write_ended:
            self._write_ended = True
            if self._between_paths:
                self.stream.end()
            else:
                self._link.connection.end(self.stream)
                self._link.flush_soon()

    # --- deadlines -------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether nothing is left of it on the wire."""
        return self._told

    def deadline_exceeded(self, what: str) -> None:
        """A timer ran out."""
        error = DeadlineExceeded(what, by="local")
        self._abort(Failure(TransportLost(error)), CloseReason.DEADLINE)

    # --- IConsumer -------------------------------------------------------------------------------------------------

    @property
    def producer(self) -> IProducer | None:
        """The registered producer."""
        return self._feed.producer

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        """Let ``producer`` write at the pace the peer takes it. ``RuntimeError`` if one is registered already."""
        self._feed.register(producer, streaming)

    def unregisterProducer(self) -> None:
        """The producer is done; a close that waited for it goes on."""
        self._feed.producer = None
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
            if self._inbox or self._ending is not None or self._peer_ended:
                self._pump_soon()

    def stopProducing(self) -> None:
        """The same as :meth:`loseConnection`."""
        self.loseConnection()

    # --- from the session ------------------------------------------------------------------------------------------

    def attach(self, protocol: IProtocol) -> None:
        """Connect ``protocol``: ``connectionMade`` now, what has come already right after."""
        self.protocol = protocol
        self.guarded(protocol.makeConnection, self)
        if self._inbox or self._ending is not None or self._peer_ended:
            self._pump_soon()

    def deliver(self, data: bytes) -> None:
        """Take ``data`` from the stream, to the application if it reads."""
        if self._paused or self.protocol is None or self._inbox:
            self._inbox.append(data)
        else:
            self._hand_over(data)

    def writable(self) -> None:
        """The stream takes more: let the producer go on."""
        self._feed.go_on()

    def end_received(self) -> None:
        """The peer has ended its stream; after a resumption it says so again."""
        if not self._peer_ended:
            self._peer_ended = True
            self._pump_soon()

    def end_acked(self) -> None:
        """Everything written, and its end, has arrived."""
        if self.disconnecting:
            # the application is done; the peer may still be finishing its side
            code = CloseReason.REFUSED if self.stream.was_cut else CloseReason.NORMAL
            self._end(end_failure(self.stream, code, local=False))
        elif self._write_end_told:
            return  # on an earlier path
        elif self.protocol is not None and IHalfCloseableProtocol.providedBy(self.protocol):
            self._write_end_told = True
            self.guarded(cast(IHalfCloseableProtocol, self.protocol).writeConnectionLost)

    def ended(self, code: int, *, local: bool, proven: bool = False) -> None:
        """The stream is over, with a CLOSE of ``code`` from the other side or from this one."""
        if not local:
            if not close_is_final(self.stream, proven=proven, closing=self.disconnecting):
                code = code or CloseReason.PEER_GONE  # a made-up "normal" is none
                self.lost(close_error(code), code)
                return
            code = peers_reason(self.stream, code, closing=self.disconnecting)
        self._tell(code, local=local)
        self._end(end_failure(self.stream, code, local=local))

    def lost(self, error: DmsgError, code: int) -> None:
        """What carried the transport is gone: wait for another path, if there may be one."""
        if self._told or self._ending is not None:
            self._tell(code, local=True)
            return
        if isinstance(self.stream, SecureStream) and not (self.disconnecting and self.stream.end_acked):
            self._detached = True
            grace_s = self._link.path_lost(self, error)
            if grace_s > 0:
                self._timers.start_grace(grace_s, error)
                return
        self.give_up(error, code)

    # --- another path ----------------------------------------------------------------------------------------------

    @property
    def detached(self) -> bool:
        """Whether the transport has no path now."""
        return self._detached

    def move_to(self, link: Link, stream: SecureStream, peer_received_bytes: int, told_bytes: int) -> None:
        """Go on over another path: nothing is lost, nothing comes twice.

        ``peer_received_bytes`` is what the peer says it has, ``told_bytes`` what we told it that we have.
        """
        old = self.stream
        assert isinstance(old, SecureStream)
        old.owner = _DONE  # what still comes on the old path in this very read is dropped
        if not self._detached:
            self._link.connection.abort(old, CloseReason.PEER_GONE)
            self._link.flush_soon()
        try:
            stream.go_on_from(old, peer_received_bytes, told_bytes)
        except StreamFault as fault:
            link.connection.abort(stream, fault.code)
            link.flush_soon()
            stream.let_go()
            self.give_up(IntegrityError("the peer claims to have what was never sent", by="local"), fault.code)
            return
        self._detached = False
        self._resume_error = None
        self._timers.stop_grace()
        self._link = link
        self.stream = stream
        stream.owner = self
        self._host = replace(self._host, server_public_key=link.server)
        self._peer = replace(self._peer, server_public_key=link.server)
        if self.disconnecting and self.producer is None:
            link.connection.close(stream)
        link.connection.go_on(stream)
        link.flush_soon()

    def failed_to_resume(self, error: DmsgError) -> None:
        """A search for another path found none; what it tried becomes the cause if the grace runs out."""
        self._resume_error = error

    def give_up(self, error: DmsgError, code: int = CloseReason.PEER_GONE) -> None:
        """No other path was found, or none may be looked for: the transport is lost."""
        self._detached = False
        self._timers.stop_grace()
        if isinstance(self.stream, SecureStream) and self.stream.complete:
            # only the news that the peer knows our end is missing, and nobody is left who could bring it
            self._tell(CloseReason.NORMAL, local=True)
            self._end(Failure(ConnectionDone()))
            return
        self._tell(code, local=True)
        self._end(Failure(TransportLost(self._resume_error or error)))

    # --- inside ----------------------------------------------------------------------------------------------------

    def _hand_over(self, data: bytes) -> None:
        if not self.disconnecting and self.connected:
            self.guarded(cast(IProtocol, self.protocol).dataReceived, data)
        else:
            self.stream.drop()
        self._consumed(len(data))

    def _consumed(self, size: int) -> None:
        if self._detached or self.stream.state is StreamState.CLOSED:
            self.stream.consumed(size)
        elif self._link.connection.consumed(self.stream, size):
            self._link.flush_soon()

    def guarded(self, call: Callable[..., object], *arguments: object) -> None:
        """Call the application: its fault ends its own transport and nothing else, as the reactor does for sockets."""
        try:
            call(*arguments)
        except Exception:  # an application may raise anything
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
        if not self.connected or (self._inbox and not self.disconnecting):
            return
        if self._ending is not None:
            self._finish(self._ending)
        elif self._peer_ended and not self._peer_end_told and not self._paused:
            self._peer_end_told = True
            self._on_peer_end()

    def _on_peer_end(self) -> None:
        if self.disconnecting:
            return
        if self.protocol is not None and IHalfCloseableProtocol.providedBy(self.protocol):
            self.guarded(cast(IHalfCloseableProtocol, self.protocol).readConnectionLost)
            if self._write_ended:
                self.loseConnection()
        elif self.producer is not None:
            # what it still had to say is cut off, and must not look complete to the peer
            self._abort(Failure(ConnectionDone()), CloseReason.REFUSED)
        else:
            self.loseConnection()

    def _close(self) -> None:
        if self._ending is not None:
            return  # over already, and about to be told
        while self._inbox:  # it will not be read, but the peer waits for the acknowledgement
            self.stream.drop()
            self._consumed(len(self._inbox.popleft()))
        if self._detached:
            self.stream.end()
            return
        if self.stream.state is StreamState.CLOSED:
            return
        if self._link.connection.close(self.stream):
            self.ended(CloseReason.NORMAL, local=True)
        elif isinstance(self.stream, SecureStream) and self.stream.end_acked:
            self.end_acked()
        self._timers.linger(self.stream.acked_bytes)
        self._link.flush_soon()

    def linger_over(self) -> None:
        """The peer has taken nothing of what was written before the close for too long."""
        if self._ending is None:
            self.deadline_exceeded("the peer took nothing of what was written before the close")
        elif self.stream.state is not StreamState.CLOSED:  # the application was told; the peer never ended its side
            self._link.connection.abort(self.stream)
            self._tell(CloseReason.NORMAL, local=True)
            self._link.flush_soon()

    def _abort(self, reason: Failure, code: int) -> None:
        if not self.connected:
            return
        self.disconnecting = True
        self._inbox.clear()
        self._timers.stop_grace()
        if not self._detached and self.stream.state is not StreamState.CLOSED:
            self._link.connection.abort(self.stream, code)
            self._link.flush_soon()
        self._detached = False
        self._tell(code, local=True)
        self._ending = reason
        self._pump_soon()

    def _tell(self, code: int, *, local: bool) -> None:
        if not self._told:
            self._told = True
            self._timers.stop()
            self._link.transport_closed(self, code, local=local)
            self.attempts = None
            self.stream.owner = _DONE
            self.stream.let_go()

    def _end(self, reason: Failure) -> None:
        if self._ending is None:
            self._ending = reason
            self._pump_soon()

    def _finish(self, reason: Failure) -> None:
        self.connected = False
        self.disconnecting = True
        self._feed.stop()
        try:
            if self.protocol is not None:
                self.protocol.connectionLost(reason)
        finally:
            if self.on_over is not None:
                self.on_over()
