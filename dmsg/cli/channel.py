"""A transport for commands: awaited reads and writes, with limited buffers in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol, IPushProducer
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.cli.exits import CommandError
from dmsg.glue.time_limits import TimeLimits
from dmsg.glue.waiters import Waiters

#: At this many unread bytes the other side has to wait until they are read.
UNREAD_PAUSE_BYTES: Final = 1024 * 1024
#: How many seconds a reader that wants many bytes waits for the rest of them: a slow transfer is still seen to move.
GATHER_S: Final = 0.1
#: Smaller pieces are joined: each object costs some 50 bytes, and the sender chooses how small its pieces are.
_SMALL_BYTES: Final = 4096


class TransportBroken(CommandError):
    """A transport ended before its work was done; ``clean`` tells whether the other side closed it in order."""

    def __init__(self, message: str, *, clean: bool = False) -> None:
        super().__init__(message)
        self.clean = clean


class TimedOut(CommandError):
    """The other side did not answer in time."""


@implementer(IPushProducer)
class Channel(Protocol):
    """One transport. ``clock`` (``IReactorTime``) measures time limits, which are in seconds.

    ``opened`` is called with the channel once it is connected.
    """

    transport: Any

    def __init__(self, clock: Any, opened: Callable[[Channel], object] | None = None) -> None:
        self._clock = clock
        self._opened = opened
        self._unread: list[bytes | bytearray] = []
        #: Received bytes that were not read yet.
        self.unread_bytes = 0
        self._enough_bytes = 1
        self._reading_paused = False
        self._readers: Waiters[None] = Waiters()
        self._writers: Waiters[None] = Waiters()
        self._writing_paused = False
        self._ended: Failure | None = None
        self._read_ended = False
        self._interruption: Exception | None = None
        self._watchers: Waiters[None] = Waiters()
        self._limits = TimeLimits(clock)

    # --- what commands use -----------------------------------------------------------------------------------------

    async def read(self, timeout_s: float | None = None) -> bytes:
        """All received bytes that were not read yet, at least one.

        Raises ``TransportBroken`` at the end, ``TimedOut`` after ``timeout_s``.
        """
        return b"".join(await self.read_pieces(timeout_s))

    async def read_pieces(self, timeout_s: float | None = None, enough_bytes: int = 1) -> list[bytes]:
        """The same in pieces, without a copy of them: waking up once for many pieces costs far less than once for each.

        After the first bytes it waits for ``enough_bytes`` (at most :data:`UNREAD_PAUSE_BYTES`) or for :data:`GATHER_S`,
        whichever is first.
        """
        while not self._unread or self._interruption is not None:
            if self._interruption is not None:
                raise self._interruption
            if self._ended is not None or self._read_ended:
                raise self._broken()
            await self._limited(self._readers.wait(), timeout_s)
        enough_bytes = min(enough_bytes, UNREAD_PAUSE_BYTES)
        if self.unread_bytes < enough_bytes and self._ended is None and not self._read_ended:
            self._enough_bytes = enough_bytes
            try:
                await self._limits.limit(self._readers.wait(), GATHER_S, _enough)
            finally:
                self._enough_bytes = 1
        return self.take_unread()

    def take_unread(self) -> list[bytes]:
        """All received bytes that were not read yet, which may be none."""
        pieces, self._unread, self.unread_bytes = self._unread, [], 0
        self._resume_reading()
        return [bytes(one) if isinstance(one, bytearray) else one for one in pieces]

    def interrupt(self, error: Exception) -> None:
        """Raise ``error`` from every read from now on: the work that needs the data has failed elsewhere."""
        self._interruption = error
        self._readers.fire(None)

    async def write(self, data: bytes, timeout_s: float | None = None) -> None:
        """Send ``data``; returns when more may be written. Raises as :meth:`read` does."""
        await self.write_pieces((data,), timeout_s)

    async def write_pieces(self, pieces: Iterable[bytes], timeout_s: float | None = None) -> None:
        """The same for data in pieces, without a copy of large ones."""
        if self._ended is not None:
            raise self._broken()
        for piece in pieces:
            self.transport.write(piece)
        if self._writing_paused:
            await self._limited(self._writers.wait(), timeout_s)
        if self._ended is not None:
            raise self._broken()

    def end_writing(self) -> None:
        """Half-close: the other side learns, after all data, that nothing more is written. For transports with a half-close."""
        if self._ended is None:
            self.transport.unregisterProducer()
            self.transport.loseWriteConnection()

    async def close(self, timeout_s: float) -> None:
        """Close once everything written has arrived; after ``timeout_s`` at once."""
        if self._ended is None:
            self.transport.unregisterProducer()
            self.transport.loseConnection()
            self._resume_reading()
        await self.wait_closed(timeout_s)

    async def wait_closed(self, timeout_s: float) -> None:
        """Wait for the end of the transport; abort it after ``timeout_s``."""
        if self._ended is not None:
            return
        # aborting ends the transport, and that ends the wait below
        late = self._clock.callLater(timeout_s, self.abort)
        try:
            await self._watchers.wait()
        finally:
            if late.active():
                late.cancel()

    def abort(self) -> None:
        """Close now; what has not been sent is dropped."""
        if self._ended is None:
            self.transport.abortConnection()

    # --- IPushProducer, towards our own transport ------------------------------------------------------------------

    def pauseProducing(self) -> None:
        self._writing_paused = True

    def resumeProducing(self) -> None:
        self._writing_paused = False
        self._writers.fire(None)

    def stopProducing(self) -> None:
        """The transport is over; ``connectionLost`` follows."""

    # --- IProtocol -------------------------------------------------------------------------------------------------

    def connectionMade(self) -> None:
        self.transport.registerProducer(self, True)
        if self._opened is not None:
            self._opened(self)

    def dataReceived(self, data: bytes) -> None:
        self._keep(data)
        if self.unread_bytes >= self._enough_bytes:
            self._readers.fire(None)
        if self.unread_bytes >= UNREAD_PAUSE_BYTES and not self._reading_paused:
            self._reading_paused = True
            self.transport.pauseProducing()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._ended = reason
        self._limits.stop()
        self._readers.fire(None)
        self._writers.fire(None)
        self._watchers.fire(None)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _keep(self, data: bytes) -> None:
        self.unread_bytes += len(data)
        if len(data) >= _SMALL_BYTES:
            self._unread.append(data)
        elif self._unread and isinstance(self._unread[-1], bytearray):
            self._unread[-1] += data
        else:
            self._unread.append(bytearray(data))

    def _broken(self) -> TransportBroken:
        if self._ended is None or self._ended.check(ConnectionDone):
            return TransportBroken("the peer closed the transport", clean=True)
        cause = getattr(self._ended.value, "cause", self._ended.value)
        return TransportBroken(f"the transport was lost: {cause}")

    def _resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resumeProducing()

    async def _limited(self, waiting: Deferred[None], timeout_s: float | None) -> None:
        if timeout_s is None:
            await waiting
        else:
            await self._limits.limit(waiting, timeout_s, lambda: _timed_out(timeout_s))


@implementer(IHalfCloseableProtocol)
class HalfOpenChannel(Channel):
    """A channel that may be written to when the other side has nothing more to say."""

    def readConnectionLost(self) -> None:
        """The other side has ended its half."""
        self._read_ended = True
        self._readers.fire(None)

    def writeConnectionLost(self) -> None:
        """The other side knows that ours has ended."""


def _timed_out(timeout_s: float) -> None:
    raise TimedOut(f"the peer did not answer within {timeout_s:g} s")


def _enough() -> None:
    """After :data:`GATHER_S`, whatever has come is enough."""
