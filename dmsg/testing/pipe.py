"""An in-memory pipe between two protocols that behaves like a TCP connection, flow control included.

Each end is a Twisted ``FileDescriptor`` over a bounded buffer in memory instead of a socket, so that it pauses producers,
flushes buffers and gives reasons exactly as Twisted's own TCP does. A clock tells the time: nothing happens before the clock
is advanced, ``advance(0)`` lets everything happen that needs no time, and no call re-enters another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Literal

from twisted.internet import error, interfaces
from twisted.internet.abstract import FileDescriptor
from twisted.internet.address import IPv4Address
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.testing.link import Lane, Link

#: Most bytes that one end reads in one turn: as much as Twisted reads from a socket at once.
READ_BYTES = 65536
#: Seconds until lost bytes are sent again for the first time, and the limit to which this time is doubled.
RETRANSMIT_S = 0.2
RETRANSMIT_LIMIT_S = 10.0

#: How a read is cut into ``dataReceived`` calls: ``None`` gives all available bytes, ``"bytes"`` one byte at a time,
#: ``"random"`` random pieces, a number pieces of that size; a function gets the number of available bytes and returns the size
#: of the next piece (at least 1).
Chunking = None | Literal["bytes", "random"] | int | Callable[[int], int]

_log = Logger()


def _cutter(chunking: Chunking, random: Random) -> Callable[[int], int]:
    if chunking is None:
        return lambda available: available
    if chunking == "bytes":
        return lambda available: 1
    if chunking == "random":
        return lambda available: random.randint(1, available)
    if isinstance(chunking, int):
        size = chunking
        return lambda available: size
    if callable(chunking):
        return chunking
    raise ValueError(f"unknown chunking {chunking!r}")


@implementer(interfaces.ITCPTransport, interfaces.IHalfCloseableDescriptor)
class PipeEnd(FileDescriptor):
    """One end of a :class:`Pipe`: an ``ITCPTransport``, consumer and push producer.

    ``protocol`` is the protocol it serves; ``on_lost`` is called after the protocol was told of the loss.
    """

    def __init__(self, pipe: Pipe, host: IPv4Address, peer: IPv4Address, lane: Lane | None) -> None:
        self._pipe = pipe
        self._lane = lane  # the lane towards this end
        self._full_since: float | None = None
        self._reading = self._writing = self._aborting = False
        super().__init__(pipe.clock)
        self.bufferSize = pipe.high_water_bytes
        self.on_lost: Callable[[Failure], object] | None = None
        self.protocol: Any = None
        self.other: PipeEnd = self
        self._host, self._peer = host, peer
        # The bytes on their way to this end, and the arrival times of parts of them.
        self._wire = bytearray()
        self._arrivals: deque[tuple[float, int]] = deque()
        self._readable = 0
        self._end_at: float | None = None
        # When the reset arrives with which the other end, which is gone, answers data. From then on nothing can be written.
        self._reset_at: float | None = None
        self._call: Any = None
        self._options = {"nodelay": False, "keepalive": False}

    # --- what happens when --------------------------------------------------------------------------------------------

    def _attach(self, protocol: Any) -> None:
        self.connected = 1
        self.protocol = protocol
        self.startReading()
        try:
            protocol.makeConnection(self)
        except Exception:  # the application's fault, told as the reactor tells it
            _log.failure("Unhandled error in {protocol}", protocol=protocol)
            self.connectionLost(Failure())

    def startReading(self) -> None:
        self._reading = True
        self._wake()

    def stopReading(self) -> None:
        self._reading = False

    def startWriting(self) -> None:
        self._writing = True
        self._wake()

    def stopWriting(self) -> None:
        self._writing = False

    def _next_at(self) -> float | None:
        """When this end has something to do: 0.0 means now, ``None`` not before something else happens."""
        if self.disconnected:
            return None
        write_at = (self.other._room_at() if self._unsent() else 0.0) if self._writing else None
        if write_at == 0.0 or not self._reading or self._pipe.frozen:
            return write_at
        if self._readable:
            return 0.0
        read_at = self._arrivals[0][0] if self._arrivals else self._end_at
        return min((when for when in (write_at, read_at) if when is not None), default=None)

    def _unsent(self) -> int:
        return len(self.dataBuffer) - self.offset + self._tempDataLen

    def _room(self) -> int:
        """How many more bytes fit on the way to this end. An end that is gone accepts any number, and loses them."""
        if self.disconnected:
            return READ_BYTES
        if self._lane is None:
            return self._pipe.high_water_bytes - len(self._wire)
        return min(self._lane.window_bytes - len(self._wire), self._lane.room(self._pipe.clock.seconds()))

    def _room_at(self) -> float | None:
        """When :meth:`_room` is more than 0: 0.0 means now, ``None`` not before this end reads."""
        if self._room() > 0:
            return 0.0
        if self._lane is None or len(self._wire) >= self._lane.window_bytes:
            return None
        return self._lane.room_at()

    def _wake(self) -> None:
        when = self._next_at()
        if self._call is not None and self._call.active():
            if when is not None and when >= self._call.getTime():
                return
            self._call.cancel()
        now = self._pipe.clock.seconds()
        self._call = None if when is None else self._pipe.clock.callLater(max(0.0, when - now), self._turn)

    def _turn(self) -> None:
        self._call = None
        if self._writing:
            self._guarded(self.doWrite, reads=False)
        if self._reading and not self.disconnected:
            self._guarded(self.doRead, reads=True)
        self._wake()
        self.other._wake()

    def _guarded(self, do: Callable[[], Exception | int | None], *, reads: bool) -> None:
        try:
            reason = do()
        except Exception as problem:
            _log.failure("Unhandled error in {protocol}", protocol=self.protocol)
            reason = problem
        if isinstance(reason, Exception):
            if reads and isinstance(reason, error.ConnectionDone):
                self.readConnectionLost(Failure(reason))
            else:
                self.connectionLost(Failure(reason))

    # --- bytes --------------------------------------------------------------------------------------------------------

    def writeSomeData(self, data: bytes) -> int | Exception:
        now = self._pipe.clock.seconds()
        # An end that reads first gets the data that was sent before the reset.
        reads_on = self._reading and (self._wire or self._end_at is not None)
        if self._reset_at is not None and self._reset_at <= now and not reads_on and not self._pipe.frozen:
            return error.ConnectionLost()
        sent = bytes(data[: max(0, self.other._room())])
        if sent and not self.other.disconnected:
            self.other._wire += sent
            travel_s, lane = self._pipe.travel_s(), self.other._lane
            pieces = [(now, len(sent))] if lane is None else lane.send(len(sent), now)
            self.other._arrivals.extend((at + travel_s, size) for at, size in pieces)
        elif sent and self._reset_at is None:
            self._reset_at = now + self.other._trip_s() + self._trip_s()
        self._note_full(len(sent) < len(data), now)
        return len(sent)

    def _note_full(self, full: bool, now: float) -> None:
        if full and self._full_since is None:
            self._full_since = now
        elif not full and self._full_since is not None:
            if self.other._lane is not None:
                self.other._lane.full_s += now - self._full_since
            self._full_since = None

    def doRead(self) -> Exception | None:
        """Hand arrived data to the protocol; returns ``ConnectionDone`` at the end of the stream."""
        now = self._pipe.clock.seconds()
        while self._arrivals and self._arrivals[0][0] <= now:
            self._readable += self._arrivals.popleft()[1]
        budget = READ_BYTES
        while self._reading and budget and self._readable and not self._pipe.frozen:
            available = min(budget, self._readable)
            size = max(1, min(available, self._pipe.cut_size(available)))
            piece = bytes(self._wire[:size])
            del self._wire[:size]
            self._readable -= size
            budget -= size
            self.other._wake()
            self.protocol.dataReceived(piece)
        may_end = self._reading and not self._wire and not self._pipe.frozen
        if may_end and self._end_at is not None and self._end_at <= now:
            self._end_at = None
            return error.ConnectionDone()
        return None

    # --- endings ------------------------------------------------------------------------------------------------------

    def _closeWriteConnection(self) -> None:
        self._send_end()
        half = interfaces.IHalfCloseableProtocol(self.protocol, None)
        if half is not None:
            half.writeConnectionLost()

    def _send_end(self) -> None:
        if not self.other.disconnected and self.other._end_at is None:
            now, lane = self._pipe.clock.seconds(), self.other._lane
            self.other._end_at = self._pipe.delay_s + (now if lane is None else lane.end_at(now))

    def readConnectionLost(self, reason: Failure) -> None:
        """The other end sends no more: a protocol that supports half-closed connections goes on, others lose the connection."""
        self.stopReading()
        half = interfaces.IHalfCloseableProtocol(self.protocol, None)
        if half is None:
            self.connectionLost(reason)
            return
        try:
            half.readConnectionLost()
        except Exception:  # the application's fault, told as the reactor tells it
            _log.failure("Unhandled error in {protocol}", protocol=self.protocol)
            self.connectionLost(Failure())

    def connectionLost(self, reason: Failure) -> None:
        """Close this end and tell its protocol once; the other end is told after all sent data has arrived, or by a reset."""
        if self.disconnected:
            return
        FileDescriptor.connectionLost(self, reason)
        if self._wire:
            last_at = self._arrivals[-1][0] if self._arrivals else 0.0
            self.other._reset_at = max(last_at, self._pipe.clock.seconds()) + self.other._trip_s()
        self._wire.clear()
        self._arrivals.clear()
        self._readable = 0
        if reason.check(error.ConnectionAborted):
            self.other._reset_soon()
        else:
            self._send_end()
        try:
            self.protocol.connectionLost(reason)
        except Exception:  # the application's fault, told as the reactor tells it
            _log.failure("Unhandled error in {protocol}", protocol=self.protocol)
        if self.on_lost is not None:
            self.on_lost(reason)
        self._wake()
        self.other._wake()
        self._pipe._end_lost()

    def abortConnection(self) -> None:
        """Drop the connection and unsent data; the other end loses its connection as soon as it can know."""
        if self.disconnected or self._aborting:
            return
        self._aborting = True
        self.stopReading()
        self.stopWriting()
        self._wake()
        self._pipe.clock.callLater(0, self.connectionLost, Failure(error.ConnectionAborted()))

    def _trip_s(self) -> float:
        """How long a message that needs no room, such as a reset, takes to this end."""
        return self._pipe.delay_s + (self._lane.delay_s if self._lane is not None else 0.0)

    def _reset_soon(self) -> None:
        if not self.disconnected and not self._pipe.frozen:
            self._pipe.clock.callLater(self._trip_s(), self.connectionLost, Failure(error.ConnectionLost()))

    # --- addresses and options ----------------------------------------------------------------------------------------

    def getHost(self) -> IPv4Address:
        return self._host

    def getPeer(self) -> IPv4Address:
        return self._peer

    def getTcpNoDelay(self) -> bool:
        return self._options["nodelay"]

    def setTcpNoDelay(self, enabled: bool) -> None:
        """Remember the wish; nothing depends on it."""
        self._options["nodelay"] = bool(enabled)

    def getTcpKeepAlive(self) -> bool:
        return self._options["keepalive"]

    def setTcpKeepAlive(self, enabled: bool) -> None:
        """Remember the wish; nothing depends on it."""
        self._options["keepalive"] = bool(enabled)


class Pipe:
    """Two ends ``a`` and ``b``, with controls for a test; :meth:`connect` attaches protocols to them.

    ``clock`` is an ``IReactorTime``: usually a ``twisted.internet.task.Clock``, but the real reactor works as well.
    ``chunking`` says how bytes come out (:data:`Chunking`; ``random`` decides for ``"random"``), ``delay_s`` how long
    they are under way. ``high_water_bytes`` is how many fit on the way in each direction, and the number of unsent bytes
    above which a producer is paused. Over a ``link``, the link decides how many bytes fit, and ``delay_s`` is added to its
    delay.

    ``frozen`` tells whether the pipe is frozen, ``closed`` whether both ends are gone. ``delay_s`` and ``loss`` may be
    changed while it is open: ``loss`` is the share of writes that are lost and, as with TCP, sent again later.
    """

    def __init__(
        self,
        clock: Any,
        *,
        chunking: Chunking = None,
        delay_s: float = 0.0,
        high_water_bytes: int = 65536,
        random: Random | None = None,
        addresses: tuple[IPv4Address, IPv4Address] | None = None,
        link: Link | None = None,
    ) -> None:
        self.clock = clock
        self.delay_s = delay_s
        self.loss = 0.0
        self.random = random if random is not None else Random(0)
        self.high_water_bytes = high_water_bytes
        self.frozen = False
        self.cut_size = _cutter(chunking, self.random)
        self.on_closed: Callable[[Pipe], object] | None = None
        host_a, host_b = addresses or (IPv4Address("TCP", "127.0.0.1", 1), IPv4Address("TCP", "127.0.0.1", 2))
        self.link = link
        self.a = PipeEnd(self, host_a, host_b, link.back if link is not None else None)
        self.b = PipeEnd(self, host_b, host_a, link.out if link is not None else None)
        self.a.other, self.b.other = self.b, self.a

    def travel_s(self) -> float:
        """How long data written now is under way, in seconds: lost data is sent again, after a time that doubles."""
        late_s, again_s = self.delay_s, RETRANSMIT_S
        while self.loss and self.random.random() < self.loss and again_s < RETRANSMIT_LIMIT_S:
            late_s, again_s = late_s + again_s, 2 * again_s
        return late_s

    @property
    def closed(self) -> bool:
        """Whether both protocols have lost their connection."""
        return bool(self.a.disconnected and self.b.disconnected)

    def connect(self, protocol_a: Any, protocol_b: Any) -> Pipe:
        """Attach the protocols; each is told at once, ``a`` first. Returns the pipe itself."""
        if self.link is not None:
            self.link.pipes.append(self)
        self.a._attach(protocol_a)
        self.b._attach(protocol_b)
        return self

    def freeze(self) -> None:
        """Let nothing arrive any more, not even a close, and tell no end: a half-open connection. See :meth:`thaw`."""
        self.frozen = True

    def thaw(self) -> None:
        """Let data under way, and later data, arrive again. An end whose other end was aborted meanwhile learns of it, as with
        the next probe of TCP keepalive.
        """
        self.frozen = False
        for end in (self.a, self.b):
            if end.other.disconnected and end._end_at is None:
                end._reset_soon()
        self._wake()

    def cut(self, reason: Exception | None = None) -> None:
        """Break the connection of both ends now, and lose data under way; ``reason`` is ``ConnectionLost`` by default."""
        for end in (self.a, self.b):
            end._end_at = None
        for end in (self.a, self.b):
            end.connectionLost(Failure(reason if reason is not None else error.ConnectionLost()))

    def _wake(self) -> None:
        self.a._wake()
        self.b._wake()

    def _end_lost(self) -> None:
        if not self.closed:
            return
        if self.link is not None:
            self.link.pipes.remove(self)
        if self.on_closed is not None:
            self.on_closed(self)
